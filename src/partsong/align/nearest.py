"""Soft alignments in which every row chooses for itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from partsong.align.likeness import costs
from partsong.align.plan import Blend
from partsong.core import Array
from partsong.errors import ParameterError


@dataclass(frozen=True, slots=True)
class Nearest:
    """Every row is the mean of its `neighbours` nearest rows of the source; several rows may choose the same."""

    is_partial: ClassVar[bool] = False
    neighbours: int = 1
    unit: bool = False

    def __post_init__(self) -> None:
        if self.neighbours < 1:
            raise ParameterError(f"Nearest needs at least one neighbour; got {self.neighbours}.")

    def plan(self, target: Array, source: Array) -> Blend:
        """P with rows that sum to 1; of equal distances the first row is taken."""
        cost = costs(target, source, unit=self.unit)
        count = min(self.neighbours, len(cost))
        chosen = np.argsort(cost, axis=1, kind="stable")[:, :count]
        P = np.zeros_like(cost)
        np.put_along_axis(P, chosen, 1.0 / count, axis=1)
        return Blend(P)


@dataclass(frozen=True, slots=True)
class SoftMax:
    """P_ab ∝ exp(−‖x_a − y_b‖²/ε), ε = blur · mean distance: what Sinkhorn is with the row constraint alone."""

    is_partial: ClassVar[bool] = False
    blur: float = 0.05
    unit: bool = False

    def __post_init__(self) -> None:
        if not self.blur > 0:
            raise ParameterError(f"SoftMax needs blur > 0; got {self.blur}.")

    def plan(self, target: Array, source: Array) -> Blend:
        """P with rows that sum to 1."""
        cost = costs(target, source, unit=self.unit)
        scores = -cost / (self.blur * (float(cost.mean()) or 1.0))
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return Blend(weights / weights.sum(axis=1, keepdims=True))
