"""Following a run: history, when to stop, what was best, and an interrupt that loses nothing."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from partsong.core.interfaces import Outcome, Round, State
from partsong.core.runtime import Interrupts
from partsong.core.streams import key
from partsong.errors import BudgetSpent, DivergenceError, ParameterError, StepTooLarge

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
class Stop:
    """Converged once the objective falls by less than `tol` of its `yardstick` per round, over `WINDOW` rounds.

    One that `is_blind` is stopped by nothing that is measured: with differential privacy errors are not released.
    """

    tol: float = 1e-4
    time_budget: float | None = None
    is_blind: bool = False

    def __post_init__(self) -> None:
        if not self.tol >= 0:
            raise ParameterError(f"tol must be zero or more; got {self.tol}.")
        if self.time_budget is not None and not self.time_budget > 0:
            raise ParameterError(f"time_budget must be more than 0 seconds (or None); got {self.time_budget}.")

    def blind(self) -> Stop:
        """The stop of a run with differential privacy; the time that rounds take can depend on data as well."""
        if self.time_budget is not None:
            raise ParameterError(
                "With differential privacy a run has the rounds that its noise was planned for: how long they take can "
                "tell of the data. Leave time_budget out, and give a number of rounds."
            )
        return Stop(0.0, None, True)

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


@dataclass(frozen=True, slots=True)
class Run:
    """How a run ended: its history, and the server's state where the objective was smallest (None: no round).

    `trouble` says what went wrong where the outcome is `diverged`.
    """

    outcome: Outcome
    history: tuple[HistoryRow, ...]
    best: State
    trouble: str = ""

    @property
    def rounds(self) -> int:
        """Whole rounds; exchanges within one are in the history, but have no objective."""
        return sum(not math.isnan(row.objective) for row in self.history)


def known_error(done: Round) -> float:
    """The relative error that the program's server knows; NaN where it knows none."""
    return done.metrics.get("relative_error", math.nan)


def known_objective(done: Round, error: float) -> float:
    """The objective that the program's server knows, with its error replaced by `error`; without one, its square."""
    if "objective" not in done.metrics:
        return error**2
    known = done.metrics.get("relative_error", error)
    return done.metrics["objective"] + (0.0 if known == error else error**2 - known**2)


@dataclass(slots=True)
class Course:
    """A run as it goes: its history, the server's state now and at its best, and how it ended, once it has.

    One that `keeps_last` takes its last state for the best: which was better is not to be released.
    """

    rows: list[HistoryRow]
    comparable: Comparable
    best: State = None
    latest: State = None
    outcome: Outcome | None = None
    trouble: str = ""
    keeps_last: bool = False

    @staticmethod
    def after(
        history: Sequence[HistoryRow] = (), best: State = None, present: float = math.inf, keeps_last: bool = False
    ) -> Course:
        """The course of a run whose earlier part had this history and this best state; `present` parties go on."""
        return Course(list(history), Comparable.of(history, present), best, keeps_last=keeps_last)

    def note(self, done: Round, row: HistoryRow) -> None:
        """One more round."""
        self.rows.append(row)
        self.latest = done.checkpoint.server
        is_best = self.comparable.add(row) or self.comparable.count == 0  # before a first whole round any model will do
        if is_best or self.keeps_last:
            self.best = self.latest

    def run(self) -> Run:
        """What has become of it; a run that nobody has ended was interrupted."""
        return Run(self.outcome or Outcome.INTERRUPTED, tuple(self.rows), self.best, self.trouble)


