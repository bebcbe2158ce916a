"""The training loop of centralized and federated fits: history, best model, stopping rule, interrupts and progress.

steps = fit.steps(point)                 # compute: CentralizedFit or FederatedFit
for step in train(steps, rule, training) # evaluate: history, best model, stopping rule, Ctrl-C
result.finish(fit, training)             # scale, order, W and error of the best model
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from partsong.core.interfaces import Array, Checkpoint, Outcome, Round, RowSolver, Shard, State
from partsong.core.runtime import InterruptCounter
from partsong.core.streams import key
from partsong.errors import BudgetSpent, DivergenceError, ParameterError
from partsong.training.result import FinalizationTimer, FitResult

if TYPE_CHECKING:
    from partsong.privacy.spending import PrivacyTracker

WINDOW = 10
"""Rounds over which progress is measured: extrapolated iterations may rise briefly, or stay on a plateau."""

RECENT = 5
"""Rounds for which a larger cohort counts as present after it was last seen."""

DIVERGENCE_FACTOR = 1e6
"""A fit has diverged if its objective exceeds its first value (and that of an empty model) by this factor."""

PERFECT = 1e-24
"""An objective, as a fraction of ½‖X‖², that is zero up to rounding."""


SMALL_ERROR = 0.2
"""An objective, as a fraction of ½‖X‖², below which `tol` relative to it would be more precise than users need."""


def yardstick(objective: float) -> float:
    """Return the scale that progress is compared to: the smaller of the residual f and the explained part 1 − f.

    If data are sparse, nearly all of f is noise, and a fraction of f may be a large fraction of the explained part. If
    f is small, a fraction of f is next to nothing of the data, and the scale is √(f · SMALL_ERROR): a model with f =
    0.2 % stops at a tenth of the relative precision, and fits of rank-k data do not continue until f is only rounding.
    """
    if not 0 <= objective < 1:
        return abs(objective)
    return min(max(objective, math.sqrt(SMALL_ERROR * objective)), 1 - objective)


class HistoryRow(NamedTuple):
    """One row of `history_`.

    `seconds` since the fit started. `relative_error`: ‖X − W H‖ / ‖X‖. `objective`: the objective with penalties over
    ½‖X‖², or the square of the error without penalties. `bytes_up`: sent in this round by all parties. `bytes_down`:
    sent to each of them. An extrapolated step that was undone is listed with its error. Exchanges within a round have
    NaN as error and objective. `drift` and `aligned_drift`: Σ_p ‖H_p − H‖² by position and after alignment, in units of
    ‖H‖², in a simulation whose parties have their own H. `parties`: how many took part. `cohort` identifies the parties
    whose rows the objective covers (0: all); only rounds of one cohort are compared. `epsilon`: the privacy loss so far
    of the party that has spent most; NaN if privacy is not accounted for.
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
    cohort: int = 0
    epsilon: float = math.nan


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """Converged once the objective falls by less than `tol` of its `yardstick` per round, over `WINDOW` rounds.

    If `is_blind`, no measurement stops the fit: with differential privacy, errors are not released.
    """

    tol: float = 1e-4
    time_budget: float | None = None
    is_blind: bool = False

    def __post_init__(self) -> None:
        if not self.tol >= 0:
            raise ParameterError(f"tol must be zero or more; got {self.tol}.", parameter="tol")
        if self.time_budget is not None and not self.time_budget > 0:
            raise ParameterError(
                f"time_budget must be more than 0 seconds; got {self.time_budget}.", parameter="time_budget"
            )

    def without_metrics(self) -> StoppingRule:
        """Return the rule for a run with differential privacy; even the time of rounds can depend on data."""
        if self.time_budget is not None:
            raise ParameterError(
                "time_budget cannot be used with differential privacy, because the time of rounds can depend on the "
                "data. Remove time_budget, and set the number of rounds.",
                parameter="time_budget",
            )
        return StoppingRule(0.0, None, True)

    def outcome(self, progress: Progress, seconds: float) -> Outcome | None:
        """Return why to stop now, or None to continue."""
        if self.is_blind:
            return None
        if progress.has_diverged():
            return Outcome.DIVERGED
        if self.tol > 0 and progress.is_flat(self.tol):
            return Outcome.CONVERGED
        if self.time_budget is not None and seconds >= self.time_budget:
            return Outcome.TIME_LIMIT
        return None


