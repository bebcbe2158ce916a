"""Calibration: how much noise a budget (ε, δ) needs, and how many releases it allows."""

from __future__ import annotations

import math

from partsong.errors import ParameterError
from partsong.privacy.accounting import Budget, Ledger, Release, check_budget, composed_epsilon, largest_mu

PRECISION = 1e-4
"""Relative precision of a multiplier found by bisection; rounded towards more noise."""


def analytic_sigma(epsilon: float, delta: float, sensitivity: float = 1.0) -> float:
    """Return the smallest σ for one release with (ε, δ), exact for every ε (Balle & Wang, 2018)."""
    if not (math.isfinite(sensitivity) and sensitivity > 0):
        raise ParameterError(f"sensitivity must be a positive number; got {sensitivity!r}.", parameter="sensitivity")
    return math.nextafter(sensitivity / largest_mu(epsilon, delta), math.inf)


def rounds_within(epsilon: float, delta: float, release: Release, spent: Ledger | None = None) -> int:
    """Return how many releases (ε, δ) allows; raise if it allows none."""
    rounds = Budget(epsilon, delta).rounds(release, spent)
    if rounds == 0:
        if release.kind == "none":
            raise ParameterError("A release without noise exceeds every budget. Use Gaussian or Laplace noise.")
        one = (spent or Ledger()).after(release).epsilon(delta)
        need = noise_multiplier_for(epsilon, delta, 1, release.kind)
        raise ParameterError(
            f"A budget that allows no round: epsilon={epsilon:g} with delta={delta:g}, but after the first one "
            f"{one:.4g} would be spent. A single round from a fresh start needs a noise multiplier of {need:.4g} (now "
            f"{release.noise_multiplier:g}); or use a larger epsilon.",
            parameter="epsilon",
        )
    return rounds


def noise_multiplier_for(epsilon: float, delta: float, rounds: int, kind: str = "gaussian") -> float:
    """Return the smallest noise multiplier with which `rounds` releases cost at most (ε, δ)."""
    if not isinstance(rounds, int) or rounds < 1:
        raise ParameterError(f"rounds must be a whole number, 1 or more; got {rounds!r}.", parameter="rounds")
    if kind == "gaussian":
        return math.sqrt(rounds) / largest_mu(epsilon, delta) * (1 + 1e-12)
    if kind != "laplace":
        raise ParameterError(f'kind must be "gaussian" or "laplace"; got {kind!r}.', parameter="kind")
    check_budget(epsilon, delta, needs_delta=False)
    high = rounds / epsilon * (1 + 1e-12)
    if delta == 0:
        return high
    low = high
    while composed_epsilon((("laplace", low, rounds),), delta) <= epsilon:
        high, low = low, low / 2
    while high - low > PRECISION * high:
        middle = math.sqrt(low * high)
        fits = composed_epsilon((("laplace", middle, rounds),), delta) <= epsilon
        low, high = (low, middle) if fits else (middle, high)
    return high
