"""Alignment of the rows of two factors: assignment, nearest, softmax, Sinkhorn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np

from partsong import kernels
from partsong.core.interfaces import Array, Plan
from partsong.core.parameters import Choice
from partsong.errors import ParameterError
from partsong.kernels.transport import NEGLIGIBLE, scale

ALMOST_ONE = 1.0 - 1e-12
LEAST, MOST = 2.0**-250, 2.0**250
"""If the largest entry of a factor lies between these, its sums of squares fit float64 without rescaling."""
DEEPEST = -1000
"""The lowest power of two that is rescaled to 1: for lower ones the scale would not be finite."""

UNMATCHED = -1


def gains(target: Array, source: Array, *, unit: bool = False) -> np.ndarray:
    """c·⟨x_a, y_b⟩ with one c > 0, a power of two for which the sums are finite for all factors.

    In float64, because nearly equal rows differ only in digits that float32 sums do not have.
    """
    X, Y = (_at_norm_one(F) if unit else _times(F, _scale(F)) for F in _numbers(target, source))
    return np.asarray(X @ Y.T)


def squared_distances(target: Array, source: Array) -> np.ndarray:
    """‖x_a − y_b‖² (k × k); infinite where float64 overflows."""
    X, Y = _numbers(target, source)
    scale = _scale(X, Y)
    with np.errstate(over="ignore"):
        return np.asarray(_distances(_times(X, scale), _times(Y, scale)) / scale / scale)


def costs(target: Array, source: Array, *, unit: bool = False) -> np.ndarray:
    """c·‖x_a − y_b‖² with one c > 0, a power of two for which the sums are finite for all factors."""
    X, Y = _numbers(target, source)
    if unit:
        return _distances(_at_norm_one(X), _at_norm_one(Y))
    scale = _scale(X, Y)
    return _distances(_times(X, scale), _times(Y, scale))


def correlations(target: Array, source: Array) -> np.ndarray:
    """Pearson's r of rows over the features (k × k); r = 0 for constant rows."""
    X, Y = (_standardized(F) for F in _numbers(target, source))
    return np.asarray(np.clip(X @ Y.T, -ALMOST_ONE, ALMOST_ONE))


def significance_threshold(n_features: int, level: float) -> float:
    """The correlation above which Fisher's z = atanh(r)·√(m−3) exceeds Φ⁻¹(1 − level): one-sided, against ρ = 0.

    With 784 features and a level of 5 % it is 0.059: the test discards nearly uncorrelated pairs. With up to three
    features no test is possible, and any positive correlation counts as significant.
    """
    if not 0 < level < 1:
        raise ParameterError(f"level must be above 0 and below 1; got {level}.")
    if n_features <= 3:
        return 0.0
    return float(np.tanh(NormalDist().inv_cdf(1 - level) / np.sqrt(n_features - 3)))


def _numbers(target: Array, source: Array) -> Iterator[np.ndarray]:
    return (np.asarray(kernels.of(factor).to_numpy(factor), np.float64) for factor in (target, source))


