"""Engines of one process: sequential, which defines the semantics, and parallel threads with the same bits."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from partsong.core import runtime
from partsong.core.interfaces import Checkpoint, Program, Reduction, Round, Schedule, Shard
from partsong.engines.rounds import run_rounds
from partsong.errors import ParameterError

# ---- parallel ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parallel:
    """Parties run in `workers` threads (0: one per core); kernels release the GIL and are serial inside a party.

    Bit-identical to Sequential: the schedule alone fixes the kernels' threads, and sums go in name order.
    """

    workers: int = 0
    record: bool = False

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ParameterError(f"workers must be 0 (one per core) or more; got {self.workers}.")

    def run(
        self,
        program: Program,
        shards: Sequence[Shard],
        schedule: Schedule,
        *,
        reduction: Reduction,
        resume: Checkpoint | None = None,
    ) -> Iterator[Round]:
        """Rounds as they are done.

        Threads live as long as a visit to the parties and hold up nobody: where Ctrl-C ends the run in the middle of
        one, they are left behind and end with their party's work or with the process.
        """
        workers = self.workers or runtime.available()

        def visit(work: Callable[[str], Any], names: Sequence[str]) -> dict[str, Any]:
            return side_by_side(work, names, workers)

        return run_rounds(program, shards, schedule, reduction, resume, visit, self.record)


def side_by_side(work: Callable[[str], Any], names: Sequence[str], workers: int) -> dict[str, Any]:
    """work(name) for all names in daemon threads; of several errors that of the first name is raised."""
    waiting, done, failed = deque(names), {}, {}

    def serve() -> None:
        while waiting:
            try:
                name = waiting.popleft()
            except IndexError:
                return
            try:
                done[name] = work(name)
            except BaseException as error:
                failed[name] = error
                waiting.clear()

    crew = [
        threading.Thread(target=serve, daemon=True, name=f"partsong-party-{i}") for i in range(min(workers, len(names)))
    ]
    for thread in crew:
        thread.start()
    try:
        for thread in crew:
            thread.join()
    except BaseException:
        waiting.clear()
        raise
    for name in names:
        if name in failed:
            raise failed[name]
    return {name: done[name] for name in names}


# ---- sequential -------------------------------------------------------------------------------------------------
#
# The engine that defines what a program means.


@dataclass(frozen=True, slots=True)
class Sequential:
    """One party after another, in one thread of control; all other engines agree with it to rounding.

    `shuffle` visits parties in an order drawn from that number, which changes nothing; `record` keeps the traffic.
    """

    shuffle: int | None = None
    record: bool = False

    def run(
        self,
        program: Program,
        shards: Sequence[Shard],
        schedule: Schedule,
        *,
        reduction: Reduction,
        resume: Checkpoint | None = None,
    ) -> Iterator[Round]:
        """Rounds as they are done."""
        return run_rounds(program, shards, schedule, reduction, resume, self._visit, self.record)

    def _visit(self, work: Callable[[str], Any], names: Sequence[str]) -> dict[str, Any]:
        order = list(names)
        if self.shuffle is not None:
            random.Random(self.shuffle).shuffle(order)
        return {name: work(name) for name in order}
