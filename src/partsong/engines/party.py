"""One party's half of a run: what it makes of each ask, as pure functions of its state.

    started ─► worked ─► begun ─► sent ─► … ─► sent ─► summed ─► counted
              (`local`) └──────── one sum ─────────┘

Work, sum and counting are three moments. `local` runs once in a round, however often its sum begins again: it may draw
noise that must not be drawn twice. A new state counts only once the server says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from partsong.core import runtime
from partsong.core.interfaces import Ask, Layout, Message, Program, Reduction, ReductionContext, Shard, State
from partsong.engines.upload_checks import Expected, check_upload
from partsong.errors import PartsongError, TooFewParties


@dataclass(frozen=True, slots=True)
class LocalResult:
    """What `local` made of the model of one round; the upload goes once its sum is done."""

    index: int
    state: State
    upload: Message | None


@dataclass(frozen=True, slots=True)
class PartyState:
    """All that a party keeps from step to step.

    `program` is the state that counts (there is one once `has_started`), `lasting` what the reduction keeps from sum to
    sum, and `sending` what it keeps within one.
    """

    program: State = None
    has_started: bool = False
    reduction_state: State = None
    work: LocalResult | None = None
    sum_state: State = None


@dataclass(frozen=True, slots=True)
class Party:
    """A shard with the program and the reduction that are run on it."""

    program: Program
    shard: Shard
    layout: Layout
    reduction: Reduction
    expected: Expected
    kernel_threads: int = 1

    def set_up(self) -> PartyState:
        """Before anything: the reduction's keys, if it has some."""
        return PartyState(reduction_state=self.reduction.setup_party(self.shard.name, self.shard.secret, self.layout))

    def start(self, state: PartyState, index: int) -> PartyState:
        """With a first state of the program."""
        with runtime.limit_kernel_threads(self.kernel_threads), annotate_errors(self.shard.name, "start", index):
            program = self.program.start_party(self.shard, self.layout)
        return PartyState(program, True, state.reduction_state, state.work, state.sum_state)

    def do_work(self, state: PartyState, ask: Ask) -> PartyState:
        """The program's work on the model, once in a round.

        The upload is checked here, where it leaves the party: nobody else sees it under a reduction that hides uploads.
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
        """The upload enters a sum among the participants."""
        assert state.work is not None
        assert state.work.upload is not None
        context = ReductionContext(ask.index, ask.participants, self.layout, ask.message)
        with annotate_errors(self.shard.name, "reduction", ask.index):
            sum_state = self.reduction.start(
                state.reduction_state, state.work.upload, self.program.aggregation, context
            )
        return PartyState(state.program, state.has_started, state.reduction_state, state.work, sum_state)

    def send(self, state: PartyState, ask: Ask) -> tuple[PartyState, Message]:
        """What the party sends in one phase of the sum."""
        reply = ask.message if ask.kind == "reduce" else Message({})
        with annotate_errors(self.shard.name, f"reduction phase {ask.phase}", ask.index):
            sum_state, message = self.reduction.client_step(ask.phase, state.sum_state, reply)
        return PartyState(state.program, state.has_started, state.reduction_state, state.work, sum_state), message

    def answer(self, state: PartyState, ask: Ask) -> tuple[PartyState, Message]:
        """The answer to an ask, of either kind."""
        if ask.kind == "work":
            state = self.begin_sum(self.do_work(state, ask), ask)
        return self.send(state, ask)

    def end_sum(self, state: PartyState) -> PartyState:
        """After a sum: what the reduction has learned is kept, and the upload goes."""
        work = None if state.work is None else LocalResult(state.work.index, state.work.state, None)
        reduction_state = (
            state.reduction_state if state.sum_state is None else self.reduction.finish_party(state.sum_state)
        )
        return PartyState(state.program, state.has_started, reduction_state, work)

    def finish_round(self, state: PartyState, *, counts: bool = True) -> PartyState:
        """After a round: the state that the work led to is the party's state, if its work counts."""
        assert not counts or state.work is not None
        program = state.work.state if counts and state.work is not None else state.program
        return PartyState(program, state.has_started, state.reduction_state, None, state.sum_state)


def raise_or_return(error: PartsongError, error_note: str | None) -> PartsongError:
    """The error as a value; raised instead where faults stop the run, or where it is about the sum and no party."""
    if error_note is not None:
        if error_note:
            error.add_note(error_note)
        raise error
    if isinstance(error, TooFewParties):
        raise error
    return error.with_traceback(None)  # which holds the party's arrays


class annotate_errors:
    """Adds party, stage and round to any error that leaves the block."""

    def __init__(self, party: str, stage: str, index: int) -> None:
        self.note = f"(party {party!r}, stage {stage!r}, round {index})"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self.note not in getattr(error, "__notes__", []):
            error.add_note(self.note)
