"""The loop that every in-process engine runs; how parties are visited is the engine's choice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from partsong.core import runtime
from partsong.core.interfaces import (
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
from partsong.engines.upload_checks import (
    KEPT_OUT,
    WAYS_ON_WITH_ALL,
    Company,
    Expected,
    check_sum,
    check_together,
    check_upload,
    fixed_company,
    require_company,
    stated_by,
)
from partsong.errors import BudgetSpent, DivergenceError, PartsongError, PartyError, TooFewParties

Visit = Callable[[Callable[[str], Any], Sequence[str]], dict[str, Any]]
Traffic = list[tuple[str, int, Message]]
Faults = Mapping[str, PartsongError]
Result = TypeVar("Result")

WAYS_ON = (
    'To go on without this party: faulty="leave out" (on the command line: --faulty leave-out), or the last checkpoint '
    "with the other shards."
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What stays the same in all rounds of a run."""

    program: Program
    shards: Mapping[str, Shard]
    schedule: Schedule
    layout: Layout
    reduction: Reduction
    expected: Expected
    visit: Visit
    record: bool


@dataclass(slots=True)
class Desk:
    """What the parties and the server of a reduction keep from one sum to the next, and who was in the last one."""

    parties: dict[str, State]
    server: State = None
    company: Company | None = None


@dataclass(frozen=True, slots=True)
class Worked:
    """What the parties of a round have done: new states, uploads that passed, and the errors of the others."""

    states: dict[str, State]
    uploads: dict[str, Message]
    faults: dict[str, PartsongError]


@dataclass(frozen=True, slots=True)
class Entered:
    """Those who enter a sum, what the reduction has made of their uploads, and the errors of those who do not."""

    occasion: Occasion
    states: dict[str, State]
    faults: dict[str, PartsongError]


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
    layout = Layout.of(shards, schedule.seed)
    expected = stated_by(program, layout)
    check_together(program, reduction, expected)
    schedule.check(layout.parties)
    by_name = {shard.name: shard for shard in shards}
    setting = Setting(program, by_name, schedule, layout, reduction, expected, visit, record)
    point = resume if resume is not None else Checkpoint(0, {}, *program.start_server(layout))
    del resume  # as large as the parties' states, and soon behind us
    desk = Desk({name: reduction.enrol(name, shard.secret, layout) for name, shard in by_name.items()})
    while point.index < schedule.rounds:
        fixed = fixed_company(program, reduction, schedule, layout.parties, point, desk.company)
        point, missing = _joined(setting, point)
        done = _one_round(setting, desk, point, missing, fixed)
        point = done.checkpoint
        yield done
        del done


def _one_round(setting: Setting, desk: Desk, point: Checkpoint, missing: Faults, fixed: Company | None) -> Round:
    began, program = time.perf_counter(), setting.program
    names = setting.schedule.participants(setting.layout.parties, point.index)
    asked = names if fixed is None else tuple(name for name in names if name in fixed)
    with runtime.kernels_on(setting.schedule.kernel_threads):
        ways_on = WAYS_ON if fixed is None else WAYS_ON_WITH_ALL
        worked = _work(setting, point, asked, missing, ways_on)
        require_company(fixed, worked.uploads, point.index, {**missing, **worked.faults})
        entered = _entered(setting, desk, worked.uploads, point, ways_on)
        faults = {**missing, **worked.faults, **entered.faults}
        require_company(fixed, entered.states, point.index, faults)
        refused = {name: KEPT_OUT for name in names if name not in asked}
        refused |= {name: str(error) for name, error in faults.items()}
        states = {name: worked.states[name] for name in entered.states}
        summed, traffic, answers = _reduce(setting, desk, entered)
        require_company(fixed, summed.names, point.index)
        check_sum(summed.aggregate, summed.names, point.index)
        desk.company = frozenset(summed.names)
        sent = {name: sum(m.nbytes for sender, _, m in traffic if sender == name) for name in names}
        kept, included, handed_over = tuple(traffic) if setting.record else (), summed.names, [summed.aggregate]
        del worked, entered, traffic, summed  # as large as the model; the program lets go of its copy when it can
        server, model = program.finish(point.server, handed_over.pop())
    return Round(
        point.index,
        model,
        program.metrics(server),
        included,
        sent,
        point.model.nbytes + answers,
        time.perf_counter() - began,
        Checkpoint(point.index + 1, {**point.parties, **states}, server, model),
        kept,
        refused,
    )


def _joined(setting: Setting, point: Checkpoint) -> tuple[Checkpoint, Faults]:
    """The same point with a state for every party that has none yet; states of those who have left are kept.

    A party that cannot start and is left out has none; it is asked again before the next round.
    """

    def begin(name: str) -> State:
        with runtime.kernels_on(setting.schedule.kernel_threads), named(name, "start", point.index):
            return setting.program.start_party(setting.shards[name], setting.layout)

    new = tuple(name for name in setting.layout.parties if name not in point.parties)
    if not new:
        return point, {}
    begun, faults = _visited(setting, begin, new)
    return replace(point, parties={**point.parties, **begun}), faults


