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

    Pivoting starts from the support of F; rows on which it fails descend from F by an active set method (Lawson &
    Hanson, 1974). A row never ends above where it started, up to the rounding of the sums. All that is known of B is
    B Bᵀ, whose condition is that of B squared, so exactness has a limit: for B ≥ 0 a row a ends at most 1e-12·½‖a‖²
    above the minimum in float64 and 5e-6·½‖a‖² in float32, however dependent the components are. With B of both signs
    entries of F can grow without the fit growing, and that holds (to 1e-10 in float64) while B Bᵀ, scaled to unit
    diagonal, has a condition below 1e8.
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
