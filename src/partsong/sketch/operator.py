"""The sketch protocol and drawn operators S (size × dimension), with their rows and products.

S = Gaussian(64).draw(X.shape[1], seed, "W", 7)
NormalEquations.of(S.sketch(X), S.sketch(H))        the W-step of round 7, with d = 64 columns instead of m
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from operator import index
from typing import Any, Protocol

import numpy as np

from partsong import kernels
from partsong.core import runtime
from partsong.core.interfaces import Array, Matrix, type_name
from partsong.core.streams import Name, stream
from partsong.data.conversion import as_matrix, float_type
from partsong.data.dense import DenseMatrix
from partsong.data.scan import Tiles
from partsong.data.sparse import SparseMatrix
from partsong.errors import ParameterError, ShapeError

BYTES = 16 << 20
"""Bytes of S in memory at a time; at least GROUP of its columns, or DRAWN_ROWS of its rows."""
GROUP = 16
DRAWN_ROWS = 512
"""Entries of a Gaussian S are drawn in blocks of this size, which are best not split."""


class Sketch(Protocol):
    """A kind of sketch and its dimension d; drawn operators satisfy E[S Sᵀ] = I (size × size).

    S depends only on the size, the seed and the names: parties with the same seed have the same S, for any number of
    parties and whichever rows they need.
    """

    @property
    def dimension(self) -> int:
        """Columns of S."""

    def draw(self, size: int, seed: int, *names: Name) -> Operator:
        """S (size × dimension) from the stream of these names."""


class Pattern(Protocol):
    """The entries of one kind of S, and its products."""

    @property
    def size(self) -> int:
        """Rows of S."""

    @property
    def dimension(self) -> int:
        """Columns of S."""

    def entries(self, indices: np.ndarray, first: int, last: int, dtype: np.dtype) -> np.ndarray:
        """S[indices, first:last], for ascending indices."""

    def times(self, matrix: Matrix, start: int) -> Array:
        """A S[start : start + c] for A (r × c)."""

    def transposed_times(self, matrix: Matrix, start: int) -> Array:
        """Aᵀ S[start : start + r] for A (r × c)."""


@dataclass(frozen=True, slots=True)
class Source:
    """The random stream of an S: the shared seed, and the names that identify this S."""

    seed: int
    names: tuple[Name, ...]

    @staticmethod
    def of(seed: int, names: tuple[Name, ...]) -> Source:
        """Create a source; NumPy integers are converted, so that round 7 of type int64 is round 7."""
        return Source(index(seed), tuple(name if isinstance(name, str) else index(name) for name in names))

    def stream(self, *parts: Name) -> np.random.Generator:
        """The random stream of one part of S."""
        return stream(self.seed, "sketch", *self.names, *parts)


@dataclass(frozen=True, slots=True)
class Operator:
    """A drawn S (size × dimension) as a value: operators of the same draw are equal, and no entry is stored.

    Products accept NumPy arrays (C or F order, mapped), SciPy sparse matrices, torch tensors and any `Matrix`. They are
    dense, with the number type and device of A, and have `dimension` columns; sparse A stays sparse. `start` is the
    first row of S that belongs to the columns (rows, if transposed) of A: products of blocks add up to the whole.
    """

    pattern: Pattern

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ParameterError(f"The size of a sketch must be at least 1; got {self.size}.")
        if self.dimension > self.size:
            raise ParameterError(
                f"A sketch of {self.size} coordinates cannot have more dimensions; got dimension={self.dimension}. Use "
                "a smaller one (see dimension_for), or no sketch."
            )

    @property
    def size(self) -> int:
        """Rows of S: the number of coordinates to sketch."""
        return self.pattern.size

    @property
    def dimension(self) -> int:
        """Columns of S: the dimension of the sketch."""
        return self.pattern.dimension

    def rows(self, start: int, stop: int, dtype: Any = np.float64) -> np.ndarray:
        """S[start:stop], without the rest of S."""
        self._require_rows(start, stop)
        return self.pattern.entries(np.arange(start, stop), 0, self.dimension, np.dtype(dtype))

    def sketch(self, A: Any, start: int = 0) -> Array:
        """A S[start : start + c] for A (r × c), as r × d."""
        matrix = _matrix_of(A)
        self._require_rows(start, start + matrix.shape[1])
        return self.pattern.times(matrix, start)

    def sketch_transposed(self, A: Any, start: int = 0) -> Array:
        """Aᵀ S[start : start + r] for A (r × c), as c × d."""
        matrix = _matrix_of(A)
        self._require_rows(start, start + matrix.shape[0])
        return self.pattern.transposed_times(matrix, start)

    def _require_rows(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.size:
            raise ShapeError(
                f"Coordinates {start} to {stop} are outside the {self.size} coordinates of this sketch. Draw it for "
                "all coordinates, and pass the offset of a block as `start`."
            )


def require_dimension(dimension: Any) -> None:
    """Refuse an invalid dimension."""
    if not isinstance(dimension, Integral) or isinstance(dimension, bool) or dimension < 1:
        raise ParameterError(f"The dimension of a sketch must be a whole number of at least 1; got {dimension!r}.")


def dimension_for(size: int, rank: int, ratio: float = 0.1) -> int:
    """Return ⌈ratio·size⌉, at least the rank (a problem of rank k needs k equations) and at most the size."""
    if size < 1 or rank < 1:
        raise ParameterError(f"size and rank must be at least 1; got size={size}, rank={rank}.")
    if not 0 < ratio <= 1:
        raise ParameterError(f"ratio must be above 0 and at most 1; got {ratio!r}.")
    wanted = math.ceil(ratio * size * (1 - 1e-12))  # 0.1 · 30 is a little more than 3
    return min(size, max(rank, wanted))


def _matrix_of(A: Any) -> Matrix:
    """Like `as_matrix`, but without a second copy of sparse data, which is used only once here."""
    if hasattr(A, "transposed_times"):
        return A
    if getattr(A, "format", "") == "csr" and A.ndim == 2:
        by_row = A.astype(float_type(A.dtype), copy=False)
        return SparseMatrix(by_row if by_row.has_sorted_indices else by_row.sorted_indices())
    return as_matrix(A)


def times(S: Pattern, matrix: Matrix, start: int) -> Array:
    """A S[start : start + c]: dense A by blocks of rows of S, other A by groups of columns of S."""
    if isinstance(matrix, DenseMatrix):
        return _times_dense(S, matrix, start)
    if isinstance(matrix, SparseMatrix):
        return _times_sparse(S, matrix, start)
    return _by_groups(S, np.arange(start, start + matrix.shape[1]), matrix, matrix.times)


def transposed_times(S: Pattern, matrix: Matrix, start: int) -> Array:
    """Aᵀ S[start : start + r]."""
    if isinstance(matrix, DenseMatrix):
        return _times_dense(S, DenseMatrix(matrix.X.T, matrix.dtype), start)
    return _by_groups(S, np.arange(start, start + matrix.shape[0]), matrix, matrix.transposed_times)


def _times_dense(S: Pattern, matrix: DenseMatrix, start: int) -> np.ndarray:
    n, m = matrix.shape
    out = np.zeros((n, S.dimension), matrix.dtype)
    step = max(1, BYTES // (S.dimension * matrix.dtype.itemsize) // DRAWN_ROWS) * DRAWN_ROWS
    cuts = [start, *range(start - start % step + step, start + m, step), start + m]
    for first, last in pairwise(cuts):
        indices = np.arange(first, last)
        _add_columns(matrix, first - start, S.entries(indices, 0, S.dimension, matrix.dtype), out)
    return out


def _add_columns(matrix: DenseMatrix, first: int, B: np.ndarray, out: np.ndarray) -> None:
    """out += A[:, first : first + len(B)] B."""
    columns = first, first + len(B)
    tiles = Tiles(matrix.X, matrix.dtype)

    def work(start: int, stop: int) -> None:
        for a, b, c, d, block in tiles.blocks((start, stop), columns):
            out[a:b] += block @ B[c - first : d - first]

    runtime.map_ranges(runtime.split_range(len(out), 2.0 * out.size * len(B)), work)


def _times_sparse(S: Pattern, matrix: SparseMatrix, start: int) -> np.ndarray:
    """Use only rows of S that meet a stored entry, if they are few."""
    from scipy.sparse import csr_array

    side = matrix.by_row
    is_met = np.zeros(matrix.shape[1], bool)
    is_met[side.indices] = True
    met = np.flatnonzero(is_met)
    if 2 * len(met) < matrix.shape[1]:
        place = np.zeros(matrix.shape[1], side.indices.dtype)
        place[met] = np.arange(len(met))
        shape = matrix.shape[0], len(met)
        matrix = SparseMatrix(csr_array((side.data, place[side.indices], side.indptr), shape=shape))
        return _by_groups(S, start + met, matrix, matrix.times)
    return _by_groups(S, np.arange(start, start + matrix.shape[1]), matrix, matrix.times)


def _by_groups(S: Pattern, indices: np.ndarray, matrix: Matrix, multiply: Callable[[Any], Array]) -> Array:
    """Apply `multiply` to groups of columns of S[indices], and concatenate the results."""
    dtype = np.dtype(type_name(matrix.dtype))
    width = max(1, BYTES // (max(1, len(indices)) * dtype.itemsize) // GROUP) * GROUP

    def product(first: int) -> Array:
        return multiply(matrix.native(S.entries(indices, first, min(first + width, S.dimension), dtype)))

    out = product(0)
    if width >= S.dimension:
        return out
    whole = kernels.of(out).empty((out.shape[0], S.dimension), out)
    whole[:, :width] = out
    for first in range(width, S.dimension, width):
        whole[:, first : first + width] = product(first)
    return whole
