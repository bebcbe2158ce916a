"""One party's side of a run: how it answers each request, as pure functions of its state.

    start ─► do_work ─► begin_sum ─► send ─► … ─► send ─► end_sum ─► finish_round
             (`local`)  └────────── one sum ────────────┘

Work, sum and the end of the round are separate steps. `local` runs once per round, however often its sum restarts,
because it may draw noise that must not be drawn twice. A new state becomes current only when the server confirms it.
"""

from __future__ import annotations

from dataclasses import dataclass

from partsong.core import runtime
from partsong.core.interfaces import Ask, Layout, Message, Program, Reduction, ReductionContext, Shard, State
from partsong.engines.upload_checks import Expected, check_upload
from partsong.errors import PartsongError, TooFewParties


@dataclass(frozen=True, slots=True)
class LocalResult:
    """The result of `local` in one round; the upload is dropped once its sum is done."""

    index: int
    state: State
    upload: Message | None


@dataclass(frozen=True, slots=True)
class PartyState:
    """Everything that a party keeps between steps.

    `program` is the program's current state, which exists once `has_started` is true. `reduction_state` is what the
    reduction keeps between sums, and `sum_state` what it keeps during one.
    """

    program: State = None
    has_started: bool = False
    reduction_state: State = None
    work: LocalResult | None = None
    sum_state: State = None


@dataclass(frozen=True, slots=True)
class Party:
    """A shard with the program and the reduction that run on it."""

    program: Program
    shard: Shard
    layout: Layout
    reduction: Reduction
    expected: Expected
    kernel_threads: int = 1

    def set_up(self) -> PartyState:
        """Return the initial state, with the reduction's keys if it has any."""
        return PartyState(reduction_state=self.reduction.setup_party(self.shard.name, self.shard.secret, self.layout))

    def start(self, state: PartyState, index: int) -> PartyState:
        """Start the program."""
        with runtime.limit_kernel_threads(self.kernel_threads), annotate_errors(self.shard.name, "start", index):
            program = self.program.start_party(self.shard, self.layout)
        return PartyState(program, True, state.reduction_state, state.work, state.sum_state)

    def do_work(self, state: PartyState, ask: Ask) -> PartyState:
        """Run the program's `local` on the model, once per round.

        The upload is checked here, before it leaves the party: if uploads are hidden, nobody can check it later.
        """
        if state.work is not None and state.work.index == ask.index:
            return state
        name = self.shard.name
        with runtime.limit_kernel_threads(self.kernel_threads), annotate_errors(name, "local", ask.index):
            after, upload = self.program.local(self.shard, state.program, ask.message)
        with annotate_errors(name, "upload", ask.index):
            check_upload(name, upload, self.expected)
        return PartyState(
            state.program, state.has_started, state.reduction_state, LocalResult(ask.index, after, upload)
        )

    def begin_sum(self, state: PartyState, ask: Ask) -> PartyState:
        """Start a sum over the participants with the upload."""
        assert state.work is not None
        assert state.work.upload is not None
        context = ReductionContext(ask.index, ask.participants, self.layout, ask.message)
        with annotate_errors(self.shard.name, "reduction", ask.index):
            sum_state = self.reduction.start(
                state.reduction_state, state.work.upload, self.program.aggregation, context
            )
        return PartyState(state.program, state.has_started, state.reduction_state, state.work, sum_state)

    def send(self, state: PartyState, ask: Ask) -> tuple[PartyState, Message]:
        """Return the message of one phase of the sum."""
        reply = ask.message if ask.kind == "reduce" else Message({})
        with annotate_errors(self.shard.name, f"reduction phase {ask.phase}", ask.index):
            sum_state, message = self.reduction.client_step(ask.phase, state.sum_state, reply)
        return PartyState(state.program, state.has_started, state.reduction_state, state.work, sum_state), message

    def answer(self, state: PartyState, ask: Ask) -> tuple[PartyState, Message]:
        """Answer a request of either kind."""
        if ask.kind == "work":
            state = self.begin_sum(self.do_work(state, ask), ask)
        return self.send(state, ask)

    def end_sum(self, state: PartyState) -> PartyState:
        """End a sum: keep the reduction's state and drop the upload."""
        work = None if state.work is None else LocalResult(state.work.index, state.work.state, None)
        reduction_state = (
            state.reduction_state if state.sum_state is None else self.reduction.finish_party(state.sum_state)
        )
        return PartyState(state.program, state.has_started, reduction_state, work)

    def finish_round(self, state: PartyState, *, counts: bool = True) -> PartyState:
        """End a round: the state after the work becomes the party's state, if the work counts."""
        assert not counts or state.work is not None
        program = state.work.state if counts and state.work is not None else state.program
        return PartyState(program, state.has_started, state.reduction_state, None, state.sum_state)


def raise_or_return(error: PartsongError, error_note: str | None) -> PartsongError:
    """Return the error; raise it instead if faults stop the run, or if it concerns the sum and not a party."""
    if error_note is not None:
        if error_note:
            error.add_note(error_note)
        raise error
    if isinstance(error, TooFewParties):
        raise error
    return error.with_traceback(None)  # the traceback would keep the party's arrays


class annotate_errors:
    """Add party, stage and round to any error that leaves the block."""

    def __init__(self, party: str, stage: str, index: int) -> None:
        self.note = f"(party {party!r}, stage {stage!r}, round {index})"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self.note not in getattr(error, "__notes__", []):
            error.add_note(self.note)
