"""The fit loop: iterations of a pooled fit and rounds of a federated one are measured, judged and ended here.

steps = fit.steps(point)                 # compute: CentralizedFit or FederatedFit
for step in train(steps, rule, training) # judge: history, best model, stopping rule, Ctrl-C
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
    from partsong.privacy.spending import Spending

WINDOW = 10
"""Rounds over which progress is judged: extrapolated iterations may go up for a moment, or rest on a plateau."""

RECENT = 5
"""Rounds for which a larger cohort counts as present."""

DIVERGENCE_FACTOR = 1e6
"""So many times its first value (and that of an empty model) the objective is not coming back."""

PERFECT = 1e-24
"""An objective, as a share of ½‖X‖², that is zero but for rounding."""


SMALL_ERROR = 0.2
"""An objective, as a share of ½‖X‖², below which a share of what is left is more than users ask for."""


def yardstick(objective: float) -> float:
    """What progress is measured against: the smaller of what the model leaves (f) and what it explains (1 − f).

    Nearly all of f is noise where data are sparse, so that a share of f may be a large share of what is explained.
    Where f is small, a share of f is next to nothing of the data, and √(f · SMALL) is asked for instead: a model that
    leaves .2 % stops at a tenth of the relative precision, and rank-k data do not run on until f is rounding.
    """
    if not 0 <= objective < 1:
        return abs(objective)
    return min(max(objective, math.sqrt(SMALL_ERROR * objective)), 1 - objective)


class HistoryRow(NamedTuple):
    """One line of `history_`: seconds since the fit began, ‖X − W H‖ / ‖X‖, the objective with penalties over ½‖X‖²
    (the square of the error where there are none), bytes sent in this round by all parties and to each of them.
    An extrapolated step that was taken back is listed with the error that it led to. Exchanges within a round have no
    error: it is NaN, as is their objective. Where parties have an H of their
    own, a simulation adds Σ_p ‖H_p − H‖² by position and after alignment, in units of ‖H‖².
    `epsilon` is what the run has cost the party that has spent most on privacy by then; NaN where nothing is accounted.
    `parties` took part. `cohort` identifies the parties whose rows the objective covers (0: all). Only rounds of one
    cohort are compared.
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

    One that `is_blind` is stopped by nothing that is measured: with differential privacy, errors are not released.
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
        """The rule for a run with differential privacy: the time that rounds take can depend on data as well."""
        if self.time_budget is not None:
            raise ParameterError(
                "With differential privacy a run has the rounds that its noise was planned for: how long they take can "
                "tell of the data. Leave time_budget out, and give a number of rounds.",
                parameter="time_budget",
            )
        return StoppingRule(0.0, None, True)

    def outcome(self, progress: Progress, seconds: float) -> Outcome | None:
        """Why to stop now, or None to go on."""
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
    """The objective over ½‖X‖² of comparable rounds: the first, the number, the latest few and the least so far."""

    first: float = math.nan
    count: int = 0
    values: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW + 1))
    minima: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW + 1))

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

    def has_diverged(self) -> bool:
        """Whether the latest value is no number any more, or beyond all measure."""
        if not self.count:
            return False
        latest = self.values[-1]
        return not (math.isfinite(latest) and latest <= DIVERGENCE_FACTOR * max(1.0, self.first))

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
"""Called after every step with what it did and its line of the history."""


@dataclass(frozen=True, slots=True)
class Step:
    """One pooled iteration or one federated exchange, with what is known of the model after it.

    The objective is NaN after an exchange within a round: such a model is not compared with others, and no fit ends
    with it. `measuring` are the seconds that it took to find these numbers; they are not the method's own.
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
        """Whether a round ended with it."""
        return not math.isnan(self.objective)

    def row(self, seconds: float) -> HistoryRow:
        """Its line of the history, `seconds` after the fit began."""
        done, sent = self.done, sum(self.done.bytes_up.values())
        numbers = (seconds, self.error, self.objective, sent, done.bytes_down, *self.drift)
        return HistoryRow(done.index + 1, *numbers, len(done.participants), self.cohort, self.epsilon)


class Measures:
    """What the loop may know of a round: ‖X − W H‖ / ‖X‖, what is minimised, how far parties are from the model.

    These are what the program's server knows: an error and an objective over ½‖X‖², or neither (NaN).
    """

    __slots__ = ()

    def error(self, done: Round) -> float:
        return done.metrics.get("relative_error", math.nan)

    def objective(self, done: Round, error: float) -> float:
        """The server's, with its error replaced by `error`; without one, the square of `error`."""
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
    """Measure rounds as they come; of exchanges within a round nothing is, except after the `last`.

    `present` are the parties over whose rows a simulation computes errors (None: all that the run has ever known).
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
    """A number for the parties whose rows the objective covers.

    Zero stands for all rows: everybody took part, or a simulation computes the error over all. Those who have left
    are no longer in its error.
    """
    everyone = done.checkpoint.parties.keys() | done.refused.keys()
    over = frozenset(done.participants) if "relative_error" in done.metrics else (present or everyone)
    return 0 if over >= everyone else 1 + key(0, *sorted(over)) % 2**48  # exact as a float


@dataclass(slots=True)
class Training:
    """A fit under way: its history, its latest and its best model, its clock, and how it ended once it has.

    One that `keeps_last` takes its latest state for the best: which was better is not to be released. `reserve` says
    how many seconds of a time budget the end of the fit will need; `last` is the number of steps. The seconds that a
    caller keeps for itself between two steps, `away`, count neither in the history nor against a time budget.
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
        """Why it ended; a fit that nobody has ended was interrupted."""
        return self.ended or Outcome.INTERRUPTED

    @property
    def rounds(self) -> int:
        """Whole rounds; exchanges within one are in the history, but have no objective."""
        return sum(not math.isnan(row.objective) for row in self.history)

    def note(self, done: Round, row: HistoryRow) -> None:
        """Add one more step."""
        self.history.append(row)
        self.latest = done.checkpoint.server
        is_best = self.progress.add(row) or self.progress.count == 0  # before a first whole round any model will do
        if is_best or self.keeps_last:
            self.best = self.latest


