"""The parties of a round side by side on one machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from partsong import threads
from partsong.core import Checkpoint, Program, Reduction, Round, Schedule, Shard
from partsong.engines.rounds import run_rounds
from partsong.errors import ParameterError


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
        """Rounds as they are done; the threads end with the iteration."""
        with ThreadPoolExecutor(self.workers or threads.available(), thread_name_prefix="partsong-party") as pool:

            def visit(work: Callable[[str], Any], names: Sequence[str]) -> dict[str, Any]:
                return dict(zip(names, pool.map(work, names), strict=True))

            yield from run_rounds(program, shards, schedule, reduction, resume, visit, self.record)
