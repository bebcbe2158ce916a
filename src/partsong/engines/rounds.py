"""Synchronous rounds, the same over every network: which parties are asked, what is summed, and which work counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from partsong.core import runtime
from partsong.core.interfaces import (
    Answers,
    Ask,
    Checkpoint,
    Layout,
    Message,
    Network,
    Point,
    Program,
    Reduction,
    ReductionContext,
    Round,
    RoundAttempt,
    Schedule,
    Served,
    State,
)
from partsong.core.streams import stream
from partsong.engines.upload_checks import (
    FIXED_RECOVERY,
    NOT_IN_COHORT,
    Cohort,
    check_compatibility,
    check_sum,
    fixed_cohort,
    require_cohort,
)
from partsong.errors import BudgetSpent, DivergenceError, ParameterError, PartsongError, PartyError, TooFewParties

Faults = Mapping[str, PartsongError]

RECOVERY = (
    'To continue without this party, use on_party_error="skip" or --on-party-error skip, or resume from the last '
    "checkpoint with the other shards."
)


class CallerError(Exception):
    """The caller's loop over the rounds raised an error."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")

    def as_fault(self, rank: int) -> PartyError:
        """Return the error that other ranks raise."""
        return PartyError(
            f"The caller at rank {rank} ended the run: its loop over the rounds raised {self}. Fix it there, then "
            "resume every rank from its last checkpoint."
        )


class Rounds(Iterator[Round]):
    """Iterator over the rounds of a run.

    A caller that leaves its loop ends the run at all ranks. In `with engine.run(…) as rounds`, an exception in the
    caller's block is raised at the other ranks as well.
    """

    def __init__(self, generator: Generator[Round]) -> None:
        self._generator = generator

    def __next__(self) -> Round:
        return next(self._generator)

    def __enter__(self) -> Rounds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            with suppress(CallerError):
                self.throw(error)

    def throw(self, error: BaseException) -> Round:
        """End the run with an error of the caller's loop."""
        return self._generator.throw(error if isinstance(error, CallerError) else CallerError(error))

    def close(self) -> None:
        """End the run after the last yielded round."""
        self._generator.close()


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Settings that are constant during a run."""

    program: Program
    network: Network
    layout: Layout
    schedule: Schedule
    reduction: Reduction
    record: bool

    def is_over(self, point: Point) -> bool:
        """Whether the run is over, by its schedule or by its program."""
        return point.index >= self.schedule.rounds or self.program.is_over(point.server)


@dataclass(slots=True)
class SumServer:
    """The server's side of one sum. `serve` changes it only on success, so it may be called again after an error."""

    run: RunConfig
    point: Point
    attempt: RoundAttempt
    cohort: Cohort | None
    state: State
    context: ReductionContext | None = None

    def serve(self, ask: Ask, answers: Answers) -> Served:
        """Return the reply to one phase; after the last phase, the aggregate.

        If uploads are hidden and a party fails in the first phase, nothing of its upload has left, and the sum restarts
        without it. In later phases it is a dropout, and the reduction decides whether the sum can continue.
        """
        reduction, aggregation = self.run.reduction, self.run.program.aggregation
        able = tuple(name for name in ask.names if name not in answers.faults)
        faults = {**self.attempt.refused, **answers.faults}
        if answers.faults and not able:
            ordered = {name: faults[name] for name in sorted(faults)}
            raise no_party_left_error(ordered, ask.index) from next(iter(ordered.values()))
        if ask.kind == "work":
            require_cohort(self.cohort, able, ask.index, faults)
            if len(able) < len(ask.names) and reduction.hides_uploads and ask.phase == 0:
                return Served(included=able, faults=answers.faults, must_restart=True)
        participants = able if self.attempt.first == 0 else self.attempt.asked
        context = self.context or ReductionContext(ask.index, participants, self.run.layout, self.point.model)
        state, message = reduction.server_step(ask.phase, answers.messages, self.state, context)
        reply_bytes = message.nbytes if message.arrays else 0
        included = tuple(answers.messages)
        if ask.phase + 1 == reduction.phases:
            state, message, included = reduction.result(state, aggregation, context)
            require_cohort(self.cohort, included, ask.index)
        # Last: after an error above, the same phase can be served again.
        self.state, self.context = state, context
        sizes = {name: sent.nbytes for name, sent in answers.messages.items()}
        return Served(message, included, able, answers.faults, sizes, reply_bytes)


