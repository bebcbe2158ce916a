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

from partsong.errors import ParameterError, format_count
from partsong.privacy.second_moment import noise_edge

MAX_TAU = 0.4
"""Above it, one component: a noisy mean profile."""
NOISE_TAU = 2.0
"""Above it, not even rows that are all alike are visible."""
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
    """What to expect of `n_rows` rows with `n_features` columns; `sigma`: of the noise, for rows of norm 1.

    `n_rows` is a public lower bound, or None if there is none; with protects="party" it is the number of parties, each
    of which adds all of the noise unless it is `in_shares`. With `buckets`, the release has that many rows.
    `mean_noise`: the norm of the noise of a mean direction that is released separately. `largest_share`: the energy
    that a direction beyond the mean may have at most for the forecast. `guess`: a rank, and public guesses of the
    relative errors of the mean profile alone and of a pooled NMF.
    """

    n_rows: int | None
    n_features: int
    sigma: float
    epsilon: float
    protects: str = "row"
    in_shares: bool = False
    buckets: int | None = None
    mean_noise: float = 0.0
    largest_share: float = MAX_TAU / 2
    guess: tuple[int, float, float] | None = None

    @property
    def edge(self) -> float:
        """The largest eigenvalue, or singular value, that the noise alone has."""
        if self.buckets is not None:
            return self.sigma * (math.sqrt(self.buckets) + math.sqrt(self.n_features))
        return noise_edge(self.sigma, self.n_features)

    @property
    def tau(self) -> float:
        """The noise over the energy of all rows; NaN without their number."""
        return math.nan if self.n_rows is None else self.edge / self.n_rows

    @property
    def least_share(self) -> float:
        """The share of the energy above which a direction is visible; NaN without the number of rows."""
        if self.n_rows is None or self.buckets is None:
            return self.tau / 2
        return self.sigma * (self.buckets * self.n_features) ** 0.25 / self.n_rows

    @property
    def least_rows(self) -> int:
        """The number of rows, or parties, from which on more than one component is worth trying.

        Noise of every party grows with the root of their number; noise in shares does not.
        """
        rows = max(self.mean_noise, self.edge / (2 * self.largest_share))
        is_same = self.protects == "row" or self.in_shares or self.n_rows is None
        return math.ceil(rows if is_same else rows**2 / (self.n_rows or 1))

    @property
    def is_noise(self) -> bool:
        """Whether nothing but noise is to be expected."""
        if self.n_rows is None:
            return False
        return self.mean_noise > self.n_rows if self.mean_noise else self.tau > NOISE_TAU

    @property
    def is_mean(self) -> bool:
        """Whether the mean profile alone, or less, is to be expected."""
        return self.is_noise or self.tau > 2 * self.largest_share

    @property
    def mechanism(self) -> str:
        """The best mechanism at this τ."""
        return "hybrid" if self.tau < HYBRID_TAU else "moment"

    def require(self, rank: int) -> None:
        """Refuse more than one component where the noise leaves only the mean profile, and any where it leaves none."""
        if not (self.is_noise or (rank > 1 and self.is_mean)):
            return
        left = "nothing" if self.is_noise else "nothing but the mean profile"
        limit = NOISE_TAU if self.is_noise else MAX_TAU
        one = "" if self.is_noise else "n_components=1, "
        raise ParameterError(
            f"With {self._amount} and epsilon={self.epsilon:g} the noise leaves {left} (τ = {self.tau:.2g}, above "
            f"{limit:g}), and nothing was spent. Use {one}a larger epsilon, at least {self.least_rows} rows, or fewer "
            "columns.",
            parameter="epsilon" if self.is_noise else "n_components",
        )

    def visible(self, shares: Any) -> int:
        """How many directions with these shares of the energy would be above the noise."""
        return int((np.asarray(shares) > self.least_share).sum())

    def expected_directions(self, rank: int, mean_error: float, pooled_error: float) -> int:
        """How many directions will be visible, at most `rank`, from public guesses of the relative errors of the mean
        profile alone and of a pooled NMF of this rank.
        """
        return min(rank, self.visible(guessed_shares(self.n_features, rank, mean_error, pooled_error, CAPTURE)))

    def expected_error(self, rank: int, mean_error: float, pooled_error: float) -> float:
        """The relative error of the model, from the same guesses: of each visible direction, cos² = 1 − (q/p)² of its
        share p of the energy is explained, where q is the least visible share.
        """
        shares = guessed_shares(self.n_features, rank, mean_error, pooled_error)[:rank]
        explained = shares * np.clip(1 - (self.least_share / np.maximum(shares, TINY)) ** 2, 0.0, 1.0)
        return math.sqrt(max(0.0, 1.0 - float(explained.sum())))

    @property
    def _amount(self) -> str:
        columns = format_count(self.n_features, "column")
        if self.n_rows is None:
            return columns
        rows = format_count(self.n_rows, *(("row",) if self.protects == "row" else ("party", "parties")))
        return f"{rows}, {columns}"

    def __str__(self) -> str:
        units = "rows" if self.protects == "row" else "parties"
        head = f"With {self._amount} and ε = {self.epsilon:g}"
        if self.n_rows is None:
            return f"{head}, more than the mean profile can be expected from about {self.least_rows} {units} on."
        tau = f"(τ = {self.tau:.2g})"
        if self.is_noise:
            why = f"(the noise of the mean is {self.mean_noise:.3g} rows)" if self.mean_noise else tau
            others = "" if self.protects == "party" else ", or fewer columns"
            return (
                f"{head}, expect nothing but noise {why}. Use a larger epsilon, at least {self.least_rows} {units}"
                f"{others}."
            )
        if not self.mean_noise:
            reach = "rows that reach the row bound" if self.protects == "row" else "parties that reach the clip"
            tau = f"(τ = {self.tau:.2g}, for {reach})"
        if self.is_mean:
            return (
                f"{head}, expect the mean profile alone {tau}: use one component. More can be expected from about "
                f"{self.least_rows} {units} on."
            )
        if self.guess is None:
            share = f"{100 * self.least_share:.2g} %"
            whole = "energy" if self.protects == "row" else "sum of all clips"
            return f"{head}, expect the mean profile and each direction with more than {share} of the {whole} {tau}."
        further = self.expected_directions(*self.guess) - 1
        if further < 1:
            return f"{head}, expect the mean profile alone {tau}, if the guesses of the errors are right."
        directions = "one direction" if further == 1 else f"{further} directions"
        return f"{head}, expect the mean profile and about {directions} {tau}, if the guesses of the errors are right."

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a report or a script; None where the number of rows, or a guess, is needed."""
        is_known = self.n_rows is not None
        guess = self.guess if is_known else None
        return {
            "n_rows": self.n_rows if self.protects == "row" else None,
            "n_features": self.n_features,
            "epsilon": self.epsilon,
            "tau": self.tau if is_known else None,
            "least_rows": self.least_rows if self.protects == "row" else None,
            "least_share": self.least_share if is_known else None,
            "expected_directions": None if guess is None else self.expected_directions(*guess),
            "expected_error": None if guess is None else self.expected_error(*guess),
            "sentence": str(self),
        }


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
