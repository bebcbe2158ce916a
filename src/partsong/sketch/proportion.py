"""Sketches whose dimension goes with what is sketched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

from partsong.errors import ParameterError
from partsong.sketch.operator import Operator, Sketch, dimension_for
from partsong.sketch.subsampling import Subsampling
from partsong.streams import Name


@dataclass(frozen=True, slots=True)
class Proportion:
    """A kind of sketch with d = ⌈ratio·size⌉, not below the rank and not above the size."""

    kind: Callable[[int], Sketch] = Subsampling
    ratio: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.ratio, Real) or isinstance(self.ratio, bool) or not 0 < float(self.ratio) <= 1:
            raise ParameterError(f"The ratio of a sketch must be above 0 and at most 1; got {self.ratio!r}.")

    def dimension(self, size: int, rank: int) -> int:
        """How many columns S has for so many coordinates."""
        return dimension_for(size, rank, self.ratio)

    def draw(self, size: int, rank: int, seed: int, *names: Name) -> Operator:
        """S (size × d) from the stream of these names."""
        return self.kind(self.dimension(size, rank)).draw(size, seed, *names)
