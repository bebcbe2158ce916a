"""The result of a fit: scale, order, weights and error of the best model, its warnings, and the time this will take."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from partsong import kernels
from partsong.core import runtime
from partsong.core.interfaces import Array, Matrix, Outcome, Round, RowSolver, Shard
from partsong.errors import DivergenceWarning, IllPosedWarning
from partsong.solvers.squared_error import RELIABLE_ERROR, ColumnState, RowState

if TYPE_CHECKING:
    from partsong.training.loop import Fit, Training

TRIAL_ROWS = 400
"""Rows used to estimate the time of the end of a fit, for a time budget."""

NEGLIGIBLE = 1e-9
"""A fraction of ‖X‖² that is only rounding."""

Result = TypeVar("Result")

ROUNDING = 1e-15
"""A fraction of ‖X‖ that counts as zero."""


class Reducer:
    """The processes that complete a model together, each with its own shards; this class is for a single process.

    `run_on_all` does some work here and raises at all processes if it fails at one. `sum` is a sum over all processes,
    with the same bits at each.
    """

    __slots__ = ()

    def run_on_all(self, work: Callable[[], Result]) -> Result:
        return work()

    def sum(self, array: np.ndarray) -> np.ndarray:
        return array


@dataclass(frozen=True, slots=True)
class FitResult:
    """H (k × m) scaled and sorted, W per party, explained shares, and the error over all rows."""

    H: np.ndarray
    weights: dict[str, Array]
    shares: np.ndarray
    squared_error: float
    squared_norm: float

    @property
    def W(self) -> Array:
        """The weights of the only party."""
        (weights,) = self.weights.values()
        return weights

    @property
    def relative_error(self) -> float:
        """‖X − W H‖ / ‖X‖; zero for a matrix of zeros."""
        return float(np.sqrt(self.squared_error / self.squared_norm)) if self.squared_norm > 0 else 0.0


def complete(
    solver: RowSolver,
    shards: Sequence[Shard],
    Ht: Array,
    rescale: bool,
    reducer: Reducer = Reducer(),
    keeps_order: bool = False,
) -> FitResult:
    """Scale H, solve for every W as `transform` does, and sort by explained share.

    Without penalties, rows of H get Euclidean norm 1. W is solved for the sorted H, so transforming the same rows later
    gives the same numbers. Only sums over parties are needed (k × k, and two numbers); `reducer` computes them over all
    processes. If components are linearly dependent, W is not unique, and the order is that of a nearby solution. With
    `keeps_order`, components are not sorted: under differential privacy, an order by shares would disclose the rows
    that the shares are computed from.
    """

    def solve(Ht: Array, exactly: bool = True) -> tuple[dict[str, Array], np.ndarray, np.ndarray]:
        weights = reducer.run_on_all(lambda: _solve(solver, shards, Ht, exactly))
        gram = reducer.sum(_gram(weights, Ht))
        return weights, _shares(gram, Ht), gram

    if rescale:
        Ht = _unit_columns(Ht)
    if not keeps_order:
        _, shares, gram = solve(Ht, exactly=False)
        if not rescale:
            norm = reducer.sum(np.array([sum(shard.matrix.squared_norm for shard in shards)]))
            Ht = _without_rounding(Ht, gram, float(norm[0]))
        Ht = _sorted(Ht, shares)
    weights, shares, _ = solve(Ht)
    if not keeps_order and (np.diff(shares) > 0).any():  # close calls
        Ht = _sorted(Ht, shares)
        weights, shares, _ = solve(Ht)
    error, norm = reducer.sum(reducer.run_on_all(lambda: _squares(shards, weights, Ht)))
    H = np.ascontiguousarray(kernels.of(Ht).to_numpy(Ht).T)
    return FitResult(H, weights, shares, float(np.maximum(0.0, error)), float(norm))


def scale_is_free(solver: RowSolver) -> bool:
    """Whether only W H matters: not with penalties, nor for a solver without penalty parameters, whose W are shares."""
    return not any(getattr(solver, penalty, True) for penalty in ("penalty_W", "penalty_H"))


def _solve(solver: RowSolver, shards: Sequence[Shard], Ht: Array, exactly: bool) -> dict[str, Array]:
    return {s.name: solver.solve_rows(s.matrix, s.matrix.native(Ht), exactly=exactly) for s in shards}


def _sorted(F: Array, shares: np.ndarray) -> Array:
    """Return the columns of F by decreasing share, in contiguous memory."""
    order = np.argsort(-shares, kind="stable")
    return kernels.of(F).cast(np.take(kernels.of(F).to_numpy(F), order, axis=1), F)


def _without_rounding(Ht: Array, gram: np.ndarray, norm: float) -> Array:
    """Set components of Hᵀ that contribute less than rounding to zero; penalties shrink them but never reach 0."""
    values = kernels.of(Ht).to_numpy(Ht)
    sizes = np.einsum("ij,ij->j", values, values, dtype=np.float64) * gram.diagonal()
    return kernels.of(Ht).cast(values * (sizes > ROUNDING**2 * norm), Ht)


def _unit_columns(Ht: Array) -> Array:
    on = kernels.of(Ht)
    values = on.to_numpy(Ht)
    sizes = np.sqrt(np.einsum("ij,ij->j", values, values, dtype=np.float64))
    return on.cast(np.ascontiguousarray(values / np.where(sizes > 0, sizes, 1).astype(values.dtype)), Ht)


def _gram(weights: dict[str, Array], Ht: Array) -> np.ndarray:
    """Return Σ_p W_pᵀW_p (k × k) in float64; zero without rows."""
    gram = np.zeros((Ht.shape[1], Ht.shape[1]))
    for W in weights.values():
        gram += kernels.of(W).to_numpy(kernels.of(W).gram(W))
    return gram


def _shares(gram: np.ndarray, Ht: Array) -> np.ndarray:
    """Return share_j = Σ_l (WᵀW)_jl (HHᵀ)_jl / Σ, the contribution of component j to ‖W H‖²."""
    contribution = (gram * kernels.of(Ht).to_numpy(kernels.of(Ht).gram(Ht))).sum(axis=1)
    total = float(contribution.sum())
    return contribution / total if total > 0 else np.full(len(contribution), 1.0 / max(1, len(contribution)))


def _squares(shards: Sequence[Shard], weights: dict[str, Array], Ht: Array) -> np.ndarray:
    """Return ‖X − W H‖² and ‖X‖² over the rows of this process."""
    error = sum(shard.matrix.squared_distance(weights[shard.name], shard.matrix.native(Ht)) for shard in shards)
    norm = sum(shard.matrix.squared_norm for shard in shards)
    return np.array([error, norm], np.float64)


def is_reliable_error(error: float, dtype: object) -> bool:
    """Whether a relative error computed from sums is more than rounding; True for NaN, which is no error."""
    squared = error**2
    if math.isnan(squared) or squared > RELIABLE_ERROR["float32"]:
        return True
    return "float32" not in str(dtype) and squared > RELIABLE_ERROR["float64"]


def error_from_data(
    known: float, matrices: Sequence[Matrix], parties: Sequence[RowState], columns: ColumnState, dtype: object
) -> float:
    """Return the relative error of W and H: from sums, or from the data if the former is mostly rounding.

    ‖X‖² − 2⟨Hᵀ, XᵀW⟩ + ⟨WᵀW, HHᵀ⟩ is a small difference of large numbers if the model fits well, or if one column is so
    large that all others are rounding beside it.
    """
    if is_reliable_error(known, dtype):
        return known
    precision = "float32" if "float32" in str(dtype) else "float64"
    norm = sum(matrix.squared_norm for matrix in matrices)
    if norm <= 0 or any(rows.W is None for rows in parties):
        return known
    squared = 0.0
    for matrix, rows in zip(matrices, parties, strict=True):
        W = rows.W if rows.point is None else rows.point
        squared += matrix.squared_distance(W, matrix.native(columns.Ht))
    least = 8 * float(np.finfo(precision).eps)
    return max(least, math.sqrt(max(0.0, squared) / norm))


def top_features(H: np.ndarray, names: Sequence[str] | None, n: int) -> list[list[str | int]]:
    """Return the n features with the largest values in each row of H: names if known, else column numbers."""
    order = np.argsort(-H, axis=1, kind="stable")[:, :n]
    return [[int(j) if names is None else str(names[j]) for j in row] for row in order]


class EmptyModelWarning(UserWarning):
    """A fit ended with a model that is zero, although the data are not."""


def finish(fit: Fit, training: Training) -> FitResult:
    """Return the best model of a run, or the initial one if no step was made: H scaled and sorted, W, shares, error."""
    H = fit.components(fit.server_at_start() if training.best is None else training.best)
    with runtime.limit_kernel_threads(fit.threads):
        Ht, rescale = kernels.of(H).rows_of(H), scale_is_free(fit.solver)
        return complete(fit.solver, fit.shards, Ht, rescale, keeps_order=fit.is_private)


@dataclass(slots=True)
class FinalizationTimer:
    """Estimates how long the end of a fit will take, so that a time budget covers it, from trials on a few rows."""

    fit: Fit
    seconds: float = 0.0
    tried_at: float = 0.0

    def reserve(self, done: Round, spent: float) -> float:
        """Return the seconds to reserve; measured again each time the time spent has doubled."""
        if self.tried_at == 0.0 or spent >= 2 * self.tried_at:
            self.tried_at = spent
            self.seconds = self._try(self.fit.components(done.checkpoint.server))
        return self.seconds

    def _try(self, H: Array) -> float:
        shards = self.fit.shards
        rows = sum(shard.matrix.shape[0] for shard in shards)
        share = min(1.0, TRIAL_ROWS / max(1, rows))
        few = [_some_rows(shard, share) for shard in shards]
        began = time.perf_counter()
        with runtime.limit_kernel_threads(1):
            complete(self.fit.solver, few, kernels.of(H).rows_of(H), rescale=False)
        taken = time.perf_counter() - began
        return taken * rows / max(1, sum(shard.matrix.shape[0] for shard in few)) / self.fit.threads


def _some_rows(shard: Shard, share: float) -> Shard:
    n = shard.matrix.shape[0]
    count = max(1, round(n * share))
    return shard if count >= n else replace(shard, matrix=shard.matrix.rows(np.arange(count) * n // count))


def warn_about_divergence(training: Training) -> None:
    """Warn Python callers of divergence; the command line reports the outcome instead."""
    if training.outcome is Outcome.DIVERGED:
        message = f"The fit diverged and was stopped. The best model so far is kept. {training.error_text}".rstrip()
        warnings.warn(message, DivergenceWarning, stacklevel=2)


def is_zero(result: FitResult) -> bool:
    """Whether W H explains nothing of an X that is not zero."""
    return result.squared_norm > 0 and result.squared_error >= (1 - NEGLIGIBLE) * result.squared_norm


def warn_if_model_is_zero(solver: Any, result: FitResult, comparison: str = "") -> None:
    """Warn if W H is zero, with the reason; `comparison` is the result of a fit from another start."""
    if not is_zero(result):
        return
    if getattr(solver, "penalty_W", None) or getattr(solver, "penalty_H", None):
        why = (
            f"The penalties ({solver.penalty_W} on W, {solver.penalty_H} on H) outweigh the data, at least from this "
            "initialization. Lower alpha_W and alpha_H, or the penalties of the program's solver."
        )
        why = f"{why} {comparison}".rstrip()
    else:
        why = "The iteration collapsed to zero. Use smaller steps, or another solver or seed."
    warnings.warn(f"The model is zero: W H explains nothing of X. {why}", EmptyModelWarning, stacklevel=2)


def warn_if_ill_posed(solver: Any) -> None:
    """Warn if only one factor has a penalty: c W and H / c have the same product, and no c is optimal."""
    on_W, on_H = getattr(solver, "penalty_W", None), getattr(solver, "penalty_H", None)
    if bool(on_W) == bool(on_H):
        return
    free, held_back = ("W", "H") if on_H else ("H", "W")
    warnings.warn(
        f"Only {held_back} has a penalty (alpha_{held_back}), so the objective has no minimum: {free} grows and "
        f"{held_back} shrinks without limit. Set alpha_{free} above 0 as well.",
        IllPosedWarning,
        stacklevel=2,
    )
