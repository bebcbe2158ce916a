"""Following a run: history, when to stop, what was best, and an interrupt that loses nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from partsong.core import Outcome, Round, State
from partsong.errors import ParameterError

WINDOW = 5
"""Rounds over which progress is judged: extrapolated iterations may go up for a moment."""


class HistoryRow(NamedTuple):
    """One line of `history_`: seconds since the fit began, ‖X − W H‖ / ‖X‖, the objective with penalties over ½‖X‖²
    (the square of the error where there are none), bytes sent in this round by all parties and to each of them.
    An extrapolated step that was taken back is listed with the error that it led to.
    """

    iteration: int
    seconds: float
    relative_error: float
    objective: float
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Converged once the objective falls by less than `tol` of itself per round, over a few rounds."""

    tol: float = 1e-4
    time_budget: float | None = None

    def __post_init__(self) -> None:
        if not self.tol >= 0:
            raise ParameterError(f"tol must be zero or more; got {self.tol}.")
        if self.time_budget is not None and not self.time_budget > 0:
            raise ParameterError(f"time_budget must be more than 0 seconds (or None); got {self.time_budget}.")

    def outcome(self, values: Sequence[float], seconds: float) -> Outcome | None:
        """Why to stop now, or None to go on; `values` are the objective over ½‖X‖², round by round."""
        if values and not math.isfinite(values[-1]):
            return Outcome.DIVERGED
        if self.tol > 0 and len(values) > WINDOW and _is_flat(values, self.tol):
            return Outcome.CONVERGED
        if self.time_budget is not None and seconds >= self.time_budget:
            return Outcome.TIME_SPENT
        return None


def _is_flat(values: Sequence[float], tol: float) -> bool:
    """Whether the least value has hardly fallen over the window; never while the latest lies above it."""
    least, before = min(values), min(values[:-WINDOW])
    return values[-1] <= least * (1 + tol) and (before - least <= WINDOW * tol * least or least < 1e-13)


@dataclass(frozen=True, slots=True)
class Run:
    """How a run ended: its history, and the server's state where the objective was smallest (None: no round)."""

    outcome: Outcome
    history: tuple[HistoryRow, ...]
    best: State


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
        rows, best, least, present = list(history), None, math.inf, 0
        values = [row.objective for row in rows]
        earlier = rows[-1].seconds if rows else 0.0
        outcome = Outcome.MAX_ROUNDS
        try:
            for done in rounds:
                error = self.error_of(done)
                seconds = earlier + time.perf_counter() - self.began
                value = done.metrics.get("objective", error**2)
                row = HistoryRow(done.index + 1, seconds, error, value, sum(done.bytes_up.values()), done.bytes_down)
                rows.append(row)
                if len(done.participants) > present:  # rounds with fewer parties are judged on fewer rows
                    values = values if present == 0 else []
                    present, least = len(done.participants), math.inf
                if len(done.participants) == present:
                    values.append(value)
                    if value <= least:
                        best, least = done.checkpoint.server, value
                self.watch(done, row)
                ending = self.stop.outcome(values, seconds)
                if ending is not None:
                    outcome = ending
                    break
        except KeyboardInterrupt:
            outcome = Outcome.INTERRUPTED
        return Run(outcome, tuple(rows), best)
