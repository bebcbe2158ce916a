"""The rounds of a fit over ranks: all of them see the same numbers after each, and so end after the same one."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from partsong import kernels, threads
from partsong.cli.ranks_company import heard
from partsong.core import Outcome, Round
from partsong.engines.agreement import share
from partsong.engines.communicator import Communicator
from partsong.fitting import ClosingTime, Task, Watch, pursue
from partsong.interrupts import Interrupts
from partsong.running import Run


@dataclass(slots=True)
class Unison:
    """What ranks tell each other after a whole round: rank 0 its error, objective and clock, all whether to end.

    `ending` counts the wishes of all: a Ctrl-C or SIGTERM at any rank, or the time of rank 0, which is everybody's.
    """

    communicator: Communicator
    pressed: Interrupts
    began: float
    budget: float | None
    closing: ClosingTime | None = None
    ending: Interrupts = field(default_factory=Interrupts)
    is_late: bool = False
    is_pressed: bool = False
    objective: float = math.nan
    latest: float = 0.0
    measure: Callable[[Round], tuple[float, float]] = lambda done: (math.nan, math.nan)

    def error_of(self, done: Round) -> float:
        """Rank 0's error of this round, or where its server knows none that of all rows, at every rank.

        Sent: six numbers.
        """
        own = [*(done.metrics.get(name, math.nan) for name in ("relative_error", "objective"))]
        squares = self.measure(done) if math.isnan(own[0]) else (math.nan, math.nan)
        told = json.dumps([*own, self._is_late(done), self.pressed.count, *squares])
        with heard():
            every = [json.loads(text) for text in share(self.communicator, told)]
        error, self.objective, self.is_late = every[0][:3]
        if math.isnan(error):
            distance, energy = (sum(one[at] for one in every) for at in (4, 5))
            error = math.sqrt(max(0.0, distance) / energy) if energy else 0.0
            self.objective = error**2
        self.is_pressed = any(one[3] for one in every)
        self.ending.count = int(self.is_late or self.is_pressed)
        return float(error)

    def objective_of(self, done: Round, error: float) -> float:
        """Rank 0's objective, which came with its error."""
        return self.objective

    def _is_late(self, done: Round) -> bool:
        """Whether one more round like this one, and the end of the fit, would take too long; rank 0 decides."""
        if self.budget is None or self.closing is None or self.communicator.rank > 0:
            return False
        spent = time.perf_counter() - self.began
        ahead = spent - self.latest + self.closing.reserve(done, spent)
        self.latest = time.perf_counter() - self.began
        return spent + ahead >= self.budget


def squares_at(task: Task) -> Callable[[Round], tuple[float, float]]:
    """‖X_r − W_r H‖² and ‖X_r‖² of this rank's own rows and weights after a round."""

    def measure(done: Round) -> tuple[float, float]:
        (shard,) = task.shards
        matrix, W = shard.matrix, getattr(done.checkpoint.parties[shard.name], "W", None)
        if W is None:
            return matrix.squared_norm, matrix.squared_norm
        H = matrix.native(task.program.components(done.checkpoint.server))
        with threads.kernels_on(task.threads):
            return matrix.squared_distance(W, kernels.of(H).rows_of(H)), matrix.squared_norm

    return measure


def pursued(task: Task, unison: Unison, watch: Watch) -> Run:
    """The rounds to their end, which is the same at all ranks; a second Ctrl-C breaks off at once."""
    unison.closing, unison.measure = ClosingTime(task), squares_at(task)
    agreed = replace(task, error_of=unison.error_of, objective_of=unison.objective_of)
    run = pursue(agreed, began=unison.began, watch=watch, interrupts=unison.ending)
    if unison.pressed.count > 1:
        raise KeyboardInterrupt
    is_timed = run.outcome is Outcome.INTERRUPTED and unison.is_late and not unison.is_pressed
    return replace(run, outcome=Outcome.TIME_SPENT) if is_timed else run