@dataclass(frozen=True, slots=True)
class RoundSum:
    """The aggregate of a round, the parties whose uploads are in it and whose work counts, and what was sent."""

    aggregate: Message
    included: tuple[str, ...]
    worked: tuple[str, ...]
    refused: Faults
    sizes: Mapping[str, int]
    reply_bytes: int
    traffic: tuple[tuple[str, int, Message], ...]
    server: State


def run_rounds(
    program: Program,
    network: Network,
    schedule: Schedule,
    reduction: Reduction,
    point: Point | None = None,
    record: bool = False,
) -> Generator[Round]:
    """Yield one Round after another; the caller stops by leaving its loop.

    Over ranks, every rank runs this loop, and all of them get the server's decisions from `serve`.
    """
    with network.running():
        layout = network.layout
        check_compatibility(program, reduction, program.upload_spec(layout))
        schedule.check(layout.parties)
        run = RunConfig(program, network, layout, schedule, reduction, record)
        point = point or Point(0, *program.start_server(layout))
        while not run.is_over(point):
            done, point = _one_round(run, point)
            yield done
            # Otherwise the states of this round would stay in memory during the next one.
            del done


def _one_round(run: RunConfig, point: Point) -> tuple[Round, Point]:
    began, program, schedule, index = time.perf_counter(), run.program, run.schedule, point.index
    cohort = fixed_cohort(program, run.reduction, schedule, run.layout.parties, point, point.cohort)
    names = schedule.participants(run.layout.parties, index)
    asked = names if cohort is None else tuple(name for name in names if name in cohort)
    with runtime.limit_kernel_threads(schedule.kernel_threads):
        summed = _sum(run, point, asked, cohort)
        check_sum(summed.aggregate, summed.included, index)
        included, worked, sums, traffic = summed.included, summed.worked, summed.server, summed.traffic
        refused = {name: NOT_IN_COHORT for name in names if name not in asked}
        refused |= {name: str(error) for name, error in summed.refused.items() if name not in included}
        up = {name: summed.sizes.get(name, 0) for name in names}
        down, handed_over = point.model.nbytes + summed.reply_bytes, [summed.aggregate]
        del summed  # as large as the model; the program lets go of its copy when it can
        server, model = program.finish(point.server, handed_over.pop())
    metrics = program.metrics(server)
    after = Point(index + 1, server, model, sums, frozenset(included))
    states = run.network.commit(after, worked, is_last=run.is_over(after))
    checkpoint, seconds = Checkpoint(after.index, states, server, model), time.perf_counter() - began
    return Round(index, model, metrics, included, up, down, seconds, checkpoint, traffic, refused), after


def _sum(run: RunConfig, point: Point, asked: tuple[str, ...], cohort: Cohort | None) -> RoundSum:
    """Run work and sum; repeat with fewer parties if the server asks for it."""
    attempt = RoundAttempt(point.index, 0, asked)
    error_note = error_note_for(run.schedule, run.layout, cohort)
    while True:
        attempt = run.network.open(attempt, _first_of(run, point))
        server = SumServer(run, point, attempt, cohort, point.sums)
        served = _work(run, server, error_note)
        refused = {**attempt.refused, **served.faults}
        if not served.must_restart:
            return _phases(run, server, served, refused, error_note)
        attempt = RoundAttempt(point.index, attempt.attempt + 1, served.included, refused=refused)


def error_note_for(schedule: Schedule, layout: Layout, cohort: Cohort | None = None) -> str | None:
    """Return the note that is added to a fault; None if faulty parties are left out."""
    if schedule.on_party_error != "raise":
        return None
    if len(layout.parties) == 1:
        return ""
    return RECOVERY if cohort is None else FIXED_RECOVERY


