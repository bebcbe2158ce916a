"""Hard alignments: every component has one partner, or none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from partsong.align.likeness import correlations, gains, least_significant
from partsong.align.plan import ALONE, Matching
from partsong.core import Array


@dataclass(frozen=True, slots=True)
class Identity:
    """By position: row a belongs to row a."""

    is_partial: ClassVar[bool] = False

    def plan(self, target: Array, source: Array) -> Matching:
        """I."""
        return Matching.identity(len(target))


@dataclass(frozen=True, slots=True)
class Assignment:
    """The permutation that minimises ½‖target − P·source‖²: maximise ⟨P, target·sourceᵀ⟩ (LAP, D₁).

    With `unit` rows are compared at norm 1, so that components match by direction whatever their scale.
    O(k²m + k³), by scipy.optimize.linear_sum_assignment.
    """

    is_partial: ClassVar[bool] = False
    unit: bool = False

    def plan(self, target: Array, source: Array) -> Matching:
        """P of zeros and ones with one of them in every row and column."""
        from scipy.optimize import linear_sum_assignment

        gain = gains(target, source, unit=self.unit)
        return Matching(linear_sum_assignment(gain, maximize=True)[1])


@dataclass(frozen=True, slots=True)
class PartialAssignment:
    """Assignment by correlation in which rows without a significant partner stay alone (LAP_ρ, D₂).

    Costs are 1 − r_ab, and infinite where r_ab is not significantly above zero (`likeness.least_significant`); every
    row may instead take a place of its own at the largest finite cost. `bonferroni` divides the level by k².
    """

    is_partial: ClassVar[bool] = True
    level: float = 0.05
    bonferroni: bool = False

    def plan(self, target: Array, source: Array) -> Matching:
        """P of zeros and ones with at most one of them in every row and column."""
        from scipy.optimize import linear_sum_assignment

        r = correlations(target, source)
        k, is_alike = len(r), significant(r, target.shape[1], self.level, self.bonferroni)
        if not is_alike.any():
            return Matching(np.full(k, ALONE))
        cost = np.where(is_alike, 1.0 - r, 4.0 * k)
        alone = np.full((k, k), float((1.0 - r)[is_alike].max()))
        rows, places = linear_sum_assignment(np.hstack([cost, alone]))
        partners = np.full(k, ALONE)
        for row, place in zip(rows, places, strict=True):
            if place < k and is_alike[row, place]:
                partners[row] = place
        return Matching(partners)


def significant(r: np.ndarray, n_features: int, level: float, bonferroni: bool) -> np.ndarray:
    """Which correlations are significantly above zero."""
    return r > least_significant(n_features, level / r.size if bonferroni else level)
