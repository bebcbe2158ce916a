"""A stop-watch that stands still while the error is evaluated."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.speed.evaluation import Problem

STRIDE = 1.02
"""Iterates are evaluated once the clock shows this much more than at the last evaluation; the same for everybody."""
STRIDE_WITHOUT_W = 1.1
"""The same for methods that hold no W: fitting one takes long, though not on their clock."""
FLAT = 1e-5
"""A run is over when the last third of its time brought less than this share of the explained variance."""


class Enough(Exception):
    """Raised into a method to end its run."""


@dataclass(slots=True)
class Recorder:
    """Called by a method after each iteration with its W and H; W is None where a method only learns H.

    `limit` is in seconds on this clock; `goal` is an explained variance at which the run may end; `hint` is about how
    long the method took to get there before, for methods that can only be given a time beforehand. A run also ends
    when it could not reach the next of `targets` within the limit even if it went on twice as fast as of late.
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
        """The method begins: from here on its time counts."""
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
        """Late enough to judge by the last third of the time."""
        return self.elapsed >= max(1.0, self.limit / 5) and self.points[0][0] <= self.elapsed * 2 / 3

    def _gain(self) -> tuple[float, float]:
        """What the last third of the time brought, and how long that was."""
        then, before = [point for point in self.points if point[0] <= self.elapsed * 2 / 3][-1]
        return self.points[-1][1] - before, self.elapsed - then

    def _is_flat(self) -> bool:
        return self._gain()[0] < FLAT * abs(self.points[-1][1])

    def _is_hopeless(self) -> bool:
        ahead = [target for target in self.targets if target > max(value for _, value in self.points)]
        gain, seconds = self._gain()
        return bool(ahead) and self.points[-1][1] + 2 * gain / seconds * (self.limit - self.elapsed) < min(ahead)