@dataclass(slots=True)
class Follower:
    """Collects rounds until they end, a stop applies, or Ctrl-C; the model so far is kept, if there is one.

    `error_of` tells the relative error of a round (by default what the program's server knows); `watch` is called after
    each round with the new history row; `reserve` tells how many seconds of a time budget the end of the fit will need.
    `drift_of` tells how far parties are from the model, by position and after alignment; `objective_of` what is to fall
    (by default what the server knows, or else the square of the error); `spent_on` what a round has cost in privacy,
    with all before it; `last` is the number of rounds; `present` are
    the parties over whose rows a simulation computes the error (by default all that the run has ever known).
    `is_whole` tells whether a round ends with an exchange; of others nothing is measured, they are not compared, and no
    run ends with them.
    What `error_of`, `drift_of`, `reserve` and whoever iterates take is not the method's time and not in the history. A
    time budget is about all of it but `away`, the seconds that a caller of ours has kept for itself between rounds.
    """

    stop: Stop
    began: float = field(default_factory=time.perf_counter)
    error_of: Callable[[Round], float] = known_error
    drift_of: Callable[[Round], tuple[float, float]] = lambda done: (math.nan, math.nan)
    objective_of: Callable[[Round, float], float] = known_objective
    spent_on: Callable[[Round], float] = lambda done: math.nan
    is_whole: Callable[[Round], bool] = lambda done: True
    watch: Callable[[Round, HistoryRow], None] = lambda done, row: None
    reserve: Callable[[Round, float], float] = lambda done, seconds: 0.0
    interrupts: Interrupts = field(default_factory=Interrupts)
    last: float = math.inf
    present: frozenset[str] | None = None
    away: float = 0.0

    def follow(self, rounds: Iterator[Round], history: Sequence[HistoryRow] = ()) -> Run:
        """Run to the end; `history` holds the rows of an earlier part of the same run."""
        course = Course.after(history)
        for _ in self.attend(rounds, course):
            pass
        return course.run()

    def attend(self, rounds: Iterator[Round], course: Course) -> Iterator[HistoryRow]:
        """One round after another, each noted in `course`; whoever has seen enough leaves the loop."""
        earlier = course.rows[-1].seconds if course.rows else 0.0
        apart, turned = 0.0, time.perf_counter()
        try:
            for done in rounds:
                paused = time.perf_counter()
                error, objective, drift = self._measured(done)
                apart += time.perf_counter() - paused
                seconds = earlier + time.perf_counter() - self.began - apart
                row = _row(done, seconds, error, objective, drift, self.present)._replace(epsilon=self.spent_on(done))
                course.note(done, row)
                self.watch(done, row)
                paused = time.perf_counter()
                spent = earlier + paused - self.began - self.away
                is_whole = not math.isnan(row.objective)
                course.outcome = self._ending(done, course, spent, paused - turned) if is_whole else None
                del done  # as large as the parties' states
                yield row
                apart += time.perf_counter() - paused
                turned = time.perf_counter() if is_whole else turned
                if course.outcome is not None:
                    return
            course.outcome = Outcome.MAX_ROUNDS
        except KeyboardInterrupt:
            if course.best is None:
                raise  # there is no model to keep
            course.outcome = Outcome.INTERRUPTED
        except BudgetSpent:
            if course.best is None:
                raise
            course.outcome = Outcome.BUDGET_SPENT
        except DivergenceError as error:
            if course.best is None and not isinstance(error, StepTooLarge):
                raise
            told = " ".join((str(error), *getattr(error, "__notes__", ())))
            course.outcome, course.trouble = Outcome.DIVERGED, told

    def _measured(self, done: Round) -> tuple[float, float, tuple[float, float]]:
        """Error, objective and drifts of the model after an exchange that ends a round, or the run."""
        if not (self.is_whole(done) or done.index + 1 >= self.last):
            return math.nan, math.nan, (math.nan, math.nan)
        error = self.error_of(done)
        objective = self.objective_of(done, error)
        return error, math.inf if math.isnan(objective) else objective, self.drift_of(done)

    def _ending(self, done: Round, course: Course, spent: float, latest: float) -> Outcome | None:
        """A time budget has to hold one more round like the latest, and the end of the fit."""
        if self.interrupts.count:
            return Outcome.INTERRUPTED
        if self.stop.time_budget is not None:
            spent += latest + self.reserve(done, spent)
        ending = self.stop.outcome(course.comparable.current, spent)
        return Outcome.MAX_ROUNDS if ending is None and done.index + 1 >= self.last else ending


@dataclass(slots=True)
class Comparable:
    """Progress by company: objectives over different rows are not compared.

    A round counts for the best model unless one with more parties was seen within the last few; where those parties
    have not met for as long, the next round that counts takes their place, however good it is. All of it follows from
    the history, so that a run which goes on later chooses the same rounds. A run that goes on with fewer parties,
    `present` of them, does not wait for more than there are.
    """

    current: Progress = field(default_factory=Progress)
    by_company: dict[int, Progress] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    owner: int | None = None
    count: int = 0
    present: float = math.inf

    @staticmethod
    def of(history: Iterable[HistoryRow], present: float = math.inf) -> Comparable:
        """The state after these rounds, for a run that goes on with so many parties."""
        comparable = Comparable(present=present)
        for row in history:
            comparable.add(row)
        return comparable

    def add(self, row: HistoryRow) -> bool:
        """Note a round; returns whether it is the best now. What has no objective is no round of its own."""
        if math.isnan(row.objective):
            return False
        company = row.company
        self.count += 1
        self.current = self.by_company.get(company) or self.by_company.setdefault(company, Progress())
        is_least = self.current.add(row.objective)
        self.seen[company], self.sizes[company] = self.count, row.parties
        others = (size for other, size in self.sizes.items() if other != company and self._is_recent(other))
        if any(row.parties < size <= self.present for size in others):
            return False
        is_best = is_least or self.owner is None or (self.owner != company and not self._is_recent(self.owner))
        self.owner = company if is_best else self.owner
        return is_best

    def _is_recent(self, company: int) -> bool:
        return self.count - self.seen.get(company, 0) < RECENT


def _company(done: Round, present: frozenset[str] | None) -> int:
    """A number for whose rows the objective of a round is over.

    Zero stands for all rows: everybody took part, or a simulation computes the error over all. Those who have left
    are no longer in its error.
    """
    everyone = done.checkpoint.parties.keys() | done.refused.keys()
    over = frozenset(done.participants) if "relative_error" in done.metrics else (present or everyone)
    return 0 if over >= everyone else 1 + key(0, *sorted(over)) % 2**48  # exact as a float


def _row(
    done: Round,
    seconds: float,
    error: float,
    objective: float,
    drift: tuple[float, float],
    present: frozenset[str] | None,
) -> HistoryRow:
    sent, company = (sum(done.bytes_up.values()), done.bytes_down), _company(done, present)
    return HistoryRow(done.index + 1, seconds, error, objective, *sent, *drift, len(done.participants), company)
