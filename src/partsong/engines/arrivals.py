"""Asynchronous runs: the server processes each upload as it arrives. The same code runs over every network.

No party waits for another. The server aggregates one upload, calls `finish`, and answers only its sender. One arrival
is one Round.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

from partsong.core import runtime
from partsong.core.interfaces import (
    Arrival,
    Arrivals,
    Ask,
    AsyncCheckpoint,
    Checkpoint,
    Layout,
    Program,
    Reduction,
    ReductionContext,
    Round,
    Schedule,
    State,
    WorkItem,
)
from partsong.engines.collective import error_from_text, error_to_text
from partsong.engines.rounds import no_party_left_error
from partsong.engines.upload_checks import Expected, check_compatibility, check_sum
from partsong.errors import CompositionError, ParameterError, PartsongError


@dataclass(frozen=True, slots=True)
class AsyncConfig:
    """Settings that are constant during an asynchronous run."""

    program: Program
    schedule: Schedule
    layout: Layout
    reduction: Reduction
    expected: Expected
    record: bool


def ask_for(name: str, item: WorkItem, error_note: str | None) -> Ask:
    """Return the request for an item: local work, then a sum over this party alone with the model it was sent."""
    return Ask("work", item.version, 0, 0, (name,), (name,), item.model, error_note=error_note)


def run_arrivals(
    program: Program,
    arrivals: Arrivals,
    schedule: Schedule,
    reduction: Reduction,
    point: Checkpoint | None = None,
    record: bool = False,
    is_over: Callable[[AsyncCheckpoint], bool] | None = None,
) -> Generator[Round]:
    """Yield a Round for every arrival. All parties know that the run is over before the last one is yielded.

    By default a run ends after as many arrivals as the schedule has rounds.
    """
    with arrivals.running():
        run = async_config(program, schedule, arrivals.layout, reduction, record)
        current = arrivals.begin(starting_point(run, point))
        del point  # as large as the parties' states
        is_over = is_over or (lambda reached: reached.index >= schedule.rounds)
        sums: State = None
        if not is_over(current):
            arrivals.send(current.items)
        while not arrivals.has_ended and not is_over(current):
            arrival = arrivals.next()
            if arrival is None:
                continue
            done, sums = process_arrival(run, sums, current, arrival)
            done = arrivals.commit(done, arrival, sums)
            assert isinstance(done.checkpoint, AsyncCheckpoint)
            current = done.checkpoint
            if is_over(current):
                arrivals.close()
                yield done
                return
            arrivals.send({arrival.name: current.items[arrival.name]})
            del arrival  # as large as the model
            yield done
            del done
        arrivals.close()


def async_config(
    program: Program, schedule: Schedule, layout: Layout, reduction: Reduction, record: bool
) -> AsyncConfig:
    """Return the settings of a run; raise an error if it cannot be asynchronous."""
    kind = type(reduction).__name__
    if reduction.hides_uploads:
        raise CompositionError(
            f"{kind} reveals only sums to the server, but an asynchronous server processes uploads one at a time and "
            "sees each of them. Use a synchronous engine, or PlainReduction with noise that parties add."
        )
    if reduction.phases != 1:
        raise CompositionError(
            f"{kind} needs {reduction.phases} exchanges for a sum, but an asynchronous party sends one message. Use "
            "PlainReduction, or a synchronous engine."
        )
    if schedule.absent or schedule.dropouts:
        raise ParameterError(
            "An asynchronous run has no common rounds, so its schedule cannot have absences or dropouts. Make a party "
            "slow instead (Durations(stragglers={name: factor}) on the virtual clock), remove its shard, or use a "
            "synchronous engine."
        )
    if program.traits.full_participation and len(layout.parties) > 1:
        raise CompositionError(
            f"{type(program).__name__} needs the sum over all parties, but an asynchronous server processes uploads "
            "one at a time. Use a program that updates with each upload (LocalAveraging with Relaxation), or a "
            "synchronous engine."
        )
    expected = program.upload_spec(layout)
    check_compatibility(program, reduction, expected)
    return AsyncConfig(program, schedule, layout, reduction, expected, record)


def starting_point(run: AsyncConfig, resume: Checkpoint | None) -> AsyncCheckpoint:
    """Return the checkpoint that a run starts or resumes from; parties without an item are sent the current model.

    A checkpoint of a synchronous run works as well. States of parties that have left are kept, their items are not.
    """
    point = resume if resume is not None else Checkpoint(0, {}, *run.program.start_server(run.layout))
    if run.program.turn(point.model).steps > 1:
        raise CompositionError(
            "A round of this program takes several exchanges over the same parties, which an asynchronous run does not "
            "have. Use one exchange per round (sweeps=1), or a synchronous engine."
        )
    known, clock = (point.items, point.clock) if isinstance(point, AsyncCheckpoint) else ({}, 0.0)
    items = {name: known.get(name) or WorkItem(point.model, point.index) for name in run.layout.parties}
    return AsyncCheckpoint(point.index, dict(point.parties), point.server, point.model, items, clock)


def process_arrival(run: AsyncConfig, sums: State, point: AsyncCheckpoint, arrival: Arrival) -> tuple[Round, State]:
    """Process an arrival: return its round and what the reduction keeps. The checkpoint has the sender's next item."""
    if arrival.item is not None:
        point = replace(point, items={**point.items, arrival.name: arrival.item})
    name, sent, item = arrival.name, arrival.sent, point.items[arrival.name]
    if isinstance(sent, PartsongError):
        return _refused(run, point, arrival, sent), sums
    program, reduction = run.program, run.reduction
    context = ReductionContext(item.version, (name,), run.layout, item.model)
    with runtime.limit_kernel_threads(run.schedule.kernel_threads):
        state, answer = reduction.server_step(0, {name: sent}, sums, context)
        sums, aggregate, included = reduction.result(state, program.aggregation, context)
        check_sum(aggregate, included, point.index)
        handed_over = [aggregate]
        del aggregate  # as large as the model; the program lets go of its copy when it can
        server, model = program.finish(point.server, handed_over.pop())
    down = item.model.nbytes + (answer.nbytes if answer.arrays else 0)
    after = _next(replace(point, server=server, model=model), arrival, ())
    traffic = ((name, 0, sent),) if run.record else ()
    seconds, metrics = arrival.clock - point.clock, program.metrics(server)
    return Round(point.index, model, metrics, included, {name: sent.nbytes}, down, seconds, after, traffic), sums


def _refused(run: AsyncConfig, point: AsyncCheckpoint, arrival: Arrival, error: PartsongError) -> Round:
    """Return the round of a failed upload: the model stays as it is and is sent to the party, which tries again."""
    name = arrival.name
    after = _next(point, arrival, tuple(error_to_text(error)))
    faults = {party: after.items[party].fault for party in run.layout.parties}
    if all(faults.values()):
        everyone = {party: error if party == name else error_from_text(*fault) for party, fault in faults.items()}
        raise no_party_left_error(everyone, point.index) from error
    down, seconds = point.items[name].model.nbytes, arrival.clock - point.clock
    metrics = run.program.metrics(point.server)
    return Round(point.index, point.model, metrics, (), {name: 0}, down, seconds, after, (), {name: str(error)})


def _next(point: AsyncCheckpoint, arrival: Arrival, fault: tuple[str, ...]) -> AsyncCheckpoint:
    name, index = arrival.name, point.index + 1
    item = WorkItem(point.model, index, point.items[name].number + 1, fault=fault)
    return replace(point, index=index, items={**point.items, name: item}, clock=arrival.clock)
