"""In-process engines: parties one after another (the reference semantics), or in threads with bit-identical results."""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from partsong.core import runtime
from partsong.core.interfaces import (
    Aggregation,
    Answers,
    Ask,
    Checkpoint,
    Layout,
    Message,
    Point,
    Program,
    Reduction,
    RoundAttempt,
    Schedule,
    Served,
    Shard,
    State,
)
from partsong.engines.party import Party, PartyState, raise_or_return
from partsong.engines.rounds import Rounds, run_rounds
from partsong.errors import ParameterError, PartsongError

Result = TypeVar("Result")
Visit = Callable[[Callable[[str], Any], Sequence[str]], dict[str, Any]]


class InProcess(ABC):
    """Base of engines whose parties are in this process; `_visit` decides how they run."""

    __slots__ = ()

    record: bool

    @abstractmethod
    def _visit(self, work: Callable[[str], Any], names: Sequence[str]) -> dict[str, Any]:
        """Return work(name) for all names."""

    def run(
        self,
        program: Program,
        shards: Sequence[Shard],
        schedule: Schedule,
        *,
        reduction: Reduction,
        resume: Checkpoint | None = None,
    ) -> Rounds:
        known, point = ({}, None) if resume is None else (resume.parties, to_point(resume))
        network = Local(program, shards, schedule, reduction, known, self._visit)
        return Rounds(run_rounds(program, network, schedule, reduction, point, self.record))


@dataclass(frozen=True, slots=True)
class Sequential(InProcess):
    """Run one party after another in one thread; all other engines agree with it to rounding.

    `shuffle` is the seed of a random order of parties, which does not change results. `record` keeps the traffic.
    """

    shuffle: int | None = field(default=None, kw_only=True)
    record: bool = field(default=False, kw_only=True)

    def _visit(self, work: Callable[[str], Any], names: Sequence[str]) -> dict[str, Any]:
        order = list(names)
        if self.shuffle is not None:
            random.Random(self.shuffle).shuffle(order)
        return run_one_by_one(work, order)


@dataclass(frozen=True, slots=True)
class Parallel(InProcess):
    """Run parties in `workers` threads (0: one per core); kernels release the GIL and are serial inside a party.

    Bit-identical to Sequential: the schedule alone sets the kernels' threads, and sums are in name order. The threads
    are daemons that live for one pass over the parties. After Ctrl-C they are not joined; they end with their party's
    work or with the process.
    """

    workers: int = 0
    record: bool = False

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ParameterError(f"workers must be 0 (one per core) or more; got {self.workers}.", parameter="workers")

    def _visit(self, work: Callable[[str], Any], names: Sequence[str]) -> dict[str, Any]:
        return run_in_threads(work, names, self.workers or runtime.available_threads())