@dataclass(slots=True)
class Progress:
    """Objectives over ½‖X‖² of comparable rounds: the first, their number, the latest few and the minimum so far."""

    first: float = math.nan
    count: int = 0
    values: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW + 1))
    minima: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW + 1))

    @property
    def least(self) -> float:
        """The smallest value so far."""
        return self.minima[-1] if self.minima else math.inf

    def add(self, value: float) -> bool:
        """Add a round; return whether no earlier one was better."""
        is_best = value <= self.least
        self.minima.append(value if is_best else self.least)
        self.values.append(value)
        self.first = self.first if self.count else value
        self.count += 1
        return is_best

    def has_diverged(self) -> bool:
        """Whether the latest value is not finite, or exceeds `DIVERGENCE_FACTOR` times the first."""
        if not self.count:
            return False
        latest = self.values[-1]
        return not (math.isfinite(latest) and latest <= DIVERGENCE_FACTOR * max(1.0, self.first))

    def is_flat(self, tol: float) -> bool:
        """Whether the minimum has hardly fallen over the window, and the latest value is not above it.

        Values that oscillate up to more than twice the minimum are not flat.
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

    A round can become the best model unless a cohort with more parties was seen within the last `RECENT` rounds. If the
    cohort of the best model has not been seen for as long, the next eligible round replaces it, however good it is. All
    of this follows from the history, so a resumed run chooses the same rounds. A run that resumes with fewer parties
    (`present`) does not wait for larger cohorts.
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
        """Return the state after these rounds, for a run that resumes with `present` parties."""
        comparable = ProgressByCohort(present=present)
        for row in history:
            comparable.add(row)
        return comparable

    def add(self, row: HistoryRow) -> bool:
        """Add a round; return whether it is the best. A row without an objective is no whole round and is ignored."""
        if math.isnan(row.objective):
            return False
        cohort = row.cohort
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


Watch = Callable[[Round, HistoryRow], None]
"""Callback after every step, with its round and its row of the history."""


@dataclass(frozen=True, slots=True)
class Step:
    """One centralized iteration or one federated exchange, with the metrics of the model after it.

    The objective is NaN after an exchange within a round: such a model is not compared with others, and no fit ends
    with it. `measuring` is the time of these measurements in seconds, which is not part of the method's time.
    """

    done: Round
    error: float
    objective: float
    drift: tuple[float, float] = (math.nan, math.nan)
    epsilon: float = math.nan
    cohort: int = 0
    measuring: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether a round ended with this step."""
        return not math.isnan(self.objective)

    def row(self, seconds: float) -> HistoryRow:
        """Return its row of the history, `seconds` after the fit started."""
        done, sent = self.done, sum(self.done.bytes_up.values())
        numbers = (seconds, self.error, self.objective, sent, done.bytes_down, *self.drift)
        return HistoryRow(done.index + 1, *numbers, len(done.participants), self.cohort, self.epsilon)


class Measures:
    """Metrics of a round: the error ‖X − W H‖ / ‖X‖, the objective, and the drift of the parties.

    This class returns what the program's server knows: an error and an objective over ½‖X‖², or neither (NaN).
    """

    __slots__ = ()

    def error(self, done: Round) -> float:
        return done.metrics.get("relative_error", math.nan)

    def objective(self, done: Round, error: float) -> float:
        """Return the server's objective with its error replaced by `error`; the square of `error` if there is none."""
        if "objective" not in done.metrics:
            return error**2
        known = done.metrics.get("relative_error", error)
        return done.metrics["objective"] + (0.0 if known == error else error**2 - known**2)

    def drift(self, done: Round) -> tuple[float, float]:
        return math.nan, math.nan


