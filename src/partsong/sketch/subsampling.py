"""Sketches that keep some of the coordinates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partsong.core import Array, Matrix
from partsong.once import once
from partsong.sketch import placing
from partsong.sketch.operator import Operator, Source, require_dimension
from partsong.sketch.placing import Placed
from partsong.streams import Name


@dataclass(frozen=True, slots=True)
class Subsampling:
    """d of the n coordinates, without replacement and in their order, each times √(n/d): E[S Sᵀ] = I.

    The paper prints the columns without the factor, with which E[S Sᵀ] = (d/n) I (Qian et al., 2020, Sec. 3.4).
    d = n gives S = I. O(rows·d) to apply. A S *is* d columns of A: who sees it sees those as they are.
    """

    dimension: int

    def __post_init__(self) -> None:
        require_dimension(self.dimension)

    def draw(self, size: int, seed: int, *names: Name) -> Operator:
        """S (size × d) from the stream of these names."""
        return Operator(ChosenCoordinates(int(size), int(self.dimension), Source.of(seed, names)))


@dataclass(frozen=True)
class ChosenCoordinates:
    """Which coordinates are kept: everybody draws all d of them, once."""

    size: int
    dimension: int
    source: Source

    @once
    def chosen(self) -> np.ndarray:
        """The coordinates, ascending."""
        chosen = self.source.stream("subsampling").choice(self.size, self.dimension, replace=False, shuffle=False)
        return np.sort(chosen)

    def placed(self, start: int, stop: int) -> Placed:
        """The entries of S[start:stop]."""
        first, last = np.searchsorted(self.chosen, (start, stop))
        weights = np.full(last - first, (self.size / self.dimension) ** 0.5)
        return Placed(self.chosen[first:last] - start, np.arange(first, last), weights)

    def entries(self, indices: np.ndarray, first: int, last: int, dtype: np.dtype) -> np.ndarray:
        """S[indices, first:last], for ascending indices."""
        return placing.entries(self, indices, first, last, dtype)

    def times(self, matrix: Matrix, start: int) -> Array:
        """A S[start : start + c]."""
        return placing.times(self, matrix, start)

    def transposed_times(self, matrix: Matrix, start: int) -> Array:
        """Aᵀ S[start : start + r]."""
        return placing.transposed_times(self, matrix, start)
