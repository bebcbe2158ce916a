"""Row-level differential privacy: sums over rows with an exact bound on the contribution of each row.

A row adds (λ c w wᵀ, c w xᵀ) with ONE weight 0 < c ≤ 1, of joint norm c ‖w‖ √(λ²‖w‖² + ‖x‖²) ≤ radius. Factors are
whole numbers of a public unit, so that sums of their products have no rounding error in any order of addition. One row
then changes exactly what the theorem states, and not also the last bits of other rows' contributions. A weight w
depends on its own row and the public H only, to the last bit, as Theorem 6 assumes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from partsong import kernels
from partsong.core.interfaces import Array
from partsong.errors import DataError, ParameterError, PartyError, ShapeError
from partsong.privacy.accounting import Release, check_relation
from partsong.privacy.discrete_noise import RoundedGaussian
from partsong.privacy.mechanisms import MAX_NOISE_MULTIPLIER, MIN_NOISE_MULTIPLIER
from partsong.privacy.randomness import Source, system_source

WEIGHT_BITS, ROW_BITS, BLOCK = 16, 20, 1 << 16
"""Products of such factors, added over a block of rows, stay below 2⁵³: exact in float64."""
MAX_ROWS = 1 << 26
SHRINK = 1 - 2.0**-40

COUNT_UNIT = 2.0**-20
SHORTEST = 1e-150
"""Rows below it have no direction: their squares underflow, so that their length is not known."""
SWEEPS = 30
MODEL_UNIT = 2.0**-24
"""Parties round H to this unit: products of whole numbers have no rounding error, for any other rows in the block."""
BLOCK_ROWS = 1 << 13


@dataclass(frozen=True, slots=True)
class RowSums:
    """Σ c w wᵀ (k × k) and Σ c w xᵀ (k × m) in whole units, and the number of rows; sums of parties add up."""

    gram: Any
    cross: Any
    count: int

    def __add__(self, other: RowSums) -> RowSums:
        return RowSums(self.gram + other.gram, self.cross + other.cross, self.count + other.count)


@dataclass(frozen=True, slots=True)
class RowBounds:
    """Public bounds: radius = a √(λ²a² + b²) for ‖w‖ ≤ a = weight_bound, ‖x‖ ≤ b = row_bound, λ = gram_scale.

    Longer rows x are scaled down to b, once. Where w and x together exceed the radius, both products get the weight
    c = radius / (‖w‖ √(λ²‖w‖² + ‖x‖²)), as if the row had been √c (w, x): the sums stay those of a weighted
    least-squares problem. Unit norms of H's rows and an exact w ≥ 0 give ‖w‖ ≤ ‖x‖, so that a = b never weighs down.
    """

    weight_bound: float
    row_bound: float
    gram_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("weight_bound", "row_bound", "gram_scale"):
            value = getattr(self, name)
            if not 1e-30 <= value <= 1e30:
                raise ParameterError(f"{name} must be a number from 1e-30 to 1e30; got {value!r}.", parameter=name)

    @staticmethod
    def balanced(weight_bound: float, row_bound: float, rank: int, n_features: int) -> RowBounds:
        """λ⁴ = k b² / (m a²): the least noise in cross − gram·H for rows of H with unit norm (docs, Proposition 7)."""
        return RowBounds(weight_bound, row_bound, (rank * row_bound**2 / (n_features * weight_bound**2)) ** 0.25)

    @property
    def radius(self) -> float:
        """The most that one row can add, in the joint norm."""
        return self.weight_bound * math.hypot(self.gram_scale * self.weight_bound, self.row_bound)

    @property
    def weight_unit(self) -> float:
        """A power of two: √c w and c w, at most √(radius / λ) long, are whole multiples of it."""
        return power_of_two_unit(math.sqrt(self.radius / self.gram_scale), WEIGHT_BITS)

    @property
    def row_unit(self) -> float:
        """A power of two: x is a whole multiple of it."""
        return power_of_two_unit(self.row_bound, ROW_BITS)

    def quantize_rows(self, X: Any) -> Any:
        """The rows (dense or sparse) in whole units, as float64, none longer than the bound; each from itself alone."""
        return bounded_rows(X, self.row_bound, self.row_unit)

    def sums(self, W: Any, quantized_rows: Any) -> RowSums:
        """The sums of rows with weights W (n × k) ≥ 0, in whole units; never an object of n × k × m."""
        W = _as_c_order(W)
        n, m = quantized_rows.shape
        if W.ndim != 2 or W.shape[0] != n:
            raise ShapeError(f"W has shape {W.shape}, but there are {n} rows.")
        if n > MAX_ROWS:
            # the message must not reveal the number of rows
            raise ParameterError(
                f"Sums are exact for at most {MAX_ROWS} rows per party; there are more. Split the party."
            )
        if not (np.isfinite(W).all() and (W >= 0).all()):
            raise DataError("Weights of rows must be finite and non-negative; nothing was computed.")
        total = RowSums(np.zeros((W.shape[1],) * 2, np.int64), np.zeros((W.shape[1], m), np.int64), n)
        for start in range(0, n, BLOCK):
            rows = quantized_rows[start : start + BLOCK]
            self._check_whole(rows)
            V, U = self.quantize_weights(W[start : start + BLOCK], rows)
            total.gram[...] += (V.T @ V).astype(np.int64)
            total.cross[...] += np.asarray((rows.T @ U).T).astype(np.int64)
        return total

    def quantize_weights(self, W: Any, quantized_rows: Any) -> tuple[Any, Any]:
        """√c w for gram and c w for cross in whole units; a row depends on its own w and x alone."""
        squares = _row_squares(quantized_rows)
        row_lengths = self.row_unit * np.sqrt(squares)
        with np.errstate(over="ignore"):
            lengths = np.linalg.norm(W, axis=1)
            joint = lengths * np.hypot(self.gram_scale * lengths, row_lengths)
        weight = np.minimum(1.0, self.radius / np.maximum(joint, self.radius))
        V, U = (np.rint(factor[:, None] * W / self.weight_unit) for factor in (np.sqrt(weight), weight))
        while (is_over := ~self._within(V, U, squares)).any():
            weight = np.where(is_over, weight * SHRINK, weight)
            for kept, factor in ((V, np.sqrt(weight)), (U, weight)):
                kept[is_over] = np.trunc(factor[is_over, None] * W[is_over] / self.weight_unit)
        return V, U

    def _check_whole(self, rows: Any) -> None:
        values = rows.data if sparse.issparse(rows) else rows
        is_short = (_row_squares(rows) <= (self.row_bound / self.row_unit) ** 2).all()
        if not (is_short and (values == np.rint(values)).all()):
            raise ParameterError("Rows must come from `quantize_rows` of the same bounds; these do not.")

    def _within(self, V: Any, U: Any, squares: Any) -> Any:
        gram = self.gram_scale * self.weight_unit**2 * (V * V).sum(axis=1)
        cross = self.weight_unit**2 * self.row_unit**2 * (U * U).sum(axis=1) * squares
        return gram**2 + cross <= self.radius**2 * (1 - 2.0**-45)


def _as_c_order(values: Any) -> Any:
    """In float64 and C order: in another, NumPy adds up a row's squares in an order that depends on how many rows."""
    return np.asarray(values, np.float64, order="C")