def train(steps: Iterable[Step], stop: StoppingRule, training: Training) -> Iterator[Step]:
    """Yield step after step, each noted in `training`, until they end, `stop` applies, or Ctrl-C.

    A model that was found is kept however the steps end; without one, their error is raised. An earlier part of the
    same run may have met `stop` already: then there are no steps.
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
            raise  # there is no model to keep
        training.ended = Outcome.INTERRUPTED
    except BudgetSpent:
        if training.best is None:
            raise
        training.ended = Outcome.PRIVACY_BUDGET_EXHAUSTED
    except DivergenceError as error:
        if training.best is None or not training.rounds:
            raise  # in the middle of the first round there is nothing better to keep
        training.ended = Outcome.DIVERGED
        training.error_text = " ".join((str(error), *getattr(error, "__notes__", ())))


def _ending(done: Round, stop: StoppingRule, training: Training, spent: float, latest: float) -> Outcome | None:
    """Why to end now; a time budget has to hold one more round like the latest, and the end of the fit."""
    if training.interrupts.count:
        return Outcome.INTERRUPTED
    if stop.time_budget is not None:
        spent += latest + training.reserve(done, spent)
    outcome = stop.outcome(training.progress.current, spent)
    return Outcome.MAX_ROUNDS if outcome is None and done.index + 1 >= training.last else outcome


class Fit(Protocol):
    """What is to be computed: steps from a point on, and what it takes to finish a model of them.

    `spending` are accounts of privacy, and `server_at_start` is the state before the first step. `is_private`: messages
    carry noise, so that nothing that is measured without it may choose a model or end the fit.
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
    def spending(self) -> Spending | None: ...
    def steps(self, point: Checkpoint | None) -> Iterator[Step]: ...
    def components(self, server: State) -> Array: ...
    def server_at_start(self) -> State: ...


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What an earlier part of the same run left behind: where it stood, its history, the server's state at its best."""

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
    """Return the training of a fit from its start, or from where an earlier part of the same run stood."""
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
    """Run a fit to its end, from its start or from where an earlier part of the same run stood.

    The same steps, and the same best of them, as if the run had never been interrupted. They end after the step in
    which `interrupts` counts a first Ctrl-C.
    """
    training = start_training(fit, resume=resume, began=began, watch=watch, interrupts=interrupts)
    exhaust(iterate_steps(fit, training, resume))
    return training


class FitObserver:
    """Observes a fit before its first step, after each step and at its end. This one does nothing."""

    def begin(self, fit: Fit, left_out: list[Exclusion]) -> AbstractContextManager[ResumePoint | None]:
        """Hold open whatever the steps need; yield the point to resume from, or None for a new run.

        `left_out` lists the parties left out so far and grows during the run. Those of a resumed run go in front.
        """
        return nullcontext()

    def watch(self, done: Round, row: HistoryRow) -> None:
        """See one more step, with its line of the history."""

    def end(self, training: Training, result: FitResult) -> None:
        """See how it ended, and with which model."""


def exhaust(steps: Iterator[Step]) -> None:
    """Take all steps, none of which is kept while the next is computed: each holds the states of all parties."""
    deque(steps, maxlen=0)


# Parties that are left out

RAISE, SKIP = ON_PARTY_ERROR = ("raise", "skip")
"""What follows where a party's data cannot be used, its work ends in an error, or its upload is refused."""


class LeftOutWarning(UserWarning):
    """A fit goes on without a party: in a round, or in all of them."""


class Exclusion(NamedTuple):
    """A round that a party was left out of, and the reason."""

    iteration: int
    party: str
    reason: str


@dataclass(slots=True)
class ExclusionLog:
    """Who is left out of which round; `missing` are those left out of all of them, by name, with the reason.

    There is one warning for each party: before the rounds, or after the first that has gone on without it.
    """

    missing: Mapping[str, str] = field(default_factory=dict)
    left_out: list[Exclusion] = field(default_factory=list)
    reported: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for name, reason in self.missing.items():
            warnings.warn(f"Party {name!r} is left out of this run. {reason}", LeftOutWarning, stacklevel=4)

    def note(self, done: Round, row: HistoryRow) -> None:
        """Add one more round."""
        reasons = {**self.missing, **done.refused}
        self.left_out += [Exclusion(row.iteration, name, reason) for name, reason in reasons.items()]
        for name in done.refused.keys() - self.reported:
            self.reported.add(name)
            message = (
                f"Party {name!r} is left out of round {row.iteration}, and asked again in the next. {reasons[name]}"
            )
            warnings.warn(message, LeftOutWarning, stacklevel=2)


MAX_SECONDS_SHOWN = 1e12
"""Seconds that are shown at most."""


@contextmanager
def progress(verbose: int, rounds: int, time_budget: float | None, title: str) -> Iterator[Watch]:
    """A watch that draws iteration, error, elapsed time and an estimate of the time left on standard error."""
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
