"""Revival: components that a penalised step has set to zero in both factors cannot come back by themselves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partsong import kernels
from partsong.core.interfaces import Array
from partsong.core.states import state
from partsong.core.streams import stream


@state("squared-error.trial")
@dataclass(frozen=True, slots=True)
class RevivalState:
    """A split that is being tried: Hᵀ before it (None: no trial is on), its objective, steps so far, trials so far."""

    before: Array | None = None
    objective: float = float("inf")
    steps: int = 0
    count: int = 0


@dataclass(frozen=True, slots=True)
class Revival:
    """Split the strongest components into those that are zero, go on, and return if that is no better.

    A split halves the features of h_a at random: h_j takes some of them and h_a keeps the others, so that W can fit
    both as before. It is tried once steps gain less than `slow`, for `patience` steps; whether zero components are a
    loss or what the penalties want is then known. H alone is looked at: it works wherever H is updated from sums.
    """

    slow: float = 2e-4
    patience: int = 15
    most: int = 3

    def is_due(self, trial: RevivalState, sizes: np.ndarray, before: float, now: float) -> bool:
        """Whether to split now; `sizes` (k) are ‖w_j‖ ‖h_j‖, and the objective has fallen from `before` to `now`."""
        is_slow = before - now <= self.slow * abs(now)
        some_are_zero = 0 < int((sizes == 0).sum()) < len(sizes)
        return trial.before is None and trial.count < self.most and is_slow and some_are_zero

    def split(self, Ht: Array, sizes: np.ndarray, count: int) -> Array:
        """Hᵀ (m × k) with the strongest components shared out to those that are zero."""
        values = np.array(kernels.of(Ht).to_numpy(Ht))
        strong = [j for j in np.argsort(-sizes, kind="stable") if sizes[j] > 0]
        for place, j in enumerate(np.flatnonzero(sizes == 0)):
            source = strong[place % len(strong)]
            goes = stream(0, "split", count, int(j)).random(len(values)) < 0.5
            values[:, j] = values[:, source] * goes
            values[:, source] *= ~goes
        return kernels.of(Ht).cast(values, Ht)

    def is_improved(self, trial: RevivalState, now: float) -> bool:
        """Whether the split has led below where it began, by more than such steps gain."""
        return now < trial.objective - self.slow * abs(trial.objective)