def bounded_rows(X: Any, bound: float, unit: float, *, is_signed: bool = False, is_unit: bool = False) -> Any:
    """Rows (dense or sparse) as whole multiples of `unit`, none longer than `bound`; each from itself alone.

    Longer rows are scaled down to the bound; with `is_unit`, shorter ones are scaled up to it, except those below
    SHORTEST, which become zero.
    """
    is_sparse = sparse.issparse(X)
    if np.ndim(X) != 2:
        raise ShapeError(f"Rows must be a matrix; got {np.ndim(X)} dimensions. Pass X (n × m).")
    rows: Any = sparse.csr_array(X, dtype=np.float64, copy=True) if is_sparse else _as_c_order(X)
    if is_sparse:
        rows.sum_duplicates()
    values = rows.data if is_sparse else rows
    if not (np.isfinite(values).all() and (is_signed or (values >= 0).all())):
        raise DataError("Rows must be finite and non-negative to be bounded; nothing was computed.")
    owner = np.repeat(np.arange(rows.shape[0]), np.diff(rows.indptr)) if is_sparse else None
    with np.errstate(over="ignore"):  # a row too long to be measured becomes zero
        lengths = np.sqrt(_squares(values, owner, rows.shape[0]))
    least = np.where(lengths > SHORTEST, lengths, np.inf) if is_unit else np.maximum(lengths, bound)
    factor = bound / least / unit
    limit = (bound / unit) ** 2
    whole = np.rint(_scaled(values, factor, owner))
    while (is_long := _squares(whole, owner, rows.shape[0]) > limit).any():
        factor = np.where(is_long, factor * SHRINK, factor)
        cut = np.trunc(_scaled(values, factor, owner))
        whole = np.where(is_long[owner] if is_sparse else is_long[:, None], cut, whole)
    return sparse.csr_array((whole, rows.indices, rows.indptr), rows.shape) if is_sparse else whole


