"""Centered data, accessed through products: nothing is copied, and sparse data stay sparse."""

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

    X_c B = X B − 1 (μᵀ B) and X_cᵀ A = Xᵀ A − μ (1ᵀ A): one row more than a product with X. Everything is in float64,
    even for float32 data: products with X and Xᵀ square its condition number, and float32 would lose everything below a
    hundredth of the largest singular value.
    """

    matrix: Matrix
    mean: np.ndarray
    energy: float

    @staticmethod
    def of(X: Any, *, center: bool = True) -> CenteredMatrix:
        """Return X minus its mean, or X itself without `center`.

        Dense float32 arrays and sparse values are copied to float64; memory maps are converted tile by tile.
        """
        matrix = as_matrix(X, np.float64)
        mean = _column_sums(matrix) / matrix.shape[0] if center else np.zeros(matrix.shape[1])
        return CenteredMatrix(matrix, mean, _squares_about(matrix, mean))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.matrix.shape

    def rows(self, indices: np.ndarray) -> CenteredMatrix:
        """Some of the rows in memory, minus the mean of all rows; `indices` are ascending."""
        return replace(self, matrix=self.matrix.rows(indices))

    def times(self, B: np.ndarray) -> np.ndarray:
        """X_c B (n × c)."""
        return self.matrix.times(self.matrix.native(B)) - self.mean @ B

    def covariance_times(self, V: np.ndarray) -> np.ndarray:
        """M V = X_cᵀ X_c V / n, for V (d × c); M (d × d) is never formed."""
        scores = self.times(V)
        return (self.matrix.transposed_times(scores) - np.outer(self.mean, scores.sum(axis=0))) / self.shape[0]


def require_finite(X: Any, feature_names: Sequence[str] | None) -> None:
    """Raise DataError for NaN, infinite values, and values whose squares overflow."""
    low, high = extremes(X)
    if not (np.isfinite(low) and np.isfinite(high)):
        for finding in inspect(X, feature_names):
            if finding.kind in ("nan", "infinite"):
                raise error_from(finding)
    largest = max(abs(low), abs(high))
    if largest > LARGEST:
        raise DataError(
            f"The largest value is {largest:.3g}, and its square overflows float64. Rescale the data, for example by "
            "the largest value."
        )


def require_variance(data: CenteredMatrix, *, center: bool) -> None:
    """Refuse data without variance, up to rounding of the mean."""
    n, limits = data.shape[0], np.finfo(np.float64)
    rounded = (8 * limits.eps) ** 2 * n * float(data.mean @ data.mean)
    if data.energy > max(rounded, limits.tiny):
        return
    if data.energy <= limits.tiny and _differs_from(data.matrix, data.mean):
        small = "The squared deviations from the mean" if center else "The squares of the values"
        raise DataError(f"{small} underflow float64. Rescale the data, for example by the largest value.")
    if not center:
        shown = "this sample" if n == 1 else f"these {n} samples"
        raise DataError(f"Every value of {shown} is zero. Check the data.")
    raise DataError(
        f"{'1 sample has' if n == 1 else f'These {n} samples have'} zero variance: "
        f"{'a single row has no principal directions' if n == 1 else 'all rows are equal'}. Pass at least two "
        "different rows, or use center=False."
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
    """Σ (x_ij − μ_j)²; ‖X‖² − n‖μ‖² would cancel if the mean is large."""
    if not isinstance(matrix, SparseMatrix):
        return sum(float(np.square(block - mean[c:d]).sum()) for _, _, c, d, block in _blocks(matrix))
    absent, total = np.full(mean.size, float(matrix.shape[0])), 0.0
    for columns, values in _entries(matrix):
        absent -= np.bincount(columns, minlength=mean.size)
        total += float(np.square(values - mean[columns]).sum())
    return total + float(absent @ np.square(mean))


def _differs_from(matrix: Matrix, mean: np.ndarray) -> bool:
    """Whether any x_ij differs from μ_j by more than its rounding."""
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
    """Columns and values of the stored entries, in chunks."""
    side = matrix.by_row
    for first in range(0, side.data.size, CHUNK):
        chunk = slice(first, first + CHUNK)
        yield side.indices[chunk], side.data[chunk].astype(np.float64)


def _blocks(matrix: Matrix) -> Iterator[tuple[int, int, int, int, np.ndarray]]:
    assert isinstance(matrix, DenseMatrix)
    return Tiles(matrix.X, matrix.dtype).blocks((0, matrix.shape[0]), (0, matrix.shape[1]))
