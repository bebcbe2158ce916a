"""Coordinate descent (HALS), plain and proximal."""

from __future__ import annotations

import math
from dataclasses import dataclass

from partsong import kernels
from partsong.core import Array, Claim
from partsong.errors import ParameterError
from partsong.kernels.turns import Move
from partsong.local.equations import NormalEquations
from partsong.local.rules import RuleState


@dataclass(frozen=True, slots=True)
class CoordinateDescent:
    """`sweeps` passes over the columns of F, with an optional proximal weight.

        F_j ← max(0, (μ_t F⁰_j + cross_j − Σ_{l≠j} F_l gram_lj) / (gram_jj + μ_t)),   μ_t = alpha + beta·t

    μ = 0 is HALS, and several sweeps per product accelerated HALS (Gillis & Glineur, 2012). Sketched problems need
    μ_t → ∞ to reach a stationary point of the unsketched one (Qian et al., 2020, Alg. 3, Thm. 1). F⁰ is the factor
    at the start of the step.
    """

    sweeps: int = 1
    alpha: float = 0.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        if self.sweeps < 1 or not (0 <= self.alpha < math.inf and 0 <= self.beta < math.inf):
            raise ParameterError(f"CoordinateDescent needs sweeps ≥ 1, and alpha and beta ≥ 0 and finite; got {self}.")

    @property
    def claims(self) -> frozenset[Claim]:
        """An absolute weight μ fixes a scale, so only plain HALS is equivariant."""
        plain = {Claim.SCALE_EQUIVARIANT} if self.alpha == self.beta == 0 else set()
        return frozenset({Claim.MONOTONE, Claim.ROW_SEPARABLE, *plain})

    @property
    def compiled_move(self) -> Move | None:
        """Sweeps, where nothing holds them back."""
        return Move("sweep", self.sweeps) if self.alpha == self.beta == 0 else None

    def init(self, factor: Array) -> RuleState:
        """Only steps are counted, for μ_t."""
        return RuleState()

    def step(self, factor: Array, equations: NormalEquations, state: RuleState) -> tuple[Array, RuleState]:
        """One application of the rule."""
        problem = equations.damped(self.alpha + self.beta * state.count, factor)
        moved = kernels.of(factor).sweep(factor, problem.gram, problem.cross, self.sweeps, equations.place)
        return moved, state.advanced()
