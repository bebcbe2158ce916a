"""Centralized NMF, X ≈ W H with all rows in one place: initialization, iterations, and fits that end at zero."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from partsong import kernels
from partsong.core import runtime
from partsong.core.interfaces import Array, Checkpoint, Matrix, Message, Outcome, Round, Shard
from partsong.core.runtime import InterruptCounter, graceful_interrupt
from partsong.core.streams import stream
from partsong.data.observed import ObservedMatrix
from partsong.errors import ParameterError
from partsong.solvers.initialization import (
    InitialFactors,
    anchors,
    balanced,
    is_mostly_zero,
    nndsvd,
    random_init,
)
from partsong.solvers.observed import ObservedRowSolver
from partsong.solvers.squared_error import ColumnState, RowState, SquaredError
from partsong.solvers.update_rules import CoordinateDescent, Extrapolation, Multiplicative, NoExtrapolation
from partsong.training.loop import Fit, FitObserver, HistoryRow, Step, StoppingRule, Training, Watch, run
from partsong.training.result import (
    NEGLIGIBLE,
    EmptyModelWarning,
    FitResult,
    error_from_data,
    finish,
    is_zero,
    warn_about_divergence,
    warn_if_ill_posed,
    warn_if_model_is_zero,
)

PARTY = "all"
"""The name of the only party."""

EMPTY_MESSAGE = Message({})
"""The message of a party that sends nothing."""

TRIAL_STEPS = 200
"""Iterations of a fit from another start, if the first ended at zero."""

INITS = ("auto", "anchors", "random", "nndsvd", "nndsvda", "nndsvdar")

FILLS = {"nndsvd": 0.0, "nndsvda": 1.0, "nndsvdar": 0.01}
"""Replacement for zeros of a double SVD, in units of the mean of X; a random fraction of it for "nndsvdar"."""


@dataclass(frozen=True, slots=True)
class CentralizedConfig:
    """Settings of centralized NMF: rank, solver, initialization and stopping rule.

    With a `sketch`, steps use sketched data of that kind. With a `game` (a `solvers.game.Game`, or "game" for the
    default), players update single cells, and the solver fits rows to their final H. `shuffle` draws the order of
    components from the seed.
    """

    rank: int
    solver: SquaredError | ObservedRowSolver
    init: str = "auto"
    seed: int = 0
    max_iter: int = 500
    stop: StoppingRule = StoppingRule()
    threads: int = 1
    sketch: str | None = None
    sketch_ratio: float = 0.1
    game: Any = None
    shuffle: bool = False


def iterations(
    solver: SquaredError, matrix: Matrix, rows: RowState, columns: ColumnState, *, first: int, most: int, threads: int
) -> Iterator[Step]:
    """Yield iterations `first` to `most` with their errors: W ← rule(W; H), then H ← rule(H; WᵀW, XᵀW)."""
    dtype = matrix.dtype
    for index in range(first, most):
        began = time.perf_counter()
        with runtime.limit_kernel_threads(threads):
            rows, columns = solver.iterate(matrix, rows, columns, 1)
            metrics, measuring = solver.metrics(columns), time.perf_counter()
            error = error_from_data(metrics["relative_error"], [matrix], [rows], columns, dtype)
            objective = metrics["objective"]
            if error != metrics["relative_error"]:
                objective += error**2 - metrics["relative_error"] ** 2
        now = time.perf_counter()
        after = Checkpoint(index + 1, {PARTY: rows}, columns, EMPTY_MESSAGE)
        done = Round(index, EMPTY_MESSAGE, metrics, (PARTY,), {}, 0, measuring - began, after)
        yield Step(done, error, math.inf if math.isnan(objective) else objective, measuring=now - measuring)


@dataclass(frozen=True, slots=True)
class CentralizedFit:
    """A fit that alternates both half-steps; without `init` it starts as the configuration says."""

    matrix: Matrix
    config: CentralizedConfig
    init: InitialFactors | None = None
    is_private: bool = field(default=False, init=False)
    spending: None = field(default=None, init=False)

    @property
    def solver(self) -> SquaredError:
        """The half-steps; the solver "hals" makes one sweep per step on sparse data.

        There, products with the data cost less than sweeps, and several sweeps per product end in worse minima.
        """
        solver = self.config.solver
        assert isinstance(solver, SquaredError)
        is_hals = isinstance(solver.momentum, Extrapolation) and isinstance(solver.rule, CoordinateDescent)
        if not is_hals or isinstance(self.matrix, ObservedMatrix) or not is_mostly_zero(self.matrix):
            return solver
        return replace(solver, rule=replace(solver.rule, sweeps=1))  # type: ignore[type-var]

    @property
    def shards(self) -> list[Shard]:
        return [Shard(PARTY, self.matrix)]

    @property
    def stop(self) -> StoppingRule:
        return self.config.stop

    @property
    def rank(self) -> int:
        return self.config.rank

    @property
    def last(self) -> int:
        return self.config.max_iter

    @property
    def threads(self) -> int:
        return self.config.threads

    def steps(self, point: Checkpoint | None) -> Iterator[Step]:
        solver, point = self.solver, self._start() if point is None else point
        rows, columns, first = point.parties[PARTY], point.server, point.index
        del point  # do not keep the start: W is as large as its rows
        return iterations(solver, self.matrix, rows, columns, first=first, most=self.last, threads=self.threads)

    def components(self, server: ColumnState) -> Array:
        return self.solver.components(server)

    def server_at_start(self) -> ColumnState:
        columns: ColumnState = self._start().server
        return columns

    def _start(self) -> Checkpoint:
        config, solver = self.config, self.solver
        with runtime.limit_kernel_threads(config.threads):
            chosen = self.init if self.init is not None else initial_factors(self.matrix, config)
            chosen = balanced(self.matrix, _shuffled(chosen, config) if config.shuffle else chosen, solver)
        return Checkpoint(0, {PARTY: RowState(chosen.W)}, solver.begin(chosen.Ht), EMPTY_MESSAGE)


Build = Callable[[Matrix, CentralizedConfig, InitialFactors | None], Fit]
"""Builds a fit from a configuration: `CentralizedFit`, or a function of `training.single_party`."""


def fit_centralized(
    matrix: Matrix,
    config: CentralizedConfig,
    init: InitialFactors | None,
    build: Build,
    began: float,
    watch: Watch,
    observer: FitObserver,
) -> tuple[Training, FitResult]:
    """Fit X ≈ W H; if a penalized fit ends at zero, try again from another start.

    `init` replaces the configured initialization. The observer sees only the first of these fits.
    """

    def watch_all(done: Round, row: HistoryRow) -> None:
        observer.watch(done, row)
        watch(done, row)

    fit = build(matrix, config, init)
    warn_if_ill_posed(config.solver)
    with graceful_interrupt() as interrupts, runtime.limit_kernel_threads(config.threads):
        with observer.begin(fit, []) as resume_point:
            training = run(fit, resume=resume_point, began=began, watch=watch_all, interrupts=interrupts)
        warn_about_divergence(training)
        result = finish(fit, training)
        if not is_zero(result):
            return training, result
        is_asked = isinstance(config.solver, SquaredError) and config.solver.is_penalized and init is None
        if not is_asked or training.outcome is Outcome.TIME_LIMIT or interrupts.count:
            warn_if_model_is_zero(config.solver, result)
            return training, result
        return _retry_from_another_start(matrix, config, build, (training, result), interrupts)


def _retry_from_another_start(
    matrix: Matrix,
    config: CentralizedConfig,
    build: Build,
    found: tuple[Training, FitResult],
    interrupts: InterruptCounter,
) -> tuple[Training, FitResult]:
    """Return a penalized fit that ended at zero, or plain steps from another start if they are better; both warn."""
    assert isinstance(config.solver, SquaredError)
    init = "nndsvda" if config.init == "random" and config.rank <= min(matrix.shape) else "random"
    plain = replace(config.solver, rule=CoordinateDescent(), momentum=NoExtrapolation())
    steps = min(config.max_iter, TRIAL_STEPS)
    trial = build(matrix, replace(config, solver=plain, init=init, max_iter=steps), None)
    training = run(trial, interrupts=interrupts)
    least = min((row.objective for row in training.history if math.isfinite(row.objective)), default=1.0)
    how = f"a fit with solver='cd' from init={init!r} ends at {least:.5g}"
    if least >= 1 - NEGLIGIBLE:
        comparison = f"The objective of the zero model is 1 (in units of ½‖X‖²); {how}."
        warn_if_model_is_zero(config.solver, found[1], comparison)
        return found
    warnings.warn(
        f"From init={config.init!r} the fit ends at the zero model, with an objective of 1 (in units of ½‖X‖²); "
        f"{how}, and is returned instead.",
        EmptyModelWarning,
        stacklevel=2,
    )
    return training, finish(trial, training)


def initial_factors(matrix: Matrix, config: CentralizedConfig) -> InitialFactors:
    """Return the configured initial factors; "auto" uses nndsvda for sparse data and anchors otherwise.

    Random factors are used if cells are unknown, or if there are more components than rows or columns, for which there
    is no SVD. With a sketch, "auto" avoids the double SVD, which takes twelve products with the data.
    """
    generator, init = stream(config.seed, "start"), config.init
    is_partly_known = isinstance(matrix, ObservedMatrix)
    if init == "auto" and config.sketch is None and not is_partly_known and is_mostly_zero(matrix):
        init = "random" if config.rank > min(matrix.shape) else "nndsvda"
    if init == "random" or is_partly_known:
        return random_init(matrix, config.rank, generator)
    if init in FILLS:
        if config.rank > min(matrix.shape):
            raise ParameterError(
                f"init = '{init}' can only be used when n_components <= min(n_samples, n_features); got n_components = "
                f"{config.rank} and X of shape {matrix.shape[0]} × {matrix.shape[1]}. Use init='random'.",
                parameter="init",
            )
        fill = FILLS[init] * matrix.mean
        return nndsvd(matrix, config.rank, generator, fill, is_random=init == "nndsvdar")
    factors = anchors(matrix, config.rank, generator)
    if isinstance(config.solver, SquaredError) and isinstance(config.solver.rule, Multiplicative):
        # multiplicative steps never change a zero
        return InitialFactors(factors.Ht + factors.Ht.dtype.type(0.01 * float(factors.Ht.mean())))
    return factors


def _shuffled(factors: InitialFactors, config: CentralizedConfig) -> InitialFactors:
    """Return the same components in random order, which matters to rules that update one after another."""
    order = stream(config.seed, "order").permutation(config.rank)
    return InitialFactors(
        *(None if F is None else kernels.of(F).rows_of(F[:, order].T) for F in (factors.Ht, factors.W))
    )