def _first_of(run: RunConfig, point: Point) -> Callable[[tuple[str, ...]], int]:
    def first(names: tuple[str, ...]) -> int:
        return run.reduction.first_phase(point.sums, ReductionContext(point.index, names, run.layout, point.model))

    return first


def _work(run: RunConfig, server: SumServer, error_note: str | None) -> Served:
    """Run `local` at the parties that are asked, and the first phase of their sum."""
    attempt, dropouts = server.attempt, run.schedule.dropouts.get(server.point.index, {})
    ask = Ask(
        kind="work",
        index=attempt.index,
        attempt=attempt.attempt,
        phase=attempt.first,
        participants=attempt.asked,
        names=attempt.asked,
        message=server.point.model,
        dropouts=frozenset(name for name in attempt.asked if dropouts.get(name, run.reduction.phases) <= attempt.first),
        error_note=error_note,
    )
    try:
        served = run.network.sum(ask, run.program.aggregation)
        return run.network.exchange(ask, partial(server.serve, ask)) if served is None else served
    except TooFewParties as error:
        for name, fault in attempt.refused.items():
            if repr(name) not in str(error):
                error.add_note(f"Party {name!r} was left out of it: {fault}")
        raise


def _phases(run: RunConfig, server: SumServer, served: Served, refused: Faults, error_note: str | None) -> RoundSum:
    """Run the later phases of a sum, each with the parties that answered the phase before."""
    attempt, reduction, index = server.attempt, run.reduction, server.point.index
    dropouts, worked, refused = run.schedule.dropouts.get(index, {}), served.worked, dict(refused)
    sizes, reply_bytes = dict(served.sizes), served.reply_bytes
    traffic = [(name, attempt.first, message) for name, message in run.network.seen().items() if run.record]
    for phase in range(attempt.first + 1, reduction.phases):
        names = tuple(name for name in served.included if phase < dropouts.get(name, reduction.phases))
        before = Ask(
            "reduce", index, attempt.attempt, phase, attempt.asked, names, served.message, error_note=error_note
        )
        served = run.network.exchange(before, partial(server.serve, before))
        refused |= served.faults
        sizes |= {name: sizes.get(name, 0) + size for name, size in served.sizes.items()}
        reply_bytes += served.reply_bytes
        traffic += [(name, phase, message) for name, message in run.network.seen().items() if run.record]
    return RoundSum(served.message, served.included, worked, refused, sizes, reply_bytes, tuple(traffic), server.state)


def no_party_left_error(faults: Faults, index: int) -> PartyError:
    """Return the error of a round in which every party is faulty."""
    kinds = (DivergenceError, BudgetSpent)
    kind = next((kind for kind in kinds if all(isinstance(error, kind) for error in faults.values())), PartyError)
    name, first = next(iter(faults.items()))
    return kind(f"No party is left in round {index}: all {len(faults)} are faulty. The first, {name!r}: {first}")


def sample_participants(parties: Sequence[str], rounds: int, fraction: float, seed: int) -> dict[int, frozenset[str]]:
    """Return the `absent` of a Schedule in whose rounds m = max(1, round(fraction · N)) sampled parties take part.

    Sampling is without replacement. Round t depends only on the seed, the names and t: a longer run starts with the
    same rounds, and a resumed run continues as if it had not stopped.
    """
    if not 0 < fraction <= 1:
        raise ParameterError(f"fraction must be above 0 and at most 1; got {fraction!r}.", parameter="fraction")
    names = sorted(parties)
    count = max(1, round(fraction * len(names)))
    if count == len(names):
        return {}

    def missing(index: int) -> frozenset[str]:
        chosen = stream(seed, "participants", index).choice(len(names), count, replace=False)
        return frozenset(names) - {names[i] for i in chosen.tolist()}

    return {index: missing(index) for index in range(rounds)}
