"""The cells of a matrix as players meet over them: one door to the compiled plays for every form of data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import Any, Protocol

import numpy as np

from partsong.core import Array, Matrix
from partsong.data.dense import DenseMatrix
from partsong.data.observed import ObservedMatrix
from partsong.data.sparse import SparseMatrix
from partsong.errors import CompositionError, ParameterError
from partsong.kernels import compiled_game

LEADERS = {None: compiled_game.TOGETHER, "rows": compiled_game.ROW_LEADS, "columns": compiled_game.COLUMN_LEADS}
CHUNK = 1 << 20
"""Cells of a random order whose values are gathered at a time."""
MOST_SHUFFLED = 1 << 28


@dataclass(frozen=True, slots=True)
class Meeting:
    """How two players move when they meet: η, or a relaxation by their norms; and who of them moves first."""

    eta: float
    relaxation: float
    leader: str | None = None

    def numbers(self, dtype: Any) -> tuple[Any, Any, int]:
        """As compiled code takes them."""
        kind = np.dtype(dtype).type
        return kind(self.eta), kind(self.relaxation), LEADERS[self.leader]


class Board(Protocol):
    """Cells that are played, row by row or in a random order; factors are changed in place."""

    @property
    def row_cells(self) -> np.ndarray:
        """How many cells the rows up to each have, from 0 to all (n + 1 numbers)."""

    @property
    def largest(self) -> float:
        """The largest x_ij, and 0 where there is none."""

    def play(self, rows: Array, first: int, last: int, W: Array, Ht: Array, meeting: Meeting) -> float:
        """These rows against columns first … last − 1, row by row; returns Σ e² as players saw it."""

    def shuffle(self, draw: np.random.Generator, first: int, last: int, W: Array, Ht: Array, meeting: Meeting) -> float:
        """All cells in columns first … last − 1, in a random order."""

    def arranged(self, columns: Array) -> Board:
        """The same cells with the columns in another order."""


@singledispatch
def board_of(matrix: Matrix) -> Board:
    """The board of a matrix in memory."""
    raise CompositionError(
        f"Single cells of a {type(matrix).__name__} cannot be played: that is for arrays and sparse matrices. "
        "Let all players move at once (Simultaneous, Alternating), or convert the data to a NumPy array."
    )


@dataclass(frozen=True, slots=True)
class DenseBoard:
    """All cells of an array."""

    X: np.ndarray

    @property
    def row_cells(self) -> np.ndarray:
        """The same number in every row."""
        return np.arange(self.X.shape[0] + 1) * self.X.shape[1]

    @property
    def largest(self) -> float:
        """Of all cells."""
        return float(self.X.max(initial=0))

    def play(self, rows: Array, first: int, last: int, W: Array, Ht: Array, meeting: Meeting) -> float:
        """Row by row."""
        columns = np.arange(first, last)
        return float(compiled_game.play_dense(self.X, rows, columns, W, Ht, *meeting.numbers(W.dtype)))

    def shuffle(self, draw: np.random.Generator, first: int, last: int, W: Array, Ht: Array, meeting: Meeting) -> float:
        """In a random order."""
        width = last - first
        order = _shuffled(draw, len(self.X) * width)
        numbers, seen = meeting.numbers(W.dtype), 0.0
        for start in range(0, len(order), CHUNK):
            rows, columns = np.divmod(order[start : start + CHUNK], max(1, width))
            columns += first
            seen += compiled_game.play_cells(rows, columns, self.X[rows, columns], W, Ht, *numbers)
        return seen

    def arranged(self, columns: Array) -> DenseBoard:
        """A copy."""
        return DenseBoard(np.ascontiguousarray(self.X[:, columns]))


@dataclass(frozen=True, slots=True)
class SparseBoard:
    """All cells of a CSR matrix with ascending columns; those that are not stored are zeros, and played as such."""

    by_row: Any

    @property
    def row_cells(self) -> np.ndarray:
        """The same number in every row."""
        return np.arange(self.by_row.shape[0] + 1) * self.by_row.shape[1]

    @property
    def largest(self) -> float:
        """Of those that are stored."""
        return float(self.by_row.data.max(initial=0))

    def play(self, rows: Array, first: int, last: int, W: Array, Ht: Array, meeting: Meeting) -> float:
        """Row by row."""
        side, columns = self.by_row, np.arange(first, last)
        entries = side.indptr, side.indices, side.data
        return float(compiled_game.play_sparse(*entries, rows, columns, W, Ht, *meeting.numbers(W.dtype)))

    def shuffle(self, draw: np.random.Generator, first: int, last: int, W: Array, Ht: Array, meeting: Meeting) -> float:
        """In a random order."""
        width = last - first
        order = _shuffled(draw, self.by_row.shape[0] * width)
        numbers, seen = meeting.numbers(W.dtype), 0.0
        for start in range(0, len(order), CHUNK):
            rows, columns = np.divmod(order[start : start + CHUNK], max(1, width))
            columns += first
            values = np.asarray(self.by_row[rows, columns]).ravel()
            seen += compiled_game.play_cells(rows, columns, values, W, Ht, *numbers)
        return seen

    def arranged(self, columns: Array) -> SparseBoard:
        """A copy."""
        return SparseBoard(_arranged(self.by_row, columns))


@dataclass(frozen=True, slots=True)
class KnownBoard:
    """The stored cells of a CSR matrix with ascending columns; players never meet over any other."""

    by_row: Any

    @property
    def row_cells(self) -> np.ndarray:
        """What is stored."""
        return np.asarray(self.by_row.indptr, np.int64)

    @property
    def largest(self) -> float:
        """Of known cells."""
        return float(self.by_row.data.max(initial=0))

    def play(self, rows: Array, first: int, last: int, W: Array, Ht: Array, meeting: Meeting) -> float:
        """Row by row."""
        side = self.by_row
        entries = side.indptr, side.indices, side.data
        return float(compiled_game.play_stored(*entries, rows, first, last, W, Ht, *meeting.numbers(W.dtype)))

    def shuffle(self, draw: np.random.Generator, first: int, last: int, W: Array, Ht: Array, meeting: Meeting) -> float:
        """In a random order."""
        side = self.by_row
        rows = np.repeat(np.arange(side.shape[0]), np.diff(side.indptr))
        here = np.flatnonzero((side.indices >= first) & (side.indices < last))
        order = here[_shuffled(draw, len(here))]
        numbers = meeting.numbers(W.dtype)
        return float(compiled_game.play_cells(rows[order], side.indices[order], side.data[order], W, Ht, *numbers))

    def arranged(self, columns: Array) -> KnownBoard:
        """A copy."""
        return KnownBoard(_arranged(self.by_row, columns))


@board_of.register
def _(matrix: DenseMatrix) -> Board:
    is_plain = matrix.X.dtype in (np.float32, np.float64)
    return DenseBoard(matrix.X if is_plain else matrix.X.astype(matrix.dtype))


@board_of.register
def _(matrix: SparseMatrix) -> Board:
    return SparseBoard(matrix.by_row)


@board_of.register
def _(matrix: ObservedMatrix) -> Board:
    return KnownBoard(matrix.by_row)


def _arranged(by_row: Any, columns: Array) -> Any:
    moved = by_row[:, columns].tocsr()
    moved.sort_indices()
    return moved


def _shuffled(draw: np.random.Generator, count: int) -> np.ndarray:
    if count > MOST_SHUFFLED:
        raise ParameterError(
            f"A random order of {count:,} cells is too long a list to hold in memory (at most {MOST_SHUFFLED:,}). "
            "Take another order of play: a stratified one needs no list."
        )
    return draw.permutation(count)
