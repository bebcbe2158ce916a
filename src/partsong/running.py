"""Following a run: history, when to stop, what was best, and an interrupt that loses nothing."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from partsong.core import Outcome, Round, State
from partsong.errors import DivergenceError, ParameterError
from partsong.interrupts import Interrupts

WINDOW = 5
"""Rounds over which progress is judged: extrapolated iterations may go up for a moment."""

RUNAWAY = 1e6
"""So many times its first value (and that of an empty model) the objective is not coming back."""

PERFECT = 1e-13
"""An objective, as a share of ½‖X‖², that is zero but for rounding."""


class HistoryRow(NamedTuple):
    """One line of `history_`: seconds since the fit began, ‖X − W H‖ / ‖X‖, the objective with penalties over ½‖X‖²
    (the square of the error where there are none), bytes sent in this round by all parties and to each of them.
    An extrapolated step that was taken back is listed with the error that it led to. Where parties have an H of their
    own, a simulation adds Σ_p ‖H_p − H‖² by position and after alignment, in units of ‖H‖².
    """

    iteration: int
    seconds: float
    relative_error: float
    objective: float
    bytes_up: int
    bytes_down: int
    drift: float = math.nan
    aligned_drift: float = math.nan


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

    def outcome(self, progress: Progress, seconds: float) -> Outcome | None:
        """Why to stop now, or None to go on."""
        if progress.is_lost():
            return Outcome.DIVERGED
        if self.tol > 0 and progress.is_flat(self.tol):
            return Outcome.CONVERGED
        if self.time_budget is not None and seconds >= self.time_budget:
            return Outcome.TIME_SPENT
        return None


@dataclass(slots=True)
class Progress:
    """The objective over ½‖X‖² of comparable rounds: the first, the number, the latest few and the least so far."""

    first: float = math.nan
    count: int = 0
    values: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW + 1))
    minima: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW + 1))

    @staticmethod
    def of(values: Iterable[float]) -> Progress:
        """The progress that these values were."""
        progress = Progress()
        for value in values:
            progress.add(value)
        return progress

    @property
    def least(self) -> float:
        """The smallest value so far."""
        return self.minima[-1] if self.minima else math.inf

    def add(self, value: float) -> bool:
        """Note one more round; returns whether none before was better."""
        is_best = value <= self.least
        self.minima.append(value if is_best else self.least)
        self.values.append(value)
        self.first = self.first if self.count else value
        self.count += 1
        return is_best

    def is_lost(self) -> bool:
        """Whether the latest value is no number any more, or beyond all measure."""
        return self.count > 0 and not self.values[-1] <= RUNAWAY * max(1.0, self.first)

    def is_flat(self, tol: float) -> bool:
        """Whether the least value has hardly fallen over the window; never while the latest lies above it.

        Values that swing to more than twice the least are not at rest either.
        """
        if self.count <= WINDOW:
            return False
        least, before = self.least, self.minima[0]
        if least < PERFECT:
            return self.values[-1] < 2 * PERFECT
        is_at_rest = self.values[-1] <= least * (1 + tol) and max(self.values) <= 2 * least
        return is_at_rest and before - least <= WINDOW * tol * least


@dataclass(frozen=True, slots=True)
class Run:
    """How a run ended: its history, and the server's state where the objective was smallest (None: no round).

    `trouble` says what went wrong where the outcome is `diverged`.
    """

    outcome: Outcome
    history: tuple[HistoryRow, ...]
    best: State
    trouble: str = ""


def known_error(done: Round) -> float:
    """The relative error that the program's server knows; NaN where it knows none."""
    return done.metrics.get("relative_error", math.nan)


