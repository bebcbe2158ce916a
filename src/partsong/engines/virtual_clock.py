"""Asynchronous runs in one process: arrivals on a virtual clock, or in a recorded order.

Nothing sleeps or reads the host's clock, so the same settings give the same times everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

from partsong.core.interfaces import (
    Arrival,
    AsyncCheckpoint,
    Checkpoint,
    Layout,
    Program,
    Reduction,
    Round,
    Schedule,
    Shard,
    State,
    WorkItem,
)
from partsong.core.streams import stream
from partsong.engines.arrivals import ask_for, run_arrivals
from partsong.engines.local import LocalParties
from partsong.engines.rounds import Rounds, error_note_for
from partsong.errors import ParameterError

MAX_EXPONENT = 700.0
"""Largest exponent whose exponential is finite."""


@dataclass(frozen=True, slots=True)
class Durations:
    """Virtual seconds from sending a model to a party until its upload arrives.

        d(p, i) = latency + base_p · straggler_p · exp(jitter · z_pi),   base_p = seconds_p, or per_row · n_p

    for the i-th work item of party p. `seconds` names all parties or none. `stragglers` names slower parties with their
    factor; 2 means half the speed. z_pi is standard normal and depends only on the run's seed, p and i. `latency` is
    the sum of both directions.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    stragglers: Mapping[str, float] = field(default_factory=dict)
    jitter: float = 0.0
    latency: float = 0.0
    per_row: float = 1.0

    def __post_init__(self) -> None:
        named = {
            f"{what} of {name!r}": value
            for what in ("seconds", "stragglers")
            for name, value in getattr(self, what).items()
        }
        for what, value in {**named, "per_row": self.per_row}.items():
            if not 0 < value < math.inf:
                raise ParameterError(f"Durations: {what} must be finite and above 0; got {value!r}.")
        for what, value in (("jitter", self.jitter), ("latency", self.latency)):
            if not 0 <= value < math.inf:
                raise ParameterError(f"Durations: {what} must be finite and 0 or more; got {value!r}.")

    def check(self, names: Sequence[str]) -> None:
        """Refuse unknown names, and seconds for some parties only."""
        unknown = sorted((self.seconds.keys() | self.stragglers.keys()) - set(names))
        if unknown:
            raise ParameterError(
                f"Durations name unknown parties: {', '.join(unknown[:5])}. "
                f"Use the parties' names: {', '.join(sorted(names)[:5])}{'…' if len(names) > 5 else ''}."
            )
        missing = sorted(set(names) - self.seconds.keys()) if self.seconds else []
        if missing:
            raise ParameterError(
                f"Durations lack the seconds of {', '.join(missing[:5])}. Pass the seconds of all parties, or of none "
                "to make them proportional to rows."
            )

    def duration(self, shard: Shard, number: int, seed: int) -> float:
        """Return d(p, i) for a party's work item number i, from 0."""
        name = shard.name
        base = self.seconds[name] if self.seconds else self.per_row * shard.matrix.shape[0]
        exponent = self.jitter * stream(seed, "duration", name, number).standard_normal() if self.jitter else 0.0
        scale = math.exp(exponent) if exponent < MAX_EXPONENT else math.inf
        duration = self.latency + base * self.stragglers.get(name, 1.0) * scale
        if not 0 < duration < math.inf:
            raise ParameterError(
                f"A work item of party {name!r} would last {duration!r} virtual seconds, which must be finite and "
                "above 0. Set its seconds, or lower jitter."
            )
        return duration


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """Asynchronous engine: no party waits for another; each continues with the model that answered its last upload.

    `Schedule.rounds` counts arrivals. A Round is one arrival, with its sender as the only participant. Arrivals are in
    the order of (virtual time, name), so a run depends on `durations` and not on the host. `Round.seconds` is the
    virtual time since the previous arrival; the total is `Round.checkpoint.clock`. A faulty party that is left out uses
    up an arrival too, and tries again with the current model. The run ends when the latest upload of every party was
    faulty. Checkpoints hold the work in progress (`AsyncCheckpoint`), and a resumed run equals the uninterrupted one
    bit for bit. With one party, and a server that adopts what it receives, this is Sequential.
    """

    durations: Durations = Durations()
    record: bool = False

    def run(
        self,
        program: Program,
        shards: Sequence[Shard],
        schedule: Schedule,
        *,
        reduction: Reduction,
        resume: Checkpoint | None = None,
    ) -> Rounds:
        clock = VirtualClock(program, shards, schedule, reduction, self.durations)
        return Rounds(run_arrivals(program, clock, schedule, reduction, resume, self.record))


