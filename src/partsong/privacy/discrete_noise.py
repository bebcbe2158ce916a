"""Exact Gaussian and Laplace noise on a public grid, without floating-point leaks: integers are added to integers.

For v on the grid, v + round(N) = round(v + N): a function of v + N alone. Every guarantee of the continuous Gaussian
(Laplace) mechanism therefore holds for the rounded one, on any grid (docs/reference/privacy.md, Theorem 1).
Whole numbers are drawn from uniform bits and a table of their cumulative probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from partsong.errors import ParameterError
from partsong.privacy.randomness import Source, words

BITS = 128
ONE = 1 << BITS
DIGITS = 70
"""Decimal digits that tables are computed with; 39 are kept."""
REACH = 13
"""Standard deviations after which the tail of a Gaussian is folded into the last entry: 2 Φ(−13) < 2⁻¹²⁵."""

SHIFT = 9
"""Finer parts of a sum come in units that are 2⁻⁹ of the next coarser."""
OVERLAP = 3
"""Standard deviation of a finer part, in units of the next coarser one."""
SMOOTHING = 2.0**-200
"""Bounds 2 exp(−2π²s²), the relative error of a Gaussian that is a sum of two parts, where s² > 8 (Lemma 2)."""
WIDEST = 2.0**13
FINEST, COARSEST = 2.0**55, 64.0
"""Between which the scale of the noise lies, in units of its grid."""


@dataclass(frozen=True)
class Table:
    """J = first + #{i : c_i ≤ U}, for U uniform on 0 … 2¹²⁸ − 1 and thresholds c_i = 2¹²⁸ P(J ≤ first + i), ascending.

    `missing` bounds the probability that was folded into an end.
    """

    first: int
    thresholds: tuple[int, ...]
    missing: float = 0.0

    @property
    def distance(self) -> float:
        """A bound on the statistical distance between J and what it stands for: rounding, and folded tails."""
        return (len(self.thresholds) + 1) * 2.0**-BITS + self.missing

    @cached_property
    def _halves(self) -> tuple[Any, Any]:
        high = np.array([value >> 64 for value in self.thresholds], np.uint64)
        low = np.array([value & (2**64 - 1) for value in self.thresholds], np.uint64)
        return high, low

    def draw(self, count: int, source: Source) -> Any:
        """`count` independent numbers (int64); a second word is asked for where the first does not decide."""
        high, low = self._halves
        drawn = words(count, source)
        at = np.searchsorted(high, drawn, side="left")
        for position in np.flatnonzero(high[np.minimum(at, high.size - 1)] == drawn):
            end = int(np.searchsorted(high, drawn[position], side="right"))
            begin = int(at[position])
            if begin < end:
                at[position] = begin + np.searchsorted(low[begin:end], words(1, source)[0], side="right")
        return at + self.first

    def probabilities(self) -> tuple[Fraction, ...]:
        """What is really drawn, exactly: P(J = first), P(J = first + 1), …"""
        edges = (0, *self.thresholds, ONE)
        return tuple(Fraction(b - a, ONE) for a, b in pairwise(edges))


def symmetric(tails: Sequence[int], missing: float) -> Table:
    """The table of a J with the distribution of −J, from 2¹²⁸ P(J > j) for j = 0, 1, …"""
    reached = [tail for tail in tails if tail > 0]
    return Table(-len(reached), (*reversed(reached), *(ONE - tail for tail in reached)), missing)


@lru_cache(maxsize=32)
def rounded_gaussian(deviation: float) -> Table:
    """J = N(0, `deviation`²) rounded to the nearest whole number.

    With h = 1/deviation and x = jh,  P(J = j) = φ(x) Σ_n 2 He_2n(x) (h/2)²ⁿ⁺¹ / (2n + 1)!,  a polynomial in x².
    """
    with localcontext() as context:
        context.prec = DIGITS
        step = 1 / Decimal(deviation)
        polynomial = _cell_polynomial(step)
        density = 1 / (2 * _pi()).sqrt()
        decay, ratio = (-step * step).exp(), (-step * step / 2).exp()
        tail, tails = Decimal("0.5") - density * polynomial[0] / 2, []
        for j in range(1, int(REACH * deviation) + 2):
            tails.append(round(ONE * tail))
            density, ratio = density * ratio, ratio * decay
            squared, value = (j * step) ** 2, Decimal(0)
            for coefficient in reversed(polynomial):
                value = value * squared + coefficient
            tail -= density * value
        return symmetric(tails, 2.0**-125)


@lru_cache(maxsize=32)
def discrete_gaussian(variance: Fraction) -> Table:
    """P(J = j) ∝ exp(−j² / 2 `variance`) on the whole numbers."""
    with localcontext() as context:
        context.prec = DIGITS
        share = Decimal(variance.denominator) / Decimal(variance.numerator)
        decay, ratio = (-share).exp(), (-share / 2).exp()
        reach = int(REACH * float(variance) ** 0.5) + 2
        weights = [Decimal(1)]
        for _ in range(reach):
            weights.append(weights[-1] * ratio)
            ratio *= decay
        total = 2 * sum(weights[1:], Decimal(0)) + 1
        tails, left = [], (total - 1) / 2
        for weight in weights[1:]:
            tails.append(round(ONE * left / total))
            left -= weight
        return symmetric(tails, 2.0**-124)


@lru_cache(maxsize=32)
def geometric(rate: Fraction, size: int | None = None) -> Table:
    """P(G ≥ i) = exp(−i · `rate`) on 0, 1, …; with a `size`, given that G < size."""
    with localcontext() as context:
        context.prec = DIGITS
        exact = Decimal(rate.numerator) / Decimal(rate.denominator)
        decay = (-exact).exp()
        reach = size if size is not None else int(87 / float(rate)) + 2
        least = (-exact * size).exp() if size is not None else Decimal(0)
        survival, thresholds = Decimal(1), []
        for _ in range(reach - 1):
            survival *= decay
            thresholds.append(round(ONE * (1 - survival) / (1 - least)))
        return Table(0, tuple(value for value in thresholds if value < ONE), 0.0 if size is not None else 2.0**-125)


@lru_cache(maxsize=32)
def bernoulli(rate: Fraction) -> Table:
    """1 with probability exp(−`rate`), else 0."""
    return Table(0, (ONE - _exponential(rate),))


def _exponential(rate: Fraction) -> int:
    """2¹²⁸ exp(−rate), rounded."""
    with localcontext() as context:
        context.prec = DIGITS
        return round(ONE * (-Decimal(rate.numerator) / Decimal(rate.denominator)).exp())


def _cell_polynomial(step: Decimal) -> list[Decimal]:
    """Coefficients, by powers of x², of ∫ φ(x + s) ds / φ(x) over |s| ≤ step/2.

    |φ(x) He_n(x)| ≤ √(n!) (Cramér) bounds what is left out; the terms fall fast where step ≤ 1.
    """
    even, odd = [Decimal(1)], [Decimal(1)]  # He_0, and He_1 / x
    total, power, order = [step], step, 0
    while power * Decimal(math.factorial(order)).sqrt() > Decimal(10) ** (5 - DIGITS):
        even = [a - (order + 1) * b for a, b in zip([Decimal(0), *odd], [*even, Decimal(0)], strict=True)]
        odd = [a - (order + 2) * b for a, b in zip(even, [*odd, Decimal(0)], strict=True)]
        order += 2
        power *= step * step / 4 / (order * (order + 1))
        total = [a + power * b for a, b in zip([*total, Decimal(0)], even, strict=True)]
    return total


def _pi() -> Decimal:
    """π = 16 arctan(1/5) − 4 arctan(1/239) (Machin)."""

    def arctan_of_inverse(n: int) -> Decimal:
        term, total, odd, sign = 1 / Decimal(n), 1 / Decimal(n), 1, 1
        while term > Decimal(10) ** -(DIGITS + 5):
            term, odd, sign = term / (n * n), odd + 2, -sign
            total += sign * term / odd
        return total

    return 16 * arctan_of_inverse(5) - 4 * arctan_of_inverse(239)


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
    """Return the increase of δ when the drawn noise is within a total statistical distance of the exact noise.

    P(A) ≤ P*(A) + τ ≤ e^ε P'*(A) + δ + τ ≤ e^ε P'(A) + δ + (1 + e^ε) τ
    """
    return distance * (1 + math.exp(epsilon)) if epsilon < 700 else math.inf


def _check(name: str, scale: float, grid: float) -> None:
    if not (math.isfinite(scale) and scale > 0):
        raise ParameterError(f"{name} of the noise must be a positive number; got {scale!r}.")
    if not (grid > 0 and math.frexp(grid)[0] == 0.5):
        raise ParameterError(f"grid must be a power of two, so that sums on it are exact; got {grid!r}.")
    if not COARSEST <= scale / grid <= FINEST:
        raise ParameterError(
            f"The {name} must be from {COARSEST:.0f} to 2^55 cells of the grid; got {scale / grid:.3g}. "
            "Use a noise multiplier between 1e-4 and 1e6, or another grid."
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
