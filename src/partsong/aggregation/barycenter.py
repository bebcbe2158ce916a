"""Barycenters of matrices whose rows are in different orders: by alignment or by clustering."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from partsong import kernels
from partsong.aggregation.alignment import Assignment, Matching, are_equal, is_soft, squared_distances
from partsong.core.interfaces import Alignment, Array, Message, Plan, type_name
from partsong.core.parameters import Choice
from partsong.core.streams import stream
from partsong.errors import ParameterError

ROUNDING = 8.0
"""A sweep that moves H̄ by less than this many units in the last place has converged."""


@dataclass(frozen=True, slots=True, eq=False)
class Barycenter:
    """H̄ (k × m), a plan for every matrix (P_j H_j has the row order of H̄), and the loss of each sweep.

    loss = Σ_j w_j ½‖H̄ − P_j H_j‖² over the matched rows, with weights that sum to 1.
    """

    H: Array
    plans: tuple[Plan, ...]
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class FromMean:
    """Start from the mean by position, as the FNMF paper does."""

    def choose(self, matrices: Sequence[Array], weights: np.ndarray, previous: Array | None, align: Alignment) -> Array:
        """Σ_j w_j H_j."""
        return average(matrices, [Matching.identity(len(matrices[0]))] * len(matrices), weights, matrices[0])


@dataclass(frozen=True, slots=True)
class FromMedoid:
    """Start from the matrix nearest to all others after alignment, among `candidates` evenly spaced ones."""

    candidates: int = 8

    def choose(self, matrices: Sequence[Array], weights: np.ndarray, previous: Array | None, align: Alignment) -> Array:
        count = min(self.candidates, len(matrices))
        chosen = [matrices[i * len(matrices) // count] for i in range(count)]
        if count == 1:
            return chosen[0]
        return min(chosen, key=lambda one: loss_of(one, matrices, _plans(align, one, matrices), weights))


@dataclass(frozen=True, slots=True)
class FromPrevious:
    """Start from the model that was sent to the parties; without one, from `otherwise`."""

    otherwise: FromMean | FromMedoid = FromMedoid()

    def choose(self, matrices: Sequence[Array], weights: np.ndarray, previous: Array | None, align: Alignment) -> Array:
        return previous if previous is not None else self.otherwise.choose(matrices, weights, previous, align)


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """P_j ← align(H̄, H_j), H̄ ← mean_j P_j H_j, alternately (Dalleiger & Gionis, 2025, Alg. 1).

    For assignments each half-step is exact, so the loss never rises. Rows unmatched in every matrix keep their values;
    matches are counted row by row. The iteration stops when no plan changes, or when new plans are no better: rounding
    may decide between equal components. Soft plans always change a little. For them it stops when a sweep moves H̄ by
    less than `tol` times its distance from the start, and by less than the spread √(2·loss) around it. Without the
    second condition, copies in two orders would stay at their mean, a saddle point that is left in small, growing
    moves. With a much lower bound, H̄ of dissimilar uploads continues until all its rows are equal.
    """

    align: Alignment = Assignment()
    start: FromMean | FromMedoid | FromPrevious = FromPrevious()
    sweeps: int = 30
    tol: float = 0.1
    weighted: bool = False

    def __post_init__(self) -> None:
        if self.sweeps < 1 or self.tol < 0:
            raise ParameterError(f"FixedPoint needs sweeps ≥ 1 and tol ≥ 0; got {self}.")

    def solve(self, matrices: Sequence[Array], weights: Sequence[float], previous: Array | None = None) -> Barycenter:
        """Return the barycenter of matrices (each k × m)."""
        shares = _shares(weights, self.weighted)
        H = start = self.start.choose(matrices, shares, previous, self.align)
        plans: tuple[Plan, ...] = ()
        losses: list[float] = []
        for _ in range(self.sweeps):
            new = _plans(self.align, H, matrices)
            if plans and all(map(are_equal, plans, new)):
                break
            moved = [plan.apply(one) for one, plan in zip(matrices, new, strict=True)]
            mean = _mean(moved, new, shares, H)
            loss = _loss(mean, moved, new, shares)
            if plans and not (self.align.is_partial or loss < losses[-1] or any(map(is_soft, (*plans, *new)))):
                break
            before, H, plans = H, mean, new
            losses.append(loss)
            if any(map(is_soft, plans)) and self._has_arrived(_distance(H, before), _distance(H, start), loss, H):
                break
        return Barycenter(H, plans, tuple(losses))

    def _has_arrived(self, move: float, way: float, loss: float, H: Array) -> bool:
        nothing = ROUNDING * float(np.finfo(type_name(H.dtype)).eps) * _size(H)
        return move <= max(nothing, min(self.tol * way, float(np.sqrt(2 * loss))))

    def __call__(self, uploads: Sequence[Message], model: Message) -> Message:
        """Aggregate uploads H_j (k × m) in name order."""
        return _aggregate(self, uploads, model)


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """A merged group: its barycenter, the total weight Σ_j w_j (P_j 1) of each row, and its members' plans."""

    H: Array
    weights: np.ndarray
    plans: dict[int, Plan]

    @staticmethod
    def leaf(j: int, H: Array, weight: float) -> _Node:
        """A group of matrix j only."""
        return _Node(H, np.full(len(H), float(weight)), {j: Matching.identity(len(H))})

    def merged(self, other: _Node, align: Alignment) -> _Node:
        """Merge both groups in the order of this one: row by row Σ_j w_j P_j H_j / Σ_j w_j (P_j 1)."""
        plan, on = align.plan(self.H, other.H), kernels.of(self.H)
        mine, theirs = (on.cast(node.weights[:, None], self.H) for node in (self, other))
        weights = self.weights + plan.matrix @ other.weights
        total = self.H * mine + plan.apply(other.H * theirs)
        plans = {**self.plans, **{j: plan.after(own) for j, own in other.plans.items()}}
        return _Node(_divided(total, weights, self.H), weights, plans)

    def barycenter(self, matrices: Sequence[Array], shares: np.ndarray) -> Barycenter:
        """The barycenter of all matrices, if this group has merged them all."""
        plans = tuple(self.plans[j] for j in range(len(matrices)))
        return Barycenter(self.H, plans, (loss_of(self.H, matrices, plans, shares),))