def _work(setting: Setting, point: Checkpoint, names: Sequence[str], missing: Faults, ways_on: str) -> Worked:
    """`local` at every party, and a look at its upload where it leaves the party: the last place where that can be.

    (An engine with a network looks again where uploads arrive, unless the reduction hides them.)
    """
    program, schedule = setting.program, setting.schedule

    def work(name: str) -> tuple[State, Message]:
        with runtime.kernels_on(schedule.kernel_threads), named(name, "local", point.index):
            state, upload = program.local(setting.shards[name], point.parties[name], point.model)
        with named(name, "upload", point.index):
            check_upload(name, upload, setting.expected)
        return state, upload

    done, faults = _visited(setting, work, [name for name in names if name not in missing], ways_on)
    if not done:
        everyone = {name: faults.get(name) or missing[name] for name in names}
        raise nobody_left(everyone, point.index) from everyone[names[0]]
    states, uploads = ({name: pair[i] for name, pair in done.items()} for i in range(2))
    return Worked(states, uploads, faults)


def _visited(
    setting: Setting, work: Callable[[str], Result], names: Sequence[str], ways_on: str = WAYS_ON
) -> tuple[dict[str, Result], dict[str, PartsongError]]:
    """What came of it at each party, in the order of the names, and the errors of those who are left out."""
    done = setting.visit(_attempt(setting, work, ways_on), names)
    faults = {name: done[name] for name in names if isinstance(done[name], PartsongError)}
    return {name: done[name] for name in names if name not in faults}, faults


def _attempt(setting: Setting, work: Callable[[str], Result], ways_on: str) -> Callable[[str], Result | PartsongError]:
    """The same work, which returns errors of ours where parties with one are left out."""

    def attempt(name: str) -> Result | PartsongError:
        try:
            return work(name)
        except PartsongError as error:
            if setting.schedule.faulty == "stop":
                if len(setting.shards) > 1:
                    error.add_note(ways_on)
                raise
            if isinstance(error, TooFewParties):  # which is about the sum, and about no party in it
                raise
            return error.with_traceback(None)  # which holds the party's arrays

    return attempt


def nobody_left(faults: Faults, index: int) -> PartyError:
    """The error of a round in which every party is faulty."""
    kinds = (DivergenceError, BudgetSpent)
    kind = next((kind for kind in kinds if all(isinstance(error, kind) for error in faults.values())), PartyError)
    name, first = next(iter(faults.items()))
    return kind(f"Nobody is left in round {index}: all {len(faults)} parties are faulty. The first, {name!r}: {first}")


def _entered(setting: Setting, desk: Desk, uploads: Mapping[str, Message], point: Checkpoint, ways_on: str) -> Entered:
    """`begin` at every party; what was begun is begun anew without those who fail, as it tells who takes part."""
    reduction, faults = setting.reduction, dict[str, PartsongError]()
    while True:
        names = tuple(name for name in uploads if name not in faults)
        if not names:
            raise nobody_left(faults, point.index) from next(iter(faults.values()))
        occasion = Occasion(point.index, names, setting.layout, point.model)

        def begin(name: str, occasion: Occasion = occasion) -> State:
            with named(name, "reduction", occasion.index):
                return reduction.begin(desk.parties[name], uploads[name], setting.program.aggregation, occasion)

        try:
            begun = {name: _attempt(setting, begin, ways_on)(name) for name in names}
        except TooFewParties as error:
            note_left_out(error, faults)
            raise
        new = {name: error for name, error in begun.items() if isinstance(error, PartsongError)}
        if not new:
            return Entered(occasion, begun, faults)
        faults |= new


def note_left_out(error: PartsongError, faults: Faults) -> None:
    """Add why others are not in the sum that this error is about."""
    for name, fault in faults.items():
        error.add_note(f"Left out of it was {name!r}: {fault}")


def _reduce(setting: Setting, desk: Desk, entered: Entered) -> tuple[Summed, Traffic, int]:
    """The phases of one sum; returns the sum, what was sent, and the bytes of the server's answers."""
    reduction, occasion, states = setting.reduction, entered.occasion, entered.states
    silent = setting.schedule.silent.get(occasion.index, {})
    traffic: Traffic = []
    heard, server, answers = Message({}), desk.server, 0
    for phase in range(reduction.first(server, occasion), reduction.phases):
        inbox: dict[str, Message] = {}
        for name in (name for name in occasion.participants if phase < silent.get(name, reduction.phases)):
            with named(name, f"reduction phase {phase}", occasion.index):
                states[name], inbox[name] = reduction.send(phase, states[name], heard)
            traffic.append((name, phase, inbox[name]))
        server, heard = reduction.hear(phase, inbox, server, occasion)
        answers += heard.nbytes if heard.arrays else 0
    desk.parties.update({name: reduction.rest(state) for name, state in states.items()})
    desk.server, aggregate, included = reduction.total(server, setting.program.aggregation, occasion)
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
