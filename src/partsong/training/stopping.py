"""When a fit stops: its history, progress that can be compared, and the rule that ends it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from partsong.core.interfaces import Outcome
from partsong.errors import ParameterError

WINDOW = 10
"""Rounds over which progress is judged: extrapolated iterations may go up for a moment, or rest on a plateau."""

RECENT = 5
"""Rounds for which a larger cohort counts as present."""

RUNAWAY = 1e6
"""So many times its first value (and that of an empty model) the objective is not coming back."""

PERFECT = 1e-24
"""An objective, as a share of ½‖X‖², that is zero but for rounding."""


SMALL = 0.2
"""An objective, as a share of ½‖X‖², below which a share of what is left is more than users ask for."""


def yardstick(objective: float) -> float:
    """What progress is measured against: the smaller of what the model leaves (f) and what it explains (1 − f).

    Nearly all of f is noise where data are sparse, so that a share of f may be a large share of what is explained.
    Where f is small, a share of f is next to nothing of the data, and √(f · SMALL) is asked for instead: a model that
    leaves .2 % stops at a tenth of the relative precision, and rank-k data do not run on until f is rounding.
    """
    if not 0 <= objective < 1:
        return abs(objective)
    return min(max(objective, math.sqrt(SMALL * objective)), 1 - objective)


class HistoryRow(NamedTuple):
    """One line of `history_`: seconds since the fit began, ‖X − W H‖ / ‖X‖, the objective with penalties over ½‖X‖²
    (the square of the error where there are none), bytes sent in this round by all parties and to each of them.
    An extrapolated step that was taken back is listed with the error that it led to. Exchanges within a round have no
    error: it is NaN, as is their objective. Where parties have an H of their
    own, a simulation adds Σ_p ‖H_p − H‖² by position and after alignment, in units of ‖H‖².
    `epsilon` is what the run has cost the party that has spent most on privacy by then; NaN where nothing is accounted.
    `parties` took part. `company` is a number for whose rows the objective is over, 0 for all rows: rounds of different
    companies are not compared.
    """

    iteration: int
    seconds: float
    relative_error: float
    objective: float
    bytes_up: int
    bytes_down: int
    drift: float = math.nan
    aligned_drift: float = math.nan
    parties: int = 0
    company: int = 0
    epsilon: float = math.nan


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """Converged once the objective falls by less than `tol` of its `yardstick` per round, over `WINDOW` rounds.

    One that `is_blind` is stopped by nothing that is measured: with differential privacy, errors are not released.
    """

    tol: float = 1e-4
    time_budget: float | None = None
    is_blind: bool = False

    def __post_init__(self) -> None:
        if not self.tol >= 0:
            raise ParameterError(f"tol must be zero or more; got {self.tol}.")
        if self.time_budget is not None and not self.time_budget > 0:
            raise ParameterError(f"time_budget must be more than 0 seconds (or None); got {self.time_budget}.")

    def without_metrics(self) -> StoppingRule:
        """The rule for a run with differential privacy: the time that rounds take can depend on data as well."""
        if self.time_budget is not None:
            raise ParameterError(
                "With differential privacy a run has the rounds that its noise was planned for: how long they take can "
                "tell of the data. Leave time_budget out, and give a number of rounds."
            )
        return StoppingRule(0.0, None, True)

    def outcome(self, progress: Progress, seconds: float) -> Outcome | None:
        """Why to stop now, or None to go on."""
        if self.is_blind:
            return None
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
        if not self.count:
            return False
        latest = self.values[-1]
        return not (math.isfinite(latest) and latest <= RUNAWAY * max(1.0, self.first))

    def is_flat(self, tol: float) -> bool:
        """Whether the least value has hardly fallen over the window; never while the latest lies above it.

        Values that swing to more than twice the least are not at rest either.
        """
        if self.count <= WINDOW:
            return False
        least, before = self.least, self.minima[0]
        if least < PERFECT:
            return self.values[-1] < 2 * PERFECT
        slack = tol * yardstick(least)
        is_at_rest = self.values[-1] <= least + slack and max(self.values) <= 2 * least
        return is_at_rest and before - least <= WINDOW * slack


@dataclass(slots=True)
class ProgressByCohort:
    """Progress of each cohort: objectives over different rows are not compared.

    A round counts for the best model unless one with more parties was seen within the last few; where those parties
    have not met for as long, the next round that counts takes their place, however good it is. All of it follows from
    the history, so that a run which goes on later chooses the same rounds. A run that goes on with fewer parties,
    `present` of them, does not wait for more than there are.
    """

    current: Progress = field(default_factory=Progress)
    by_cohort: dict[int, Progress] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    owner: int | None = None
    count: int = 0
    present: float = math.inf

    @staticmethod
    def of(history: Iterable[HistoryRow], present: float = math.inf) -> ProgressByCohort:
        """The state after these rounds, for a run that goes on with so many parties."""
        comparable = ProgressByCohort(present=present)
        for row in history:
            comparable.add(row)
        return comparable

    def add(self, row: HistoryRow) -> bool:
        """Note a round; returns whether it is the best now. What has no objective is no round of its own."""
        if math.isnan(row.objective):
            return False
        cohort = row.company
        self.count += 1
        self.current = self.by_cohort.get(cohort) or self.by_cohort.setdefault(cohort, Progress())
        is_least = self.current.add(row.objective)
        self.seen[cohort], self.sizes[cohort] = self.count, row.parties
        others = (size for other, size in self.sizes.items() if other != cohort and self._is_recent(other))
        if any(row.parties < size <= self.present for size in others):
            return False
        is_best = is_least or self.owner is None or (self.owner != cohort and not self._is_recent(self.owner))
        self.owner = cohort if is_best else self.owner
        return is_best

    def _is_recent(self, cohort: int) -> bool:
        return self.count - self.seen.get(cohort, 0) < RECENT
