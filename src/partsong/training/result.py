"""From the last round to a model: scale, order, weights, error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from partsong import kernels
from partsong.core.interfaces import Array, Matrix, RowSolver, Shard
from partsong.solvers.squared_error import TRUSTED, ColumnState, RowState

Result = TypeVar("Result")

ROUNDING = 1e-15
"""A share of ‖X‖ that is nothing."""


class Reducer(Protocol):
    """The processes that complete a model together, each with shards of its own.

    `jointly` does some work here and fails everywhere where it fails for one; `total` is a sum over all, the same bits
    everywhere.
    """

    def jointly(self, work: Callable[[], Result]) -> Result: ...
    def total(self, array: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class SingleProcess:
    """All shards are here."""

    def jointly(self, work: Callable[[], Result]) -> Result:
        return work()

    def total(self, array: np.ndarray) -> np.ndarray:
        return array


@dataclass(frozen=True, slots=True)
class FitResult:
    """H (k × m) on its stated scale and in order, W per party, explained shares, and the error over all rows."""

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
    among: Reducer = SingleProcess(),
    keeps_order: bool = False,
) -> FitResult:
    """Put H on its scale, solve for every W as `transform` does, and sort by explained share.

    Without penalties rows of H get Euclidean norm 1. W is solved for the sorted H, so that transforming the same
    rows later gives the same numbers; only sums over parties (k × k, and two numbers) are needed, which are those of
    everybody `among` whom the shards are. Where components depend on each other W is not unique, and the order is that
    of a nearby solution. One that `keeps_order` is not sorted: with differential privacy an order by shares, which are
    known from all rows, would tell of them.
    """

    def solved(Ht: Array, exactly: bool = True) -> tuple[dict[str, Array], np.ndarray, np.ndarray]:
        weights = among.jointly(lambda: _solve(solver, shards, Ht, exactly))
        gram = among.total(_gram(weights, Ht))
        return weights, _shares(gram, Ht), gram

    if rescale:
        Ht = _unit_columns(Ht)
    if not keeps_order:
        _, shares, gram = solved(Ht, exactly=False)
        if not rescale:
            norm = among.total(np.array([sum(shard.matrix.squared_norm for shard in shards)]))
            Ht = _without_rounding(Ht, gram, float(norm[0]))
        Ht = _sorted(Ht, shares)
    weights, shares, _ = solved(Ht)
    if not keeps_order and (np.diff(shares) > 0).any():  # close calls
        Ht = _sorted(Ht, shares)
        weights, shares, _ = solved(Ht)
    error, norm = among.total(among.jointly(lambda: _squares(shards, weights, Ht)))
    H = np.ascontiguousarray(kernels.of(Ht).to_numpy(Ht).T)
    return FitResult(H, weights, shares, float(np.maximum(0.0, error)), float(norm))


def scale_is_free(solver: RowSolver) -> bool:
    """Whether W H alone matters: not under penalties, nor for a solver without any, whose weights are shares."""
    return not any(getattr(solver, penalty, True) for penalty in ("penalty_W", "penalty_H"))


def _solve(solver: RowSolver, shards: Sequence[Shard], Ht: Array, exactly: bool) -> dict[str, Array]:
    return {s.name: solver.solve_rows(s.matrix, s.matrix.native(Ht), exactly=exactly) for s in shards}


def _sorted(F: Array, shares: np.ndarray) -> Array:
    """Columns of F by falling share, in contiguous memory."""
    order = np.argsort(-shares, kind="stable")
    return kernels.of(F).cast(np.take(kernels.of(F).to_numpy(F), order, axis=1), F)


def _without_rounding(Ht: Array, gram: np.ndarray, norm: float) -> Array:
    """Hᵀ with components set to zero that contribute less than rounding: penalties shrink them for ever, never to 0."""
    values = kernels.of(Ht).to_numpy(Ht)
    sizes = np.einsum("ij,ij->j", values, values, dtype=np.float64) * gram.diagonal()
    return kernels.of(Ht).cast(values * (sizes > ROUNDING**2 * norm), Ht)


def _unit_columns(Ht: Array) -> Array:
    on = kernels.of(Ht)
    values = on.to_numpy(Ht)
    sizes = np.sqrt(np.einsum("ij,ij->j", values, values, dtype=np.float64))
    return on.cast(np.ascontiguousarray(values / np.where(sizes > 0, sizes, 1).astype(values.dtype)), Ht)


def _gram(weights: dict[str, Array], Ht: Array) -> np.ndarray:
    """Σ_p W_pᵀW_p (k × k) in float64; zero where there are no rows."""
    gram = np.zeros((Ht.shape[1], Ht.shape[1]))
    for W in weights.values():
        gram += kernels.of(W).to_numpy(kernels.of(W).gram(W))
    return gram


def _shares(gram: np.ndarray, Ht: Array) -> np.ndarray:
    """share_j = Σ_l (WᵀW)_jl (HHᵀ)_jl / Σ: what component j contributes to ‖W H‖²."""
    contribution = (gram * kernels.of(Ht).to_numpy(kernels.of(Ht).gram(Ht))).sum(axis=1)
    total = float(contribution.sum())
    return contribution / total if total > 0 else np.full(len(contribution), 1.0 / max(1, len(contribution)))


def _squares(shards: Sequence[Shard], weights: dict[str, Array], Ht: Array) -> np.ndarray:
    """‖X − W H‖² and ‖X‖² over the rows that are here."""
    error = sum(shard.matrix.squared_distance(weights[shard.name], shard.matrix.native(Ht)) for shard in shards)
    norm = sum(shard.matrix.squared_norm for shard in shards)
    return np.array([error, norm], np.float64)


def error_from_data(
    known: float, matrices: Sequence[Matrix], parties: Sequence[RowState], columns: ColumnState, dtype: object
) -> float:
    """The relative error of W and H: what their sums tell, or from the data where that is mostly rounding.

    ‖X‖² − 2⟨Hᵀ, XᵀW⟩ + ⟨WᵀW, HHᵀ⟩ is a small difference of large numbers where a model fits well, or where one column
    is so large that all others are rounding beside it.
    """
    precision = "float32" if "float32" in str(dtype) else "float64"
    if math.isnan(known) or known**2 > TRUSTED[precision]:
        return known
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
    """The n features with the largest values in each row of H: names where known, else column numbers."""
    order = np.argsort(-H, axis=1, kind="stable")[:, :n]
    return [[int(j) if names is None else str(names[j]) for j in row] for row in order]
