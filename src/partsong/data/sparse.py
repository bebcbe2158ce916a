"""Sparse rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong import kernels
from partsong.core import runtime
from partsong.core.runtime import once
from partsong.data.dense import FEW_COMPONENTS
from partsong.kernels import fused_steps as compiled_turns
from partsong.kernels import hals, numpy_backend
from partsong.kernels.fused_steps import Move, Turns, most_turns

TILE_ROWS = 4096
CHUNK = 1 << 20
"""Entries looked at together."""
TRUSTED = 1e-11
"""Squared errors below this share of ‖X‖² are mostly rounding where they are a difference of sums."""
KNOWN = 1e-13
"""The least that such a difference can tell."""
MOST_ENTRYWISE = 2e8
"""Multiply-adds for which all entries of W H are looked at, zeros of X included."""
EXACT_SUMS = 1 << 21
"""Sums up to this number are held in float64."""
SECOND_COPY_BYTES = 16 << 20
"""Data up to this size are held by column as well."""
GATHER_COST = 4
"""What an entry of a sparse product costs, in multiply-adds of a dense one: factor rows are fetched at random."""


@dataclass(frozen=True, eq=False)
class SparseMatrix:
    """Rows in CSR form with ascending columns; nothing is ever made dense.

    X Hᵀ goes over rows and gathers rows of Hᵀ. XᵀW gathers rows of W where the CSR form of the transpose is at hand;
    otherwise rows of W are scattered, with a range of columns for each thread. A second copy is faster while W fits
    the cache, and costs as much memory as the data.
    """

    by_row: Any
    by_column: Any = None

    @staticmethod
    def of_rows(by_row: Any) -> SparseMatrix:
        """With a second copy by column where that is small."""
        is_small = by_row.data.nbytes + by_row.indices.nbytes <= SECOND_COPY_BYTES
        return SparseMatrix(by_row, by_row.T.tocsr() if is_small else None)

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

    @once
    def squared_norm(self) -> float:
        """‖X‖², in float64."""
        data = self.by_row.data
        return sum(float(np.square(data[chunk], dtype=np.float64).sum()) for chunk in _chunks(data))

    @once
    def mean(self) -> float:
        """The mean entry, zeros counted."""
        return float(self.by_row.data.sum(dtype=np.float64)) / max(1, self.shape[0] * self.shape[1])

    def visit(
        self, Ht: np.ndarray, update: Callable[[int, int, np.ndarray], None], F: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """One pass over the rows, then one over the columns; see core.Matrix."""
        self.walk(Ht, update)
        is_cheap = F.shape[1] < FEW_COMPONENTS or F.size < 1.5 * self.stored
        return numpy_backend.gram(F, is_cheap), self.transposed_times(F)

    def walk(self, Ht: np.ndarray, update: Callable[[int, int, np.ndarray], None]) -> None:
        """One pass over the rows without sums; see core.Matrix."""

        def work(start: int, stop: int) -> None:
            for a in range(start, stop, TILE_ROWS):
                b = min(a + TILE_ROWS, stop)
                update(a, b, _product(self.by_row, Ht, a, b))

        runtime.over(self._pieces(self.by_row, Ht.shape[1], 2 * Ht.shape[1]), work)

    def times(self, B: np.ndarray) -> np.ndarray:
        """X B."""
        out = np.empty((self.shape[0], B.shape[1]), self.dtype)
        B = np.ascontiguousarray(B, self.dtype)
        runtime.over(self._pieces(self.by_row, B.shape[1]), lambda a, b: _product_into(self.by_row, B, a, out[a:b]))
        return out

    def transposed_times(self, A: np.ndarray) -> np.ndarray:
        """Xᵀ A."""
        out = np.empty((self.shape[1], A.shape[1]), self.dtype)
        A = np.ascontiguousarray(A, self.dtype)
        side = self.by_row if self.by_column is None else self.by_column
        entries = side.indptr, side.indices, side.data, A
        if self.by_column is not None:
            gather = hals.gather_rows
            runtime.over(self._pieces(side, A.shape[1]), lambda a, b: gather(*entries, a, out[a:b]))
            return out
        scatter = hals.scatter_columns
        total = np.empty(out.shape, np.float64 if out.size <= EXACT_SUMS else self.dtype)
        runtime.over(self._column_pieces(A.shape[1]), lambda a, b: scatter(*entries, a, out[a:b], total[a:b]))
        return total.astype(self.dtype, copy=False)

    def most_turns(self, rank: int, move: Move) -> int:
        """So many that a call takes a fraction of a second; none without a copy by column, or where threads share."""
        if self.by_column is None or len(self._pieces(self.by_row, rank, 2 * rank)) > 1:
            return 0
        return most_turns(4.0 * rank * GATHER_COST * self.stored, self.shape, rank, move)

    def take_turns(
        self, W: np.ndarray, W_before: np.ndarray, Ht: np.ndarray, Ht_before: np.ndarray, turns: Turns
    ) -> None:
        """By rows, then by columns; see local.turns."""
        by_row, by_column = ((side.indptr, side.indices, side.data) for side in (self.by_row, self.by_column))
        compiled_turns.on_sparse(by_row, by_column, W, W_before, Ht, Ht_before, turns)

    def rows(self, indices: np.ndarray) -> SparseMatrix:
        """Some of the rows."""
        from scipy.sparse import csr_array

        chosen = csr_array(self.by_row)[indices]
        return SparseMatrix.of_rows(chosen)

    def columns(self, indices: np.ndarray) -> np.ndarray:
        """Some of the columns, as a dense array."""
        out = np.zeros((self.shape[0], len(indices)), self.dtype)
        for position, j in enumerate(indices):
            rows, values = self._column(int(j))
            out[rows, position] = values
        return out

    def column_energies(self) -> np.ndarray:
        """Σ_i X_ij² for each column j."""
        total, side = np.zeros(self.shape[1]), self.by_row
        for chunk in _chunks(side.data):
            squares = np.square(side.data[chunk], dtype=np.float64)
            total += np.bincount(side.indices[chunk], squares, self.shape[1])
        return total

    def gram_column(self, j: int) -> np.ndarray:
        """Xᵀ x_j, from the rows where x_j is not zero."""
        out, side = np.zeros(self.shape[1]), self.by_row
        hals.add_rows(side.indptr, side.indices, side.data, *self._column(j), out)
        return out

    def _column(self, j: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows where column j is stored, and its values there."""
        if self.by_column is not None:
            entries = slice(self.by_column.indptr[j], self.by_column.indptr[j + 1])
            return self.by_column.indices[entries], self.by_column.data[entries]
        side = self.by_row
        found = [np.flatnonzero(side.indices[chunk] == j) + chunk.start for chunk in _chunks(side.data)]
        at = np.concatenate([np.empty(0, np.int64), *found])
        return np.searchsorted(side.indptr, at, side="right") - 1, side.data[at]

    def native(self, values: Any) -> np.ndarray:
        """As a NumPy array of this matrix's number type."""
        return kernels.of(values).to_numpy(values).astype(self.dtype, copy=False)

    def squared_distance(self, W: np.ndarray, Ht: np.ndarray) -> float:
        """‖X − W H‖² in float64: by the trace formula, or entry by entry where that is nothing but rounding."""
        side = self.by_row
        entries = side.indptr, side.indices, side.data, Ht
        inner = hals.inner_with_rows
        parts = runtime.over(self._pieces(side, Ht.shape[1]), lambda a, b: inner(*entries, W[a:b], a))
        squared = self.squared_norm - 2 * sum(parts) + float(np.vdot(numpy_backend.gram(W), numpy_backend.gram(Ht)))
        if squared > TRUSTED * self.squared_norm:
            return squared
        is_affordable = float(self.shape[0]) * self.shape[1] * Ht.shape[1] <= MOST_ENTRYWISE
        return self._distance_by_entries(W, Ht) if is_affordable else max(squared, KNOWN * self.squared_norm)

    def _distance_by_entries(self, W: np.ndarray, Ht: np.ndarray) -> float:
        """‖X − W H‖² with some rows of W H at a time: n·m·k operations, for models that fit nearly perfectly."""
        H, side, total = Ht.T.astype(np.float64), self.by_row, 0.0
        height = max(1, CHUNK // max(1, self.shape[1]))
        for a in range(0, self.shape[0], height):
            rest = W[a : a + height].astype(np.float64) @ H
            entries = slice(side.indptr[a], side.indptr[min(a + height, self.shape[0])])
            rows = np.repeat(np.arange(len(rest)), np.diff(side.indptr[a : a + len(rest) + 1]))
            rest[rows, side.indices[entries]] -= side.data[entries]
            total += float(np.vdot(rest, rest))
        return total

    def _pieces(self, side: Any, columns: int, per_row: int = 0) -> list[tuple[int, int]]:
        """Ranges of rows with equal effort: entries gathered, and what a row costs beside them (in the same unit)."""
        rows = side.shape[0]
        effort = side.indptr * np.int64(GATHER_COST) + np.arange(rows + 1, dtype=np.int64) * per_row
        return runtime.ranges(rows, 2.0 * columns * float(effort[-1]), effort)

    def _column_pieces(self, columns: int) -> list[tuple[int, int]]:
        """Ranges of columns with equal numbers of entries."""
        counts = sum(np.bincount(self.by_row.indices[c], minlength=self.shape[1]) for c in _chunks(self.by_row.data))
        effort = np.concatenate([[0], np.cumsum(counts)]) * np.int64(GATHER_COST)
        return runtime.ranges(self.shape[1], 2.0 * columns * float(effort[-1]), effort.tolist())


def _chunks(data: np.ndarray) -> list[slice]:
    return [slice(start, start + CHUNK) for start in range(0, max(1, len(data)), CHUNK)]


def _product(side: Any, B: np.ndarray, start: int, stop: int) -> np.ndarray:
    out = np.empty((stop - start, B.shape[1]), B.dtype)
    _product_into(side, B, start, out)
    return out


def _product_into(side: Any, B: np.ndarray, start: int, out: np.ndarray) -> None:
    hals.gather_rows(side.indptr, side.indices, side.data, B, start, out)
