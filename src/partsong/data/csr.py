"""Stored cells in CSR form: the common base of sparse rows and rows with unknown cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from partsong import kernels
from partsong.core import runtime
from partsong.core.interfaces import RowBlock, Sums
from partsong.kernels import csr_products, numpy_backend

TILE_ROWS = 4096
CHUNK = 1 << 20
"""Entries processed together."""
GATHER_COST = 4
"""Cost of an entry of a sparse product in multiply-adds of a dense one, because of random access to factor rows."""


@dataclass(frozen=True, eq=False)
class CsrRows:
    """CSR arrays with ascending columns of X and, optionally, of Xᵀ; never dense."""

    by_row: Any
    by_column: Any = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return int(self.by_row.shape[0]), int(self.by_row.shape[1])

    @property
    def dtype(self) -> np.dtype:
        """The number type of the entries."""
        return np.dtype(self.by_row.dtype)

    @property
    def stored(self) -> int:
        """Number of stored entries."""
        return int(self.by_row.nnz)

    @property
    def row_weights(self) -> None:
        """All rows have weight 1."""

    @property
    def total_weight(self) -> float:
        return float(self.shape[0])

    def row_energies(self) -> np.ndarray:
        rows = np.repeat(np.arange(self.shape[0]), np.diff(self.by_row.indptr))
        return np.bincount(rows, np.square(self.by_row.data, dtype=np.float64), self.shape[0])

    def blocks(self, work: Callable[[RowBlock], Sums], per_cell: float = 1.0) -> Sums:
        """Σ work(block) over the stored cells; `per_cell` is the cost per stored cell."""
        effort = self.by_row.indptr * np.int64(GATHER_COST)
        pieces = runtime.split_range(self.shape[0], per_cell * float(effort[-1]), effort)
        return self.summed_over_tiles(pieces, lambda at: work(self._block(at)))

    def summed_over_tiles(self, pieces: list[tuple[int, int]], work: Callable[[slice], Sums]) -> Sums:
        """Σ work(rows) over tiles of rows; one empty tile if there are no rows."""

        def over_piece(start: int, stop: int) -> Sums:
            starts = range(start, stop, TILE_ROWS) or [start]
            return reduce(kernels.add, (work(slice(a, min(a + TILE_ROWS, stop))) for a in starts))

        return reduce(kernels.add, runtime.map_ranges(pieces, over_piece))

    def _block(self, at: slice) -> RowBlock:
        side = self.by_row
        indptr = side.indptr[at.start : at.stop + 1]
        cells = slice(indptr[0], indptr[-1])
        return RowBlock(at, self.shape[1], None, indptr - indptr[0], side.indices[cells], side.data[cells])

    def columns(self, indices: np.ndarray) -> np.ndarray:
        """Some of the columns, as a dense array with zeros for cells that are not stored."""
        out = np.zeros((self.shape[0], len(indices)), self.dtype)
        for position, j in enumerate(indices):
            rows, values = self._column(int(j))
            out[rows, position] = values
        return out

    def column_energies(self) -> np.ndarray:
        """Σ_i x_ij² over the stored cells of each column j."""
        total, side = np.zeros(self.shape[1]), self.by_row
        for chunk in chunks(side.data):
            total += np.bincount(side.indices[chunk], np.square(side.data[chunk], dtype=np.float64), self.shape[1])
        return total

    def gram_column(self, j: int) -> np.ndarray:
        """Σ_i x_ij x_i over the rows that store column j."""
        out, side = np.zeros(self.shape[1]), self.by_row
        csr_products.add_rows(side.indptr, side.indices, side.data, *self._column(j), out)
        return out

    def native(self, values: Any) -> np.ndarray:
        """As a NumPy array of this matrix's number type."""
        return numpy_backend.cast(values, self)

    def _column(self, j: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows where column j is stored, and its values there."""
        if self.by_column is not None:
            entries = slice(self.by_column.indptr[j], self.by_column.indptr[j + 1])
            return self.by_column.indices[entries], self.by_column.data[entries]
        side = self.by_row
        found = [np.flatnonzero(side.indices[chunk] == j) + chunk.start for chunk in chunks(side.data)]
        at = np.concatenate([np.empty(0, np.int64), *found])
        return np.searchsorted(side.indptr, at, side="right") - 1, side.data[at]


def chunks(data: np.ndarray) -> Iterator[slice]:
    """Slices of CHUNK entries."""
    return (slice(start, start + CHUNK) for start in range(0, max(1, len(data)), CHUNK))
