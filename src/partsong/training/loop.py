"""Fitting, in the steps that every caller shares: a start, rounds that are followed, a model.

`fit_rows` is centralised NMF; `pursue` and `conclude` are its two halves for any program, so that a caller can go on
from an earlier run, or protect the second half from an interrupt that ended the first.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np

from partsong import kernels
from partsong.aggregation.plaintext import InTheOpen
from partsong.core import runtime
from partsong.core.interfaces import (
    Array,
    Checkpoint,
    Engine,
    Layout,
    Matrix,
    Outcome,
    Reduction,
    Round,
    Schedule,
    Shard,
    traits_of,
    turn_of,
)
from partsong.core.runtime import Interrupts, held
from partsong.core.streams import stream
from partsong.data.observed import ObservedMatrix
from partsong.engines.local import Sequential
from partsong.errors import DivergenceWarning, FeatureError, IllPosedWarning, ParameterError, PartyError, first_few
from partsong.methods.dsanls import SketchExchange, SketchParty
from partsong.methods.exact import SharedSums, is_known
from partsong.methods.game import PlayInStrata, PlayParty
from partsong.privacy.ledger import Spending, accounted
from partsong.sketch.crossing import Proportion
from partsong.solvers.game import Game, balance, first_weights
from partsong.solvers.initialization import (
    InitialFactors,
    anchors,
    balanced,
    double_svd,
    is_mostly_zero,
    random_beginning,
)
from partsong.solvers.observed import ObservedRows
from partsong.solvers.squared_error import Extrapolation, NoExtrapolation, RowState, SquaredError
from partsong.solvers.update_rules import CoordinateDescent, Multiplicative
from partsong.training.result import Finished, complete, finish
from partsong.training.stopping import Course, Follower, HistoryRow, Run, Stop, known_error, known_objective

# ---- fitting ----------------------------------------------------------------------------------------------------

Watch = Callable[[Round, HistoryRow], None]

TRIAL_ROWS = 400
"""Rows on which the end of a fit is tried when a time budget has to cover it."""

LOOK_EVERY = 10
"""Sketched iterations from one look at the error to the next: it costs a pass over the data."""

TRIAL_STEPS = 200
"""Iterations of a fit from another start, where the first has led to nothing."""

NOTHING = 1e-9
"""A share of ‖X‖² that is nothing but rounding."""

INITS = ("auto", "anchors", "random", "nndsvd", "nndsvda", "nndsvdar")


FILLS = {"nndsvd": 0.0, "nndsvda": 1.0, "nndsvdar": 0.01}
"""What zeros of a double SVD become, in units of the mean of X; for "nndsvdar" it is a random share of that."""


class EmptyModelWarning(UserWarning):
    """A fit ended with a model that is zero, although the data are not."""


@dataclass(frozen=True, slots=True)
class RowFit:
    """Centralised NMF as a value: rank, solver, start, and when to stop.

    With a `sketch` steps see sketched data; with a `game` players meet over single cells, and the solver fits rows to
    what they end with. `shuffle` draws the order of components from the seed.
    """

    rank: int
    solver: SquaredError | ObservedRows
    init: str = "auto"
    seed: int = 0
    max_iter: int = 500
    stop: Stop = Stop()
    threads: int = 1
    sketch: Proportion | None = None
    game: Game | None = None
    shuffle: bool = False

    def __post_init__(self) -> None:
        if self.init not in INITS:
            raise ParameterError(f"Unknown init {self.init!r}; choose one of {', '.join(INITS)}.")


@dataclass(frozen=True, slots=True)
class Task:
    """A program with all that it takes to run it; `begin` makes its start (None: the program's own).

    `error_of` and `drift_of` tell of a round what a simulation can know; the conclusion may use `threads`. A round is
    `exchanges` of the engine's, unless the program says when it ends. `spending` are its accounts where it has noise.
    """

    program: Any
    shards: Sequence[Shard]
    schedule: Schedule
    stop: Stop = Stop()
    engine: Engine = Sequential()
    reduction: Reduction = InTheOpen()
    begin: Callable[[], Checkpoint] | None = None
    threads: int = 1
    error_of: Callable[[Round], float] = known_error
    drift_of: Callable[[Round], tuple[float, float]] = lambda done: (math.nan, math.nan)
    objective_of: Callable[[Round, float], float] = known_objective
    exchanges: int = 1
    spending: Spending | None = None

    @property
    def is_private(self) -> bool:
        """Whether messages carry noise, so that nothing else may tell of the data."""
        return traits_of(self.program).release is not None

    def spent_on(self, done: Round) -> float:
        """What a round has cost, with all before it."""
        return math.nan if self.spending is None else self.spending.note(done)

    def is_whole(self, done: Round) -> bool:
        """Whether a round ends with an exchange: as the program says, and every `exchanges` of them."""
        return turn_of(self.program, done.model).ends_round and (done.index + 1) % self.exchanges == 0


@dataclass(frozen=True, slots=True)
class Earlier:
    """What an earlier part of the same run left behind: where it stood, its history, the server's state at its best."""

    checkpoint: Checkpoint
    history: tuple[HistoryRow, ...] = ()
    best: Any = None


def fit_rows(
    matrix: Matrix,
    settings: RowFit,
    *,
    beginning: InitialFactors | None = None,
    earlier: Earlier | None = None,
    began: float | None = None,
    watch: Watch = lambda done, row: None,
) -> tuple[Run, Finished]:
    """X ≈ W H of the rows of a matrix; `beginning` replaces the start that the settings name."""
    began = time.perf_counter() if began is None else began
    task = rows_task(matrix, settings, beginning)
    warn_if_ill_posed(settings.solver)
    with held() as interrupts:
        run = pursue(task, earlier=earlier, began=began, watch=watch, interrupts=interrupts)
        warn_of_divergence(run)
        done = conclude(task, run)
        if is_zero(done):
            is_asked = isinstance(settings.solver, SquaredError) and settings.solver.is_penalised and beginning is None
            is_asked = is_asked and run.outcome is not Outcome.TIME_SPENT and not interrupts.count
            if not is_asked:
                warn_of_nothing(task, done)
                return run, done
            return _compared_with_zero(task, (run, done), settings, interrupts)
        return run, done


def is_zero(done: Finished) -> bool:
    """Whether W H explains nothing of an X that is not zero."""
    return done.squared_norm > 0 and done.squared_error >= (1 - NOTHING) * done.squared_norm


def _compared_with_zero(
    task: Task, found: tuple[Run, Finished], settings: RowFit, interrupts: Interrupts
) -> tuple[Run, Finished]:
    """A penalised fit that ended at zero, or one by plain steps from another start where that is better; both warn."""
    assert isinstance(settings.solver, SquaredError)
    matrix = task.shards[0].matrix
    other = "nndsvda" if settings.init == "random" and settings.rank <= min(matrix.shape) else "random"
    plain = replace(settings.solver, rule=CoordinateDescent(), momentum=NoExtrapolation())
    trial = rows_task(matrix, replace(settings, solver=plain, init=other, max_iter=min(settings.max_iter, TRIAL_STEPS)))
    run = pursue(trial, interrupts=interrupts)
    least = min((row.objective for row in run.history if math.isfinite(row.objective)), default=1.0)
    how = f"a fit with solver='cd' from init={other!r} ends at {least:.5g}"
    if least >= 1 - NOTHING:
        warn_of_nothing(task, found[1], f"The objective of the zero model is 1 (in units of ½‖X‖²); {how}.")
        return found
    warnings.warn(
        f"From init={settings.init!r} the fit ends at the zero model, with an objective of 1 (in units of ½‖X‖²); "
        f"{how}, and is returned instead.",
        EmptyModelWarning,
        stacklevel=2,
    )
    return run, conclude(trial, run)


def warn_if_ill_posed(solver: Any) -> None:
    """Say so where only one factor has a penalty: c W and H / c have the same product, and c has no best value."""
    on_W, on_H = getattr(solver, "penalty_W", None), getattr(solver, "penalty_H", None)
    if bool(on_W) == bool(on_H):
        return
    free, held_back = ("W", "H") if on_H else ("H", "W")
    warnings.warn(
        f"Only {held_back} has a penalty (alpha_{held_back}), so that the objective has no minimum: {free} grows and "
        f"{held_back} shrinks without end. Set alpha_{free} above 0 as well.",
        IllPosedWarning,
        stacklevel=2,
    )


def rows_task(matrix: Matrix, settings: RowFit, beginning: InitialFactors | None = None) -> Task:
    """Centralised NMF as the program of a single party; the start is computed when the task is pursued."""
    if settings.game is not None:
        return _game_task(matrix, settings, settings.game, beginning)
    if settings.sketch is not None:
        return _sketched_task(matrix, settings, settings.sketch, beginning)
    assert isinstance(settings.solver, SquaredError)
    solver = _for_data(settings.solver, matrix)
    program = SharedSums(settings.rank, solver)

    def begin() -> Checkpoint:
        with runtime.kernels_on(settings.threads):
            chosen = beginning if beginning is not None else beginning_of(matrix, settings)
            chosen = balanced(matrix, _shuffled(chosen, settings) if settings.shuffle else chosen, solver)
        server, model = program.start_from(chosen.Ht)
        return Checkpoint(0, {"all": RowState(chosen.W)}, server, model)

    schedule, shards = Schedule(settings.max_iter, kernel_threads=settings.threads), [Shard("all", matrix)]
    error_of = error_over(shards, settings.threads)
    return Task(program, shards, schedule, settings.stop, begin=begin, threads=settings.threads, error_of=error_of)


def _for_data(solver: SquaredError, matrix: Matrix) -> SquaredError:
    """The solver called "hals", with one sweep a step on sparse data.

    Products with sparse data cost less than sweeps, and several sweeps to one product end in worse minima there.
    """
    is_hals = isinstance(solver.momentum, Extrapolation) and isinstance(solver.rule, CoordinateDescent)
    if not is_hals or isinstance(matrix, ObservedMatrix) or not is_mostly_zero(matrix):
        return solver
    return replace(solver, rule=replace(solver.rule, sweeps=1))  # type: ignore[type-var]


def _shuffled(beginning: InitialFactors, settings: RowFit) -> InitialFactors:
    """The same components in another order, which rules that update one after another go by."""
    order = stream(settings.seed, "order").permutation(settings.rank)
    factors = (beginning.Ht, beginning.W)
    return InitialFactors(*(None if F is None else kernels.of(F).rows_of(F[:, order].T) for F in factors))


def error_over(shards: Sequence[Shard], threads: int) -> Callable[[Round], float]:
    """The error that sums tell of a round of `SharedSums`; from the data where that is mostly rounding.

    ‖X‖² − 2⟨Hᵀ, XᵀW⟩ + ⟨WᵀW, HHᵀ⟩ is a small difference of large numbers where a model fits well, or where one column
    is so large that all others are rounding beside it.
    """

    def error_of(done: Round) -> float:
        parties, norm = done.checkpoint.parties, sum(shard.matrix.squared_norm for shard in shards)
        states = [parties.get(shard.name, RowState()) for shard in shards]
        known, dtype = known_error(done), shards[0].matrix.dtype
        if norm <= 0 or math.isnan(known) or is_known(done, dtype) or any(rows.W is None for rows in states):
            return known
        Ht, squared = done.checkpoint.server.Ht, 0.0
        with runtime.kernels_on(threads):
            for shard, rows in zip(shards, states, strict=True):
                W = rows.W if rows.point is None else rows.point
                squared += shard.matrix.squared_distance(W, shard.matrix.native(Ht))
        least = 8 * float(np.finfo(str(dtype).removeprefix("torch.")).eps)
        return max(least, math.sqrt(max(0.0, squared) / norm))

    return error_of


def _game_task(matrix: Matrix, settings: RowFit, game: Game, beginning: InitialFactors | None) -> Task:
    """An iteration is a sweep over all cells; columns without a known cell begin, and stay, at zero."""
    assert isinstance(settings.solver, ObservedRows)
    program = PlayInStrata(settings.rank, game, settings.solver)

    def begin() -> Checkpoint:
        with runtime.kernels_on(settings.threads):
            chosen = beginning if beginning is not None else beginning_of(matrix, settings)
            Ht = chosen.Ht + 0
            if isinstance(matrix, ObservedMatrix):
                Ht[matrix.empty_columns] = 0
            W = first_weights(matrix, Ht) if chosen.W is None else chosen.W
            scale = balance(W, Ht) if beginning is None else 1.0
        server, model = program.start_from(Ht / scale)
        return Checkpoint(0, {"all": PlayParty(0, 1, settings.seed, W * scale)}, server, model)

    schedule = Schedule(settings.max_iter, settings.seed, kernel_threads=settings.threads)
    return Task(program, [Shard("all", matrix)], schedule, settings.stop, begin=begin, threads=settings.threads)


def _sketched_task(matrix: Matrix, settings: RowFit, sketch: Proportion, beginning: InitialFactors | None) -> Task:
    """An iteration is two exchanges, of a party with itself; its H is looked at now and then."""
    assert isinstance(settings.solver, SquaredError)
    most, rows = settings.max_iter, matrix.shape[0]
    program = SketchExchange(settings.rank, settings.solver, sketch, most, min(LOOK_EVERY, most), n_rows=rows)

    def begin() -> Checkpoint:
        with runtime.kernels_on(settings.threads):
            chosen = beginning if beginning is not None else beginning_of(matrix, settings)
        server, model = program.start_from(chosen.Ht)
        return Checkpoint(0, {"all": SketchParty(settings.seed, 1, chosen.W)}, server, model)

    schedule = Schedule(program.rounds_for(), settings.seed, kernel_threads=settings.threads)
    stop = replace(settings.stop, tol=settings.stop.tol * program.every)
    return Task(program, [Shard("all", matrix)], schedule, stop, begin=begin, threads=settings.threads)


@dataclass(frozen=True, slots=True)
class Pursuit:
    """A task on its way: iterating runs one round after another, and `course` tells how it stands between them."""

    task: Task
    follower: Follower
    course: Course
    resume: Checkpoint | None = None

    @staticmethod
    def of(
        task: Task,
        *,
        earlier: Earlier | None = None,
        began: float | None = None,
        watch: Watch = lambda done, row: None,
        interrupts: Interrupts | None = None,
    ) -> Pursuit:
        """A task to be pursued from its start, or from where an earlier part of the same run stood."""
        follower = Follower(
            task.stop.blind() if task.is_private else task.stop,
            time.perf_counter() if began is None else began,
            error_of=task.error_of,
            drift_of=task.drift_of,
            objective_of=task.objective_of,
            spent_on=task.spent_on,
            is_whole=task.is_whole,
            watch=watch,
            reserve=ClosingTime(task).reserve,
            interrupts=interrupts if interrupts is not None else Interrupts(),
            last=task.schedule.rounds,
            present=frozenset(shard.name for shard in task.shards),
        )
        if earlier is None:
            return Pursuit(task, follower, Course.after(keeps_last=task.is_private))
        course = Course.after(earlier.history, earlier.best, len(task.shards), task.is_private)
        return Pursuit(task, follower, course, earlier.checkpoint)

    def __iter__(self) -> Iterator[HistoryRow]:
        """Rounds until one of them is the last; none where the earlier part had come to its end."""
        self.course.outcome = self.follower.stop.outcome(self.course.comparable.current, 0.0)
        if self.course.outcome is None:
            yield from self.follower.attend(_rounds(self.task, self.resume), self.course)


def pursue(
    task: Task,
    *,
    earlier: Earlier | None = None,
    began: float | None = None,
    watch: Watch = lambda done, row: None,
    interrupts: Interrupts | None = None,
) -> Run:
    """The rounds of a task, from its start or from where an earlier part of the same run stood, to their end.

    The same rounds, and the same best of them, as if the run had never been interrupted. They end after the round in
    which `interrupts` counts a first Ctrl-C.
    """
    pursuit = Pursuit.of(task, earlier=earlier, began=began, watch=watch, interrupts=interrupts)
    for _ in pursuit:
        pass
    return pursuit.course.run()


def warn_of_divergence(run: Run) -> None:
    """For callers in Python; a command line tells the outcome instead."""
    if run.outcome is Outcome.DIVERGED:
        told = "The fit ran away from its solution and was stopped; the best model before that is kept."
        warnings.warn(f"{told} {run.trouble}".rstrip(), DivergenceWarning, stacklevel=2)


def warn_of_nothing(task: Task, done: Finished, from_elsewhere: str = "") -> None:
    """Say where W H is zero, and why; `from_elsewhere` is what a fit from another start has shown."""
    if not is_zero(done):
        return
    solver = task.program.solver
    if getattr(solver, "penalty_W", None) or getattr(solver, "penalty_H", None):
        why = (
            f"The penalties ({solver.penalty_W} on W, {solver.penalty_H} on H) outweigh the data, at least from this "
            "start. Lower them: alpha_W and alpha_H, or those of the program's solver."
        )
        why = f"{why} {from_elsewhere}".rstrip()
    else:
        why = "The iteration has lost its start on the way. Take smaller steps, or another solver or seed."
    warnings.warn(f"The model is zero: W H explains nothing of X. {why}", EmptyModelWarning, stacklevel=2)


@dataclass(slots=True)
class ClosingTime:
    """How long the end of a fit will take, so that a time budget covers it: tried on a few rows now and then."""

    task: Task
    seconds: float = 0.0
    tried_at: float = 0.0

    def reserve(self, done: Round, spent: float) -> float:
        """Seconds to keep back; tried again each time that twice as much time has been spent."""
        if self.tried_at == 0.0 or spent >= 2 * self.tried_at:
            self.tried_at = spent
            self.seconds = self._try(self.task.program.components(done.checkpoint.server))
        return self.seconds

    def _try(self, H: Array) -> float:
        rows = sum(shard.matrix.shape[0] for shard in self.task.shards)
        share = min(1.0, TRIAL_ROWS / max(1, rows))
        few = [_some_rows(shard, share) for shard in self.task.shards]
        began = time.perf_counter()
        with runtime.kernels_on(1):
            complete(self.task.program.solver, few, kernels.of(H).rows_of(H), rescale=False)
        taken = time.perf_counter() - began
        return taken * rows / max(1, sum(shard.matrix.shape[0] for shard in few)) / self.task.threads


def _some_rows(shard: Shard, share: float) -> Shard:
    n = shard.matrix.shape[0]
    count = max(1, round(n * share))
    return shard if count >= n else replace(shard, matrix=shard.matrix.rows(np.arange(count) * n // count))


def _rounds(task: Task, resume: Checkpoint | None) -> Iterator[Round]:
    """The start is handed over and not kept: its W is as large as the party's."""
    rounds = task.engine.run(
        task.program,
        task.shards,
        task.schedule,
        reduction=task.reduction,
        resume=resume if resume is not None else (task.begin() if task.begin is not None else None),
    )
    names = [shard.name for shard in task.shards]
    return rounds if task.spending is None else accounted(rounds, task.spending, names)


def conclude(task: Task, run: Run) -> Finished:
    """The model of a run that has ended, or of the start where not even one round was done."""
    start = None
    if run.best is None:
        start = task.program.components(_first_server(task))
    with runtime.kernels_on(task.threads):
        return finish(task.program, task.program.solver, task.shards, run, start, keeps_order=task.is_private)


def _first_server(task: Task) -> Any:
    if task.begin is not None:
        return task.begin().server
    return task.program.start_server(Layout.of(task.shards, task.schedule.seed))[0]


def beginning_of(matrix: Matrix, settings: RowFit) -> InitialFactors:
    """The start that the settings name; "auto" takes nndsvda for sparse data and anchors for others.

    Random numbers are for cells that are unknown, and for more components than rows or columns, which no SVD has.
    Sketches are for data that one would rather not multiply by often, and the double SVD takes twelve products.
    """
    generator = stream(settings.seed, "start")
    is_partly_known = isinstance(matrix, ObservedMatrix)
    if is_partly_known and settings.init not in ("auto", "random"):
        raise ParameterError(f"init={settings.init!r} needs all cells of X, and some are unknown. Take init='random'.")
    init = settings.init
    if init == "auto" and settings.sketch is None and not is_partly_known and is_mostly_zero(matrix):
        init = "random" if settings.rank > min(matrix.shape) else "nndsvda"
    if init == "random" or is_partly_known:
        return random_beginning(matrix, settings.rank, generator)
    if init in FILLS:
        if settings.rank > min(matrix.shape):
            raise ParameterError(
                f"init = '{init}' can only be used when n_components <= min(n_samples, n_features); got n_components = "
                f"{settings.rank} and X of {matrix.shape[0]} × {matrix.shape[1]}. Use init='random'."
            )
        fill = FILLS[init] * matrix.mean
        return double_svd(matrix, settings.rank, generator, fill, is_random=init == "nndsvdar")
    beginning = anchors(matrix, settings.rank, generator)
    if isinstance(settings.solver, SquaredError) and isinstance(
        settings.solver.rule, Multiplicative
    ):  # zeros would stay zeros for ever
        return InitialFactors(beginning.Ht + beginning.Ht.dtype.type(0.01 * float(beginning.Ht.mean())))
    return beginning


# ---- leaving out ------------------------------------------------------------------------------------------------
#
# Parties that are left out: of which round, why, and who is told of it.

STOP, LEAVE_OUT = FAULTY = ("stop", "leave out")
"""What a party leads to whose data cannot be used, whose work ends in an error of ours, or whose upload is refused."""


MOST_NAMES, FEW_PARTIES = 30, 5
"""How many columns of a party, and how many parties, a message tells of by name."""

AGREE = "Agree on one list of columns."


class LeftOutWarning(UserWarning):
    """A fit goes on without a party: in a round, or in all of them."""


class LeftOut(NamedTuple):
    """A round that a party was left out of, and the reason."""

    iteration: int
    party: str
    reason: str


def warn_in_python(message: str) -> None:
    """For callers in Python; a command line has words of its own."""
    warnings.warn(message, LeftOutWarning, stacklevel=2)


@dataclass(slots=True)
class Attendance:
    """Who is left out of which round; `missing` are those left out of all of them, by name, with the reason.

    `tell` hears of each party once: before the rounds, or after the first that has gone on without it.
    """

    missing: Mapping[str, str] = field(default_factory=dict)
    tell: Callable[[str], None] = warn_in_python
    left_out: list[LeftOut] = field(default_factory=list)
    told: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for name, reason in self.missing.items():
            self.tell(f"Party {name!r} is left out of this run. {reason}")

    def note(self, done: Round, row: HistoryRow) -> None:
        """One more round."""
        reasons = {**self.missing, **done.refused}
        self.left_out += [LeftOut(row.iteration, name, reason) for name, reason in reasons.items()]
        for name in done.refused.keys() - self.told:
            self.told.add(name)
            self.tell(
                f"Party {name!r} is left out of round {row.iteration}, and asked again in the next. {reasons[name]}"
            )


class Columns(NamedTuple):
    """The columns of a party: how many they are, and their names where they have some."""

    width: int
    names: Sequence[Any] | None


def of_other_columns(parties: Mapping[str, Columns]) -> dict[str, str]:
    """Who does not hold the columns that most parties hold, and how they differ; the order of columns is no matter.

    Refused where no columns are those of the most: nobody can tell then who is to be left out.
    """
    odd = _minority({name: held.width for name, held in parties.items()})
    rest = {name: held for name, held in parties.items() if name not in odd}
    named = {name: frozenset(held.names) for name, held in rest.items() if held.names is not None}
    odd += _minority(named)
    usual = next((name for name in named if name not in odd), next(iter(rest), ""))
    whom = _like(usual, len(parties) - len(odd), len(parties))
    return {name: f"{difference(name, parties[name], whom, parties[usual])} {AGREE}" for name in odd}


def require_same_columns(parties: Mapping[str, Columns]) -> None:
    """Refuse parties whose named columns are not the same, in whatever order, and say who lacks, or has besides, what.

    Compared with a party whose columns most parties hold; with the first, where there are no such columns.
    """
    held = {name: frozenset(one.names) for name, one in parties.items() if one.names is not None}
    votes = Counter(held.values()).most_common(2)
    if len(votes) < 2:
        return
    is_tie = votes[0][1] == votes[1][1]
    usual = next(name for name, names in held.items() if is_tie or names == votes[0][0])
    odd = [name for name, names in held.items() if names != held[usual]]
    whom = _like(usual, len(held) - len(odd), len(held))
    said = [difference(name, parties[name], whom, parties[usual]) for name in odd[:FEW_PARTIES]]
    said += [f"{len(odd) - FEW_PARTIES} more parties differ as well."] if len(odd) > FEW_PARTIES else []
    gaps = {name: _gap(parties[name], parties[usual]) for name in odd}
    raise FeatureError(
        " ".join([*said, AGREE]),
        missing={name: missing for name, (missing, _) in gaps.items() if missing},
        unexpected={name: extra for name, (_, extra) in gaps.items() if extra},
    )


def _like(usual: str, alike: int, parties: int) -> str:
    return f"{usual!r} and most others" if alike > 1 and 2 * alike > parties else f"{usual!r}"


def _minority(held: Mapping[str, Hashable]) -> list[str]:
    votes = Counter(held.values()).most_common(2)
    if len(votes) == 2 and votes[0][1] == votes[1][1]:
        sides = [next(name for name, value in held.items() if value == vote) for vote, _ in votes]
        raise FeatureError(
            f"Parties do not hold the same columns, and there are as many like {sides[0]!r} as like {sides[1]!r}: it "
            "cannot be told whom to leave out. Agree on one list of columns, or give the data of one side only."
        )
    return [name for name, value in held.items() if value != votes[0][0]] if votes else []


def difference(name: str, held: Columns, whom: str, expected: Columns) -> str:
    """How the columns of a party differ from those of others; the order of columns is no matter."""
    missing, extra = _gap(held, expected)
    said = [f"lacks {first_few(missing[:MOST_NAMES], len(missing), 'column')}"] if missing else []
    said += [f"has {first_few(extra[:MOST_NAMES], len(extra), 'other column')}"] if extra else []
    said = said or [f"has {held.width} columns, not {expected.width}"]
    return f"Party {name!r} {' and '.join(said)}, compared with {whom}."


def _gap(held: Columns, expected: Columns) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names that a party lacks, and those that it has besides; none where one of the two has no names."""
    if held.names is None or expected.names is None:
        return (), ()
    here, there = set(held.names), set(expected.names)
    missing = tuple(str(column) for column in expected.names if column not in here)
    return missing, tuple(str(column) for column in held.names if column not in there)


def require_somebody(kept: Sequence[str] | Mapping[str, Any], faults: Mapping[str, str]) -> None:
    """Refuse a federation in which everybody is left out."""
    if not kept:
        name, reason = next(iter(faults.items()))
        raise PartyError(
            f"Nobody is left: the data of all {len(faults)} parties are faulty. The first, {name!r}: {reason}"
        )


# ---- progress ----------------------------------------------------------------------------------------------------
#
# A line that shows how far a long fit is and how long it will take.

FOR_EVER = 1e12


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
    return str(timedelta(seconds=math.ceil(min(max(0.0, seconds), FOR_EVER))))
