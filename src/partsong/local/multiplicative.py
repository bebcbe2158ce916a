"""Multiplicative updates."""

from __future__ import annotations

from dataclasses import dataclass

from partsong import kernels
from partsong.core import Array, Claim
from partsong.kernels.turns import Move
from partsong.local.equations import NormalEquations
from partsong.local.rules import RuleState


@dataclass(frozen=True, slots=True)
class Multiplicative:
    """F ← F ∘ cross / (F gram), `steps` times (Lee & Seung, 2001).

    Zeros stay zeros: a fixed point need not be a stationary point of the problem.
    """

    steps: int = 1

    @property
    def claims(self) -> frozenset[Claim]:
        """Everything."""
        return frozenset(Claim)

    @property
    def compiled_move(self) -> Move | None:
        """A single multiplication."""
        return Move("multiply") if self.steps == 1 else None

    def init(self, factor: Array) -> RuleState:
        """Nothing is remembered."""
        return RuleState()

    def step(self, factor: Array, equations: NormalEquations, state: RuleState) -> tuple[Array, RuleState]:
        """One application of the rule."""
        on = kernels.of(factor)
        for _ in range(self.steps):
            factor = on.multiply(factor, equations.gram, equations.cross)
        return factor, state.advanced()