@dataclass(frozen=True, slots=True)
class Streaming:
    """One pass: row l of H̄ ← (v_l H̄ + w_j P H_j)_l / (v_l + w_j (P 1)_l) with P = align(H̄, H_j), in the best of a few
    random orders; v_l = Σ_i w_i (P_i 1)_l is the weight of the row so far.

    Usable while uploads arrive. (Our version of the paper's Alg. 3, whose text is not printed.)
    """

    align: Alignment = Assignment()
    orders: int = 1
    seed: int = 0
    weighted: bool = False

    def __post_init__(self) -> None:
        if self.orders < 1:
            raise ParameterError(f"orders must be at least 1; got {self.orders}.")

    def solve(self, matrices: Sequence[Array], weights: Sequence[float], previous: Array | None = None) -> Barycenter:
        """Return the barycenter of matrices (each k × m)."""
        shares = _shares(weights, self.weighted)
        draw = stream(self.seed, "barycenter", "orders")
        passes = [self._pass(matrices, shares, draw.permutation(len(matrices))) for _ in range(self.orders)]
        return min(passes, key=lambda found: found.losses[-1])

    def _pass(self, matrices: Sequence[Array], shares: np.ndarray, order: np.ndarray) -> Barycenter:
        first, *rest = order.tolist()
        found = _Node.leaf(first, matrices[first], shares[first])
        for j in rest:
            found = found.merged(_Node.leaf(j, matrices[j], shares[j]), self.align)
        return found.barycenter(matrices, shares)

    def __call__(self, uploads: Sequence[Message], model: Message) -> Message:
        """Aggregate uploads H_j (k × m) in name order."""
        return _aggregate(self, uploads, model)


@dataclass(frozen=True, slots=True)
class Hierarchical:
    """A balanced tree: neighbors are merged with P = align(A, B), level by level.

        row l of the merged ← (v_A A + P (v_B B))_l / (v_A + P v_B)_l,   v: the weight of each row, Σ_j w_j (P_j 1)

    Plans are composed down to the leaves; sub-servers can merge their own parties. (Our version of the paper's Alg. 4,
    whose text is not printed.)
    """

    align: Alignment = Assignment()
    weighted: bool = False

    def solve(self, matrices: Sequence[Array], weights: Sequence[float], previous: Array | None = None) -> Barycenter:
        """Return the barycenter of matrices (each k × m)."""
        shares = _shares(weights, self.weighted)
        level = [_Node.leaf(j, H, shares[j]) for j, H in enumerate(matrices)]
        while len(level) > 1:
            pairs = [level[i].merged(level[i + 1], self.align) for i in range(0, len(level) - 1, 2)]
            level = pairs + level[len(pairs) * 2 :]
        (root,) = level
        return root.barycenter(matrices, shares)

    def __call__(self, uploads: Sequence[Message], model: Message) -> Message:
        """Aggregate uploads H_j (k × m) in name order."""
        return _aggregate(self, uploads, model)