def power_of_two_unit(bound: float, bits: int) -> float:
    """The power of two of which `bound` is more than 2^(bits − 1) and at most 2^bits."""
    mantissa, exponent = math.frexp(bound)
    return math.ldexp(1.0, exponent - bits - (mantissa == 0.5))


def _row_squares(rows: Any) -> Any:
    if sparse.issparse(rows):
        owner = np.repeat(np.arange(rows.shape[0]), np.diff(rows.indptr))
        return _squares(rows.data, owner, rows.shape[0])
    return _squares(rows, None, rows.shape[0])


def _squares(values: Any, owner: Any, n: int) -> Any:
    """Σ values² of each row; `owner` has the rows of the stored values of a sparse matrix."""
    squares = values * values
    return squares.sum(axis=1) if owner is None else np.bincount(owner, squares, n)


def _scaled(values: Any, factor: Any, owner: Any) -> Any:
    return values * (factor[:, None] if owner is None else factor[owner])


@dataclass(frozen=True, slots=True)
class NoisyRowSums:
    """Gaussian noise on gram, cross and (under add-or-remove) the number of rows, released together.

        released:   κ·n,   λ·gram (diagonal once, above it √2 times),   cross         each + N(0, σ²)

    Under "replace" the number of rows is public. `shares`: the noise is that of one of so many honest parties of whom
    only the sum is seen; each adds a variance of σ² / shares.
    """

    bounds: RowBounds
    noise_multiplier: float
    relation: str = "add-or-remove"
    count_share: float = 0.1
    shares: int = 1

    def __post_init__(self) -> None:
        check_relation("row", self.relation)
        if not MIN_NOISE_MULTIPLIER <= self.noise_multiplier <= MAX_NOISE_MULTIPLIER:
            raise ParameterError(
                f"noise_multiplier must be a number from {MIN_NOISE_MULTIPLIER:g} to {MAX_NOISE_MULTIPLIER:g}; "
                f"got {self.noise_multiplier!r}. `noise_multiplier_for` finds one for a budget.",
                parameter="noise_multiplier",
            )
        if not 1e-3 <= self.count_share <= 10:
            raise ParameterError(
                f"count_share must be from 0.001 to 10; got {self.count_share!r}.", parameter="count_share"
            )
        if not isinstance(self.shares, int) or not 1 <= self.shares <= 100_000:
            raise ParameterError(
                f"shares must be a whole number from 1 to 100000; got {self.shares!r}.", parameter="shares"
            )

    @property
    def sensitivity(self) -> float:
        """The most that one row can change the release, in the joint norm.

        add-or-remove: √(radius² + κ²). replace: √2 radius, since two rows that only add cannot point apart.
        """
        if self.relation == "replace":
            return math.sqrt(2) * self.bounds.radius * (1 + 2.0**-50)
        return math.hypot(1.0, self.count_share) * self.bounds.radius * (1 + 2.0**-50)

    @property
    def sigma(self) -> float:
        """Of the noise in the sum over all shares."""
        return math.nextafter(self.noise_multiplier * self.sensitivity, math.inf)

    @property
    def release(self) -> Release:
        """The privacy cost of one round for each row."""
        return Release("gaussian", self.noise_multiplier, "row", self.relation)

    def add_noise(self, sums: RowSums, source: Source = system_source) -> RowSums:
        """Return the sums with noise, still in whole units (the count in units of 2⁻²⁰ under add-or-remove)."""
        sigma = math.nextafter(self.sigma / math.sqrt(self.shares), math.inf)
        k = sums.gram.shape[0]
        unit = self.bounds.weight_unit**2
        gram = np.zeros((k, k), np.int64)
        above = np.triu_indices(k, 1)
        gram[above] = RoundedGaussian(sigma / self.bounds.gram_scale / math.sqrt(2), unit).draw(above[0].size, source)
        gram += gram.T
        gram[np.diag_indices(k)] = RoundedGaussian(sigma / self.bounds.gram_scale, unit).draw(k, source)
        cross = RoundedGaussian(sigma, self.bounds.weight_unit * self.bounds.row_unit).draw(sums.cross.size, source)
        count = sums.count
        if self.relation == "add-or-remove":
            scale = RoundedGaussian(sigma / (self.count_share * self.bounds.radius), COUNT_UNIT)
            count = round(count / COUNT_UNIT) + int(scale.draw(1, source)[0])
        return RowSums(sums.gram + gram, sums.cross + cross.reshape(sums.cross.shape), count)

    def postprocess(self, noisy: RowSums) -> tuple[Any, Any, float]:
        """Return valid gram, cross and number of rows from the noisy total alone (post-processing)."""
        gram = project_gram(noisy.gram * self.bounds.weight_unit**2)
        cross = np.maximum(noisy.cross * (self.bounds.weight_unit * self.bounds.row_unit), 0.0)
        count = noisy.count * COUNT_UNIT if self.relation == "add-or-remove" else float(noisy.count)
        return gram, cross, max(0.0, count)