def measure(
    rounds: Iterable[Round],
    measures: Measures = Measures(),
    *,
    ends_round: Callable[[Round], bool] = lambda done: True,
    epsilon: Callable[[Round], float] = lambda done: math.nan,
    last: float = math.inf,
    present: frozenset[str] | None = None,
) -> Iterator[Step]:
    """Yield rounds with their metrics. Exchanges within a round are not measured, except the `last` one.

    `present` are the parties over whose rows a simulation computes errors (None: all parties that the run has had).
    """
    for done in rounds:
        began, error, objective, drift = time.perf_counter(), math.nan, math.nan, (math.nan, math.nan)
        if ends_round(done) or done.index + 1 >= last:
            error = measures.error(done)
            objective = measures.objective(done, error)
            objective, drift = math.inf if math.isnan(objective) else objective, measures.drift(done)
        seconds = time.perf_counter() - began
        step = Step(done, error, objective, drift, epsilon(done), _cohort(done, present), seconds)
        del done  # as large as the parties' states
        yield step
        del step


def _cohort(done: Round, present: frozenset[str] | None) -> int:
    """Return a number that identifies the parties whose rows the objective covers.

    Zero means all rows: all parties took part, or a simulation computes the error over all. Parties that have left are
    no longer in its error.
    """
    everyone = done.checkpoint.parties.keys() | done.refused.keys()
    over = frozenset(done.participants) if "relative_error" in done.metrics else (present or everyone)
    return 0 if over >= everyone else 1 + key(0, *sorted(over)) % 2**48  # exact as a float


@dataclass(slots=True)
class Training:
    """The state of a fit: its history, its latest and best model, its clock, and its outcome once it has ended.

    With `keeps_last`, the latest state counts as the best, because which one was better must not be released. `reserve`
    estimates the seconds of a time budget that the end of the fit needs. `last` is the number of steps.
    `paused_seconds`, the time a caller spends between steps, counts neither in the history nor against a time budget.
    """

    history: list[HistoryRow] = field(default_factory=list)
    progress: ProgressByCohort = field(default_factory=ProgressByCohort)
    best: State = None
    latest: State = None
    ended: Outcome | None = None
    error_text: str = ""
    keeps_last: bool = False
    began: float = field(default_factory=time.perf_counter)
    paused_seconds: float = 0.0
    last: float = math.inf
    interrupts: InterruptCounter = field(default_factory=InterruptCounter)
    watch: Watch = lambda done, row: None
    reserve: Callable[[Round, float], float] = lambda done, spent: 0.0

    @property
    def outcome(self) -> Outcome:
        """Why the fit ended; INTERRUPTED if no reason was set."""
        return self.ended or Outcome.INTERRUPTED

    @property
    def rounds(self) -> int:
        """The number of whole rounds; exchanges within one are in the history, but have no objective."""
        return sum(not math.isnan(row.objective) for row in self.history)

    def note(self, done: Round, row: HistoryRow) -> None:
        """Add a step."""
        self.history.append(row)
        self.latest = done.checkpoint.server
        is_best = self.progress.add(row) or self.progress.count == 0  # before the first whole round, keep any model
        if is_best or self.keeps_last:
            self.best = self.latest


