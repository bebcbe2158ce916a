"""Games that column players play against themselves: they shape H, once per column in each sweep."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import numpy as np

from partsong import kernels
from partsong.core import Array
from partsong.errors import ParameterError


@dataclass(frozen=True, slots=True)
class NoSelfPlay:
    """Columns play against rows alone."""

    def __call__(self, Ht: Array) -> Array:
        """As it is."""
        return Ht


@dataclass(frozen=True, slots=True)
class ShrinkSmallest:
    """J-min: the smallest entry of every column of H is multiplied by `factor`, the first of equal ones."""

    factor: float = 0.99

    def __post_init__(self) -> None:
        _require_share(self.factor)

    def __call__(self, Ht: Array) -> Array:
        """Hᵀ (m × k) after it; rows of Hᵀ are columns of H."""
        return _scaled(Ht, lambda values: values.argmin(axis=1), self.factor, is_chosen=True)


@dataclass(frozen=True, slots=True)
class ShrinkOthers:
    """J-max: all entries of every column of H but the largest, the first of equal ones, are multiplied by `factor`.

    Rows of H are driven towards disjoint supports. The shrinking puts a floor under the error.
    """

    factor: float = 0.99

    def __post_init__(self) -> None:
        _require_share(self.factor)

    def __call__(self, Ht: Array) -> Array:
        """Hᵀ (m × k) after it; rows of Hᵀ are columns of H."""
        return _scaled(Ht, lambda values: values.argmax(axis=1), self.factor, is_chosen=False)


SelfPlay = NoSelfPlay | ShrinkSmallest | ShrinkOthers


def _scaled(Ht: Array, choose, factor: float, *, is_chosen: bool) -> Array:  # type: ignore[no-untyped-def]
    values = kernels.of(Ht).to_numpy(Ht)
    chosen = np.zeros(values.shape, bool)
    chosen[np.arange(len(values)), choose(values)] = True
    moved = np.where(chosen == is_chosen, values * values.dtype.type(factor), values)
    return kernels.of(Ht).like(moved, Ht)


def _require_share(factor: float) -> None:
    if not isinstance(factor, Real) or isinstance(factor, bool) or not 0 <= factor <= 1:
        raise ParameterError(f"A shrink factor lies between 0 and 1; got {factor!r}.")
