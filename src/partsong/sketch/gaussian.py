"""Gaussian sketches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partsong import threads
from partsong.core import Array, Matrix
from partsong.sketch import products
from partsong.sketch.operator import Operator, Source, require_dimension
from partsong.sketch.products import DRAWN_ROWS, GROUP
from partsong.streams import Name

DRAW_COST = 60.0
"""What a normal number costs, in floating-point operations."""


@dataclass(frozen=True, slots=True)
class Gaussian:
    """Entries 𝒩(0, 1/d), independent: E[S Sᵀ] = I.

    O(size·d) to draw, and a dense or sparse product with d columns to apply. Who sees A S and S knows of each row of
    A its projection on d random directions; further sketches add theirs (see `recover`).
    """

    dimension: int

    def __post_init__(self) -> None:
        require_dimension(self.dimension)

    def draw(self, size: int, seed: int, *names: Name) -> Operator:
        """S (size × d) from the stream of these names."""
        return Operator(GaussianEntries(int(size), int(self.dimension), Source.of(seed, names)))


@dataclass(frozen=True, slots=True)
class GaussianEntries:
    """Entries in blocks of rows and columns, each with a stream of its own: only those in use are drawn.

    They are drawn in float64; float32 ones are the same, rounded.
    """

    size: int
    dimension: int
    source: Source

    def entries(self, indices: np.ndarray, first: int, last: int, dtype: np.dtype) -> np.ndarray:
        """S[indices, first:last], for ascending indices."""
        out = np.empty((len(indices), last - first), dtype)
        numbers, begins = np.unique(indices // DRAWN_ROWS, return_index=True)
        ends = np.append(begins[1:], len(indices))

        def work(start: int, stop: int) -> None:
            for number, begin, end in zip(numbers[start:stop], begins[start:stop], ends[start:stop], strict=True):
                within = indices[begin:end] - number * DRAWN_ROWS
                is_whole = within[-1] - within[0] == end - begin - 1
                rows = slice(int(within[0]), int(within[-1]) + 1) if is_whole else within
                for group in range(first // GROUP, -(-last // GROUP)):
                    here = group * GROUP
                    a, b = max(first, here), min(last, here + GROUP)
                    block = self._block(int(number), group, int(within[-1]) + 1)
                    out[begin:end, a - first : b - first] = block[rows][:, a - here : b - here]

        threads.over(threads.ranges(len(numbers), DRAW_COST * out.size), work)
        return out

    def _block(self, number: int, group: int, height: int) -> np.ndarray:
        """The upper rows of a block, times 1/√d."""
        width = min(GROUP, self.dimension - group * GROUP)
        block = self.source.stream("gaussian", number, group).standard_normal((height, width))
        return np.multiply(block, self.dimension**-0.5, out=block)

    def times(self, matrix: Matrix, start: int) -> Array:
        """A S[start : start + c]."""
        return products.times(self, matrix, start)

    def transposed_times(self, matrix: Matrix, start: int) -> Array:
        """Aᵀ S[start : start + r]."""
        return products.transposed_times(self, matrix, start)