def train(steps: Iterable[Step], stop: StoppingRule, training: Training) -> Iterator[Step]:
    """Yield steps and add each to `training`, until they end, `stop` applies, or Ctrl-C.

    If there is a model, it is kept however the steps end; otherwise their error is raised. If an earlier part of the
    same run already met `stop`, there are no steps.
    """
    training.ended = stop.outcome(training.progress.current, 0.0)
    if training.ended is not None:
        return
    earlier = training.history[-1].seconds if training.history else 0.0
    measuring, round_began = 0.0, time.perf_counter()
    try:
        for step in steps:
            measuring += step.measuring
            row = step.row(earlier + time.perf_counter() - training.began - measuring)
            training.note(step.done, row)
            training.watch(step.done, row)
            paused = time.perf_counter()
            if step.is_whole:
                spent = earlier + paused - training.began - training.paused_seconds
                training.ended = _ending(step.done, stop, training, spent, paused - round_began)
            yield step
            measuring += time.perf_counter() - paused
            round_began = time.perf_counter() if step.is_whole else round_began
            if training.ended is not None:
                return
            del step  # as large as the parties' states
        training.ended = Outcome.MAX_ROUNDS
    except KeyboardInterrupt:
        if training.best is None:
            raise  # no model to keep
        training.ended = Outcome.INTERRUPTED
    except BudgetSpent:
        if training.best is None:
            raise
        training.ended = Outcome.PRIVACY_BUDGET_EXHAUSTED
    except DivergenceError as error:
        if training.best is None or not training.rounds:
            raise  # no model to keep within the first round
        training.ended = Outcome.DIVERGED
        training.error_text = " ".join((str(error), *getattr(error, "__notes__", ())))


def _ending(done: Round, stop: StoppingRule, training: Training, spent: float, latest: float) -> Outcome | None:
    """Return why to end now; a time budget must cover one more round like the latest, and the end of the fit."""
    if training.interrupts.count:
        return Outcome.INTERRUPTED
    if stop.time_budget is not None:
        spent += latest + training.reserve(done, spent)
    outcome = stop.outcome(training.progress.current, spent)
    return Outcome.MAX_ROUNDS if outcome is None and done.index + 1 >= training.last else outcome


