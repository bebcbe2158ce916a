"""Revival of components that a penalized step has set to zero in both factors, by splitting strong components."""

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
    """A trial split: Hᵀ before it (None: no trial is running), its objective, steps so far, trials so far."""

    before: Array | None = None
    objective: float = float("inf")
    steps: int = 0
    count: int = 0


@dataclass(frozen=True, slots=True)
class Revival:
    """Split the strongest components to replace zero ones, continue, and undo the split if the objective is no better.

    A component that is zero in both factors cannot recover by itself. A split divides the features of h_a at random:
    h_j takes some of them and h_a keeps the rest, so that W can fit both as before. A trial starts when a step reduces
    the objective by less than the share `slow`, and runs for `patience` steps. It shows whether zero components are a
    loss or the optimum under the penalties. A split changes only H, so it works whenever H is updated from sums.
    """

    slow: float = 2e-4
    patience: int = 15
    most: int = 3

    def is_due(self, trial: RevivalState, sizes: np.ndarray, before: float, now: float) -> bool:
        """Return whether to split now; `sizes` (k) are ‖w_j‖ ‖h_j‖, and the objective went from `before` to `now`."""
        is_slow = before - now <= self.slow * abs(now)
        some_are_zero = 0 < int((sizes == 0).sum()) < len(sizes)
        return trial.before is None and trial.count < self.most and is_slow and some_are_zero

    def split(self, Ht: Array, sizes: np.ndarray, count: int) -> Array:
        """Return Hᵀ (m × k) with zero components replaced by parts of the strongest ones."""
        values = np.array(kernels.of(Ht).to_numpy(Ht))
        strong = [j for j in np.argsort(-sizes, kind="stable") if sizes[j] > 0]
        for place, j in enumerate(np.flatnonzero(sizes == 0)):
            source = strong[place % len(strong)]
            goes = stream(0, "split", count, int(j)).random(len(values)) < 0.5
            values[:, j] = values[:, source] * goes
            values[:, source] *= ~goes
        return kernels.of(Ht).cast(values, Ht)

    def is_improved(self, trial: RevivalState, now: float) -> bool:
        """Return whether the objective is now below its value before the split, by more than the share `slow`."""
        return now < trial.objective - self.slow * abs(trial.objective)