def run_in_threads(work: Callable[[str], Result], names: Sequence[str], workers: int) -> dict[str, Result]:
    """Return work(name) for all names, run in daemon threads; of several errors, raise that of the first name."""
    waiting, done, failed = deque(names), dict[str, Result](), dict[str, BaseException]()

    def serve() -> None:
        while waiting:
            try:
                # Another thread may have taken the last name since the test.
                name = waiting.popleft()
            except IndexError:
                return
            try:
                done[name] = work(name)
            except BaseException as error:
                failed[name] = error
                waiting.clear()

    threads = [
        threading.Thread(target=serve, daemon=True, name=f"partsong-party-{i}") for i in range(min(workers, len(names)))
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        # After Ctrl-C threads finish their party, and take no other.
        waiting.clear()
        raise
    for name in names:
        if name in failed:
            raise failed[name]
    return {name: done[name] for name in names}


def run_one_by_one(work: Callable[[str], Result], names: Sequence[str]) -> dict[str, Result]:
    """Return work(name) for all names, run in their order."""
    return {name: work(name) for name in names}


def to_point(checkpoint: Checkpoint) -> Point:
    """Return the server's part of a checkpoint. It has no reduction state, which is set up again."""
    return Point(checkpoint.index, checkpoint.server, checkpoint.model)


class Local:
    """The network of one process; `visit` runs the parties."""

    def __init__(
        self,
        program: Program,
        shards: Sequence[Shard],
        schedule: Schedule,
        reduction: Reduction,
        states: Mapping[str, State],
        visit: Visit,
    ) -> None:
        self._phases, self._seen = reduction.phases, dict[str, Message]()
        self._settings = program, tuple(shards), schedule, reduction
        self._states, self._visit = dict(states), visit

    @contextmanager
    def running(self) -> Iterator[None]:
        """Set up the parties; there is no other process to coordinate with."""
        program, shards, schedule, reduction = self._settings
        self.layout = Layout.of(shards, schedule.seed)
        self._parties = LocalParties(program, shards, schedule, reduction, self.layout, self._states, self._visit)
        self._states = {}
        yield

    def open(self, attempt: RoundAttempt, first: Callable[[tuple[str, ...]], int]) -> RoundAttempt:
        """Return the attempt with its first phase."""
        return replace(attempt, first=first(attempt.asked))

    def exchange(self, ask: Ask, serve: Callable[[Answers], Served]) -> Served:
        """Ask the parties and serve their answers."""
        if ask.kind == "work" and ask.attempt == 0:
            self._parties.start(ask.index, ask.error_note)
        answers = self._parties.answer(ask)
        served = serve(answers)
        self._seen = dict(answers.messages)
        if ask.phase + 1 == self._phases and not served.must_restart:
            self._parties.end_sum()
        return served

    def sum(self, ask: Ask, aggregation: Aggregation) -> None:
        """Return None: one process has no collective sum."""

    def seen(self) -> Mapping[str, Message]:
        """Return what all parties sent since the last call."""
        seen, self._seen = self._seen, {}
        return seen

    def commit(self, after: Point, worked: tuple[str, ...], is_last: bool) -> Mapping[str, State]:
        """Return the states of all parties, including those that have left."""
        return self._parties.finish_round(worked)


class LocalParties:
    """The parties in this process and their states."""

    def __init__(
        self,
        program: Program,
        shards: Sequence[Shard],
        schedule: Schedule,
        reduction: Reduction,
        layout: Layout,
        states: Mapping[str, State],
        visit: Visit = run_one_by_one,
    ) -> None:
        expected, threads = program.upload_spec(layout), schedule.kernel_threads
        self.parties = {
            shard.name: Party(program, shard, layout, reduction, expected, threads)
            for shard in sorted(shards, key=lambda shard: shard.name)
        }
        self.states: dict[str, PartyState] = {}
        self._known, self._visit = dict(states), visit
        self._unstarted: dict[str, PartsongError] = {}

    def answer(self, ask: Ask) -> Answers:
        """Return the answers of the parties in this process. `visit` runs their work; sums are in name order.

        A party that could not start is faulty, whether it is asked or not.
        """
        names, faults = [name for name in ask.names if name in self.parties], dict[str, PartsongError]()
        if ask.kind == "work":
            faults = dict(self._unstarted)
            able = [name for name in names if name not in faults]
            faults |= self._try_each(
                lambda name: self.parties[name].do_work(self.states[name], ask), able, ask.error_note
            )
        messages: dict[str, Message] = {}
        for name in (name for name in names if name not in faults):
            party, state = self.parties[name], self.states[name]
            try:
                state = party.begin_sum(state, ask) if ask.kind == "work" else state
                if name not in ask.dropouts:
                    state, messages[name] = party.send(state, ask)
            except PartsongError as error:
                faults[name] = raise_or_return(error, ask.error_note)
                state = replace(state, sum_state=None)
            self.states[name] = state
        return Answers(messages, dict(sorted(faults.items())))

    def start(self, index: int, error_note: str | None, names: Sequence[str] | None = None) -> None:
        """Set up and start the named parties (None: all) that have not started. One that cannot start is faulty."""
        chosen = list(self.parties) if names is None else names
        for name in (name for name in chosen if name not in self.states):
            self.states[name] = self.parties[name].set_up()
            if name in self._known:
                self.states[name] = replace(self.states[name], program=self._known.pop(name), has_started=True)
        new = [name for name in chosen if not self.states[name].has_started]
        if new:

            def start(name: str) -> PartyState:
                return self.parties[name].start(self.states[name], index)

            others = {name: error for name, error in self._unstarted.items() if name not in new}
            self._unstarted = others | self._try_each(start, new, error_note)

    def end_sum(self) -> None:
        """End a sum: drop the uploads."""
        for name, state in self.states.items():
            self.states[name] = self.parties[name].end_sum(state)

    def finish_round(self, worked: Collection[str]) -> dict[str, State]:
        """End a round in which the work of these parties counts; return all states by name."""
        for name, state in self.states.items():
            if state.work is not None:
                self.states[name] = self.parties[name].finish_round(state, counts=name in worked)
        started = {name: state.program for name, state in self.states.items() if state.has_started}
        return {**self._known, **started}

    def _try_each(
        self, step: Callable[[str], PartyState], names: Sequence[str], error_note: str | None
    ) -> dict[str, PartsongError]:
        """Run a step at each of these parties; return the errors of those that failed."""

        def attempt(name: str) -> PartyState | PartsongError:
            try:
                return step(name)
            except PartsongError as error:
                return raise_or_return(error, error_note)

        done = self._visit(attempt, names)
        self.states.update({name: state for name, state in done.items() if isinstance(state, PartyState)})
        return {name: error for name, error in done.items() if isinstance(error, PartsongError)}
