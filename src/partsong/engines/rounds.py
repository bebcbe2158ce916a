"""The loop that every in-process engine runs; how parties are visited is the engine's choice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partsong import threads
from partsong.core import (
    Aggregation,
    Checkpoint,
    Layout,
    Message,
    Occasion,
    Program,
    Reduction,
    Round,
    Schedule,
    Shard,
    State,
)

Visit = Callable[[Callable[[str], Any], Sequence[str]], dict[str, Any]]
Traffic = list[tuple[str, int, Message]]


@dataclass(slots=True)
class Desk:
    """What the parties and the server of a reduction keep from one sum to the next."""

    parties: dict[str, State]
    server: State = None


@dataclass(frozen=True, slots=True)
class Summed:
    """The aggregate of a round, and whose uploads are in it."""

    aggregate: Message
    names: tuple[str, ...]


def run_rounds(
    program: Program,
    shards: Sequence[Shard],
    schedule: Schedule,
    reduction: Reduction,
    resume: Checkpoint | None,
    visit: Visit,
    record: bool,
) -> Iterator[Round]:
    """Yield one Round after another; the caller stops by leaving its loop."""
    reduction.check(program.aggregation)
    layout = Layout.of(shards, schedule.seed)
    schedule.check(layout.parties)
    by_name = {shard.name: shard for shard in shards}
    point = resume if resume is not None else start(program, by_name, layout, visit, schedule.kernel_threads)
    del resume  # as large as the parties' states, and soon behind us
    desk = Desk({name: reduction.enrol(name, shard.secret, layout) for name, shard in by_name.items()})
    while point.index < schedule.rounds:
        done = _one_round(program, by_name, schedule, layout, reduction, desk, point, visit, record)
        point = done.checkpoint
        yield done
        del done


def _one_round(
    program: Program,
    shards: dict[str, Shard],
    schedule: Schedule,
    layout: Layout,
    reduction: Reduction,
    desk: Desk,
    point: Checkpoint,
    visit: Visit,
    record: bool,
) -> Round:
    began = time.perf_counter()
    names = schedule.participants(layout.parties, point.index)
    occasion = Occasion(point.index, names, layout, point.model)
    with threads.kernels_on(schedule.kernel_threads):
        parties, uploads = _local(program, shards, point, names, visit, schedule.kernel_threads)
        silent = schedule.silent.get(point.index, {})
        summed, traffic, answers = _reduce(program.aggregation, reduction, desk, uploads, occasion, silent)
        sent = {name: sum(m.nbytes for sender, _, m in traffic if sender == name) for name in names}
        kept, included, handed_over = tuple(traffic) if record else (), summed.names, [summed.aggregate]
        del uploads, traffic, summed  # as large as the model; the program lets go of its copy when it can
        server, model = program.finish(point.server, handed_over.pop())
    return Round(
        point.index,
        model,
        program.metrics(server),
        included,
        sent,
        point.model.nbytes + answers,
        time.perf_counter() - began,
        Checkpoint(point.index + 1, {**point.parties, **parties}, server, model),
        kept,
    )


def start(
    program: Program, shards: dict[str, Shard], layout: Layout, visit: Visit, kernel_threads: int = 1
) -> Checkpoint:
    """Every state before the first round."""

    def begin(name: str) -> State:
        with threads.kernels_on(kernel_threads), named(name, "start", 0):
            return program.start_party(shards[name], layout)

    server, model = program.start_server(layout)
    return Checkpoint(0, visit(begin, layout.parties), server, model)


def _local(
    program: Program,
    shards: dict[str, Shard],
    point: Checkpoint,
    names: Sequence[str],
    visit: Visit,
    kernel_threads: int,
) -> tuple[dict[str, State], dict[str, Message]]:
    def work(name: str) -> tuple[State, Message]:
        with threads.kernels_on(kernel_threads), named(name, "local", point.index):
            return program.local(shards[name], point.parties[name], point.model)

    done = visit(work, names)
    return {name: done[name][0] for name in names}, {name: done[name][1] for name in names}


def _reduce(
    aggregation: Aggregation,
    reduction: Reduction,
    desk: Desk,
    uploads: dict[str, Message],
    occasion: Occasion,
    silent: Mapping[str, int],
) -> tuple[Summed, Traffic, int]:
    """All phases of the reduction; returns the sum, what was sent, and the bytes of the server's answers."""
    states: dict[str, State] = {}
    for name, upload in uploads.items():
        with named(name, "reduction", occasion.index):
            states[name] = reduction.begin(desk.parties[name], upload, aggregation, occasion)
    traffic: Traffic = []
    heard, server, answers = Message({}), desk.server, 0
    for phase in range(reduction.phases):
        inbox: dict[str, Message] = {}
        for name in (name for name in uploads if phase < silent.get(name, reduction.phases)):
            with named(name, f"reduction phase {phase}", occasion.index):
                states[name], inbox[name] = reduction.send(phase, states[name], heard)
            traffic.append((name, phase, inbox[name]))
        server, heard = reduction.hear(phase, inbox, server, occasion)
        answers += heard.nbytes if heard.arrays else 0
    desk.parties.update({name: reduction.rest(state) for name, state in states.items()})
    desk.server, aggregate, included = reduction.total(server, aggregation, occasion)
    return Summed(aggregate, included), traffic, answers


class named:
    """Adds party, stage and round to any error that leaves the block."""

    def __init__(self, party: str, stage: str, index: int) -> None:
        self.note = f"(party {party!r}, stage {stage!r}, round {index})"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self.note not in getattr(error, "__notes__", []):
            error.add_note(self.note)