def project_gram(gram: Any) -> Any:
    """Return a symmetric, non-negative, positive semidefinite matrix near `gram`: Dykstra's projections, then a shift.

    The shift of all eigenvalues by the most negative one that remains makes both properties hold at once.
    """
    current = (gram + gram.T) / 2
    turned, raised = np.zeros_like(current), np.zeros_like(current)
    for _ in range(SWEEPS):
        values, vectors = np.linalg.eigh(current + turned)
        semidefinite = (vectors * np.maximum(values, 0.0)) @ vectors.T
        turned += current - semidefinite
        following = np.maximum(semidefinite + raised, 0.0)
        raised += semidefinite - following
        is_still = np.abs(following - current).max(initial=0.0) <= 1e-12 * np.abs(current).max(initial=0.0)
        current = (following + following.T) / 2
        if is_still:
            break
    lowest = float(np.linalg.eigvalsh(current).min(initial=0.0))
    slack = 1e-12 * float(np.abs(current).max(initial=0.0))
    return current if lowest >= 0 else current + (slack - lowest) * np.eye(current.shape[0])


def row_weights(rows: Any, H: Any, row_unit: float, sweeps: int) -> Any:
    """W (n × k) by sweeps from c·1, c = Σ_j cross_j / Σ gram; each row from itself and H alone, to the last bit.

    `rows` and H are whole numbers (of row_unit and MODEL_UNIT), so that products are exact however they are blocked;
    what follows is one operation at a time on all rows, without sums across or orders that depend on them.
    """
    gram = (H @ H.T) * MODEL_UNIT**2
    total, k = float(gram.sum()), H.shape[0]
    W = np.empty((rows.shape[0], k))
    for start in range(0, rows.shape[0], BLOCK_ROWS):
        cross = np.ascontiguousarray((rows[start : start + BLOCK_ROWS] @ H.T).T) * (row_unit * MODEL_UNIT)
        scale = np.zeros(cross.shape[1])
        for part in cross:
            scale += part
        block = np.tile(scale / total if total > 0 else scale * 0, (k, 1))
        for j in (j for _ in range(sweeps) for j in range(k) if gram[j, j] > 0):
            rest = cross[j].copy()
            for other in (other for other in range(k) if other != j and gram[other, j] > 0):
                rest -= gram[other, j] * block[other]
            block[j] = np.maximum(0.0, rest / gram[j, j])
        W[start : start + BLOCK_ROWS] = block.T
    return W


def quantize_model(party: str, values: Array, shape: tuple[int, int]) -> Any:
    """Validate H from the server, and return it in whole units."""
    return np.rint(validate_model(party, values, shape) / MODEL_UNIT)


def validate_model(party: str, values: Array, shape: tuple[int, int]) -> Any:
    """Validate that H is what a private program broadcasts, and return it in float64.

    A crafted H could fail on some data only, which would leak. The check does not use the party's data, so a refusal
    reveals nothing about them.
    """
    H = np.asarray(kernels.of(values).to_numpy(values), np.float64)
    if H.shape != shape:
        raise ShapeError(f"Party {party!r} received an H of shape {H.shape}, not {shape}; nothing was computed.")
    with np.errstate(over="ignore", invalid="ignore"):
        is_sound = bool((H >= 0).all() and (np.square(H).sum(axis=1) <= 1.01).all())
    if not is_sound:
        raise PartyError(
            f"Party {party!r} received an H that is not non-negative with rows of unit norm; nothing was computed. "
            "Check the server, or the checkpoint from which the run was resumed."
        )
    return H
