"""Empirical privacy audits: attack a mechanism to get a lower bound on its ε, with a confidence level.

Run the mechanism many times on two neighboring inputs. The attacker sees an output and guesses the input. For every
test of an (ε, δ)-private mechanism  P(says second | second) ≤ e^ε P(says second | first) + δ,  so that rates that are
too good refute the claim:

    ε ≥ ln( (true positives − δ) / false positives )          with Clopper–Pearson bounds for the two rates

Gaussian noise satisfies a whole curve, μ-GDP. Testing each point of it is more powerful:

    μ ≥ Φ⁻¹(true positives) − Φ⁻¹(false positives)

The direction and the threshold are chosen on one half of the runs and evaluated on the other, so the confidence holds
for any choice. A low bound proves nothing; a bound above the claim proves a bug, at the given confidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

from partsong.errors import DataError, ParameterError

Transcript = Callable[[int], Any]
"""A function from the number of a run to everything the attacker sees of it, as a vector."""


@dataclass(frozen=True, slots=True)
class AuditResult:
    """Lower bounds `epsilon` on ε and `mu` on μ of Gaussian noise, each with `confidence`, and the rates behind ε."""

    epsilon: float
    mu: float
    delta: float
    confidence: float
    runs: int
    true_positives: float
    false_positives: float

    def refutes(self, claim: float) -> bool:
        """Return whether a claimed ε (at the same δ) is refuted."""
        return self.epsilon > claim

    def refutes_gaussian(self, claim: float) -> bool:
        """Return whether a claimed μ = sensitivity / σ (over all rounds: √Σ μ²) is refuted."""
        return self.mu > claim


@dataclass(frozen=True, slots=True)
class HitCounts:
    """How often an attacker says "second", of how many runs, when it was the second and when it was the first."""

    true: int
    of_true: int
    false: int
    of_false: int


Bound = Callable[[HitCounts, float, float], float]


def audit(
    first: Transcript, second: Transcript, *, runs: int = 2000, delta: float = 1e-5, confidence: float = 0.999
) -> AuditResult:
    """Run a mechanism `runs` times on each of two neighboring inputs and attack it."""
    if runs < 40:
        raise ParameterError(f"runs must be at least 40 for each input; got {runs}.", parameter="runs")
    seen = [np.array([np.ravel(transcript(run)) for run in range(runs)], np.float64) for transcript in (first, second)]
    return attack(seen[0], seen[1], delta=delta, confidence=confidence)


def attack(first: Any, second: Any, *, delta: float = 1e-5, confidence: float = 0.999) -> AuditResult:
    """The bound from outputs (runs × entries) on two neighboring inputs."""
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise DataError("An audit needs finite outputs of the mechanism; some are NaN or infinite.")
    if not 0.5 < confidence < 1 or not 0 <= delta < 1:
        raise ParameterError(
            f"confidence must be between 0.5 and 1, delta from 0 to below 1; got {confidence}, {delta}."
        )
    direction = fisher_direction(first[::2], second[::2])
    scores = first @ direction, second @ direction
    candidates = _candidates(scores[0][::2], scores[1][::2])

    def outcome(bound: Bound) -> HitCounts:
        """On the second half, of the test that looks best on the first."""

        def merit(test: tuple[float, int]) -> float:
            return bound(_hits(scores[0][::2], scores[1][::2], *test), delta, confidence)

        return _hits(scores[0][1::2], scores[1][1::2], *max(candidates, key=merit))

    plain, curved = outcome(_epsilon_bound), outcome(_mu_bound)
    return AuditResult(
        max(0.0, _epsilon_bound(plain, delta, confidence)),
        max(0.0, _mu_bound(curved, delta, confidence)),
        delta,
        confidence,
        plain.of_true + plain.of_false,
        plain.true / plain.of_true,
        plain.false / plain.of_false,
    )


def fisher_direction(first: Any, second: Any) -> Any:
    """Return Fisher's linear discriminant: the inverse of the common covariance times the difference of means.

    With isotropic noise this is the difference of means. Where noise is missing or used twice, it finds the uncovered
    direction.
    """
    gap = second.mean(axis=0) - first.mean(axis=0)
    centered = np.vstack([first - first.mean(axis=0), second - second.mean(axis=0)])
    covariance = centered.T @ centered / len(centered)
    scale = np.trace(covariance) / max(1, gap.size)
    floor = 1e-9 * scale if scale > 0 else 1.0
    return np.linalg.solve(covariance + floor * np.eye(gap.size), gap)


def _candidates(first: Any, second: Any) -> list[tuple[float, int]]:
    levels = np.quantile(np.concatenate([first, second]), np.linspace(0.01, 0.99, 99))
    ends = [math.nextafter(float(first.max()), math.inf), math.nextafter(float(first.min()), -math.inf)]
    return [(float(level), sign) for level in (*levels, *ends) for sign in (1, -1)]


def _hits(first: Any, second: Any, threshold: float, sign: int) -> HitCounts:
    """Says "second" above the threshold; with sign −1 "first" below it, which is the other inequality of the two."""
    if sign > 0:
        return HitCounts(int((second >= threshold).sum()), second.size, int((first >= threshold).sum()), first.size)
    return HitCounts(int((first < threshold).sum()), first.size, int((second < threshold).sum()), second.size)


def _epsilon_bound(hits: HitCounts, delta: float, confidence: float) -> float:
    low, high = _rates(hits, confidence)
    return math.log((low - delta) / high) if low > delta else -math.inf


def _mu_bound(hits: HitCounts, delta: float, confidence: float) -> float:
    low, high = _rates(hits, confidence)
    return float(special.ndtri(low) - special.ndtri(high))


def _rates(hits: HitCounts, confidence: float) -> tuple[float, float]:
    """A lower bound of the true positives and an upper one of the false, which hold together (Clopper & Pearson)."""
    level = (1 - confidence) / 2
    misses = hits.of_false - hits.false
    low = float(special.betaincinv(hits.true, hits.of_true - hits.true + 1, level)) if hits.true else 0.0
    high = float(special.betaincinv(hits.false + 1, misses, 1 - level)) if misses else 1.0
    return low, high
