"""Gradient rules: projected gradient and inertial proximal alternating linearized minimization."""

from __future__ import annotations

from dataclasses import dataclass

from partsong import kernels
from partsong.core import Array, Claim
from partsong.errors import ParameterError
from partsong.kernels.turns import Move
from partsong.local.equations import NormalEquations
from partsong.local.rules import RuleState


@dataclass(frozen=True, slots=True)
class ProjectedGradient:
    """F ← max(0, F − η_t (F gram − cross)),   η_t = (step / L) / (1 + decay·t),   L = ‖gram‖₂.

    With `absolute`, η_t = step / (1 + decay·t) whatever the problem's scale, as printed in Qian et al. (2020), whose
    factor 2 belongs to an objective without ½.
    """

    step_size: float = 1.0
    decay: float = 0.0
    absolute: bool = False

    def __post_init__(self) -> None:
        if self.step_size <= 0 or self.decay < 0:
            raise ParameterError(f"ProjectedGradient needs step_size > 0 and decay ≥ 0; got {self}.")

    @property
    def claims(self) -> frozenset[Claim]:
        """Steps up to 2/L never raise the objective."""
        safe = {Claim.MONOTONE, Claim.SCALE_EQUIVARIANT} if not self.absolute and self.step_size <= 2 else set()
        return frozenset({Claim.ROW_SEPARABLE, *safe})

    def init(self, factor: Array) -> RuleState:
        """Only steps are counted, for η_t."""
        return RuleState()

    def step(self, factor: Array, equations: NormalEquations, state: RuleState) -> tuple[Array, RuleState]:
        """One application of the rule."""
        on = kernels.of(factor)
        return on.descend(factor, equations.gram, equations.cross, self._eta(equations, state)), state.advanced()

    def pulled_step(
        self, factor: Array, equations: NormalEquations, state: RuleState, weight: float, centre: Array
    ) -> tuple[Array, RuleState]:
        """The step followed by the proximal map of ½ weight ‖F − centre‖² on F ≥ 0."""
        eta = self._eta(equations, state)
        return _descend_towards(factor, equations, eta, weight, centre), state.advanced()

    def _eta(self, equations: NormalEquations, state: RuleState) -> float:
        scale = 1.0 if self.absolute else _lipschitz(equations)
        return self.step_size / scale / (1 + self.decay * state.count)


@dataclass(frozen=True, slots=True)
class InertialPalm:
    """Y = F + β (F − F⁻);  F⁺ = max(0, Y − η (Y gram − cross)),   L = ‖gram‖₂   (Pock & Sabach, 2016).

    η = 1/L for β = 0 and 2(1−β)/((1+2β) L) for β > 0. L is the constant of the gradient in F, the norm of the
    *other* factor's gram; the FNMF paper prints the factor's own, with which the iteration overflows.
    """

    inertia: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.inertia < 1:
            raise ParameterError(f"InertialPalm needs 0 ≤ inertia < 1; got {self.inertia}.")

    @property
    def claims(self) -> frozenset[Claim]:
        """With inertia a single step may go up."""
        calm = {Claim.MONOTONE} if self.inertia == 0 else set()
        return frozenset({Claim.SCALE_EQUIVARIANT, Claim.ROW_SEPARABLE, *calm})

    @property
    def compiled_move(self) -> Move:
        """A gradient step."""
        return Move("descend", inertia=self.inertia)

    def init(self, factor: Array) -> RuleState:
        """At rest: the previous factor is the factor."""
        return RuleState(previous=factor if self.inertia > 0 else None)

    def step(self, factor: Array, equations: NormalEquations, state: RuleState) -> tuple[Array, RuleState]:
        """One application of the rule."""
        point, eta = self._point(factor, state), self._eta(equations)
        moved = kernels.of(factor).descend(point, equations.gram, equations.cross, eta)
        return moved, state.advanced(factor if self.inertia > 0 else None)

    def pulled_step(
        self, factor: Array, equations: NormalEquations, state: RuleState, weight: float, centre: Array
    ) -> tuple[Array, RuleState]:
        """The step followed by the proximal map of ½ weight ‖F − centre‖² on F ≥ 0."""
        moved = _descend_towards(self._point(factor, state), equations, self._eta(equations), weight, centre)
        return moved, state.advanced(factor if self.inertia > 0 else None)

    def _point(self, factor: Array, state: RuleState) -> Array:
        return factor if self.inertia == 0 else factor + self.inertia * (factor - state.previous)

    def _eta(self, equations: NormalEquations) -> float:
        beta = self.inertia
        return (1.0 if beta == 0 else 2 * (1 - beta) / (1 + 2 * beta)) / _lipschitz(equations)


def _descend_towards(point: Array, equations: NormalEquations, eta: float, weight: float, centre: Array) -> Array:
    """[(Z + ηγC)/(1 + ηγ)]₊ with Z = Y − η(Y gram − cross): a step of η/(1 + ηγ) on the equations damped by γ at C."""
    damped = equations.damped(weight, centre)
    return kernels.of(point).descend(point, damped.gram, damped.cross, eta / (1 + eta * weight))


def _lipschitz(equations: NormalEquations) -> float:
    """‖gram‖₂, or 1 for a problem without any component: its gradient is −cross = 0 and no step moves it."""
    return equations.curvature() or 1.0
