"""Exact non-negative least squares."""

from __future__ import annotations

from dataclasses import dataclass

from partsong import kernels
from partsong.core import Array, Claim
from partsong.local.equations import NormalEquations
from partsong.local.rules import RuleState


@dataclass(frozen=True, slots=True)
class BlockPivoting:
    """F ← argmin over F ≥ 0 of ½‖A − F B‖², by block principal pivoting (Kim & Park, 2011).

    Rows with the same passive set share one factorization; the support of F is where pivoting starts.
    """

    @property
    def claims(self) -> frozenset[Claim]:
        """Everything."""
        return frozenset(Claim)

    def init(self, factor: Array) -> RuleState:
        """Nothing is remembered."""
        return RuleState()

    def step(self, factor: Array, equations: NormalEquations, state: RuleState) -> tuple[Array, RuleState]:
        """The exact solution."""
        return kernels.of(factor).solve_exactly(factor, equations.gram, equations.cross), state.advanced()