class Fit(Protocol):
    """A fit that the loop can run: its steps from a checkpoint on, and what is needed to finish its model.

    `spending` are the privacy accounts, and `server_at_start` returns the state before the first step. `is_private`:
    messages carry noise, so no measurement without noise may choose a model or end the fit.
    """

    @property
    def shards(self) -> Sequence[Shard]: ...
    @property
    def solver(self) -> RowSolver: ...
    @property
    def rank(self) -> int: ...
    @property
    def stop(self) -> StoppingRule: ...
    @property
    def last(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def is_private(self) -> bool: ...
    @property
    def spending(self) -> PrivacyTracker | None: ...
    def steps(self, point: Checkpoint | None) -> Iterator[Step]: ...
    def components(self, server: State) -> Array: ...
    def server_at_start(self) -> State: ...


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What an earlier part of the same run saved: its checkpoint, its history and the server's best state."""

    checkpoint: Checkpoint
    history: tuple[HistoryRow, ...] = ()
    best: State = None


def start_training(
    fit: Fit,
    *,
    resume: ResumePoint | None = None,
    began: float | None = None,
    watch: Watch = lambda done, row: None,
    interrupts: InterruptCounter | None = None,
) -> Training:
    """Return the training of a fit from its start, or from the point where an earlier part of the run ended."""
    history, best, present = ((), None, math.inf) if resume is None else (resume.history, resume.best, len(fit.shards))
    return Training(
        list(history),
        ProgressByCohort.of(history, present),
        best,
        keeps_last=fit.is_private,
        began=time.perf_counter() if began is None else began,
        last=fit.last,
        interrupts=interrupts if interrupts is not None else InterruptCounter(),
        watch=watch,
        reserve=FinalizationTimer(fit).reserve,
    )


def iterate_steps(fit: Fit, training: Training, resume: ResumePoint | None = None) -> Iterator[Step]:
    """Yield the steps of a fit until one of them is the last."""
    rule = fit.stop.without_metrics() if fit.is_private else fit.stop
    return train(fit.steps(None if resume is None else resume.checkpoint), rule, training)


def run(
    fit: Fit,
    *,
    resume: ResumePoint | None = None,
    began: float | None = None,
    watch: Watch = lambda done, row: None,
    interrupts: InterruptCounter | None = None,
) -> Training:
    """Run a fit to its end, from its start or from the point where an earlier part of the run ended.

    Steps and best model are the same as if the run had not been interrupted. The fit ends after the step in which
    `interrupts` counts a first Ctrl-C.
    """
    training = start_training(fit, resume=resume, began=began, watch=watch, interrupts=interrupts)
    exhaust(iterate_steps(fit, training, resume))
    return training


class FitObserver:
    """Callbacks before the first step of a fit, after each step and at its end; this base class does nothing."""

    def begin(self, fit: Fit, left_out: list[Exclusion]) -> AbstractContextManager[ResumePoint | None]:
        """Return a context manager around the steps that yields the point to resume from, or None for a new run.

        `left_out` lists the parties left out so far and grows during the run. Those of a resumed run go in front.
        """
        return nullcontext()

    def watch(self, done: Round, row: HistoryRow) -> None:
        """Observe a step with its row of the history."""

    def end(self, training: Training, result: FitResult) -> None:
        """Observe the outcome and the model."""


def exhaust(steps: Iterator[Step]) -> None:
    """Run all steps. No step is kept while the next is computed, because each holds the states of all parties."""
    deque(steps, maxlen=0)


# Parties that are left out

RAISE, SKIP = ON_PARTY_ERROR = ("raise", "skip")
"""What happens if a party's data are unusable, its work fails, or its upload is refused."""


class LeftOutWarning(UserWarning):
    """A fit continues without a party, in one round or in all rounds."""


class Exclusion(NamedTuple):
    """A round that a party was left out of, with the reason."""

    iteration: int
    party: str
    reason: str


@dataclass(slots=True)
class ExclusionLog:
    """The parties left out of each round; `missing` are those left out of all rounds, by name, with the reason.

    Each party causes one warning: before the rounds, or after the first round without it.
    """

    missing: Mapping[str, str] = field(default_factory=dict)
    left_out: list[Exclusion] = field(default_factory=list)
    reported: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for name, reason in self.missing.items():
            warnings.warn(f"Party {name!r} is left out of this run. {reason}", LeftOutWarning, stacklevel=4)

    def note(self, done: Round, row: HistoryRow) -> None:
        """Add a round."""
        reasons = {**self.missing, **done.refused}
        self.left_out += [Exclusion(row.iteration, name, reason) for name, reason in reasons.items()]
        for name in done.refused.keys() - self.reported:
            self.reported.add(name)
            message = (
                f"Party {name!r} is left out of round {row.iteration} and asked again in the next. {reasons[name]}"
            )
            warnings.warn(message, LeftOutWarning, stacklevel=2)


MAX_SECONDS_SHOWN = 1e12
"""Largest number of seconds that is shown."""


@contextmanager
def progress(verbose: int, rounds: int, time_budget: float | None, title: str) -> Iterator[Watch]:
    """Yield a callback that shows iteration, error, elapsed time and the estimated time left on standard error."""
    if not verbose:
        yield lambda done, row: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns: list[Any] = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[number]}/{task.total:.0f}"),
        TextColumn("error {task.fields[error]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]} left"),
    ]
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=False, redirect_stdout=False) as bar:
        task = bar.add_task(title, total=float(rounds), number=0, error="…", left="…")
        began, rounds_here = time.perf_counter(), 0

        def watch(done: Round, row: HistoryRow) -> None:
            nonlocal rounds_here
            rounds_here += 1
            share = row.iteration / rounds
            if time_budget is not None:
                share = max(share, min(1.0, row.seconds / time_budget))
            error = f"{100 * row.relative_error:.3f} %" if row.relative_error == row.relative_error else "–"
            left = (time.perf_counter() - began) / rounds_here * (rounds - row.iteration)
            left = left if time_budget is None else min(left, time_budget - row.seconds)
            bar.update(task, completed=share * rounds, number=row.iteration, error=error, left=_clock(left))

        yield watch
        bar.update(task, left=_clock(0))


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=math.ceil(min(max(0.0, seconds), MAX_SECONDS_SHOWN))))
