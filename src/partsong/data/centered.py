"""Rows of either sign less their mean, seen through products: nothing is copied, and nothing sparse made dense."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from partsong.core.interfaces import Matrix
from partsong.data.conversion import as_matrix
from partsong.data.csr import CHUNK
from partsong.data.dense import DenseMatrix
from partsong.data.scan import Tiles, extremes
from partsong.data.sparse import SparseMatrix
from partsong.data.validation import error_from, inspect
from partsong.errors import DataError

LARGEST = 1e140
"""Sums of squares of larger values may overflow."""


@dataclass(frozen=True, eq=False, slots=True)
class CenteredMatrix:
    """X_c = X − 1 μᵀ for X (n × d) and μ (d), or any rows of it; `energy` is ‖X_c‖² of all rows.

    X_c B = X B − 1 (μᵀ B) and X_cᵀ A = Xᵀ A − μ (1ᵀ A): a row more than a product with X. All is in float64, also of
    data in float32: products with both X and Xᵀ square its spread, and float32 would lose whatever is below a hundredth
    of the largest singular value.
    """

    matrix: Matrix
    mean: np.ndarray
    energy: float

    @staticmethod
    def of(X: Any, *, center: bool = True) -> CenteredMatrix:
        """The rows of X less their mean, or as they are; the second moment is taken about the mean.

        Dense arrays in float32 and sparse values get a copy in float64, memory maps are converted tile by tile.
        """
        matrix = as_matrix(X, np.float64)
        mean = _column_sums(matrix) / matrix.shape[0] if center else np.zeros(matrix.shape[1])
        return CenteredMatrix(matrix, mean, _squares_about(matrix, mean))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.matrix.shape

    def rows(self, indices: np.ndarray) -> CenteredMatrix:
        """Some of the rows, in memory, less the mean of all; `indices` ascend."""
        return replace(self, matrix=self.matrix.rows(indices))

    def times(self, B: np.ndarray) -> np.ndarray:
        """X_c B (n × c)."""
        return self.matrix.times(self.matrix.native(B)) - self.mean @ B

    def covariance_times(self, V: np.ndarray) -> np.ndarray:
        """M V = X_cᵀ X_c V / n, for V (d × c); M (d × d) is never formed."""
        scores = self.times(V)
        return (self.matrix.transposed_times(scores) - np.outer(self.mean, scores.sum(axis=0))) / self.shape[0]


def require_finite(X: Any, feature_names: Sequence[str] | None) -> None:
    """Raise the typed error for NaN, infinite values, and values whose squares overflow."""
    low, high = extremes(X)
    if not (np.isfinite(low) and np.isfinite(high)):
        for finding in inspect(X, feature_names):
            if finding.kind in ("nan", "infinite"):
                raise error_from(finding)
    largest = max(abs(low), abs(high))
    if largest > LARGEST:
        raise DataError(
            f"The largest value is {largest:.3g}: squares of such values leave the range of float64. "
            "Rescale the data (divide by the largest value, say)."
        )


def require_variance(data: CenteredMatrix, *, center: bool) -> None:
    """Refuse rows that are all alike, but for the rounding of their mean."""
    n, limits = data.shape[0], np.finfo(np.float64)
    rounded = (8 * limits.eps) ** 2 * n * float(data.mean @ data.mean)
    if data.energy > max(rounded, limits.tiny):
        return
    if data.energy <= limits.tiny and _differs_from(data.matrix, data.mean):
        small = "differ from their mean by so little that its square leaves" if center else "have squares that leave"
        raise DataError(
            f"Values of these data {small} the range of float64. Rescale the data (divide by the largest value, say)."
        )
    if not center:
        shown = "this sample" if n == 1 else f"these {n} samples"
        raise DataError(f"Every value of {shown} is zero. Check the data.")
    raise DataError(
        f"{'1 sample has' if n == 1 else f'These {n} samples have'} zero variance: "
        f"{'it differs from nothing' if n == 1 else 'all rows are alike'}, so that no direction is a principal one. "
        "Give at least two rows that differ, or take center=False for directions from zero."
    )


def _column_sums(matrix: Matrix) -> np.ndarray:
    total = np.zeros(matrix.shape[1])
    if isinstance(matrix, SparseMatrix):
        for columns, values in _entries(matrix):
            total += np.bincount(columns, values, total.size)
        return total
    for _, _, c, d, block in _blocks(matrix):
        total[c:d] += block.sum(axis=0, dtype=np.float64)
    return total


def _squares_about(matrix: Matrix, mean: np.ndarray) -> float:
    """Σ (x_ij − μ_j)²; taking n‖μ‖² from ‖X‖² instead would lose all digits where the mean is large."""
    if not isinstance(matrix, SparseMatrix):
        return sum(float(np.square(block - mean[c:d]).sum()) for _, _, c, d, block in _blocks(matrix))
    absent, total = np.full(mean.size, float(matrix.shape[0])), 0.0
    for columns, values in _entries(matrix):
        absent -= np.bincount(columns, minlength=mean.size)
        total += float(np.square(values - mean[columns]).sum())
    return total + float(absent @ np.square(mean))


def _differs_from(matrix: Matrix, mean: np.ndarray) -> bool:
    """Whether any x_ij is not μ_j, but for the rounding of μ_j."""
    most = 8 * np.finfo(np.float64).eps * np.abs(mean)
    if not isinstance(matrix, SparseMatrix):
        return any((np.abs(block - mean[c:d]) > most[c:d]).any() for _, _, c, d, block in _blocks(matrix))
    absent = np.full(mean.size, matrix.shape[0])
    for columns, values in _entries(matrix):
        absent -= np.bincount(columns, minlength=mean.size)
        if (np.abs(values - mean[columns]) > most[columns]).any():
            return True
    return bool(mean[absent > 0].any())


def _entries(matrix: SparseMatrix) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Columns and values of the stored entries, some at a time."""
    side = matrix.by_row
    for first in range(0, side.data.size, CHUNK):
        chunk = slice(first, first + CHUNK)
        yield side.indices[chunk], side.data[chunk].astype(np.float64)


def _blocks(matrix: Matrix) -> Iterator[tuple[int, int, int, int, np.ndarray]]:
    assert isinstance(matrix, DenseMatrix)
    return Tiles(matrix.X, matrix.dtype).blocks((0, matrix.shape[0]), (0, matrix.shape[1]))
