"""A clock that stops while the error is evaluated."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.speed.evaluation import Problem

STRIDE = 1.02
"""Iterates are evaluated once the clock has advanced by this factor; the same for all methods."""
STRIDE_WITHOUT_W = 1.1
"""The same for methods without a W, which must be fitted for the evaluation (off the clock)."""
FLAT = 1e-5
"""A run ends when the last third of its time gained less than this share of the explained variance."""


class Enough(Exception):
    """Raised inside a method to end its run."""


@dataclass(slots=True)
class Recorder:
    """Called by a method after each iteration with W and H (W is None for methods that only learn H).

    `limit`: seconds on this clock. `goal`: explained variance at which the run may end. `hint`: roughly how long the
    method took to reach it before, for methods that need a time budget in advance. A run also ends if it could not
    reach the next of `targets` within the limit at twice its recent pace.
    """

    problem: Problem
    limit: float
    goal: float = math.inf
    hint: float = math.inf
    targets: tuple[float, ...] = ()
    elapsed: float = 0.0
    points: list[tuple[float, float]] = field(default_factory=list)
    stopped: str = "end"
    after: float = math.nan
    note: str = ""
    _since: float = math.nan

    def start(self) -> None:
        """Start the clock."""
        self._since = time.perf_counter()

    def __call__(self, W: Any, H: Any) -> None:
        self.elapsed += time.perf_counter() - self._since
        if self.is_due(self.elapsed, STRIDE_WITHOUT_W if W is None else STRIDE) or self.elapsed >= self.limit:
            W = self.problem.weights(H) if W is None else W
            self.add(self.elapsed, self.problem.explained(W, H))
            self._end_if_enough()
        self._since = time.perf_counter()

    def is_due(self, elapsed: float, stride: float = STRIDE) -> bool:
        return not self.points or elapsed >= stride * self.points[-1][0]

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
        elif self._is_late() and self._is_flat():
            self.stopped = "flat"
        elif self._is_late() and self._is_hopeless():
            self.stopped = "hopeless"
        else:
            return
        raise Enough

    def _is_late(self) -> bool:
        """Whether enough time has passed to judge by its last third."""
        return self.elapsed >= max(1.0, self.limit / 5) and self.points[0][0] <= self.elapsed * 2 / 3

    def _gain(self) -> tuple[float, float]:
        """Gain in the last third of the time, and its length."""
        then, before = [point for point in self.points if point[0] <= self.elapsed * 2 / 3][-1]
        return self.points[-1][1] - before, self.elapsed - then

    def _is_flat(self) -> bool:
        return self._gain()[0] < FLAT * abs(self.points[-1][1])

    def _is_hopeless(self) -> bool:
        ahead = [target for target in self.targets if target > max(value for _, value in self.points)]
        gain, seconds = self._gain()
        return bool(ahead) and self.points[-1][1] + 2 * gain / seconds * (self.limit - self.elapsed) < min(ahead)
