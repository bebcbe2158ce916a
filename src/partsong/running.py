"""Following a run: history, when to stop, what was best, and an interrupt that loses nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from partsong.core import Outcome, Round
from partsong.errors import ParameterError

WINDOW = 5
"""Rounds over which progress is judged: extrapolated iterations may go up for a moment."""


class HistoryRow(NamedTuple):
    """One line of `history_`: seconds since the fit began, ‖X − W H‖ / ‖X‖, bytes sent in this round by all parties."""

    iteration: int
    seconds: float
    relative_error: float
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Converged once the squared error falls by less than `tol` of itself per round, over a few rounds."""

    tol: float = 1e-4
    time_budget: float | None = None

    def __post_init__(self) -> None:
        if not self.tol >= 0:
            raise ParameterError(f"tol must be zero or more; got {self.tol}.")
        if self.time_budget is not None and not self.time_budget > 0:
            raise ParameterError(f"time_budget must be more than 0 seconds (or None); got {self.time_budget}.")

    def outcome(self, errors: Sequence[float], seconds: float) -> Outcome | None:
        """Why to stop now, or None to go on."""
        if errors and not math.isfinite(errors[-1]):
            return Outcome.DIVERGED
        if self.tol > 0 and len(errors) > WINDOW and _is_flat(errors, self.tol):
            return Outcome.CONVERGED
        if self.time_budget is not None and seconds >= self.time_budget:
            return Outcome.TIME_SPENT
        return None


def _is_flat(errors: Sequence[float], tol: float) -> bool:
    now, then = min(errors[-WINDOW:]) ** 2, errors[-WINDOW - 1] ** 2
    return then - now <= WINDOW * tol * now or now < 1e-13


@dataclass(frozen=True, slots=True)
class Run:
    """How a run ended, round by round; `best` is the round with the smallest error, `last` the latest."""

    outcome: Outcome
    history: tuple[HistoryRow, ...]
    last: Round | None
    best: Round | None


@dataclass(slots=True)
class Follower:
    """Collects rounds until they end, a stop applies, or Ctrl-C; the model so far is kept in every case.

    `error_of` names the relative error of a round (by default what the program's server knows); `watch` is called
    after each round with the new history row.
    """

    stop: Stop
    began: float = field(default_factory=time.perf_counter)
    error_of: Callable[[Round], float] = lambda done: done.metrics.get("relative_error", math.nan)
    watch: Callable[[Round, HistoryRow], None] = lambda done, row: None

    def follow(self, rounds: Iterator[Round], history: Sequence[HistoryRow] = ()) -> Run:
        """Run to the end; `history` holds the rows of an earlier part of the same run."""
        rows, last, best, least = list(history), None, None, math.inf
        earlier = rows[-1].seconds if rows else 0.0
        outcome = Outcome.MAX_ROUNDS
        try:
            for done in rounds:
                error = self.error_of(done)
                seconds = earlier + time.perf_counter() - self.began
                row = HistoryRow(done.index + 1, seconds, error, sum(done.bytes_up.values()), done.bytes_down)
                rows.append(row)
                last = done
                if not error > least:
                    best, least = done, error if math.isfinite(error) else least
                self.watch(done, row)
                ending = self.stop.outcome([r.relative_error for r in rows], seconds)
                if ending is not None:
                    outcome = ending
                    break
        except KeyboardInterrupt:
            outcome = Outcome.INTERRUPTED
        return Run(outcome, tuple(rows), last, best)