def average(matrices: Sequence[Array], plans: Sequence[Plan], weights: np.ndarray, fallback: Array) -> Array:
    """Row l: Σ_j w_j (P_j H_j)_l / Σ_j w_j (P_j 1)_l, or the row of `fallback` if no matrix has one."""
    return _mean((plan.apply(H) for H, plan in zip(matrices, plans, strict=True)), plans, weights, fallback)


def loss_of(H: Array, matrices: Sequence[Array], plans: Sequence[Plan], weights: np.ndarray) -> float:
    """Σ_j w_j ½‖H − P_j H_j‖² over the matched rows."""
    return _loss(H, (plan.apply(one) for one, plan in zip(matrices, plans, strict=True)), plans, weights)


def _plans(align: Alignment, H: Array, matrices: Sequence[Array]) -> tuple[Plan, ...]:
    """A plan from each matrix to H; H is converted to float64 and the memory order of products once."""
    on = kernels.of(H)
    target = np.asarray(on.to_numpy(on.rows_of(H)), np.float64).T
    return tuple(align.plan(target, one) for one in matrices)


def _mean(moved: Iterable[Array], plans: Sequence[Plan], weights: np.ndarray, fallback: Array) -> Array:
    total, counts = None, np.zeros(len(fallback))
    for one, plan, weight in zip(moved, plans, weights, strict=True):
        share = one * float(weight)
        if total is None:
            total = share
        else:
            total += share
        counts += float(weight) * plan.weights
    return _divided(total, counts, fallback)


def _divided(total: Array, counts: np.ndarray, fallback: Array) -> Array:
    """Divide sums of rows by their weights; rows of weight zero come from `fallback`."""
    mean = total / kernels.of(fallback).cast(np.where(counts > 0, counts, 1.0)[:, None], fallback)
    for row in np.flatnonzero(counts <= 0).tolist():
        mean[row] = fallback[row]
    return mean


def _loss(H: Array, moved: Iterable[Array], plans: Sequence[Plan], weights: np.ndarray) -> float:
    on, total = kernels.of(H), 0.0
    for one, plan, weight in zip(moved, plans, weights, strict=True):
        gaps = on.to_numpy(H - one)
        by_row = np.einsum("ij,ij->i", gaps, gaps, dtype=np.float64)
        total += 0.5 * float(weight) * float(by_row[plan.weights > 0].sum())
    return total


def _aggregate(method: FixedPoint | Streaming | Hierarchical, uploads: Sequence[Message], model: Message) -> Message:
    matrices = [upload["H"] for upload in uploads]
    previous = model.arrays.get("H")
    if previous is not None:
        previous = _in_the_type_of(matrices[0], previous)
    found = method.solve(matrices, [upload.weight for upload in uploads], previous)
    return Message({"H": found.H}, sum(upload.weight for upload in uploads))


def _in_the_type_of(example: Array, H: Array) -> Array:
    return kernels.of(example).cast(kernels.of(H).to_numpy(H), example)


def _shares(weights: Sequence[float], weighted: bool) -> np.ndarray:
    """Normalized weights; equal ones unless `weighted`."""
    values = np.asarray(weights, np.float64) if weighted else np.ones(len(weights))
    total = sum(values.tolist())
    if not ((values >= 0).all() and 0 < total < np.inf):
        raise ParameterError(
            "Weights of a barycenter must be finite and non-negative, with a positive sum; got "
            f"{', '.join(f'{value:g}' for value in values[:5])}{', …' if len(values) > 5 else ''}. Use the number of "
            "rows behind each matrix, or weighted=False."
        )
    return values / total


def _distance(A: Array, B: Array) -> float:
    return _size(A - B)


def _size(A: Array) -> float:
    return float(np.linalg.norm(kernels.of(A).to_numpy(A).astype(np.float64, copy=False)))


