"""Sparse rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from partsong import kernels, threads
from partsong.kernels import compiled_sparse

TILE_ROWS = 4096
GATHER_COST = 4
"""What an entry of a sparse product costs, in multiply-adds of a dense one: factor rows are fetched at random."""


@dataclass(frozen=True, eq=False)
class SparseMatrix:
    """Rows in CSR form, with the CSR form of the transpose kept beside it; nothing is ever made dense.

    X Hᵀ goes over rows and XᵀW over columns, each by gathering rows of the other factor. The second copy costs as
    much memory as the data and makes both products run in parallel without sharing sums.
    """

    by_row: Any
    by_column: Any

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
        """Entries kept: those that are not zero."""
        return int(self.by_row.nnz)

    @cached_property
    def squared_norm(self) -> float:
        """‖X‖², in float64."""
        return float(np.sum(np.square(self.by_row.data, dtype=np.float64)))

    @cached_property
    def mean(self) -> float:
        """The mean entry, zeros counted."""
        return float(self.by_row.data.sum(dtype=np.float64)) / max(1, self.shape[0] * self.shape[1])

    def visit(
        self, Ht: np.ndarray, update: Callable[[int, int, np.ndarray], None], F: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """One pass over the rows, then one over the columns; see core.Matrix."""
        k = Ht.shape[1]

        def work(start: int, stop: int) -> np.ndarray:
            gram = np.zeros((k, k), np.float64)
            for a in range(start, stop, TILE_ROWS):
                b = min(a + TILE_ROWS, stop)
                update(a, b, _product(self.by_row, Ht, a, b))
                gram += F[a:b].T @ F[a:b]
            return gram

        parts = threads.over(self._pieces(self.by_row, k, 2 * k), work)
        gram = sum(parts[1:], parts[0])
        return gram.astype(self.dtype), self.transposed_times(F)

    def walk(self, Ht: np.ndarray, update: Callable[[int, int, np.ndarray], None]) -> None:
        """One pass over the rows without sums; see core.Matrix."""

        def work(start: int, stop: int) -> None:
            for a in range(start, stop, TILE_ROWS):
                b = min(a + TILE_ROWS, stop)
                update(a, b, _product(self.by_row, Ht, a, b))

        threads.over(self._pieces(self.by_row, Ht.shape[1], 2 * Ht.shape[1]), work)

    def times(self, B: np.ndarray) -> np.ndarray:
        """X B."""
        return self._gather(self.by_row, B)

    def transposed_times(self, A: np.ndarray) -> np.ndarray:
        """Xᵀ A."""
        return self._gather(self.by_column, A)

    def rows(self, indices: np.ndarray) -> SparseMatrix:
        """Some of the rows."""
        from scipy.sparse import csr_array

        chosen = csr_array(self.by_row)[indices]
        return SparseMatrix(chosen, chosen.T.tocsr())

    def columns(self, indices: np.ndarray) -> np.ndarray:
        """Some of the columns, as a dense array."""
        out = np.zeros((self.shape[0], len(indices)), self.dtype)
        side = self.by_column
        for position, j in enumerate(indices):
            entries = slice(side.indptr[j], side.indptr[j + 1])
            out[side.indices[entries], position] = side.data[entries]
        return out

    def column_energies(self) -> np.ndarray:
        """Σ_i X_ij² for each column j."""
        columns = np.repeat(np.arange(self.shape[1]), np.diff(self.by_column.indptr))
        return np.bincount(columns, np.square(self.by_column.data, dtype=np.float64), self.shape[1])

    def gram_column(self, j: int) -> np.ndarray:
        """Xᵀ x_j, from the rows where x_j is not zero."""
        out = np.zeros(self.shape[1])
        one, rows = self.by_column, self.by_row
        entries = slice(one.indptr[j], one.indptr[j + 1])
        chosen, values = one.indices[entries], one.data[entries]
        compiled_sparse.add_rows(rows.indptr, rows.indices, rows.data, chosen, values, out)
        return out

    def native(self, values: Any) -> np.ndarray:
        """As a NumPy array of this matrix's number type."""
        return kernels.of(values).to_numpy(values).astype(self.dtype, copy=False)

    def squared_distance(self, W: np.ndarray, Ht: np.ndarray) -> float:
        """‖X − W H‖² by the trace formula, with products in float64."""
        exact_Ht = Ht.astype(np.float64)

        def work(start: int, stop: int) -> tuple[float, np.ndarray]:
            crossed, gram = 0.0, np.zeros((Ht.shape[1], Ht.shape[1]))
            for a in range(start, stop, TILE_ROWS):
                b = min(a + TILE_ROWS, stop)
                w = W[a:b].astype(np.float64)
                crossed += float(np.vdot(w, _product(self.by_row, exact_Ht, a, b)))
                gram += w.T @ w
            return crossed, gram

        parts = threads.over(self._pieces(self.by_row, Ht.shape[1], Ht.shape[1]), work)
        gram = sum((part[1] for part in parts[1:]), parts[0][1])
        distance = self.squared_norm - 2 * sum(part[0] for part in parts)
        return distance + float(np.vdot(gram, exact_Ht.T @ exact_Ht))

    def _gather(self, side: Any, B: np.ndarray) -> np.ndarray:
        out = np.empty((side.shape[0], B.shape[1]), self.dtype)
        B = np.ascontiguousarray(B, self.dtype)
        threads.over(self._pieces(side, B.shape[1]), lambda a, b: _product_into(side, B, a, out[a:b]))
        return out

    def _pieces(self, side: Any, columns: int, per_row: int = 0) -> list[tuple[int, int]]:
        """Ranges of rows with equal effort: entries gathered, and what a row costs beside them (in the same unit)."""
        rows = side.shape[0]
        effort = side.indptr * np.int64(GATHER_COST) + np.arange(rows + 1, dtype=np.int64) * per_row
        return threads.ranges(rows, 2.0 * columns * float(effort[-1]), effort)


def _product(side: Any, B: np.ndarray, start: int, stop: int) -> np.ndarray:
    out = np.empty((stop - start, B.shape[1]), B.dtype)
    _product_into(side, B, start, out)
    return out


def _product_into(side: Any, B: np.ndarray, start: int, out: np.ndarray) -> None:
    compiled_sparse.times_rows(side.indptr, side.indices, side.data, B, start, out)
