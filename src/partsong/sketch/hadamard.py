"""Subsampled randomized Hadamard transforms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partsong import threads
from partsong.core import Array, Matrix
from partsong.data.dense import DenseMatrix
from partsong.data.tiles import Tiles
from partsong.kernels import compiled_sketches as compiled
from partsong.once import once
from partsong.sketch import products
from partsong.sketch.operator import Operator, Source, require_dimension
from partsong.streams import Name

DRAWN_TOGETHER = 4096
"""Signs that share a stream."""
FEW = 64
"""So few dimensions that a product with the entries of S is faster than a transform."""
LONGEST = 1024
"""Coordinates that are transformed together: what fits the cache."""


@dataclass(frozen=True, slots=True)
class Hadamard:
    """Random signs, a Walsh–Hadamard transform, and d of its results: S = √(n'/d)·D·H·R, so E[S Sᵀ] = I.

    n' is the next power of two, D (n × n) has random signs, H the first n rows of the orthogonal n' × n' Hadamard
    matrix, and R takes d of its columns without replacement (Ailon & Chazelle, 2006; Tropp, 2011). So

        S_ic = ± (−1)^|i ∧ r_c| / √d,    |i ∧ r| the bits that i and r have in common.

    Dense rows cost O(size·log d), as only d results are wanted (Ailon & Liberty, 2009); sparse ones O(entries·d).
    """

    dimension: int

    def __post_init__(self) -> None:
        require_dimension(self.dimension)

    def draw(self, size: int, seed: int, *names: Name) -> Operator:
        """S (size × d) from the stream of these names."""
        return Operator(SignedHadamard(int(size), int(self.dimension), Source.of(seed, names)))


@dataclass(frozen=True)
class SignedHadamard:
    """Signs in blocks of coordinates, each with a stream of its own; the columns of H are drawn by everybody."""

    size: int
    dimension: int
    source: Source

    @once
    def chosen(self) -> np.ndarray:
        """The columns r of H, ascending."""
        padded = _power_of_two(self.size)
        return np.sort(self.source.stream("columns").choice(padded, self.dimension, replace=False, shuffle=False))

    def entries(self, indices: np.ndarray, first: int, last: int, dtype: np.dtype) -> np.ndarray:
        """S[indices, first:last], for ascending indices."""
        out = np.empty((len(indices), last - first), dtype)
        if len(indices):
            start = int(indices[0])
            signs = self._scaled_signs(start, int(indices[-1]) + 1, dtype)[indices - start]
            compiled.hadamard_entries(indices, signs, self.chosen[first:last], out)
        return out

    def times(self, matrix: Matrix, start: int) -> Array:
        """A S[start : start + c]."""
        if isinstance(matrix, DenseMatrix) and self.dimension > FEW:
            return self._transformed(matrix, start)
        return products.times(self, matrix, start)

    def transposed_times(self, matrix: Matrix, start: int) -> Array:
        """Aᵀ S[start : start + r]."""
        if isinstance(matrix, DenseMatrix):
            return self.times(DenseMatrix(matrix.X.T, matrix.dtype), start)
        return products.transposed_times(self, matrix, start)

    def _transformed(self, matrix: DenseMatrix, start: int) -> np.ndarray:
        """A S by transforms of as many coordinates as there are dimensions, whose results are added up with signs."""
        n, m = matrix.shape
        out = np.zeros((n, self.dimension), matrix.dtype)
        signs = self._scaled_signs(start, start + m, matrix.dtype)
        length = min(_power_of_two(max(1, m)), _power_of_two(self.dimension), LONGEST)
        tiles = Tiles(matrix.X, matrix.dtype)

        def work(first: int, last: int) -> None:
            for a, b, c, d, block in tiles.blocks((first, last), (0, m)):
                compiled.hadamard_rows(block, signs[c:d], start + c, self.chosen, length, out[a:b])

        threads.over(threads.ranges(n, 2.0 * n * m * length.bit_length()), work)
        return out

    def _scaled_signs(self, start: int, stop: int, dtype: np.dtype) -> np.ndarray:
        """±1/√d for coordinates start…stop."""
        numbers = range(start // DRAWN_TOGETHER, -(-stop // DRAWN_TOGETHER))
        drawn = [self.source.stream("signs", n).integers(2, size=DRAWN_TOGETHER) for n in numbers]
        bits = np.concatenate([np.empty(0, np.int64), *drawn])[start % DRAWN_TOGETHER :][: stop - start]
        return ((1 - 2 * bits) * self.dimension**-0.5).astype(dtype)


def _power_of_two(size: int) -> int:
    """The least one that is not below."""
    return 1 << (size - 1).bit_length()
