"""Many releases, one ε: exactly for Gaussian noise, by privacy loss distributions for any mixture.

A composition is a tuple of (kind, noise multiplier, count). No amplification by sampling is claimed anywhere.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from scipy import optimize

from partsong.errors import MissingExtra
from partsong.privacy.gaussian_curve import LEAST_DELTA, MARGIN, check_delta, gaussian_epsilon

Costs = tuple[tuple[str, float, int], ...]

FINEST_INTERVAL = 1e-4
FAINTEST, LARGEST_LOSS = 0.01, 1e5
"""A multiplier of Laplace noise below which, and a sum of ε beyond which, loss distributions run out of numbers."""
CELLS = 2e5
"""About how many cells the range of privacy losses is cut into; rounded up in each, so that fewer is only looser."""


def composed_epsilon(costs: Costs, delta: float) -> float:
    """The smallest ε that we can prove: all of `costs` together are (ε, δ)-private; ∞ where something has no noise.

    Gaussian alone: exact. Laplace alone with δ = 0: the sum of their ε. Else dp-accounting's pessimistic estimate; or,
    where one is smaller, the sum of the ε of Laplace noise and of the one of all Gaussian noise, or what zCDP says.
    """
    if any(kind == "none" for kind, _, _ in costs):
        return math.inf
    mu, pure = gaussian_mu(costs), pure_epsilon(costs)
    check_delta(delta, needs_delta=mu > 0)
    if pure == 0:
        return gaussian_epsilon(mu, delta) if mu > 0 else 0.0
    if delta < LEAST_DELTA:
        return pure
    if mu == 0 and sum(count for _, _, count in costs) == 1:
        return laplace_epsilon(pure, delta)
    kept = delta * (1 - MARGIN)
    simple = min(pure + (gaussian_epsilon(mu, delta) if mu > 0 else 0.0), concentrated_epsilon(costs, kept))
    is_faint = any(kind == "laplace" and multiplier < FAINTEST for kind, multiplier, _ in costs)
    return simple if is_faint or pure > LARGEST_LOSS else min(loss_distribution_epsilon(costs, kept), simple)


def gaussian_mu(costs: Costs) -> float:
    """μ of all Gaussian releases together: μ² = Σ 1 / multiplier²."""
    return math.sqrt(math.fsum(n / z**2 for kind, z, n in costs if kind == "gaussian"))


def pure_epsilon(costs: Costs) -> float:
    """Σ 1 / multiplier of all Laplace releases."""
    return math.fsum(n / z for kind, z, n in costs if kind == "laplace")


def laplace_epsilon(pure: float, delta: float) -> float:
    """ε of one Laplace release with δ > 0: from δ(ε) = 1 − exp((ε − 1/multiplier) / 2)."""
    return max(0.0, pure + 2 * math.log1p(-delta * (1 - MARGIN)))


@lru_cache(maxsize=4096)
def loss_distribution_epsilon(costs: Costs, delta: float, *, one_by_one: bool = False) -> float:
    """ε by the PLD accountant of dp-accounting.

    Gaussian releases go in as the single one that they amount to, unless `one_by_one`.
    """
    events, accounting = _dp_accounting()
    mu, pure = gaussian_mu(costs), pure_epsilon(costs)
    interval = max(FINEST_INTERVAL, (pure + mu * mu / 2 + 8 * mu) / CELLS)
    accountant = accounting.PLDAccountant(value_discretization_interval=interval)
    for kind, multiplier, count in costs:
        if kind == "laplace":
            accountant.compose(events.LaplaceDpEvent(multiplier), count)
        elif one_by_one:
            accountant.compose(events.GaussianDpEvent(multiplier), count)
    if mu > 0 and not one_by_one:
        accountant.compose(events.GaussianDpEvent(1 / mu))
    return float(accountant.get_epsilon(delta))


def concentrated_epsilon(costs: Costs, delta: float) -> float:
    """A looser ε that needs no other package: zCDP with ρ = Σ 1 / (2 multiplier²), for Gaussian and Laplace alike.

    δ = min_α exp((α − 1)(αρ − ε)) / (α − 1) · (1 − 1/α)^α          (Canonne, Kamath & Steinke, 2020)
    """
    check_delta(delta)
    if any(kind == "none" for kind, _, _ in costs):
        return math.inf
    rho = math.fsum(n / (2 * z * z) for _, z, n in costs)
    if rho == 0:
        return 0.0

    def epsilon_at(log_order: float) -> float:
        excess = math.exp(log_order)  # α − 1
        order = 1 + excess
        return order * rho + (math.log(1 / delta) - math.log(excess) + order * math.log1p(-1 / order)) / excess

    best = optimize.minimize_scalar(epsilon_at, bounds=(-20.0, 20.0), method="bounded")
    return max(0.0, float(best.fun))


def _dp_accounting() -> tuple[Any, Any]:
    try:
        import dp_accounting
        from dp_accounting import pld
    except ImportError as error:
        raise MissingExtra(
            'Adding up Laplace noise over rounds needs dp-accounting: pip install "partsong[privacy]". '
            "Gaussian noise alone does not need it."
        ) from error
    return dp_accounting, pld
