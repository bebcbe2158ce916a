"""Kinds of sketches: count, Gaussian, subsampled randomized Hadamard, and subsampling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from partsong.core import runtime
from partsong.core.interfaces import Array, Matrix
from partsong.core.parameters import Choice
from partsong.core.runtime import cached_property
from partsong.core.streams import Name
from partsong.data.dense import DenseMatrix
from partsong.data.scan import Tiles
from partsong.kernels import sketching as compiled
from partsong.sketch import operator
from partsong.sketch import placed as placing
from partsong.sketch.operator import DRAWN_ROWS, GROUP, Operator, Pattern, Source, require_dimension
from partsong.sketch.placed import Placed

DRAWN_TOGETHER = 4096
"""Coordinates that share a stream."""
DRAW_COST = 60.0
"""Cost of drawing a normal number, in floating-point operations."""
FEW = 64
"""Up to this dimension a product with the entries of S is faster than a transform."""
LONGEST = 1024
"""Coordinates that are transformed together, limited by the cache."""


@dataclass(frozen=True, slots=True)
class Kind(ABC):
    """A kind of sketch: its dimension d, and how S (size × d) is drawn."""

    dimension: int

    def __post_init__(self) -> None:
        require_dimension(self.dimension)

    @abstractmethod
    def pattern(self, size: int, source: Source) -> Pattern:
        """The entries of S (size × d)."""

    def draw(self, size: int, seed: int, *names: Name) -> Operator:
        return Operator(self.pattern(int(size), Source.of(seed, names)))


class OneEntryPerRow(ABC):
    """Products with an S that has at most one entry per row, given by `placed`."""

    __slots__ = ()

    size: int
    dimension: int

    @abstractmethod
    def placed(self, start: int, stop: int) -> Placed:
        """The entries of S[start:stop]."""

    def entries(self, indices: np.ndarray, first: int, last: int, dtype: np.dtype) -> np.ndarray:
        return placing.entries(self, indices, first, last, dtype)

    def times(self, matrix: Matrix, start: int) -> Array:
        return placing.times(self, matrix, start)

    def transposed_times(self, matrix: Matrix, start: int) -> Array:
        return placing.transposed_times(self, matrix, start)


@dataclass(frozen=True, slots=True)
class CountSketch(Kind):
    """Each coordinate goes to one of d random places with a random sign: E[S Sᵀ] = I without scaling.

    O(stored entries) to apply (Clarkson & Woodruff, 2013). A column of A that is the only (nonzero) one in its place
    can be read off A S.
    """

    def pattern(self, size: int, source: Source) -> SignedPlaces:
        return SignedPlaces(size, int(self.dimension), source)


@dataclass(frozen=True, slots=True)
class SignedPlaces(OneEntryPerRow):
    """Places and signs in blocks of coordinates, each with its own stream."""

    size: int
    dimension: int
    source: Source

    def placed(self, start: int, stop: int) -> Placed:
        numbers = range(start // DRAWN_TOGETHER, -(-stop // DRAWN_TOGETHER))
        drawn = [self.source.stream("count", n).integers(2 * self.dimension, size=DRAWN_TOGETHER) for n in numbers]
        both = np.concatenate([np.empty(0, np.int64), *drawn])[start % DRAWN_TOGETHER :][: stop - start]
        return Placed(np.arange(stop - start), both // 2, 1.0 - 2.0 * (both % 2))


@dataclass(frozen=True, slots=True)
class Gaussian(Kind):
    """Entries 𝒩(0, 1/d), independent: E[S Sᵀ] = I.

    O(size·d) to draw, and a dense or sparse product with d columns to apply. A S and S reveal the projection of each
    row of A on d random directions; further sketches add more directions (see `recovery`).
    """

    def pattern(self, size: int, source: Source) -> GaussianEntries:
        return GaussianEntries(size, int(self.dimension), source)


@dataclass(frozen=True, slots=True)
class GaussianEntries:
    """Entries in blocks of rows and columns, each with its own stream: only those in use are drawn.

    They are drawn in float64; float32 entries are the rounded ones.
    """

    size: int
    dimension: int
    source: Source

    def entries(self, indices: np.ndarray, first: int, last: int, dtype: np.dtype) -> np.ndarray:
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

        runtime.map_ranges(runtime.split_range(len(numbers), DRAW_COST * out.size), work)
        return out

    def _block(self, number: int, group: int, height: int) -> np.ndarray:
        """The upper rows of a block, times 1/√d."""
        width = min(GROUP, self.dimension - group * GROUP)
        block = self.source.stream("gaussian", number, group).standard_normal((height, width))
        return np.multiply(block, self.dimension**-0.5, out=block)

    def times(self, matrix: Matrix, start: int) -> Array:
        return operator.times(self, matrix, start)

    def transposed_times(self, matrix: Matrix, start: int) -> Array:
        return operator.transposed_times(self, matrix, start)


@dataclass(frozen=True, slots=True)
class Hadamard(Kind):
    """Random signs, a Walsh–Hadamard transform, and d of its outputs: S = √(n'/d)·D·H·R, so E[S Sᵀ] = I.

    n' is the next power of two, D (n × n) has random signs, H the first n rows of the orthogonal n' × n' Hadamard
    matrix, and R takes d of its columns without replacement (Ailon & Chazelle, 2006; Tropp, 2011). So

        S_ic = ± (−1)^|i ∧ r_c| / √d,    |i ∧ r| the number of bits set in both i and r.

    Dense rows cost O(size·log d), since only d outputs are needed (Ailon & Liberty, 2009); sparse rows O(entries·d).
    """

    def pattern(self, size: int, source: Source) -> SignedHadamard:
        return SignedHadamard(size, int(self.dimension), source)


@dataclass(frozen=True)
class SignedHadamard:
    """Signs in blocks of coordinates, each with its own stream; every party draws all columns of H."""

    size: int
    dimension: int
    source: Source

    @cached_property
    def chosen(self) -> np.ndarray:
        """The columns r of H, ascending."""
        padded = _power_of_two(self.size)
        return np.sort(self.source.stream("columns").choice(padded, self.dimension, replace=False, shuffle=False))

    def entries(self, indices: np.ndarray, first: int, last: int, dtype: np.dtype) -> np.ndarray:
        out = np.empty((len(indices), last - first), dtype)
        if len(indices):
            start = int(indices[0])
            signs = self._scaled_signs(start, int(indices[-1]) + 1, dtype)[indices - start]
            compiled.hadamard_entries(indices, signs, self.chosen[first:last], out)
        return out

    def times(self, matrix: Matrix, start: int) -> Array:
        if isinstance(matrix, DenseMatrix) and self.dimension > FEW:
            return self._transformed(matrix, start)
        return operator.times(self, matrix, start)

    def transposed_times(self, matrix: Matrix, start: int) -> Array:
        if isinstance(matrix, DenseMatrix):
            return self.times(DenseMatrix(matrix.X.T, matrix.dtype), start)
        return operator.transposed_times(self, matrix, start)

    def _transformed(self, matrix: DenseMatrix, start: int) -> np.ndarray:
        """A S by transforms of groups of coordinates, whose outputs are added with signs."""
        n, m = matrix.shape
        out = np.zeros((n, self.dimension), matrix.dtype)
        signs = self._scaled_signs(start, start + m, matrix.dtype)
        length = min(_power_of_two(max(1, m)), _power_of_two(self.dimension), LONGEST)
        tiles = Tiles(matrix.X, matrix.dtype)

        def work(first: int, last: int) -> None:
            for a, b, c, d, block in tiles.blocks((first, last), (0, m)):
                compiled.hadamard_rows(block, signs[c:d], start + c, self.chosen, length, out[a:b])

        runtime.map_ranges(runtime.split_range(n, 2.0 * n * m * length.bit_length()), work)
        return out

    def _scaled_signs(self, start: int, stop: int, dtype: np.dtype) -> np.ndarray:
        """±1/√d for coordinates start…stop."""
        numbers = range(start // DRAWN_TOGETHER, -(-stop // DRAWN_TOGETHER))
        drawn = [self.source.stream("signs", n).integers(2, size=DRAWN_TOGETHER) for n in numbers]
        bits = np.concatenate([np.empty(0, np.int64), *drawn])[start % DRAWN_TOGETHER :][: stop - start]
        return ((1 - 2 * bits) * self.dimension**-0.5).astype(dtype)


def _power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Subsampling(Kind):
    """d of the n coordinates, without replacement and in order, each times √(n/d): E[S Sᵀ] = I.

    The paper prints the columns without the factor √(n/d), so that E[S Sᵀ] = (d/n) I (Qian et al., 2020, Sec. 3.4).
    d = n gives S = I. O(rows·d) to apply. A S *is* d scaled columns of A: an observer sees these columns.
    """

    def pattern(self, size: int, source: Source) -> ChosenCoordinates:
        return ChosenCoordinates(size, int(self.dimension), source)


@dataclass(frozen=True)
class ChosenCoordinates(OneEntryPerRow):
    """The kept coordinates: every party draws all d of them once."""

    size: int
    dimension: int
    source: Source

    @cached_property
    def chosen(self) -> np.ndarray:
        """The coordinates, ascending."""
        chosen = self.source.stream("subsampling").choice(self.size, self.dimension, replace=False, shuffle=False)
        return np.sort(chosen)

    def placed(self, start: int, stop: int) -> Placed:
        first, last = np.searchsorted(self.chosen, (start, stop))
        weights = np.full(last - first, (self.size / self.dimension) ** 0.5)
        return Placed(self.chosen[first:last] - start, np.arange(first, last), weights)


SKETCHES = Choice({"subsampling": Subsampling, "gaussian": Gaussian, "count": CountSketch, "hadamard": Hadamard})
"""Random projections S with E[S Sᵀ] = I, by name."""
