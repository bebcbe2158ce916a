"""Two-sided blocks: the rows and the columns of one matrix that a node holds if both factors are distributed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.core.interfaces import Array, Matrix, RowBlock, Sums, type_name
from partsong.core.streams import stream
from partsong.data.conversion import as_matrix
from partsong.errors import CompositionError, ParameterError, ShapeError

GAP = 1e-6
"""Rounding tolerance for the total of all `coverage_sums`."""


@dataclass(frozen=True, eq=False)
class TwoSided:
    """X[I, :] (|I| × m) and X[:, J] (n × |J|) for contiguous rows I and columns J.

    As a Matrix it behaves like its rows; the columns are in `column_block`. `TwoSided.of(X)` uses a whole matrix X for
    both sides.
    """

    row_block: Matrix
    column_block: Matrix
    first_row: int
    first_column: int
    n_rows: int

    def __post_init__(self) -> None:
        (height, m), (n, width) = self.row_block.shape, self.column_block.shape
        if n != self.n_rows:
            raise ShapeError(
                f"A column block needs all {self.n_rows} rows of the matrix; this one has {n}. Pass X[:, start:stop]."
            )
        for noun, first, length, size in (
            ("rows", self.first_row, height, n),
            ("columns", self.first_column, width, m),
        ):
            if length < 1 or first < 0 or first + length > size:
                raise ShapeError(
                    f"A block of {length} {noun} from index {first} is empty or exceeds the matrix ({size} {noun}). "
                    "Use the ranges of `block_range`."
                )
        kinds = type_name(self.row_block.dtype), type_name(self.column_block.dtype)
        if kinds[0] != kinds[1]:
            raise CompositionError(f"Rows are {kinds[0]} and columns {kinds[1]}. Read both blocks in one number type.")

    @staticmethod
    def of(matrix: Matrix) -> TwoSided:
        """Use a whole matrix for both sides; return a two-sided one unchanged."""
        return matrix if isinstance(matrix, TwoSided) else TwoSided(matrix, matrix, 0, 0, matrix.shape[0])

    @property
    def shape(self) -> tuple[int, int]:
        return self.row_block.shape

    @property
    def dtype(self) -> Any:
        return self.row_block.dtype

    @property
    def squared_norm(self) -> float:
        return self.row_block.squared_norm

    @property
    def stored(self) -> int:
        return self.row_block.stored

    @property
    def mean(self) -> float:
        return self.row_block.mean

    @property
    def row_weights(self) -> Array | None:
        return self.row_block.row_weights

    @property
    def total_weight(self) -> float:
        return self.row_block.total_weight

    def row_energies(self) -> Array:
        return self.row_block.row_energies()

    def gram_is_cheap(self, k: int) -> bool:
        return self.row_block.gram_is_cheap(k)

    def visit(self, Ht: Array, A: Array, step: Callable[[slice, Array], Sums]) -> tuple[Array, Sums]:
        return self.row_block.visit(Ht, A, step)

    def walk(self, Ht: Array, step: Callable[[slice, Array], Sums]) -> Sums:
        return self.row_block.walk(Ht, step)

    def blocks(self, work: Callable[[RowBlock], Sums], per_cell: float = 1.0) -> Sums:
        return self.row_block.blocks(work, per_cell)

    def transposed(self) -> Matrix | None:
        return self.row_block.transposed()

    def times(self, B: Array) -> Array:
        return self.row_block.times(B)

    def transposed_times(self, A: Array) -> Array:
        return self.row_block.transposed_times(A)

    def rows(self, indices: Array) -> Matrix:
        """Some of the rows, as a one-sided matrix."""
        return self.row_block.rows(indices)

    def columns(self, indices: Array) -> Array:
        return self.row_block.columns(indices)

    def column_energies(self) -> Any:
        return self.row_block.column_energies()

    def gram_column(self, j: int) -> Any:
        return self.row_block.gram_column(j)

    def native(self, values: Array) -> Array:
        return self.row_block.native(values)

    def squared_distance(self, W: Array, Ht: Array) -> float:
        return self.row_block.squared_distance(W, Ht)


def block_range(size: int, parts: int, number: int) -> tuple[int, int]:
    """Start and stop of block `number` of `parts`: contiguous blocks of nearly equal size, the first ones one longer.

    Node r of N reads X[slice(*block_range(n, N, r))] and X[:, slice(*block_range(m, N, r))].
    """
    if not 0 <= number < parts:
        raise ParameterError(f"number must be from 0 to {parts - 1} for parts={parts}; got {number}.")
    if parts > size:
        raise ParameterError(f"{size} rows or columns cannot be split into {parts} non-empty blocks. Use fewer blocks.")
    length, rest = divmod(size, parts)
    start = number * length + min(number, rest)
    return start, start + length + (number < rest)


def two_sided_blocks(X: Any, parts: int, *, rows_by_column: bool = False) -> list[TwoSided]:
    """Split X into the blocks of `parts` nodes, for simulations; rows are views if possible, columns are copied.

    With `rows_by_column` dense rows are also copied, in F order: a subsampling sketch then reads only the columns that
    it keeps, which makes a step of W about three times as fast.
    """
    whole = X.tocsr() if hasattr(X, "tocsr") else X if hasattr(X, "shape") else np.asarray(X)
    if len(whole.shape) != 2 or not 1 <= parts <= min(whole.shape):
        raise ParameterError(
            f"Data of shape {tuple(whole.shape)} cannot be split into {parts} blocks of rows and of columns: each "
            "block needs at least one row and one column. Use fewer parts."
        )
    n, m = (int(size) for size in whole.shape)
    by_column = rows_by_column and isinstance(whole, np.ndarray)
    blocks = []
    for number in range(parts):
        (a, b), (c, d) = block_range(n, parts, number), block_range(m, parts, number)
        rows = np.array(whole[a:b], order="F", subok=False) if by_column else whole[a:b]
        blocks.append(TwoSided(as_matrix(rows), as_matrix(_contiguous(whole[:, c:d])), a, c, n))
    return blocks


def coverage_sums(matrix: TwoSided, parties: int) -> np.ndarray:
    """Two numbers, for rows and columns, that sum to zero over all parties if their blocks cover X exactly once.

    f(stop) − f(start) − (f(size) − f(0)) / parties, with a random f: the differences of adjacent blocks telescope.
    """
    (height, m), (n, width) = matrix.row_block.shape, matrix.column_block.shape
    sides = ((matrix.first_row, height, n), (matrix.first_column, width, m))

    def f(place: int) -> float:
        return float(stream(0, "block", place).random())

    return np.array([f(a + length) - f(a) - (f(size) - f(0)) / parties for a, length, size in sides])


def require_cover(total: Array) -> None:
    """Refuse blocks whose `coverage_sums` do not sum to zero."""
    for noun, gap in zip(("rows", "columns"), total, strict=True):
        if abs(float(gap)) > GAP:
            raise CompositionError(
                f"The parties' blocks do not cover the {noun} of X exactly once: {noun} are missing or duplicated, or "
                "a party is absent. Use the ranges of data.blocks.block_range."
            )


def _contiguous(columns: Any) -> Any:
    """A dense block as contiguous memory, even if X is mapped from a file."""
    if hasattr(columns, "contiguous"):
        return columns.contiguous()
    return columns if hasattr(columns, "tocsr") else np.array(columns, order="C", subok=False)
