"""Dense rows in memory or mapped from a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from partsong import kernels
from partsong.core import runtime
from partsong.core.interfaces import RowBlock, Sums
from partsong.core.runtime import cached_property
from partsong.data.scan import BLOCK_HEIGHT, FEWEST_TILE_ROWS, MOST_SUMMED, Tiles, even_ranges, file_mapping
from partsong.kernels import fused_steps, nnls, numpy_backend
from partsong.kernels.fused_steps import FusedSteps, StepRule, max_steps_per_call

FEWEST_SUMMED = 64
"""Minimum number of rows whose products are summed in the type of the data; larger sums are in float64."""
MANY_SUMS = 1 << 15
"""With this many entries of XᵀW rounding errors average out; fewer are summed in float64, over fewer rows."""
FEW_COMPONENTS = 16
"""Below this, WᵀW in float64 is cheap, and rounding errors in its entries would not average out."""
FUSED_TILE_BYTES = 1 << 20
SUMS_BYTES = 32 << 20
"""Maximum memory for the partial sums of all threads together."""


@dataclass(frozen=True, eq=False)
class DenseMatrix:
    """Rows as a two-dimensional array, C or F order, in memory or mapped from a file larger than memory.

    Every product goes over tiles of rows, so that one pass reads X once: a tile is multiplied by Hᵀ, its block of W is
    updated, and its part of WᵀX is added while the tile is in cache. Rows too wide for that are read twice, in blocks
    of rows and columns, and threads split the columns of WᵀX instead of computing a sum each. Integers and half
    precision are converted tile by tile; pages of a mapped file are released after each tile.
    """

    X: np.ndarray
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.X.shape[0], self.X.shape[1]

    @property
    def stored(self) -> int:
        return self.shape[0] * self.shape[1]

    @cached_property
    def squared_norm(self) -> float:
        return self._sum(lambda block: nnls.inner_rows(block, block))

    @cached_property
    def mean(self) -> float:
        total = self._sum(lambda block: float(block.sum(dtype=np.float64)))
        return total / max(1, self.shape[0] * self.shape[1])

    @property
    def row_weights(self) -> None:
        """All rows have weight 1."""

    @property
    def total_weight(self) -> float:
        return float(self.shape[0])

    def row_energies(self) -> np.ndarray:
        total = np.zeros(self.shape[0])
        for a, b, _, _, block in self._all_blocks():
            total[a:b] += np.einsum("ij,ij->i", block, block, dtype=np.float64)
        return total

    def gram_is_cheap(self, k: int) -> bool:
        return k < FEW_COMPONENTS or 32 * k < self.shape[1] or self._sums_are_large(k)

    def visit(
        self, Ht: np.ndarray, A: np.ndarray, step: Callable[[slice, np.ndarray], Sums]
    ) -> tuple[np.ndarray, Sums]:
        k = Ht.shape[1]
        if self._sums_are_large(k):
            sums = self.walk(Ht, step)
            return self.transposed_times(A), sums
        height = self._summed_together(k)
        kind = np.float64 if k * self.shape[1] < MANY_SUMS else self.dtype

        def work(start: int, stop: int) -> Sums:
            cross, product = np.zeros((k, self.shape[1]), kind), np.empty((k, self.shape[1]), self.dtype)

            def on_tile(at: slice, tile: np.ndarray) -> Sums:
                sums = step(at, tile @ Ht)
                for a, b in even_ranges(at.start, at.stop, height):
                    np.add(cross, np.dot(A[a:b].T, tile[a - at.start : b - at.start], out=product), out=cross)
                return sums

            return cross, *self._summed_over_tiles(start, stop, on_tile)

        total = reduce(kernels.add, runtime.map_ranges(self._pieces(k), work))
        return np.ascontiguousarray(total[0].T, self.dtype), total[1:]

    def walk(self, Ht: np.ndarray, step: Callable[[slice, np.ndarray], Sums]) -> Sums:
        def work(start: int, stop: int) -> Sums:
            if start == stop or not self._tiles.are_low:
                return self._summed_over_tiles(start, stop, lambda at, tile: step(at, tile @ Ht))
            return reduce(
                kernels.add, (step(slice(a, b), product) for a, b, product in self._products(start, stop, Ht))
            )

        return reduce(kernels.add, runtime.map_ranges(self._pieces(Ht.shape[1]), work))

    def blocks(self, work: Callable[[RowBlock], Sums], per_cell: float = 1.0) -> Sums:
        def on_tile(at: slice, tile: np.ndarray) -> Sums:
            return work(RowBlock(at, self.shape[1], tile=tile))

        pieces = runtime.split_range(self.shape[0], per_cell * self.stored)
        return reduce(kernels.add, runtime.map_ranges(pieces, lambda a, b: self._summed_over_tiles(a, b, on_tile)))

    def transposed(self) -> DenseMatrix:
        return DenseMatrix(self.X.T, self.dtype)

    def times(self, B: np.ndarray) -> np.ndarray:
        out = np.empty((self.shape[0], B.shape[1]), self.dtype)

        def work(start: int, stop: int) -> None:
            for a, b, product in self._products(start, stop, B):
                out[a:b] = product

        runtime.map_ranges(self._pieces(B.shape[1]), work)
        return out

    def transposed_times(self, A: np.ndarray) -> np.ndarray:
        if self._sums_are_large(A.shape[1]):
            return self._by_columns(A)

        def work(start: int, stop: int) -> np.ndarray:
            total = np.zeros((A.shape[1], self.shape[1]), self.dtype)
            for a, b, tile in self._tiles.of_rows(start, stop):
                total += A[a:b].T @ tile
            return total

        parts = runtime.map_ranges(self._pieces(A.shape[1]), work)
        return np.ascontiguousarray(sum(parts[1:], parts[0]).T)

    def _by_columns(self, A: np.ndarray) -> np.ndarray:
        """Xᵀ A with a range of columns for each thread, without partial sums."""
        n, m = self.shape
        out = np.empty((m, A.shape[1]), self.dtype)
        width = self._tiles.narrow_width

        def work(start: int, stop: int) -> None:
            for first in range(start, stop, width):
                last = min(first + width, stop)
                total = np.zeros((last - first, A.shape[1]))
                for a, b, _, _, block in self._tiles.blocks((0, n), (first, last)):
                    total += block.T @ A[a:b]
                out[first:last] = total

        runtime.map_ranges(runtime.split_range(m, 2.0 * n * m * A.shape[1]), work)
        return out

    def _summed_over_tiles(self, start: int, stop: int, work: Callable[[slice, np.ndarray], Sums]) -> Sums:
        """Σ work(rows, X[rows]) over tiles of whole rows; one empty tile if there are no rows."""
        if start == stop:
            return work(slice(start, stop), np.empty((0, self.shape[1]), self.dtype))
        return reduce(kernels.add, (work(slice(a, b), tile) for a, b, tile in self._tiles.of_rows(start, stop)))

    def _products(self, start: int, stop: int, B: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
        """X B by blocks of rows; products of wide rows are summed in float64."""
        if not self._tiles.are_low:
            for a, b, tile in self._tiles.of_rows(start, stop):
                yield a, b, tile @ B
            return
        for a in range(start, stop, BLOCK_HEIGHT):
            b = min(a + BLOCK_HEIGHT, stop)
            product = np.zeros((b - a, B.shape[1]))
            for _, _, c, d, block in self._tiles.blocks((a, b), (0, self.shape[1])):
                product += block @ B[c:d]
            yield a, b, product.astype(self.dtype, copy=False)

    def max_steps_per_call(self, rank: int, rule: StepRule) -> int:
        """Steps per call, for a fraction of a second; 0 for rows that are wide, mapped, converted or split."""
        is_ready = self.X.flags.c_contiguous and self.X.dtype == self.dtype and file_mapping(self.X) is None
        if not is_ready or len(self._pieces(rank)) > 1 or self._sums_are_large(rank):
            return 0
        return max_steps_per_call(4.0 * rank * self.stored, self.shape, rank, rule)

    def run_fused_steps(
        self, W: np.ndarray, W_before: np.ndarray, Ht: np.ndarray, Ht_before: np.ndarray, steps: FusedSteps
    ) -> None:
        in_cache = max(FEWEST_TILE_ROWS, FUSED_TILE_BYTES // max(1, self.shape[1] * self.dtype.itemsize))
        height = min(in_cache, self._summed_together(Ht.shape[1]))
        fused_steps.run_on_dense(self.X, W, W_before, Ht, Ht_before, steps, height)

    def rows(self, indices: np.ndarray) -> DenseMatrix:
        """Some of the rows in memory; `indices` are ascending."""
        if file_mapping(self.X) is None:
            return DenseMatrix(np.ascontiguousarray(self.X[indices], self.dtype), self.dtype)
        out = np.empty((len(indices), self.shape[1]), self.dtype)
        for a, b, c, d, block in self._all_blocks():
            here = slice(*np.searchsorted(indices, (a, b)))
            out[here, c:d] = block[indices[here] - a]
        return DenseMatrix(out, self.dtype)

    def columns(self, indices: np.ndarray) -> np.ndarray:
        out = np.empty((self.shape[0], len(indices)), self.dtype)
        for a, b, c, d, block in self._all_blocks():
            here = np.flatnonzero((indices >= c) & (indices < d))
            out[a:b, here] = block[:, indices[here] - c]
        return out

    def column_energies(self) -> np.ndarray:
        total = np.zeros(self.shape[1])
        for _, _, c, d, block in self._all_blocks():
            total[c:d] += np.einsum("ij,ij->j", block, block, dtype=np.float64)
        return total

    def gram_column(self, j: int) -> np.ndarray:
        total = np.zeros(self.shape[1])
        for a, b, c, d, block in self._all_blocks():
            total[c:d] += block.T @ np.asarray(self.X[a:b, j], self.dtype)
        return total

    def native(self, values: Any) -> np.ndarray:
        return numpy_backend.cast(values, self)

    def squared_distance(self, W: np.ndarray, Ht: np.ndarray) -> float:
        def work(start: int, stop: int) -> float:
            total = 0.0
            for a, b, c, d, block in self._tiles.blocks((start, stop), (0, self.shape[1])):
                rest = W[a:b].astype(np.float64) @ Ht[c:d].astype(np.float64).T
                rest -= block
                total += float(np.vdot(rest, rest))
            return total

        return sum(runtime.map_ranges(self._pieces(Ht.shape[1]), work))

    @property
    def _tiles(self) -> Tiles:
        return Tiles(self.X, self.dtype)

    def _pieces(self, columns: int) -> list[tuple[int, int]]:
        return runtime.split_range(self.shape[0], 2.0 * self.shape[0] * self.shape[1] * max(1, columns))

    def _summed_together(self, columns: int) -> int:
        """Number of rows whose products are summed in the type of the data."""
        return min(max(FEWEST_SUMMED, columns * self.shape[1] // 32), MOST_SUMMED)

    def _sums_are_large(self, columns: int) -> bool:
        """Whether to split XᵀA by columns because a partial sum for each thread would need too much memory."""
        numbers = columns * self.shape[1] * len(self._pieces(columns))
        return self._tiles.are_low or numbers * (8 + self.dtype.itemsize) > SUMS_BYTES

    def _all_blocks(self) -> Iterator[tuple[int, int, int, int, np.ndarray]]:
        return self._tiles.blocks((0, self.shape[0]), (0, self.shape[1]))

    def _sum(self, function: Callable[[np.ndarray], float]) -> float:
        """Σ of a number for each block."""

        def work(start: int, stop: int) -> float:
            return sum(function(block) for *_, block in self._tiles.blocks((start, stop), (0, self.shape[1])))

        return sum(runtime.map_ranges(self._pieces(1), work))
