"""The engine that defines what a program means."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from partsong.core import Checkpoint, Program, Reduction, Round, Schedule, Shard
from partsong.engines.rounds import run_rounds


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
