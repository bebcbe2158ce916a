"""Count sketches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partsong.core import Array, Matrix
from partsong.sketch import placing
from partsong.sketch.operator import Operator, Source, require_dimension
from partsong.sketch.placing import Placed
from partsong.streams import Name

DRAWN_TOGETHER = 4096
"""Coordinates that share a stream."""


@dataclass(frozen=True, slots=True)
class CountSketch:
    """Each coordinate goes to one of d random places with a random sign: E[S Sᵀ] = I without a factor.

    O(entries stored) to apply (Clarkson & Woodruff, 2013). A column of A that is alone in its place, or alone there
    in not being zero, can be read off A S.
    """

    dimension: int

    def __post_init__(self) -> None:
        require_dimension(self.dimension)

    def draw(self, size: int, seed: int, *names: Name) -> Operator:
        """S (size × d) from the stream of these names."""
        return Operator(SignedPlaces(int(size), int(self.dimension), Source.of(seed, names)))


@dataclass(frozen=True, slots=True)
class SignedPlaces:
    """Places and signs in blocks of coordinates, each with a stream of its own."""

    size: int
    dimension: int
    source: Source

    def placed(self, start: int, stop: int) -> Placed:
        """The entries of S[start:stop]."""
        numbers = range(start // DRAWN_TOGETHER, -(-stop // DRAWN_TOGETHER))
        drawn = [self.source.stream("count", n).integers(2 * self.dimension, size=DRAWN_TOGETHER) for n in numbers]
        both = np.concatenate([np.empty(0, np.int64), *drawn])[start % DRAWN_TOGETHER :][: stop - start]
        return Placed(np.arange(stop - start), both // 2, 1.0 - 2.0 * (both % 2))

    def entries(self, indices: np.ndarray, first: int, last: int, dtype: np.dtype) -> np.ndarray:
        """S[indices, first:last], for ascending indices."""
        return placing.entries(self, indices, first, last, dtype)

    def times(self, matrix: Matrix, start: int) -> Array:
        """A S[start : start + c]."""
        return placing.times(self, matrix, start)

    def transposed_times(self, matrix: Matrix, start: int) -> Array:
        """Aᵀ S[start : start + r]."""
        return placing.transposed_times(self, matrix, start)
