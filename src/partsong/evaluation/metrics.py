"""Metrics of a model at each party: fit, drift, component shares, and alignment of local components; no data moves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from partsong import kernels
from partsong.aggregation.alignment import Assignment, correlations, orthogonality_gap, significant
from partsong.core.interfaces import Alignment, Array, Plan, RowSolver, Shard
from partsong.solvers.squared_error import SquaredError

SIGNIFICANCE_LEVEL = 0.05
"""Two components are partners only if their correlation is above zero at this level, over all k² pairs."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Σ_j ‖H_j − H̄‖² by position and Σ_j ‖H_j − P_j H̄‖² after alignment, and the mean of ‖P_jᵀP_j − I‖."""

    regular: float
    aligned: float
    orthogonality_gap: float
    plans: tuple[Plan, ...]


def compute_drift(parties: Sequence[Array], H: Array, align: Alignment = Assignment()) -> Drift:
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
    """Σ_j ½‖X_j − W_jH_j‖² + ½γ Σ_l w_l ‖(H_j)_l − (P_jH)_l / w_l‖², w = P_j 1: what the parties of FNMF minimize
    together (Theorem 2, where all w_l = 1).

    γ = `strength` and P_j = align(H_j, H) are those of the pull. A row of H_j is pulled by its weight w_l towards the
    mean of its partners, as it is while iterating; rows without a partner are free.
    """
    target, total = _numbers(H), 0.0
    for shard in shards:
        W, Ht = weights[shard.name], kernels.of(own[shard.name]).rows_of(own[shard.name])
        mine = _numbers(own[shard.name])
        plan = align.plan(mine, target)
        total += 0.5 * max(0.0, shard.matrix.squared_distance(W, Ht)) + 0.5 * strength * _pull_cost(mine, plan, target)
    return total


def _pull_cost(mine: np.ndarray, plan: Plan, target: np.ndarray) -> float:
    """Σ_l w_l ‖h_l − (P·target)_l / w_l‖², w = P·1."""
    rows = np.flatnonzero(plan.weights > 0)
    weights = plan.weights[rows]
    gaps = mine[rows] - plan.apply(target)[rows] / weights[:, None]
    return float(weights @ np.einsum("ij,ij->i", gaps, gaps))


def _numbers(H: Array) -> np.ndarray:
    return np.asarray(kernels.of(H).to_numpy(H), np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class LocalComponents:
    """A party's own H_p (k × m) in the order of the shared components: row a belongs to component a.

    It is row places[a] of the party's own model. Where has_partner[a] is false, the two have nothing in common, and the
    row fills the place that was left.
    """

    components: np.ndarray
    places: tuple[int, ...]
    has_partner: tuple[bool, ...]

    def reorder(self, order: Sequence[int]) -> LocalComponents:
        """Return the same with shared component order[a] in place a."""
        return LocalComponents(
            self.components[list(order)],
            tuple(self.places[i] for i in order),
            tuple(self.has_partner[i] for i in order),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PartyResult:
    """One method at one party; errors and shares are fractions.

    `relative_error` is ‖X_p − W_p H‖ / ‖X_p‖ with W_p fitted to the shared H, `own_error` the same with the party's own
    H_p. Drifts are ‖H_p − H‖² / ‖H‖², by position and after alignment. `shares` say what each component contributes to
    ‖W_p H‖². NaN and None where the party has no H of its own; a method that shares nothing has nothing but that.
    """

    name: str
    rows: int
    squared_norm: float
    relative_error: float
    shares: tuple[float, ...]
    own_error: float = math.nan
    drift: float = math.nan
    aligned_drift: float = math.nan
    own: LocalComponents | None = None

    def reorder(self, order: Sequence[int]) -> PartyResult:
        """Return the same with shared component order[a] in place a."""
        own = None if self.own is None else self.own.reorder(order)
        return replace(self, shares=tuple(self.shares[i] for i in order), own=own)


def evaluate_party(shard: Shard, H: Array, solver: RowSolver, W: Array | None = None) -> PartyResult:
    """The fit of H (k × m) to the rows of a party, with the weights given, or else refitted."""
    Ht = shard.matrix.native(kernels.of(H).rows_of(H))
    fitted = solver.solve_rows(shard.matrix, Ht) if W is None else W
    norm = float(shard.matrix.squared_norm)
    error = _relative(shard.matrix.squared_distance(fitted, Ht), norm)
    return PartyResult(shard.name, shard.matrix.shape[0], norm, error, _shares(fitted, Ht))


def add_local_model(
    party: PartyResult, shard: Shard, own: Array, models: tuple[Array, Array], solver: RowSolver
) -> PartyResult:
    """Adds the party's own H_p (k × m); `models` are H as the server has it, and as it is shown: scaled and sorted."""
    served, shown = models
    if not is_finite(own):
        return replace(party, drift=math.inf, aligned_drift=math.inf)
    size = float(np.square(_numbers(served)).sum()) or 1.0
    found = compute_drift([own], served)
    return replace(
        party,
        own_error=evaluate_party(shard, own, solver).relative_error,
        drift=found.regular / size,
        aligned_drift=found.aligned / size,
        own=align_local_components(own, shown),
    )


def is_finite(H: Array) -> bool:
    """Return whether ‖H‖² is finite; it is not for a party that has diverged."""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.square(_numbers(H)).sum()))


def align_local_components(own: Array, H: Array) -> LocalComponents:
    """H_p in the order of H: the assignment with the largest total cosine."""
    source, target = _numbers(own), _numbers(H)
    places = Assignment(unit=True).plan(target, source).partners
    alike = significant(correlations(target, source), target.shape[1], SIGNIFICANCE_LEVEL, bonferroni=True)
    partners = tuple(bool(alike[a, place]) for a, place in enumerate(places))
    return LocalComponents(source[places], tuple(map(int, places)), partners)


def overall_error(parties: Sequence[PartyResult]) -> float:
    """‖X − W H‖ / ‖X‖ over all rows, from two numbers of each party."""
    norm = sum(party.squared_norm for party in parties)
    return _relative(sum(party.relative_error**2 * party.squared_norm for party in parties), norm)


def _relative(squared_error: float, squared_norm: float) -> float:
    return float(np.sqrt(np.maximum(0.0, squared_error) / squared_norm)) if squared_norm > 0 else 0.0


def _shares(W: Array, Ht: Array) -> tuple[float, ...]:
    """share_j = Σ_l (WᵀW)_jl (HHᵀ)_jl / Σ, as for the whole model; equal shares where W H is zero."""
    grams = [np.asarray(kernels.of(F).to_numpy(kernels.of(F).gram(F)), np.float64) for F in (W, Ht)]
    contribution = (grams[0] * grams[1]).sum(axis=1)
    total = float(contribution.sum())
    shares = contribution / total if total > 0 else np.full(len(contribution), 1.0 / max(1, len(contribution)))
    return tuple(float(share) for share in shares)


def relative_error(solver: SquaredError, shards: Sequence[Shard], H: Array) -> float:
    """‖X − W H‖ / ‖X‖ over all parties, with W refitted to H at each of them."""
    error = energy = 0.0
    for shard in shards:
        local = kernels.of(H).rows_of(H)
        local = shard.matrix.native(local)
        W = solver.solve_rows(shard.matrix, local)
        error += shard.matrix.squared_distance(W, local)
        energy += shard.matrix.squared_norm
    return float(np.sqrt(np.maximum(0.0, error) / energy)) if energy > 0 else 0.0
