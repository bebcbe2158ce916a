"""Dense rows in memory or on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from partsong import kernels, threads
from partsong.data.mapped import give_back, mapping
from partsong.kernels import compiled_sweeps

TILE_BYTES = 2 << 20
MAPPED_TILE_BYTES = 4 << 20


@dataclass(frozen=True, eq=False)
class DenseMatrix:
    """Rows as a two-dimensional array, C or F order, in memory or mapped from a file larger than memory.

    Every product goes over tiles of rows, so that one pass reads X once: a tile is multiplied by Hᵀ, its block of W
    is updated, and its share of WᵀW and WᵀX is added while the tile is still in cache. Integers and half precision
    are converted tile by tile; pages of a mapped file are given back once a tile is done.
    """

    X: np.ndarray
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.X.shape[0], self.X.shape[1]

    @property
    def stored(self) -> int:
        """Entries kept: all of them."""
        return self.shape[0] * self.shape[1]

    @cached_property
    def squared_norm(self) -> float:
        """‖X‖², in float64."""
        return sum(self._over_tiles(lambda tile: compiled_sweeps.inner_rows(tile, tile)))

    @cached_property
    def mean(self) -> float:
        """The mean entry."""
        total = sum(self._over_tiles(lambda tile: float(tile.sum(dtype=np.float64))))
        return total / max(1, self.shape[0] * self.shape[1])

    def visit(
        self, Ht: np.ndarray, update: Callable[[int, int, np.ndarray], None], F: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """One pass over the rows; see core.Matrix."""
        k, m = Ht.shape[1], self.shape[1]

        def work(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
            gram, cross, product = np.zeros((k, k)), None, None
            for a, b, tile in self._tiles(start, stop):
                update(a, b, tile @ Ht)
                gram += F[a:b].T @ F[a:b]
                if cross is None:
                    cross = F[a:b].T @ tile
                    continue
                product = np.dot(F[a:b].T, tile, out=product)
                cross += product
            return gram, np.zeros((k, m), self.dtype) if cross is None else cross

        (gram, cross), *others = threads.over(self._pieces(k), work)
        while others:
            more = others.pop(0)
            gram, cross = gram + more[0], np.add(cross, more[1], out=cross)
        return gram.astype(self.dtype), np.ascontiguousarray(cross.T)

    def walk(self, Ht: np.ndarray, update: Callable[[int, int, np.ndarray], None]) -> None:
        """One pass over the rows without sums; see core.Matrix."""

        def work(start: int, stop: int) -> None:
            for a, b, tile in self._tiles(start, stop):
                update(a, b, tile @ Ht)

        threads.over(self._pieces(Ht.shape[1]), work)

    def times(self, B: np.ndarray) -> np.ndarray:
        """X B."""
        out = np.empty((self.shape[0], B.shape[1]), self.dtype)

        def work(start: int, stop: int) -> None:
            for a, b, tile in self._tiles(start, stop):
                np.matmul(tile, B, out=out[a:b])

        threads.over(self._pieces(B.shape[1]), work)
        return out

    def transposed_times(self, A: np.ndarray) -> np.ndarray:
        """Xᵀ A."""

        def work(start: int, stop: int) -> np.ndarray:
            total = np.zeros((A.shape[1], self.shape[1]), self.dtype)
            for a, b, tile in self._tiles(start, stop):
                total += A[a:b].T @ tile
            return total

        parts = threads.over(self._pieces(A.shape[1]), work)
        return np.ascontiguousarray(sum(parts[1:], parts[0]).T)

    def rows(self, indices: np.ndarray) -> DenseMatrix:
        """Some of the rows, in memory; `indices` ascend."""
        if mapping(self.X) is None:
            return DenseMatrix(np.ascontiguousarray(self.X[indices], self.dtype), self.dtype)
        out = np.empty((len(indices), self.shape[1]), self.dtype)
        for a, b, tile in self._tiles(0, self.shape[0]):
            here = slice(*np.searchsorted(indices, (a, b)))
            out[here] = tile[indices[here] - a]
        return DenseMatrix(out, self.dtype)

    def columns(self, indices: np.ndarray) -> np.ndarray:
        """Some of the columns, as a new array."""
        out = np.empty((self.shape[0], len(indices)), self.dtype)
        for a, b, tile in self._tiles(0, self.shape[0]):
            out[a:b] = tile[:, indices]
        return out

    def column_energies(self) -> np.ndarray:
        """Σ_i X_ij² for each column j."""
        return np.sum(
            [np.einsum("ij,ij->j", t, t, dtype=np.float64) for _, _, t in self._tiles(0, self.shape[0])], axis=0
        )

    def gram_column(self, j: int) -> np.ndarray:
        """Xᵀ x_j."""
        parts = [tile.T @ tile[:, j] for _, _, tile in self._tiles(0, self.shape[0])]
        return np.asarray(np.sum(parts, axis=0, dtype=np.float64))

    def native(self, values: Any) -> np.ndarray:
        """As a NumPy array of this matrix's number type."""
        return kernels.of(values).to_numpy(values).astype(self.dtype, copy=False)

    def squared_distance(self, W: np.ndarray, Ht: np.ndarray) -> float:
        """‖X − W H‖² by the trace formula with products in float64, tile by tile."""
        H = Ht.T.astype(np.float64)

        def work(start: int, stop: int) -> tuple[float, np.ndarray]:
            crossed, gram = 0.0, np.zeros((len(H), len(H)))
            for a, b, tile in self._tiles(start, stop):
                w = W[a:b].T.astype(np.float64)
                crossed += float(np.vdot(H, w @ tile))
                gram += w @ w.T
            return crossed, gram

        parts = threads.over(self._pieces(len(H)), work)
        gram = sum((part[1] for part in parts[1:]), parts[0][1])
        return self.squared_norm - 2 * sum(part[0] for part in parts) + float(np.vdot(gram, H @ H.T))

    def _pieces(self, columns: int) -> list[tuple[int, int]]:
        return threads.ranges(self.shape[0], 2.0 * self.shape[0] * self.shape[1] * max(1, columns))

    def _tiles(self, start: int, stop: int) -> Iterator[tuple[int, int, np.ndarray]]:
        mapped = mapping(self.X)
        is_by_row = self.X.flags.c_contiguous
        bytes_per_row = max(1, self.shape[1] * self.dtype.itemsize)
        height = max(64, (MAPPED_TILE_BYTES if mapped else TILE_BYTES) // bytes_per_row)
        for a in range(start, stop, height):
            b = min(a + height, stop)
            yield a, b, np.asarray(self.X[a:b], self.dtype)
            if mapped is not None:
                give_back(mapped, self.X, *((a, b) if is_by_row else (0, self.shape[1])))

    def _over_tiles(self, function: Callable[[np.ndarray], float]) -> list[float]:
        def work(start: int, stop: int) -> float:
            return sum(function(tile) for _, _, tile in self._tiles(start, stop))

        return threads.over(self._pieces(1), work)