def _distances(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    distances = np.einsum("ij,ij->i", X, X)[:, None] + np.einsum("ij,ij->i", Y, Y) - 2 * (X @ Y.T)
    return np.asarray(np.maximum(distances, 0.0))


def _scale(*factors: np.ndarray) -> float:
    """1, or the power of two by which the factors are scaled so that their squares fit float64."""
    largest = max(_largest(factor) for factor in factors)
    return 1.0 if largest == 0 or LEAST < largest < MOST else float(_to_one(largest))


def _times(factor: np.ndarray, scale: float) -> np.ndarray:
    return factor if scale == 1 else factor * scale


def _largest(values: np.ndarray) -> float:
    """max |x|."""
    return float(max(values.max(initial=0.0), -values.min(initial=0.0)))


def _to_one(largest: Any) -> Any:
    """The power of two that scales a number (or each of several) to between ½ and 1."""
    return np.ldexp(1.0, -np.maximum(np.frexp(largest)[1], DEEPEST))


def _rows_at_one(values: np.ndarray) -> np.ndarray:
    """Scale every row so that its largest entry is between ½ and 1."""
    return values * _to_one(np.abs(values).max(axis=1, keepdims=True, initial=0.0))


def _at_norm_one(factor: np.ndarray) -> np.ndarray:
    values = _rows_at_one(factor)
    sizes = np.linalg.norm(values, axis=1, keepdims=True)
    return np.asarray(values / np.where(sizes > 0, sizes, 1.0))


def _standardized(factor: np.ndarray) -> np.ndarray:
    values = _rows_at_one(factor)
    centered = values - values.mean(axis=1, keepdims=True)
    sizes = np.linalg.norm(centered, axis=1, keepdims=True)
    floor = 1e-12 * np.abs(values).max(axis=1, keepdims=True, initial=0.0) * np.sqrt(values.shape[1])
    return np.where(sizes > floor, centered / np.where(sizes > floor, sizes, 1.0), 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Matching:
    """A partial permutation: row a of the target matches row partners[a] of the source, or none (−1)."""

    partners: np.ndarray

    @staticmethod
    def identity(k: int) -> Matching:
        """Match every row with itself."""
        return Matching(np.arange(k))

    @property
    def matrix(self) -> np.ndarray:
        P = np.zeros((len(self.partners), len(self.partners)))
        rows = np.flatnonzero(self.partners != UNMATCHED)
        P[rows, self.partners[rows]] = 1.0
        return P

    @property
    def weights(self) -> np.ndarray:
        """P·1: one for matched rows, zero for the others."""
        return (self.partners != UNMATCHED).astype(np.float64)

    @property
    def is_permutation(self) -> bool:
        return bool((self.partners != UNMATCHED).all())

    def apply(self, source: Array) -> Array:
        """P·source (k × m), by copying rows: no value changes."""
        moved = source[_index(source, np.maximum(self.partners, 0))]
        alone = self.partners == UNMATCHED
        if alone.any():
            moved[_index(source, np.flatnonzero(alone))] = 0
        return moved

    def transposed(self) -> Matching:
        back = np.full(len(self.partners), UNMATCHED)
        rows = np.flatnonzero(self.partners != UNMATCHED)
        back[self.partners[rows]] = rows
        return Matching(back)

    def after(self, first: Plan) -> Plan:
        """P·Q, where Q = `first` is applied first."""
        if not isinstance(first, Matching):
            return SoftPlan(self.matrix @ first.matrix)
        partners = np.where(self.partners == UNMATCHED, UNMATCHED, first.partners[np.maximum(self.partners, 0)])
        return Matching(partners)


@dataclass(frozen=True, slots=True, eq=False)
class SoftPlan:
    """A soft plan: row a of the target is a mixture of source rows with weights that sum to at most 1."""

    matrix: np.ndarray

    @property
    def weights(self) -> np.ndarray:
        """P·1."""
        return np.asarray(self.matrix.sum(axis=1))

    @property
    def is_permutation(self) -> bool:
        """Whether every row and every column contains exactly one 1."""
        P = self.matrix
        return bool(np.isin(P, (0.0, 1.0)).all() and (P.sum(axis=0) == 1).all() and (P.sum(axis=1) == 1).all())

    def apply(self, source: Array) -> Array:
        """P·source (k × m)."""
        return kernels.of(source).cast(self.matrix, source) @ source

    def transposed(self) -> SoftPlan:
        """Pᵀ, the reverse transport; its rows need not sum to 1."""
        return SoftPlan(self.matrix.T)

    def after(self, first: Plan) -> Plan:
        """P·Q, where Q = `first` is applied first."""
        return SoftPlan(self.matrix @ first.matrix)


def are_equal(one: Plan, other: Plan) -> bool:
    """Whether two plans are equal entry by entry."""
    if isinstance(one, Matching) and isinstance(other, Matching):
        return np.array_equal(one.partners, other.partners)
    return np.array_equal(one.matrix, other.matrix)


def is_soft(plan: Plan) -> bool:
    """Whether any row is a mixture."""
    return not isinstance(plan, Matching) and bool(((plan.matrix > 0) & (plan.matrix < 1)).any())


def orthogonality_gap(plan: Plan) -> float:
    """‖PᵀP − I‖: zero only for permutations."""
    P = plan.matrix
    return float(np.linalg.norm(P.T @ P - np.eye(len(P))))


def _index(source: Array, rows: np.ndarray) -> Any:
    """Row indices in the array type of `source`."""
    if isinstance(source, np.ndarray):
        return rows
    import torch

    return torch.as_tensor(rows, device=source.device)


@dataclass(frozen=True, slots=True)
class Identity:
    """By position: row a matches row a."""

    is_partial: ClassVar[bool] = False

    def plan(self, target: Array, source: Array) -> Matching:
        return Matching.identity(len(target))


@dataclass(frozen=True, slots=True)
class Assignment:
    """The permutation that minimizes ½‖target − P·source‖²: maximize ⟨P, target·sourceᵀ⟩ (LAP, D₁).

    With `unit`, rows are compared at norm 1, so components match by direction regardless of scale.
    O(k²m + k³), by scipy.optimize.linear_sum_assignment.
    """

    is_partial: ClassVar[bool] = False
    unit: bool = False

    def plan(self, target: Array, source: Array) -> Matching:
        from scipy.optimize import linear_sum_assignment

        gain = gains(target, source, unit=self.unit)
        return Matching(linear_sum_assignment(gain, maximize=True)[1])


@dataclass(frozen=True, slots=True)
class PartialAssignment:
    """Assignment by correlation; rows without a significantly correlated partner stay unmatched (LAP_ρ, D₂).

    Costs are 1 − r_ab, and infinite if r_ab is not significantly above zero (`significance_threshold`). Staying
    unmatched costs the largest finite cost. `bonferroni` divides the level by k².
    """

    is_partial: ClassVar[bool] = True
    level: float = 0.05
    bonferroni: bool = False

    def plan(self, target: Array, source: Array) -> Matching:
        """P of zeros and ones with at most one 1 in every row and column."""
        from scipy.optimize import linear_sum_assignment

        r = correlations(target, source)
        k, is_alike = len(r), significant(r, target.shape[1], self.level, self.bonferroni)
        if not is_alike.any():
            return Matching(np.full(k, UNMATCHED))
        cost = np.where(is_alike, 1.0 - r, 4.0 * k)
        alone = np.full((k, k), float((1.0 - r)[is_alike].max()))
        rows, places = linear_sum_assignment(np.hstack([cost, alone]))
        partners = np.full(k, UNMATCHED)
        for row, place in zip(rows, places, strict=True):
            if place < k and is_alike[row, place]:
                partners[row] = place
        return Matching(partners)


def significant(r: np.ndarray, n_features: int, level: float, bonferroni: bool) -> np.ndarray:
    """Boolean array: which correlations are significantly above zero."""
    return r > significance_threshold(n_features, level / r.size if bonferroni else level)


@dataclass(frozen=True, slots=True)
class Nearest:
    """Every row is the mean of its `neighbors` nearest source rows; several rows may share a neighbor."""

    is_partial: ClassVar[bool] = False
    neighbors: int = 1
    unit: bool = False

    def __post_init__(self) -> None:
        if self.neighbors < 1:
            raise ParameterError(f"neighbors must be at least 1; got {self.neighbors}.")

    def plan(self, target: Array, source: Array) -> SoftPlan:
        """P with rows that sum to 1; ties go to the first row."""
        cost = costs(target, source, unit=self.unit)
        count = min(self.neighbors, len(cost))
        chosen = np.argsort(cost, axis=1, kind="stable")[:, :count]
        P = np.zeros_like(cost)
        np.put_along_axis(P, chosen, 1.0 / count, axis=1)
        return SoftPlan(P)


@dataclass(frozen=True, slots=True)
class SoftMax:
    """P_ab ∝ exp(−‖x_a − y_b‖²/ε), ε = blur · mean distance: Sinkhorn with only the row constraint."""

    is_partial: ClassVar[bool] = False
    blur: float = 0.05
    unit: bool = False

    def __post_init__(self) -> None:
        if not self.blur > 0:
            raise ParameterError(f"blur must be above 0; got {self.blur}.")

    def plan(self, target: Array, source: Array) -> SoftPlan:
        cost = costs(target, source, unit=self.unit)
        scores = -cost / (self.blur * (float(cost.mean()) or 1.0))
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return SoftPlan(weights / weights.sum(axis=1, keepdims=True))


@dataclass(frozen=True, slots=True)
class Sinkhorn:
    """min over T ≥ 0 of ⟨T, C⟩ − ε·H(T), T1 = Tᵀ1 = 1/k, with C_ab = ‖x_a − y_b‖² and ε = blur · mean(C) (SK, D₃).

    P = k·T with rows normalized to sum 1. (D₃ as printed is a quadratic program that projects every row on the hull of
    the others; Sinkhorn solves this linear one, as the paper does.) Iterations stop early once the error of the
    marginals is below `tolerance` of the total mass; with 10⁻³, P·H of uploads (50 × 784) has an error below 10⁻³.
    """

    is_partial: ClassVar[bool] = False
    blur: float = 0.05
    iterations: int = 200
    tolerance: float = 1e-3
    unit: bool = False

    def __post_init__(self) -> None:
        _check(self)

    def plan(self, target: Array, source: Array) -> SoftPlan:
        cost = costs(target, source, unit=self.unit)
        k = len(cost)
        mass = np.full(k, 1.0 / k)
        T = entropic_plan(cost, mass, mass, self.blur * _typical(cost), self.iterations, self.tolerance)
        return SoftPlan(T / T.sum(axis=1, keepdims=True))


@dataclass(frozen=True, slots=True)
class PartialSinkhorn:
    """Sinkhorn on 1 − r_ab in which insignificant pairs are forbidden and mass may stay unmatched (SK_ρ).

    An extra row and column take the unmatched mass at the largest finite cost; rows of P sum to their matched share.
    """

    is_partial: ClassVar[bool] = True
    level: float = 0.05
    bonferroni: bool = False
    blur: float = 0.05
    iterations: int = 200
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        _check(self)

    def plan(self, target: Array, source: Array) -> SoftPlan:
        r = correlations(target, source)
        k, is_alike = len(r), significant(r, target.shape[1], self.level, self.bonferroni)
        if not is_alike.any():
            return SoftPlan(np.zeros((k, k)))
        distance = 1.0 - r
        cost = np.zeros((k + 1, k + 1))
        cost[:k, :k] = np.where(is_alike, distance, np.inf)
        cost[k, :k] = cost[:k, k] = float(distance[is_alike].max())
        mass = np.append(np.full(k, 1.0 / k), 1.0)
        blur = self.blur * _typical(distance[is_alike])
        T = entropic_plan(cost, mass, mass, blur, self.iterations, self.tolerance)
        P = k * T[:k, :k]
        return SoftPlan(P / np.maximum(1.0, P.sum(axis=1, keepdims=True)))


def entropic_plan(
    cost: np.ndarray, rows: np.ndarray, columns: np.ndarray, blur: float, iterations: int, tolerance: float
) -> np.ndarray:
    """T = exp((f_a + g_b − C_ab)/ε) with given marginals; column sums are exact, row sums within `tolerance`.

    Each step scales a kernel by factors, which is cheap. When the factors become extreme they are absorbed: a step in
    the log domain, which cannot overflow, computes the next kernel.
    """
    scores = np.asarray(cost, np.float64) / -blur
    f, g, left = -_top(scores, 1)[:, 0], np.zeros(len(columns)), iterations
    while True:
        kernel = np.exp(scores + f[:, None] + g)
        kernel[kernel < NEGLIGIBLE] = 0.0
        u, v = np.ones(len(rows)), np.ones(len(columns))
        done, is_right = scale(kernel, np.ascontiguousarray(kernel.T), rows, columns, u, v, left, tolerance)
        left -= done
        if is_right or left <= 0:
            return np.asarray(u[:, None] * kernel * v)
        f = np.log(rows) - _log_sum(scores + g + np.log(v), 1)
        g, left = np.log(columns) - _log_sum(scores + f[:, None], 0), left - 1


def _log_sum(values: np.ndarray, axis: int) -> np.ndarray:
    top = _top(values, axis)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.exp(values - top).sum(axis=axis)) + np.squeeze(top, axis))


def _top(values: np.ndarray, axis: int) -> np.ndarray:
    top = values.max(axis=axis, keepdims=True)
    return np.where(np.isfinite(top), top, 0.0)


def _typical(cost: np.ndarray) -> float:
    """The mean cost, or 1 if all components are equal."""
    return float(cost.mean()) or 1.0


def _check(part: Sinkhorn | PartialSinkhorn) -> None:
    if not (part.blur > 0 and part.iterations >= 1 and part.tolerance >= 0):
        raise ParameterError(f"Sinkhorn needs blur > 0, iterations ≥ 1 and tolerance ≥ 0; got {part}.")


ALIGNMENTS = Choice(
    {
        "assignment": Assignment(),
        "partial-assignment": PartialAssignment(),
        "sinkhorn": Sinkhorn(),
        "partial-sinkhorn": PartialSinkhorn(),
        "nearest": Nearest(),
        "softmax": SoftMax(),
        "identity": Identity(),
    },
    needed=("plan",),
)
"""Alignments of a party's components with the model's, by name."""