@dataclass(frozen=True, slots=True)
class KMeans:
    """The k centers of Lloyd's algorithm on the c·k stacked rows, with k-means++ (Arthur & Vassilvitskii, 2007).

    Rows of one matrix may fall into the same cluster: this is not an alignment.
    """

    iterations: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ParameterError(f"iterations must be at least 1; got {self.iterations}.")

    def solve(self, matrices: Sequence[Array]) -> np.ndarray:
        """Return the centers (k × m) of the rows of matrices (each k × m)."""
        (rows, power), k = _stacked(matrices), len(matrices[0])
        centers = _spread_out(rows, k, stream(self.seed, "barycenter", "k-means"))
        owner = np.full(len(rows), -1)
        for _ in range(self.iterations):
            nearest = np.argmin(squared_distances(rows, centers), axis=1)
            if (nearest == owner).all():
                break
            owner = nearest
            for j in range(k):
                if (owner == j).any():
                    centers[j] = rows[owner == j].mean(axis=0)
        return np.ldexp(centers, power)

    def __call__(self, uploads: Sequence[Message], model: Message) -> Message:
        return _centers_message(self.solve([upload["H"] for upload in uploads]), uploads)


@dataclass(frozen=True, slots=True)
class FuzzyCMeans:
    """Centers c_l = Σ u_il² v_i / Σ u_il² with memberships u_il = 1 / Σ_r (‖v_i − c_l‖/‖v_i − c_r‖)² (Dunn, 1974)."""

    iterations: int = 100
    tol: float = 1e-6
    seed: int = 0

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.tol < 0:
            raise ParameterError(f"FuzzyCMeans needs iterations ≥ 1 and tol ≥ 0; got {self}.")

    def solve(self, matrices: Sequence[Array]) -> np.ndarray:
        """Return the centers (k × m) of the rows of matrices (each k × m)."""
        (rows, power), k = _stacked(matrices), len(matrices[0])
        centers = _spread_out(rows, k, stream(self.seed, "barycenter", "fuzzy"))
        floor = 1e-12 * float(np.square(rows).mean(axis=0).sum() or 1.0)
        for _ in range(self.iterations):
            closeness = 1.0 / np.maximum(squared_distances(rows, centers), floor)
            shares = np.square(closeness / closeness.sum(axis=1, keepdims=True))
            before, centers = centers, (shares.T @ rows) / shares.sum(axis=0)[:, None]
            if np.linalg.norm(centers - before) <= self.tol * np.linalg.norm(before):
                break
        return np.ldexp(centers, power)

    def __call__(self, uploads: Sequence[Message], model: Message) -> Message:
        return _centers_message(self.solve([upload["H"] for upload in uploads]), uploads)


def _spread_out(rows: np.ndarray, k: int, draw: np.random.Generator) -> np.ndarray:
    """Draw k rows, each with probability proportional to its squared distance from those before."""
    chosen = [int(draw.integers(len(rows)))]
    distance = squared_distances(rows, rows[chosen])[:, 0]
    for _ in range(1, k):
        total = float(distance.sum())
        weights = distance / total if total > 0 else np.full(len(rows), 1.0 / len(rows))
        chosen.append(int(draw.choice(len(rows), p=weights)))
        distance = np.minimum(distance, squared_distances(rows, rows[chosen[-1:]])[:, 0])
    return rows[chosen].copy()


def _stacked(matrices: Sequence[Array]) -> tuple[np.ndarray, int]:
    """All rows divided by 2^power, so that entries are below 1 and squares fit float64; and power."""
    rows = np.vstack([np.asarray(kernels.of(H).to_numpy(H), np.float64) for H in matrices])
    power = math.frexp(float(np.abs(rows).max(initial=0.0)))[1]
    return np.ldexp(rows, -power), power


def _centers_message(centers: np.ndarray, uploads: Sequence[Message]) -> Message:
    H = kernels.of(uploads[0]["H"]).cast(centers, uploads[0]["H"])
    return Message({"H": H}, sum(upload.weight for upload in uploads))


BARYCENTERS = Choice(
    {
        "fixed-point": FixedPoint,
        "streaming": Streaming,
        "hierarchical": Hierarchical,
        "k-means": KMeans,
        "fuzzy-c-means": FuzzyCMeans,
    }
)
"""Aggregation classes by name; clusterings take no alignment."""
