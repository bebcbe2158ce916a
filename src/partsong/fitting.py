"""Fitting, in the steps that every caller shares: a start, rounds that are followed, a model.

`fit_rows` is centralised NMF; `pursue` and `conclude` are its two halves for any program, so that a caller can go on
from an earlier run, or protect the second half from an interrupt that ended the first.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from partsong import kernels, threads
from partsong.aggregate.reduction import InTheOpen
from partsong.core import Array, Checkpoint, Engine, Layout, Matrix, Outcome, Reduction, Round, Schedule, Shard
from partsong.engines.sequential import Sequential
from partsong.errors import DivergenceWarning, ParameterError
from partsong.finished import Finished, complete, finish
from partsong.interrupts import Interrupts, held
from partsong.local.alternate import Alternate, Rows
from partsong.local.multiplicative import Multiplicative
from partsong.local.start import Beginning, anchors, double_svd, random_beginning
from partsong.programs.shared_statistics import SharedStatistics
from partsong.running import Follower, HistoryRow, Progress, Run, Stop, known_error
from partsong.streams import stream

Watch = Callable[[Round, HistoryRow], None]

TRIAL_ROWS = 400
"""Rows on which the end of a fit is tried when a time budget has to cover it."""

INITS = ("auto", "anchors", "random", "nndsvd", "nndsvda")


@dataclass(frozen=True, slots=True)
class RowFit:
    """Centralised NMF as a value: rank, solver, start, and when to stop."""

    rank: int
    solver: Alternate
    init: str = "auto"
    seed: int = 0
    max_iter: int = 500
    stop: Stop = Stop()
    threads: int = 1

    def __post_init__(self) -> None:
        if self.init not in INITS:
            raise ParameterError(f"Unknown init {self.init!r}; choose one of {', '.join(INITS)}.")


@dataclass(frozen=True, slots=True)
class Task:
    """A program with all that it takes to run it; `begin` makes its start (None: the program's own).

    `error_of` and `drift_of` tell of a round what a simulation can know; the conclusion may use `threads`.
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
    beginning: Beginning | None = None,
    earlier: Earlier | None = None,
    began: float | None = None,
    watch: Watch = lambda done, row: None,
) -> tuple[Run, Finished]:
    """X ≈ W H of the rows of a matrix; `beginning` replaces the start that the settings name."""
    began = time.perf_counter() if began is None else began
    task = rows_task(matrix, settings, beginning)
    with held() as interrupts:
        run = pursue(task, earlier=earlier, began=began, watch=watch, interrupts=interrupts)
        warn_of_divergence(run)
        return run, conclude(task, run)


def rows_task(matrix: Matrix, settings: RowFit, beginning: Beginning | None = None) -> Task:
    """Centralised NMF as the program of a single party; the start is computed when the task is pursued."""
    program = SharedStatistics(settings.rank, settings.solver)

    def begin() -> Checkpoint:
        with threads.kernels_on(settings.threads):
            chosen = beginning if beginning is not None else beginning_of(matrix, settings)
        server, model = program.start_from(chosen.Ht)
        return Checkpoint(0, {"all": Rows(chosen.W)}, server, model)

    schedule = Schedule(settings.max_iter, kernel_threads=settings.threads)
    return Task(program, [Shard("all", matrix)], schedule, settings.stop, begin=begin, threads=settings.threads)


def pursue(
    task: Task,
    *,
    earlier: Earlier | None = None,
    began: float | None = None,
    watch: Watch = lambda done, row: None,
    interrupts: Interrupts | None = None,
) -> Run:
    """The rounds of a task, from its start or from where an earlier part of the same run stood, to their end.

    The same rounds, and (where the same parties take part in all of them) the same best of them, as if the run had
    never been interrupted. They end after the round in which `interrupts` counts a first Ctrl-C.
    """
    history = earlier.history if earlier is not None else ()
    if task.stop.outcome(Progress.of(row.objective for row in history), 0.0) is Outcome.CONVERGED:
        return Run(Outcome.CONVERGED, history, earlier.best if earlier is not None else None)
    follower = Follower(
        task.stop,
        time.perf_counter() if began is None else began,
        error_of=task.error_of,
        drift_of=task.drift_of,
        watch=watch,
        reserve=ClosingTime(task).reserve,
        interrupts=interrupts if interrupts is not None else Interrupts(),
    )
    run = follower.follow(_rounds(task, earlier), history)
    return run if earlier is None else _with_earlier_best(run, earlier)


def warn_of_divergence(run: Run) -> None:
    """For callers in Python; a command line tells the outcome instead."""
    if run.outcome is Outcome.DIVERGED:
        told = "The fit ran away from its solution and was stopped; the best model before that is kept."
        warnings.warn(f"{told} {run.trouble}".rstrip(), DivergenceWarning, stacklevel=2)


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
        with threads.kernels_on(1):
            complete(self.task.program.solver, few, kernels.of(H).rows_of(H), rescale=False)
        taken = time.perf_counter() - began
        return taken * rows / max(1, sum(shard.matrix.shape[0] for shard in few)) / self.task.threads


def _some_rows(shard: Shard, share: float) -> Shard:
    n = shard.matrix.shape[0]
    count = max(1, round(n * share))
    return shard if count >= n else replace(shard, matrix=shard.matrix.rows(np.arange(count) * n // count))


def _rounds(task: Task, earlier: Earlier | None) -> Iterator[Round]:
    """The start is handed over and not kept: its W is as large as the party's."""
    return task.engine.run(
        task.program,
        task.shards,
        task.schedule,
        reduction=task.reduction,
        resume=earlier.checkpoint if earlier is not None else (task.begin() if task.begin is not None else None),
    )


def conclude(task: Task, run: Run) -> Finished:
    """The model of a run that has ended, or of the start where not even one round was done."""
    start = None
    if run.best is None:
        start = task.program.components(_first_server(task))
    with threads.kernels_on(task.threads):
        return finish(task.program, task.program.solver, task.shards, run, start)


def _first_server(task: Task) -> Any:
    if task.begin is not None:
        return task.begin().server
    return task.program.start_server(Layout.of(task.shards, task.schedule.seed))[0]


def _with_earlier_best(run: Run, earlier: Earlier) -> Run:
    """Of equals the later one is the best, as in `running.Follower`."""
    before = min((row.objective for row in earlier.history), default=math.inf)
    after = min((row.objective for row in run.history[len(earlier.history) :]), default=math.inf)
    is_beaten = earlier.best is None or (run.best is not None and after <= before)
    return run if is_beaten else replace(run, best=earlier.best)


def beginning_of(matrix: Matrix, settings: RowFit) -> Beginning:
    """The start that the settings name; "auto" takes anchors."""
    generator = stream(settings.seed, "start")
    if settings.init == "random":
        return random_beginning(matrix, settings.rank, generator)
    if settings.init in ("nndsvd", "nndsvda"):
        fill = matrix.mean if settings.init == "nndsvda" else 0.0
        return double_svd(matrix, settings.rank, generator, fill=fill)
    beginning = anchors(matrix, settings.rank, generator)
    if isinstance(settings.solver.rule, Multiplicative):  # zeros would stay zeros for ever
        return Beginning(beginning.Ht + beginning.Ht.dtype.type(0.01 * float(beginning.Ht.mean())))
    return beginning
