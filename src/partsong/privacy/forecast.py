"""What one noisy second moment can show, from public numbers alone: before anything is spent.

    τ = √(2m) σ / (b² n)        the largest eigenvalue of the noise over the energy of n rows of norm b

A direction that holds a share p of the energy is visible if p > τ/2: then its eigenvalue leaves the bulk of the noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize

from partsong.errors import ParameterError
from partsong.privacy.second_moment import noise_edge

MAX_TAU = 0.4
"""Above it, one component: a noisy mean profile."""
HYBRID_TAU = 0.004
"""Below it, a hybrid of the moment and noisy rounds is better."""
MAX_COLUMNS = 5000
"""With more columns, the moment has over 12 million entries."""
STEEPEST, FLATTEST = 8.0, -3.0
CAPTURE, MAX_CAPTURED = 1.5, 0.999
"""The first with the least worst error of the count on six data sets; docs/results/privacy.md shows it on others."""
TINY = 1e-300


@dataclass(frozen=True, slots=True)
class Forecast:
    """What to expect of `n_rows` rows with `n_features` columns; `sigma`: of the noise, for rows of norm 1."""

    n_rows: int
    n_features: int
    sigma: float
    epsilon: float

    @property
    def tau(self) -> float:
        """The noise over the energy of all rows."""
        return noise_edge(self.sigma, self.n_features) / self.n_rows

    @property
    def least_rows(self) -> int:
        """The number of rows from which on more than one component is worth trying."""
        return math.ceil(noise_edge(self.sigma, self.n_features) / MAX_TAU)

    @property
    def mechanism(self) -> str:
        """The best mechanism at this τ."""
        return "hybrid" if self.tau < HYBRID_TAU else "moment"

    def require(self, rank: int) -> None:
        """Refuse more than one component where the noise leaves only the mean profile."""
        if rank > 1 and self.tau > MAX_TAU:
            raise ParameterError(
                f"With {self.n_rows} rows, {self.n_features} columns and epsilon={self.epsilon:g} the noise leaves "
                f"nothing but the mean profile (τ = {self.tau:.2g}, above {MAX_TAU}), and nothing was spent. Use "
                f"n_components=1, a larger epsilon, at least {self.least_rows} rows, or fewer columns.",
                parameter="n_components",
            )

    def visible(self, shares: Any) -> int:
        """How many directions with these shares of the energy would be above the noise."""
        return int((np.asarray(shares) > self.tau / 2).sum())

    def expected_directions(self, rank: int, mean_error: float, pooled_error: float) -> int:
        """How many directions will be visible, at most `rank`, from public guesses of the relative errors of the mean
        profile alone and of a pooled NMF of this rank.
        """
        return min(rank, self.visible(guessed_shares(self.n_features, rank, mean_error, pooled_error, CAPTURE)))

    def expected_error(self, rank: int, mean_error: float, pooled_error: float) -> float:
        """The relative error of the model, from the same guesses: of each visible direction, cos² = 1 − (τ/2p)² of its
        share p of the energy is explained.
        """
        shares = guessed_shares(self.n_features, rank, mean_error, pooled_error)[:rank]
        explained = shares * np.clip(1 - (self.tau / 2 / np.maximum(shares, TINY)) ** 2, 0.0, 1.0)
        return math.sqrt(max(0.0, 1.0 - float(explained.sum())))

    def __str__(self) -> str:
        head = f"With {self.n_rows} rows, {self.n_features} columns and ε = {self.epsilon:g} (τ = {self.tau:.2g}), "
        if self.tau > 2:
            return f"{head}expect nothing but noise."
        if self.tau > MAX_TAU:
            return f"{head}expect the mean profile; use one component."
        least = f"{100 * self.tau / 2:.2g} %"
        return f"{head}expect the mean profile and each further direction that holds more than {least} of the energy."


def guessed_shares(n_features: int, rank: int, mean_error: float, pooled_error: float, capture: float = 1.0) -> Any:
    """Shares of energy p₁ = 1 − e₁² and p_i ∝ i^−a, i ≥ 2, with Σ_{2..k} p_i = c (e₁² − e_k²), in descending order.

    c = `capture`: eigenvectors hold more of the energy than as many non-negative components.
    """
    if not 0 < pooled_error <= mean_error <= 1:
        raise ParameterError(
            "Guesses of errors must satisfy 0 < pooled_error ≤ mean_error ≤ 1; got "
            f"pooled_error={pooled_error!r} and mean_error={mean_error!r}.",
            parameter="pooled_error",
        )
    rest = mean_error**2
    if n_features < 2 or rank < 2 or rest == 0:
        return np.array([1 - rest])
    places = np.arange(2, n_features + 1.0)
    captured = min(MAX_CAPTURED, capture * (rest - pooled_error**2) / rest)

    def excess(steepness: float) -> float:
        parts = places**-steepness
        return float(parts[: rank - 1].sum() / parts.sum()) - captured

    low, high = excess(FLATTEST), excess(STEEPEST)
    steepness = FLATTEST if low >= 0 else STEEPEST if high <= 0 else optimize.brentq(excess, FLATTEST, STEEPEST)
    parts = places**-steepness
    return np.sort(np.append(rest * parts / parts.sum(), 1 - rest))[::-1]
