"""Which (ε, δ) Gaussian noise gives, exactly: the curve of μ-GDP, where μ = sensitivity / σ.

    δ(ε; μ) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)          (Balle & Wang, 2018, Theorem 8)

T Gaussian releases, each chosen with the ones before in view, are together as good as one with μ² = Σ μ_t²
(Dong, Roth & Su, 2022, Corollary 3.3): composition needs no approximation.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy import special

from partsong.errors import ParameterError

MARGIN, LOST_DIGITS = 1e-9, 2e-14
"""Relative: δ is taken as this much smaller than asked for, or LOST_DIGITS times the larger of μ and 1/μ. That covers
the rounding in its formula, where numbers of the size of μ, or as close as μ, are subtracted, and noise from tables."""
HALVINGS = 200
LEAST_DELTA = 1e-300
"""A smaller δ is as good as none."""


def log_delta(epsilon: float, mu: float) -> float:
    """ln δ(ε; μ), by φ(a) (R(a) − R(a + μ)) with a = ε/μ − μ/2 and the ratio of Mills R = (1 − Φ)/φ: stable."""
    if mu <= 0:
        return -math.inf
    a = epsilon / mu - mu / 2
    if a < -5:
        second = math.exp(-a * a / 2) * float(special.erfcx((a + mu) / math.sqrt(2))) / 2  # e^ε φ(a + μ) = φ(a)
        return math.log1p(-(float(special.ndtr(a)) + second))
    mills = float(special.erfcx(a / math.sqrt(2)) - special.erfcx((a + mu) / math.sqrt(2)))
    return -a * a / 2 - math.log(2) + math.log(mills) if mills > 0 else -math.inf


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The smallest ε with δ(ε; μ) ≤ δ, rounded up; 0 where none is needed."""
    check_delta(delta)
    target = math.log(delta) + math.log1p(-_margin(mu))
    if mu <= 0 or log_delta(0.0, mu) <= target:
        return 0.0
    high = 1.0
    while log_delta(high, mu) > target:
        high *= 2
    return _first(lambda epsilon: log_delta(epsilon, mu) <= target, 0.0, high)


def largest_mu(epsilon: float, delta: float) -> float:
    """The largest μ with δ(ε; μ) ≤ δ, rounded down: all that Gaussian releases may add up to.

    Twice the margin, so that `gaussian_epsilon` of the answer does not exceed ε by its last bit.
    """
    check_budget(epsilon, delta)

    def fits(mu: float) -> bool:
        return log_delta(epsilon, mu) <= math.log(delta) + math.log1p(-2 * _margin(mu))

    low, high = 0.0, 1.0
    while fits(high):
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def analytic_sigma(epsilon: float, delta: float, sensitivity: float = 1.0) -> float:
    """The smallest σ for one release with (ε, δ), right for every ε (Balle & Wang, 2018)."""
    if not (math.isfinite(sensitivity) and sensitivity > 0):
        raise ParameterError(f"A sensitivity must be a positive number; got {sensitivity!r}.")
    return math.nextafter(sensitivity / largest_mu(epsilon, delta), math.inf)


def check_budget(epsilon: float, delta: float, *, needs_delta: bool = True) -> None:
    """Refuse an ε or δ that promises nothing or cannot be had."""
    if not (isinstance(epsilon, (int, float)) and math.isfinite(epsilon) and epsilon > 0):
        raise ParameterError(
            f"epsilon must be a positive number; got {epsilon!r}. Smaller is more private: 1 is strong, 10 is weak, "
            "and 0 would allow nothing to be sent."
        )
    check_delta(delta, needs_delta=needs_delta)


def check_delta(delta: float, *, needs_delta: bool = True) -> None:
    """Refuse a δ outside its range; only Laplace noise can have δ = 0."""
    if not (isinstance(delta, (int, float)) and 0 <= delta < 1):
        raise ParameterError(
            f"delta must be from 0 to below 1; got {delta!r}. "
            "It should be well below 1 / (number of units), such as 1e-5."
        )
    if needs_delta and delta < LEAST_DELTA:
        raise ParameterError(
            f"Gaussian noise needs delta > 0; got {delta!r}. "
            "Give one such as 1e-5, or use Laplace noise with delta = 0."
        )


def _margin(mu: float) -> float:
    return min(0.4, max(MARGIN, LOST_DIGITS * max(mu, 1 / mu))) if mu > 0 else MARGIN


def _first(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The smallest number in (low, high] from which on `holds`, rounded up."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
