"""A stop-watch that stands still while the error is evaluated."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.evaluation import Problem

STRIDE = 1.02
"""Iterates are evaluated once the clock shows this much more than at the last evaluation; the same for everybody."""
FLAT = 1e-5
"""A run is over when the last third of its time brought less than this share of the explained variance."""


class Enough(Exception):
    """Raised into a method to end its run."""


@dataclass(slots=True)
class Recorder:
    """Called by a method after each iteration with its W and H; W is None where a method only learns H.

    `limit` is in seconds on this clock; `goal` is an explained variance at which the run may end; `hint` is about how
    long the method took to get there before, for methods that can only be given a time beforehand.
    """

    problem: Problem
    limit: float
    goal: float = math.inf
    hint: float = math.inf
    elapsed: float = 0.0
    points: list[tuple[float, float]] = field(default_factory=list)
    stopped: str = "end"
    after: float = math.nan
    note: str = ""
    _since: float = math.nan

    def start(self) -> None:
        """The method begins: from here on its time counts."""
        self._since = time.perf_counter()

    def __call__(self, W: Any, H: Any) -> None:
        self.elapsed += time.perf_counter() - self._since
        if self.is_due(self.elapsed) or self.elapsed >= self.limit:
            W = self.problem.weights(H) if W is None else W
            self.add(self.elapsed, self.problem.explained(W, H))
            self._end_if_enough()
        self._since = time.perf_counter()

    def is_due(self, elapsed: float) -> bool:
        return not self.points or elapsed >= STRIDE * self.points[-1][0]

    def add(self, elapsed: float, explained: float) -> None:
        self.points.append((elapsed, explained))

    def _end_if_enough(self) -> None:
        explained = self.points[-1][1]
        if not math.isfinite(explained):
            self.stopped = "diverged"
        elif explained >= self.goal:
            self.stopped = "goal"
        elif self.elapsed >= self.limit:
            self.stopped = "limit"
        elif self._is_flat():
            self.stopped = "flat"
        else:
            return
        raise Enough

    def _is_flat(self) -> bool:
        if self.elapsed < max(1.0, self.limit / 5):
            return False
        earlier = [value for seconds, value in self.points if seconds <= self.elapsed * 2 / 3]
        return bool(earlier) and self.points[-1][1] - earlier[-1] < FLAT * abs(self.points[-1][1])
