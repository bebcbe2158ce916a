"""Sparse rows in CSR form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.core import runtime
from partsong.core.interfaces import Sums
from partsong.core.runtime import cached_property
from partsong.data.csr import CHUNK, GATHER_COST, CsrRows, chunks
from partsong.data.dense import FEW_COMPONENTS
from partsong.kernels import csr_products, fused_steps, numpy_backend
from partsong.kernels.fused_steps import FusedSteps, StepRule, max_steps_per_call

TRUSTED = 1e-11
"""Below this share of ‖X‖², squared errors from the trace formula are mostly rounding."""
KNOWN = 1e-13
"""The smallest squared error that the trace formula can resolve, as a share of ‖X‖²."""
MOST_ENTRYWISE = 2e8
"""Maximum multiply-adds for computing all entries of W H, zeros of X included."""
EXACT_SUMS = 1 << 21
"""Up to this many sums are kept in float64."""
SECOND_COPY_BYTES = 16 << 20
"""Data up to this size are also stored by column."""


@dataclass(frozen=True, eq=False)
class SparseMatrix(CsrRows):
    """Rows in CSR form with ascending columns; never dense.

    X Hᵀ goes over rows and gathers rows of Hᵀ. XᵀW gathers rows of W if the CSR form of the transpose is available;
    otherwise rows of W are scattered, with a range of columns for each thread. A second copy is faster while W fits the
    cache, and needs as much memory as the data.
    """

    @staticmethod
    def of_rows(by_row: Any) -> SparseMatrix:
        """Create a matrix, with a second copy by column if it is small."""
        is_small = by_row.data.nbytes + by_row.indices.nbytes <= SECOND_COPY_BYTES
        return SparseMatrix(by_row, by_row.T.tocsr() if is_small else None)

    @cached_property
    def squared_norm(self) -> float:
        data = self.by_row.data
        return sum(float(np.square(data[chunk], dtype=np.float64).sum()) for chunk in chunks(data))

    @cached_property
    def mean(self) -> float:
        return float(self.by_row.data.sum(dtype=np.float64)) / max(1, self.shape[0] * self.shape[1])

    def gram_is_cheap(self, k: int) -> bool:
        return k < FEW_COMPONENTS or k * self.shape[0] < 1.5 * self.stored

    def visit(
        self, Ht: np.ndarray, A: np.ndarray, step: Callable[[slice, np.ndarray], Sums]
    ) -> tuple[np.ndarray, Sums]:
        sums = self.walk(Ht, step)
        return self.transposed_times(A), sums

    def walk(self, Ht: np.ndarray, step: Callable[[slice, np.ndarray], Sums]) -> Sums:
        Ht = np.ascontiguousarray(Ht, self.dtype)
        pieces = self._pieces(self.by_row, Ht.shape[1], 2 * Ht.shape[1])
        return self.summed_over_tiles(pieces, lambda at: step(at, _product(self.by_row, Ht, at.start, at.stop)))

    def transposed(self) -> SparseMatrix | None:
        return None if self.by_column is None else SparseMatrix(self.by_column, self.by_row)

    def times(self, B: np.ndarray) -> np.ndarray:
        out = np.empty((self.shape[0], B.shape[1]), self.dtype)
        B = np.ascontiguousarray(B, self.dtype)
        runtime.map_ranges(
            self._pieces(self.by_row, B.shape[1]), lambda a, b: _product_into(self.by_row, B, a, out[a:b])
        )
        return out

    def transposed_times(self, A: np.ndarray) -> np.ndarray:
        out = np.empty((self.shape[1], A.shape[1]), self.dtype)
        A = np.ascontiguousarray(A, self.dtype)
        side = self.by_row if self.by_column is None else self.by_column
        entries = side.indptr, side.indices, side.data, A
        if self.by_column is not None:
            gather = csr_products.gather_rows
            runtime.map_ranges(self._pieces(side, A.shape[1]), lambda a, b: gather(*entries, a, out[a:b]))
            return out
        scatter = csr_products.scatter_columns
        total = np.empty(out.shape, np.float64 if out.size <= EXACT_SUMS else self.dtype)
        runtime.map_ranges(self._column_pieces(A.shape[1]), lambda a, b: scatter(*entries, a, out[a:b], total[a:b]))
        return total.astype(self.dtype, copy=False)

    def max_steps_per_call(self, rank: int, rule: StepRule) -> int:
        """Steps per call, for a fraction of a second; 0 without a copy by column, or if threads share the rows."""
        if self.by_column is None or len(self._pieces(self.by_row, rank, 2 * rank)) > 1:
            return 0
        return max_steps_per_call(4.0 * rank * GATHER_COST * self.stored, self.shape, rank, rule)

    def run_fused_steps(
        self, W: np.ndarray, W_before: np.ndarray, Ht: np.ndarray, Ht_before: np.ndarray, steps: FusedSteps
    ) -> None:
        """Run steps by rows, then by columns; see solvers.local_steps."""
        by_row, by_column = ((side.indptr, side.indices, side.data) for side in (self.by_row, self.by_column))
        fused_steps.run_on_sparse(by_row, by_column, W, W_before, Ht, Ht_before, steps)

    def rows(self, indices: np.ndarray) -> SparseMatrix:
        from scipy.sparse import csr_array

        chosen = csr_array(self.by_row)[indices]
        return SparseMatrix.of_rows(chosen)

    def squared_distance(self, W: np.ndarray, Ht: np.ndarray) -> float:
        """‖X − W H‖² in float64: by the trace formula, or entry by entry if that would be mostly rounding."""
        side = self.by_row
        entries = side.indptr, side.indices, side.data, Ht
        inner = csr_products.inner_with_rows
        parts = runtime.map_ranges(self._pieces(side, Ht.shape[1]), lambda a, b: inner(*entries, W[a:b], a))
        squared = self.squared_norm - 2 * sum(parts) + float(np.vdot(numpy_backend.gram(W), numpy_backend.gram(Ht)))
        if squared > TRUSTED * self.squared_norm:
            return squared
        is_affordable = float(self.shape[0]) * self.shape[1] * Ht.shape[1] <= MOST_ENTRYWISE
        return self._distance_by_entries(W, Ht) if is_affordable else max(squared, KNOWN * self.squared_norm)

    def _distance_by_entries(self, W: np.ndarray, Ht: np.ndarray) -> float:
        """‖X − W H‖² in blocks of rows of W H: n·m·k operations, for nearly perfect fits."""
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
        """Ranges of rows of equal cost: gathered entries plus `per_row` (in the same unit)."""
        rows = side.shape[0]
        effort = side.indptr * np.int64(GATHER_COST) + np.arange(rows + 1, dtype=np.int64) * per_row
        return runtime.split_range(rows, 2.0 * columns * float(effort[-1]), effort)

    def _column_pieces(self, columns: int) -> list[tuple[int, int]]:
        """Ranges of columns with equal numbers of entries."""
        counts = sum(np.bincount(self.by_row.indices[c], minlength=self.shape[1]) for c in chunks(self.by_row.data))
        effort = np.concatenate([[0], np.cumsum(counts)]) * np.int64(GATHER_COST)
        return runtime.split_range(self.shape[1], 2.0 * columns * float(effort[-1]), effort.tolist())


def _product(side: Any, B: np.ndarray, start: int, stop: int) -> np.ndarray:
    out = np.empty((stop - start, B.shape[1]), B.dtype)
    _product_into(side, B, start, out)
    return out


def _product_into(side: Any, B: np.ndarray, start: int, out: np.ndarray) -> None:
    csr_products.gather_rows(side.indptr, side.indices, side.data, B, start, out)