@dataclass(slots=True)
class Follower:
    """Collects rounds until they end, a stop applies, or Ctrl-C; the model so far is kept in every case.

    `error_of` tells the relative error of a round (by default what the program's server knows); `watch` is called after
    each round with the new history row; `reserve` tells how many seconds of a time budget the end of the fit will need.
    `drift_of` tells how far parties are from the model, by position and after alignment.
    What `error_of`, `drift_of` and `reserve` take is not the method's time and not in the history.
    """

    stop: Stop
    began: float = field(default_factory=time.perf_counter)
    error_of: Callable[[Round], float] = known_error
    drift_of: Callable[[Round], tuple[float, float]] = lambda done: (math.nan, math.nan)
    watch: Callable[[Round, HistoryRow], None] = lambda done, row: None
    reserve: Callable[[Round, float], float] = lambda done, seconds: 0.0
    interrupts: Interrupts = field(default_factory=Interrupts)

    def follow(self, rounds: Iterator[Round], history: Sequence[HistoryRow] = ()) -> Run:
        """Run to the end; `history` holds the rows of an earlier part of the same run."""
        rows, best, comparable = list(history), None, Comparable(Progress.of(row.objective for row in history))
        earlier = rows[-1].seconds if rows else 0.0
        apart, outcome, trouble, turned = 0.0, Outcome.MAX_ROUNDS, "", time.perf_counter()
        try:
            for done in rounds:
                paused = time.perf_counter()
                error, drift = self.error_of(done), self.drift_of(done)
                apart += time.perf_counter() - paused
                row = _row(done, error, drift, earlier + time.perf_counter() - self.began - apart)
                rows.append(row)
                if comparable.add(_who(done), row.objective):
                    best = done.checkpoint.server
                self.watch(done, row)
                paused = time.perf_counter()
                ending = self._ending(done, comparable, earlier + paused - self.began, paused - turned)
                apart, turned = apart + time.perf_counter() - paused, time.perf_counter()
                if ending is not None:
                    outcome = ending
                    break
        except KeyboardInterrupt:
            outcome = Outcome.INTERRUPTED
        except DivergenceError as error:
            if best is None:
                raise
            outcome, trouble = Outcome.DIVERGED, str(error)
        return Run(outcome, tuple(rows), best, trouble)

    def _ending(self, done: Round, comparable: Comparable, spent: float, last: float) -> Outcome | None:
        """A time budget has to hold one more round like the last, and the end of the fit."""
        if self.interrupts.count:
            return Outcome.INTERRUPTED
        if self.stop.time_budget is not None:
            spent += last + self.reserve(done, spent)
        return self.stop.outcome(comparable.current, spent)


def _who(done: Round) -> tuple[str, ...]:
    """Whose rows the objective of a round is over; nobody's in particular where a simulation computes it over all."""
    return done.participants if "relative_error" in done.metrics else ()


@dataclass(slots=True)
class Comparable:
    """Progress by who took part: objectives over different rows are not compared.

    A round counts for the best model unless one with more parties was seen within the last few; where those parties
    have not met for as long, the next round that counts takes their place, however good it is.
    """

    first: Progress
    current: Progress = field(default_factory=Progress)
    by_participants: dict[tuple[str, ...], Progress] = field(default_factory=dict)
    seen: dict[tuple[str, ...], int] = field(default_factory=dict)
    owner: tuple[str, ...] | None = None
    count: int = 0

    def add(self, participants: tuple[str, ...], value: float) -> bool:
        """Note a round; returns whether it is the best now."""
        self.count += 1
        progress = self.by_participants.get(participants)
        if progress is None:
            progress = self.first if not self.by_participants else Progress()
            self.owner = participants if progress.count else self.owner  # the best so far is from before
            self.by_participants[participants] = progress
        is_least, self.current = progress.add(value), progress
        self.seen[participants] = self.count
        if any(len(others) > len(participants) for others in self.seen if self._is_recent(others)):
            return False
        is_best = is_least or self.owner is None or (self.owner != participants and not self._is_recent(self.owner))
        self.owner = participants if is_best else self.owner
        return is_best

    def _is_recent(self, participants: tuple[str, ...]) -> bool:
        return self.count - self.seen.get(participants, 0) < WINDOW


def _row(done: Round, error: float, drift: tuple[float, float], seconds: float) -> HistoryRow:
    objective = done.metrics.get("objective", error**2)
    return HistoryRow(done.index + 1, seconds, error, objective, sum(done.bytes_up.values()), done.bytes_down, *drift)
