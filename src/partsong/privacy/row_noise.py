"""Noise for sums over rows, and what makes noisy sums usable again. Unit: the row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.errors import ParameterError
from partsong.privacy.mechanisms import LEAST_MULTIPLIER, MOST_MULTIPLIER
from partsong.privacy.noise import RoundedGaussian
from partsong.privacy.randomness import Source, system_source
from partsong.privacy.release import Release, check_relation
from partsong.privacy.rows import BoundedRows, RowSums

COUNT_UNIT = 2.0**-20
SWEEPS = 30


@dataclass(frozen=True, slots=True)
class NoisyRows:
    """Gaussian noise on gram, cross and (under add-or-remove) the number of rows, as one release.

        released:   κ·n,   λ·gram (diagonal once, above it √2 times),   cross         each + N(0, σ²)

    Under "replace" the number of rows is public. `shares`: the noise is that of one of so many honest parties of whom
    only the sum is seen; each adds a variance of σ² / shares.
    """

    bounds: BoundedRows
    noise_multiplier: float
    relation: str = "add-or-remove"
    count_share: float = 0.1
    shares: int = 1

    def __post_init__(self) -> None:
        check_relation("row", self.relation)
        if not LEAST_MULTIPLIER <= self.noise_multiplier <= MOST_MULTIPLIER:
            raise ParameterError(
                f"noise_multiplier must be a number from {LEAST_MULTIPLIER:g} to {MOST_MULTIPLIER:g}; "
                f"got {self.noise_multiplier!r}. `multiplier_for` finds one for a budget."
            )
        if not 1e-3 <= self.count_share <= 10:
            raise ParameterError(f"count_share must be from 0.001 to 10; got {self.count_share!r}.")
        if not isinstance(self.shares, int) or not 1 <= self.shares <= 100_000:
            raise ParameterError(f"shares must be a whole number from 1 to 100000; got {self.shares!r}.")

    @property
    def sensitivity(self) -> float:
        """How far one row can move all that is released, in the joint norm.

        add-or-remove: √(radius² + κ²). replace: √2 radius, since two rows that only add cannot point apart.
        """
        if self.relation == "replace":
            return math.sqrt(2) * self.bounds.radius * (1 + 2.0**-50)
        return math.hypot(1.0, self.count_share) * self.bounds.radius * (1 + 2.0**-50)

    @property
    def sigma(self) -> float:
        """Of the noise in the sum over all shares."""
        return math.nextafter(self.noise_multiplier * self.sensitivity, math.inf)

    @property
    def release(self) -> Release:
        """What one round costs every row."""
        return Release("gaussian", self.noise_multiplier, "row", self.relation)

    def noisy(self, sums: RowSums, source: Source = system_source) -> RowSums:
        """The sums with noise, still in whole units (the count in units of 2⁻²⁰ under add-or-remove)."""
        sigma = math.nextafter(self.sigma / math.sqrt(self.shares), math.inf)
        k = sums.gram.shape[0]
        unit = self.bounds.weight_unit**2
        gram = np.zeros((k, k), np.int64)
        above = np.triu_indices(k, 1)
        gram[above] = RoundedGaussian(sigma / self.bounds.gram_scale / math.sqrt(2), unit).draw(above[0].size, source)
        gram += gram.T
        gram[np.diag_indices(k)] = RoundedGaussian(sigma / self.bounds.gram_scale, unit).draw(k, source)
        cross = RoundedGaussian(sigma, self.bounds.weight_unit * self.bounds.row_unit).draw(sums.cross.size, source)
        count = sums.count
        if self.relation == "add-or-remove":
            scale = RoundedGaussian(sigma / (self.count_share * self.bounds.radius), COUNT_UNIT)
            count = round(count / COUNT_UNIT) + int(scale.draw(1, source)[0])
        return RowSums(sums.gram + gram, sums.cross + cross.reshape(sums.cross.shape), count)

    def usable(self, noisy: RowSums) -> tuple[Any, Any, float]:
        """Gram, cross and number of rows as a sum over rows could be: from the noisy total alone."""
        gram = repaired_gram(noisy.gram * self.bounds.weight_unit**2)
        cross = np.maximum(noisy.cross * (self.bounds.weight_unit * self.bounds.row_unit), 0.0)
        count = noisy.count * COUNT_UNIT if self.relation == "add-or-remove" else float(noisy.count)
        return gram, cross, max(0.0, count)


def repaired_gram(gram: Any) -> Any:
    """A symmetric, non-negative, positive semidefinite matrix near `gram`: Dykstra's projections, then a last shift.

    The shift, of all eigenvalues by the most negative one that is left, makes both properties hold at once.
    """
    current = (gram + gram.T) / 2
    turned, raised = np.zeros_like(current), np.zeros_like(current)
    for _ in range(SWEEPS):
        values, vectors = np.linalg.eigh(current + turned)
        semidefinite = (vectors * np.maximum(values, 0.0)) @ vectors.T
        turned += current - semidefinite
        following = np.maximum(semidefinite + raised, 0.0)
        raised += semidefinite - following
        is_still = np.abs(following - current).max(initial=0.0) <= 1e-12 * np.abs(current).max(initial=0.0)
        current = (following + following.T) / 2
        if is_still:
            break
    lowest = float(np.linalg.eigvalsh(current).min(initial=0.0))
    slack = 1e-12 * float(np.abs(current).max(initial=0.0))
    return current if lowest >= 0 else current + (slack - lowest) * np.eye(current.shape[0])
