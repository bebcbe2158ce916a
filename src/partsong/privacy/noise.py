"""Noise on a public grid: whole numbers are added to whole numbers, and no bit of a float tells what was underneath.

For v on the grid, v + round(N) = round(v + N): a function of v + N alone. Whatever is known of the continuous Gaussian
(Laplace) mechanism therefore holds for the rounded one, whatever the grid (docs/differential-privacy.md, Theorem 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from partsong.errors import ParameterError
from partsong.privacy.randomness import Source, words
from partsong.privacy.tables import Table, bernoulli, discrete_gaussian, geometric, rounded_gaussian

SHIFT = 9
"""Finer parts of a sum come in units that are 2⁻⁹ of the next coarser."""
OVERLAP = 3
"""Standard deviation of a finer part, in units of the next coarser one."""
SMOOTHING = 2.0**-200
"""Bounds 2 exp(−2π²s²), the relative error of a Gaussian that is a sum of two parts, where s² > 8 (Lemma 2)."""
WIDEST = 2.0**13
FINEST, COARSEST = 2.0**55, 64.0
"""Between which the scale of the noise lies, in units of its grid."""

Part = tuple[Table, int]
"""A table, and the unit of its numbers."""


@dataclass(frozen=True, slots=True)
class RoundedGaussian:
    """round(N(0, sigma²) / grid), drawn with a statistical distance of less than 2⁻¹⁰⁰ per number.

    Wide noise is a sum: a coarse discrete Gaussian, finer ones, and a rounded one at last, which are by Poisson's
    summation formula a rounded Gaussian again. What is drawn are whole multiples of the grid.
    """

    sigma: float
    grid: float

    def __post_init__(self) -> None:
        _check("sigma", self.sigma, self.grid)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The tables that are drawn from and added."""
        return _gaussian_parts(self.sigma / self.grid)

    @property
    def distance(self) -> float:
        """A bound on the statistical distance of one number from the rounded Gaussian."""
        parts = self.parts
        return sum(table.distance for table, _ in parts) + (len(parts) - 1) * SMOOTHING

    def draw(self, count: int, source: Source) -> Any:
        """`count` independent whole numbers, in units of the grid."""
        total = np.zeros(count, np.int64)
        for table, unit in self.parts:
            total += unit * table.draw(count, source)
        return total


@dataclass(frozen=True, slots=True)
class RoundedLaplace:
    """round(L / grid), L with density exp(−|x|/scale) / (2 scale), as closely as the Gaussian.

    |L| is beyond half a cell with probability exp(−grid / 2 scale), and then 1 + a geometric number of cells, whose
    digits to base 512 are independent.
    """

    scale: float
    grid: float

    def __post_init__(self) -> None:
        _check("scale", self.scale, self.grid)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The tables of the digits."""
        return _geometric_parts(Fraction(self.grid) / Fraction(self.scale))

    @property
    def distance(self) -> float:
        """A bound on the statistical distance of one number from the rounded Laplace."""
        return sum(table.distance for table, _ in self.parts) + 2.0**-127

    def draw(self, count: int, source: Source) -> Any:
        """`count` independent whole numbers, in units of the grid."""
        is_away = bernoulli(Fraction(self.grid) / Fraction(self.scale) / 2).draw(count, source)
        size = np.ones(count, np.int64)
        for table, unit in self.parts:
            size += unit * table.draw(count, source)
        sign = 1 - 2 * (words(count, source) & np.uint64(1)).astype(np.int64)
        return sign * is_away * size


def sampling_slack(epsilon: float, distance: float) -> float:
    """What δ grows by when numbers come within a statistical distance, in all, of the noise that ε, δ were proved for.

    P(A) ≤ P*(A) + τ ≤ e^ε P'*(A) + δ + τ ≤ e^ε P'(A) + δ + (1 + e^ε) τ
    """
    return distance * (1 + math.exp(epsilon)) if epsilon < 700 else math.inf


def _check(name: str, scale: float, grid: float) -> None:
    if not (math.isfinite(scale) and scale > 0):
        raise ParameterError(f"The {name} of noise must be a positive number; got {scale!r}.")
    if not (grid > 0 and math.frexp(grid)[0] == 0.5):
        raise ParameterError(f"The grid of noise must be a power of two, so that sums on it are exact; got {grid!r}.")
    if not COARSEST <= scale / grid <= FINEST:
        raise ParameterError(
            f"The {name} must be from {COARSEST:.0f} to 2^55 cells of the grid; got {scale / grid:.3g}. "
            "Choose a noise multiplier between 1e-4 and 1e6, or another grid."
        )


@lru_cache(maxsize=32)
def _gaussian_parts(deviation: float) -> tuple[Part, ...]:
    if deviation <= 2.0 ** (SHIFT + 1):
        return ((rounded_gaussian(deviation), 1),)
    shift = min(SHIFT, math.frexp(deviation)[1] - 5)
    finest = OVERLAP << shift
    left = Fraction(deviation) ** 2 - finest**2
    return ((rounded_gaussian(float(finest)), 1), *_discrete_parts(left / 4**shift, 1 << shift))


def _discrete_parts(variance: Fraction, unit: int) -> tuple[Part, ...]:
    """Parts of a discrete Gaussian on the multiples of `unit`; the variance in squares of it."""
    if variance <= WIDEST**2:
        return ((discrete_gaussian(variance), unit),)
    finer = Fraction(OVERLAP << SHIFT) ** 2
    coarser = _discrete_parts((variance - finer) / 4**SHIFT, unit << SHIFT)
    return ((discrete_gaussian(finer), unit), *coarser)


@lru_cache(maxsize=32)
def _geometric_parts(rate: Fraction) -> tuple[Part, ...]:
    parts: list[Part] = []
    unit = 1
    while rate * unit < Fraction(1, 256):
        parts.append((geometric(rate * unit, 1 << SHIFT), unit))
        unit <<= SHIFT
    return (*parts, (geometric(rate * unit), unit))
