"""Products of sketched normal equations: X S C and Xᵀ S C for narrow C, without storing X S.

A subsampling S leaves a smaller matrix of the same kind: sparse X stays sparse, and dense columns are taken tile by
tile. For any other S, sparse X is multiplied by S C, which is as small as a factor; dense X is sketched first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from partsong import kernels
from partsong.core import runtime
from partsong.core.interfaces import Array, Matrix, Sums
from partsong.core.streams import Name
from partsong.data.conversion import as_matrix
from partsong.data.dense import DenseMatrix
from partsong.data.scan import Tiles, even_ranges, file_mapping
from partsong.data.sparse import SparseMatrix
from partsong.data.tensor import TensorMatrix
from partsong.errors import ParameterError
from partsong.sketch.kinds import ChosenCoordinates, Subsampling
from partsong.sketch.operator import Operator, Sketch, dimension_for
from partsong.sketch.placed import spread

Step = Callable[[slice, Array], Sums]

HEIGHT = 1024
"""Rows that are multiplied together."""


@dataclass(frozen=True, slots=True)
class KeptCoordinates:
    """Coordinates of a block that a subsampling S keeps (counted in the block), their columns of S, and the scale."""

    indices: np.ndarray
    first: int
    last: int
    weight: float

    @staticmethod
    def of(S: Operator, start: int, length: int) -> KeptCoordinates | None:
        """The kept coordinates of S[start : start + length]; None if S is not a subsampling."""
        if not isinstance(S.pattern, ChosenCoordinates):
            return None
        chosen = S.pattern.chosen
        first, last = np.searchsorted(chosen, (start, start + length)).tolist()
        return KeptCoordinates(chosen[first:last] - start, first, last, (S.size / S.dimension) ** 0.5)

    def of_columns(self, C: Array) -> Array:
        """The rows of C (d × k) for these coordinates, scaled."""
        return C[self.first : self.last] * self.weight


def walk(S: Operator, matrix: Matrix, C: Array, step: Step) -> None:
    """Call step(rows, X[rows] S C) for blocks of rows of X (r × size), for C (d × k)."""
    kept = KeptCoordinates.of(S, 0, matrix.shape[1])
    if kept is not None and isinstance(matrix, SparseMatrix):
        SparseMatrix(_csr(matrix.by_row)[:, kept.indices]).walk(kept.of_columns(C), step)
    elif kept is not None and isinstance(matrix, DenseMatrix) and _is_taken_in_tiles(matrix):
        _walk_dense(matrix, kept.indices, kept.of_columns(C), step)
    elif isinstance(matrix, SparseMatrix) and matrix.stored < matrix.shape[0] * S.dimension:
        matrix.walk(spread(matrix, S, C.T), step)
    else:
        as_matrix(S.sketch(matrix)).walk(C, step)


def transposed_times(S: Operator, matrix: Matrix, C: Array) -> Array:
    """Xᵀ S C (c × k), for X (size × c) and C (d × k)."""
    kept = KeptCoordinates.of(S, 0, matrix.shape[0])
    if kept is None and isinstance(matrix, SparseMatrix) and matrix.stored < matrix.shape[1] * S.dimension:
        return matrix.transposed_times(spread(matrix, S, C.T))
    if kept is None or isinstance(matrix, TensorMatrix):
        return as_matrix(S.sketch_transposed(matrix)).times(C)
    if isinstance(matrix, SparseMatrix):  # SparseMatrix.rows would make a second copy, used only once
        return SparseMatrix(_csr(matrix.by_row)[kept.indices]).transposed_times(kept.of_columns(C))
    return matrix.rows(kept.indices).transposed_times(kept.of_columns(C))


def placed_rows(S: Operator, F: Array, start: int) -> Array:
    """Fᵀ S[start : start + r] (k × d) for a factor F (r × k)."""
    kept = KeptCoordinates.of(S, start, F.shape[0])
    if kept is None:
        return S.sketch_transposed(F, start)
    out = kernels.of(F).empty((S.dimension, F.shape[1]), F)
    out[: kept.first], out[kept.last :] = 0, 0
    out[kept.first : kept.last] = F[kept.indices] * kept.weight
    return out.T


def _is_taken_in_tiles(matrix: DenseMatrix) -> bool:
    """False for wide rows and for columns in a file, which the sketch reads better."""
    if matrix.X.flags.c_contiguous:
        return not Tiles(matrix.X, matrix.dtype).are_low
    return _is_by_column(matrix)


def _is_by_column(matrix: DenseMatrix) -> bool:
    X = matrix.X
    return (
        bool(X.flags.f_contiguous and not X.flags.c_contiguous) and X.dtype == matrix.dtype and file_mapping(X) is None
    )


def _walk_dense(matrix: DenseMatrix, indices: np.ndarray, C: np.ndarray, step: Step) -> None:
    """X[:, indices] C; with contiguous columns only these are read."""
    tiles, columns = Tiles(matrix.X, matrix.dtype), matrix.X.T

    def by_row(start: int, stop: int) -> None:
        for a, b, tile in tiles.of_rows(start, stop):
            step(slice(a, b), np.take(tile, indices, axis=1) @ C)

    def by_column(start: int, stop: int) -> None:
        for a, b in even_ranges(start, stop, HEIGHT):
            step(slice(a, b), columns[indices, a:b].T @ C)

    pieces = runtime.split_range(matrix.shape[0], 2.0 * matrix.shape[0] * C.size)
    runtime.map_ranges(pieces, by_column if _is_by_column(matrix) else by_row)


def _csr(side: Any) -> Any:
    from scipy.sparse import csr_array

    return csr_array(side)


@dataclass(frozen=True, slots=True)
class Proportion:
    """A kind of sketch with d = ⌈ratio·size⌉, at least the rank and at most the size."""

    kind: Callable[[int], Sketch] = Subsampling
    ratio: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.ratio, Real) or isinstance(self.ratio, bool) or not 0 < float(self.ratio) <= 1:
            raise ParameterError(f"The ratio of a sketch must be above 0 and at most 1; got {self.ratio!r}.")

    def dimension(self, size: int, rank: int) -> int:
        return dimension_for(size, rank, self.ratio)

    def draw(self, size: int, rank: int, seed: int, *names: Name) -> Operator:
        return self.kind(self.dimension(size, rank)).draw(size, seed, *names)
