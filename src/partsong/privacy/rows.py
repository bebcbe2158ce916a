"""Sums over rows in which no row counts for more than a stated amount, exactly.

A row adds (λ c w wᵀ, c w xᵀ) with ONE weight 0 < c ≤ 1, of joint norm c ‖w‖ √(λ²‖w‖² + ‖x‖²) ≤ radius. Factors are
whole numbers of a public unit, so that sums of their products have no rounding error, whatever the order of addition:
what one row changes is what the theorem says, and not also the last bits of everybody else's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from partsong.errors import DataError, ParameterError, ShapeError

WEIGHT_BITS, ROW_BITS, BLOCK = 16, 20, 1 << 16
"""Products of such factors, added over a block of rows, stay below 2⁵³: exact in float64."""
MOST_ROWS = 1 << 26
SHRINK = 1 - 2.0**-40


@dataclass(frozen=True, slots=True)
class RowSums:
    """Σ c w wᵀ (k × k) and Σ c w xᵀ (k × m) in whole units, and the number of rows; sums of parties add up."""

    gram: Any
    cross: Any
    count: int

    def __add__(self, other: RowSums) -> RowSums:
        return RowSums(self.gram + other.gram, self.cross + other.cross, self.count + other.count)


@dataclass(frozen=True, slots=True)
class BoundedRows:
    """Bounds of no data: radius = a √(λ²a² + b²) for ‖w‖ ≤ a = weight_bound, ‖x‖ ≤ b = row_bound, λ = gram_scale.

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
                raise ParameterError(f"{name} must be a number from 1e-30 to 1e30; got {value!r}.")

    @staticmethod
    def balanced(weight_bound: float, row_bound: float, rank: int, n_features: int) -> BoundedRows:
        """λ⁴ = k b² / (m a²): the least noise in cross − gram·H for rows of H with unit norm (docs, Proposition 7)."""
        return BoundedRows(weight_bound, row_bound, (rank * row_bound**2 / (n_features * weight_bound**2)) ** 0.25)

    @property
    def radius(self) -> float:
        """The most that one row can add, in the joint norm."""
        return self.weight_bound * math.hypot(self.gram_scale * self.weight_bound, self.row_bound)

    @property
    def weight_unit(self) -> float:
        """A power of two: √c w and c w, at most √(radius / λ) long, are whole multiples of it."""
        return _unit(math.sqrt(self.radius / self.gram_scale), WEIGHT_BITS)

    @property
    def row_unit(self) -> float:
        """A power of two: x is a whole multiple of it."""
        return _unit(self.row_bound, ROW_BITS)

    def whole_rows(self, X: Any) -> Any:
        """The rows (dense or sparse) in whole units, as float64, none longer than the bound; each from itself alone."""
        is_sparse = sparse.issparse(X)
        if np.ndim(X) != 2:
            raise ShapeError(f"Rows come as a matrix; got {np.ndim(X)} dimensions.")
        rows: Any = sparse.csr_array(X, dtype=np.float64, copy=True) if is_sparse else _row_after_row(X)
        if is_sparse:
            rows.sum_duplicates()
        values = rows.data if is_sparse else rows
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise DataError("Rows must be finite and non-negative to be bounded; nothing was computed.")
        owner = np.repeat(np.arange(rows.shape[0]), np.diff(rows.indptr)) if is_sparse else None
        with np.errstate(over="ignore"):  # a row too long to be measured becomes zero
            lengths = np.sqrt(_squares(values, owner, rows.shape[0]))
        factor = np.minimum(1.0, self.row_bound / np.maximum(lengths, self.row_bound)) / self.row_unit
        limit = (self.row_bound / self.row_unit) ** 2
        whole = np.rint(_scaled(values, factor, owner))
        while (is_long := _squares(whole, owner, rows.shape[0]) > limit).any():
            factor = np.where(is_long, factor * SHRINK, factor)
            cut = np.trunc(_scaled(values, factor, owner))
            whole = np.where(is_long[owner] if is_sparse else is_long[:, None], cut, whole)
        return sparse.csr_array((whole, rows.indices, rows.indptr), rows.shape) if is_sparse else whole

    def sums(self, W: Any, whole_rows: Any) -> RowSums:
        """The sums of rows with weights W (n × k) ≥ 0, in whole units; never an object of n × k × m."""
        W = _row_after_row(W)
        n, m = whole_rows.shape
        if W.ndim != 2 or W.shape[0] != n:
            raise ShapeError(f"W has shape {W.shape}, but there are {n} rows.")
        if n > MOST_ROWS:
            raise ParameterError(f"Sums are exact for at most {MOST_ROWS} rows of a party; there are more. Split it.")
        if not (np.isfinite(W).all() and (W >= 0).all()):
            raise DataError("Weights of rows must be finite and non-negative; nothing was computed.")
        total = RowSums(np.zeros((W.shape[1],) * 2, np.int64), np.zeros((W.shape[1], m), np.int64), n)
        for start in range(0, n, BLOCK):
            rows = whole_rows[start : start + BLOCK]
            self._check_whole(rows)
            V, U = self.whole_weights(W[start : start + BLOCK], rows)
            total.gram[...] += (V.T @ V).astype(np.int64)
            total.cross[...] += np.asarray((rows.T @ U).T).astype(np.int64)
        return total

    def whole_weights(self, W: Any, whole_rows: Any) -> tuple[Any, Any]:
        """√c w for gram and c w for cross in whole units; a row depends on its own w and x alone."""
        squares = _row_squares(whole_rows)
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
            raise ParameterError("Sums are over rows that `whole_rows` of the same bounds has made; these are others.")

    def _within(self, V: Any, U: Any, squares: Any) -> Any:
        gram = self.gram_scale * self.weight_unit**2 * (V * V).sum(axis=1)
        cross = self.weight_unit**2 * self.row_unit**2 * (U * U).sum(axis=1) * squares
        return gram**2 + cross <= self.radius**2 * (1 - 2.0**-45)


def _row_after_row(values: Any) -> Any:
    """In float64 and C order: in another, NumPy adds up a row's squares in an order that depends on how many rows."""
    return np.asarray(values, np.float64, order="C")


def _unit(bound: float, bits: int) -> float:
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
