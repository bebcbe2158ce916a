"""How well parties agree, and how well the shared model fits each of them: one number per party, no data moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from partsong import kernels
from partsong.align.assignment import Assignment
from partsong.align.likeness import inner_products
from partsong.align.plan import orthogonality_gap
from partsong.core import Alignment, Array, Plan, RowSolver, Shard


@dataclass(frozen=True, slots=True)
class Fit:
    """‖X_j − W_j H‖ at each party, in name order, with its number of rows and columns."""

    distances: tuple[float, ...]
    rows: tuple[int, ...]
    n_features: int

    @property
    def rmsd_sum(self) -> float:
        """Σ_j ‖X_j − W_j H‖ / √(n_j m), the measure of the FNMF paper."""
        return float(sum(d / np.sqrt(n * self.n_features) for d, n in zip(self.distances, self.rows, strict=True)))

    @property
    def total_distance(self) -> float:
        """Σ_j ‖X_j − W_j H‖."""
        return float(sum(self.distances))


def fit_of(shards: Sequence[Shard], H: Array, solver: RowSolver, weights: Mapping[str, Array] | None = None) -> Fit:
    """The fit of H (k × m) to all parties, with the weights given, or else refitted to H."""
    ordered = sorted(shards, key=lambda shard: shard.name)
    distances = []
    for shard in ordered:
        Ht = shard.matrix.native(kernels.of(H).rows_of(H))
        W = solver.solve_rows(shard.matrix, Ht) if weights is None else weights[shard.name]
        distances.append(float(np.sqrt(max(0.0, shard.matrix.squared_distance(W, Ht)))))
    return Fit(tuple(distances), tuple(s.matrix.shape[0] for s in ordered), ordered[0].matrix.shape[1])


@dataclass(frozen=True, slots=True)
class Drift:
    """Σ_j ‖H_j − H̄‖² by position and Σ_j ‖H_j − P_j H̄‖² after alignment, and the mean of ‖P_jᵀP_j − I‖."""

    regular: float
    aligned: float
    orthogonality_gap: float
    plans: tuple[Plan, ...]


def drift_of(parties: Sequence[Array], H: Array, align: Alignment = Assignment()) -> Drift:
    """How far the parties' H_j (each k × m) are from the shared H; rows without a partner do not count as aligned."""
    target = _numbers(H)
    own = [_numbers(one) for one in parties]
    plans = tuple(align.plan(one, target) for one in own)
    aligned = sum(
        float(np.square((one - plan.apply(target))[plan.weights > 0]).sum())
        for one, plan in zip(own, plans, strict=True)
    )
    regular = sum(float(np.square(one - target).sum()) for one in own)
    return Drift(regular, aligned, float(np.mean([orthogonality_gap(plan) for plan in plans])), plans)


def potential(
    shards: Sequence[Shard],
    weights: Mapping[str, Array],
    own: Mapping[str, Array],
    H: Array,
    strength: float,
    align: Alignment = Assignment(),
) -> float:
    """Σ_j ½‖X_j − W_jH_j‖² + ½γ Σ_l w_l ‖(H_j)_l − (P_jH)_l / w_l‖², w = P_j 1: what the parties of FNMF minimise
    together (Theorem 2, where all w_l = 1).

    γ = `strength` and P_j = align(H_j, H) are those of the pull. A row of H_j is pulled by its weight w_l towards the
    mean of its partners, as it is while iterating; rows without a partner are free.
    """
    target, total = _numbers(H), 0.0
    for shard in shards:
        W, Ht = weights[shard.name], kernels.of(own[shard.name]).rows_of(own[shard.name])
        mine = _numbers(own[shard.name])
        plan = align.plan(mine, target)
        total += 0.5 * max(0.0, shard.matrix.squared_distance(W, Ht)) + 0.5 * strength * _pulled(mine, plan, target)
    return total


def _pulled(mine: np.ndarray, plan: Plan, target: np.ndarray) -> float:
    """Σ_l w_l ‖h_l − (P·target)_l / w_l‖², w = P·1."""
    rows = np.flatnonzero(plan.weights > 0)
    weights = plan.weights[rows]
    gaps = mine[rows] - plan.apply(target)[rows] / weights[:, None]
    return float(weights @ np.einsum("ij,ij->i", gaps, gaps))


def recovery(found: Array, truth: Array) -> float:
    """The mean cosine between components and those they should be, in the order that fits best: 1 is all of them.

    Where their numbers differ, components of the truth without a partner count as zero.
    """
    from scipy.optimize import linear_sum_assignment

    cosines = inner_products(truth, found, unit=True)
    rows, partners = linear_sum_assignment(cosines, maximize=True)
    return float(cosines[rows, partners].sum() / len(cosines))


def _numbers(H: Array) -> np.ndarray:
    return np.asarray(kernels.of(H).to_numpy(H), np.float64)