class VirtualClock:
    """Parties in this process whose work takes the virtual time of `durations`; it is computed on arrival."""

    has_ended = False

    def __init__(
        self, program: Program, shards: Sequence[Shard], schedule: Schedule, reduction: Reduction, durations: Durations
    ) -> None:
        self._program, self._shards, self._schedule, self._reduction = program, tuple(shards), schedule, reduction
        self._durations = durations
        self._items: dict[str, WorkItem] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Set up the layout; there is no other process to coordinate with."""
        self.layout = Layout.of(self._shards, self._schedule.seed)
        self._stops = error_note_for(self._schedule, self.layout)
        yield

    def begin(self, point: AsyncCheckpoint) -> AsyncCheckpoint:
        """Start the parties, and give items without a due time one."""
        self._durations.check(self.layout.parties)
        self._parties = LocalParties(
            self._program, self._shards, self._schedule, self._reduction, self.layout, point.parties
        )
        self._parties.start(0, self._stops)
        return self._with_due_times(replace(point, parties=self._parties.finish_round(())))

    def send(self, items: Mapping[str, WorkItem]) -> None:
        """Keep the items until they are due."""
        self._items.update(items)

    def next(self) -> Arrival:
        """Work on the item that is due first, and return its arrival; ties go to the first name."""
        name = min(self._items, key=lambda party: (self._items[party].due, party))
        item = self._items.pop(name)
        assert item.due is not None
        ask = ask_for(name, item, self._stops)
        self._parties.start(item.version, self._stops, [name])
        answers = self._parties.answer(ask)
        self._parties.end_sum()
        return Arrival(name, answers.faults.get(name) or answers.messages[name], item.due)

    def commit(self, done: Round, arrival: Arrival, sums: State) -> Round:
        """Return the round with the states of all parties and the due time of the sender's next item."""
        after = done.checkpoint
        assert isinstance(after, AsyncCheckpoint)
        states = self._parties.finish_round(done.participants)
        return replace(done, checkpoint=self._with_due_times(replace(after, parties=states)))

    def close(self) -> None:
        """Nothing to do: no work is in progress."""

    def _with_due_times(self, point: AsyncCheckpoint) -> AsyncCheckpoint:
        def with_due_time(name: str, item: WorkItem) -> WorkItem:
            shard = self._parties.parties[name].shard
            return replace(item, due=point.clock + self._durations.duration(shard, item.number, self._schedule.seed))

        items = {name: with_due_time(name, item) if item.due is None else item for name, item in point.items.items()}
        return replace(point, items=items)


@dataclass(frozen=True, slots=True)
class RecordedOrder(Durations):
    """Durations that replay a recorded order: arrival i is that of order[i], at second i + 1; no other item arrives.

    Work depends only on its party's state and the model that answered its last upload, so the order determines the run.
    `Schedule.rounds` is at most the length of the order.
    """

    order: tuple[str, ...] = ()
    intervals: dict[str, list[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        seconds: dict[str, list[int]] = {}
        for second, name in enumerate(self.order, 1):
            seconds.setdefault(name, [0]).append(second)
        intervals = {name: [late - early for early, late in pairwise(times)] for name, times in seconds.items()}
        object.__setattr__(self, "intervals", intervals)

    def check(self, names: Sequence[str]) -> None:
        Durations(stragglers=dict.fromkeys(self.order, 1.0)).check(names)

    def duration(self, shard: Shard, number: int, seed: int) -> float:
        """Return the seconds between this party's arrivals number − 1 and number."""
        known = self.intervals.get(shard.name, [])
        return float(known[number]) if number < len(known) else math.inf
