"""Update rules for NMF: HALS, multiplicative, projected gradient, iPALM, block pivoting, proximal; extrapolation."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

from partsong import kernels
from partsong.core.interfaces import Array, Guarantee
from partsong.core.parameters import Choice
from partsong.core.states import state
from partsong.errors import ParameterError
from partsong.kernels.fused_steps import StepRule
from partsong.solvers.normal_equations import NormalEquations, RuleState


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
    def guarantees(self) -> frozenset[Guarantee]:
        """An absolute weight μ fixes a scale, so only plain HALS is equivariant."""
        plain = {Guarantee.SCALE_EQUIVARIANT} if self.alpha == self.beta == 0 else set()
        return frozenset({Guarantee.MONOTONE, Guarantee.ROW_SEPARABLE, *plain})

    @property
    def compiled_step(self) -> StepRule | None:
        return StepRule("sweep", self.sweeps) if self.alpha == self.beta == 0 else None

    def init(self, factor: Array) -> RuleState:
        return RuleState.at_start(factor)

    def step(self, factor: Array, equations: NormalEquations, state: RuleState) -> tuple[Array, RuleState]:
        problem = equations
        if self.alpha > 0 or self.beta > 0:
            problem = equations.damped(self.alpha + self.beta * state.steps(factor), factor)
        moved = kernels.of(factor).sweep(factor, problem.gram, problem.cross, self.sweeps, equations.out)
        return moved, state.advanced()


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
    def guarantees(self) -> frozenset[Guarantee]:
        """Steps up to 2/L never raise the objective."""
        safe = {Guarantee.MONOTONE, Guarantee.SCALE_EQUIVARIANT} if not self.absolute and self.step_size <= 2 else set()
        return frozenset({Guarantee.ROW_SEPARABLE, *safe})

    def init(self, factor: Array) -> RuleState:
        return RuleState.at_start(factor)

    def step(self, factor: Array, equations: NormalEquations, state: RuleState) -> tuple[Array, RuleState]:
        on = kernels.of(factor)
        return on.descend(factor, equations.gram, equations.cross, self._eta(equations, state)), state.advanced()

    def proximal_step(
        self, factor: Array, equations: NormalEquations, state: RuleState, weight: float, center: Array
    ) -> tuple[Array, RuleState]:
        """The step followed by the proximal map of ½ weight ‖F − center‖² on F ≥ 0."""
        eta = self._eta(equations, state)
        return _descend_towards(factor, equations, eta, weight, center), state.advanced()

    def _eta(self, equations: NormalEquations, state: RuleState) -> Array:
        scale = 1.0 if self.absolute else _lipschitz(equations)
        return self.step_size / scale / (1 + self.decay * state.steps(equations.gram))


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
    def guarantees(self) -> frozenset[Guarantee]:
        """With inertia a single step may go up."""
        calm = {Guarantee.MONOTONE} if self.inertia == 0 else set()
        return frozenset({Guarantee.SCALE_EQUIVARIANT, Guarantee.ROW_SEPARABLE, *calm})

    @property
    def compiled_step(self) -> StepRule:
        return StepRule("descend", inertia=self.inertia)

    def init(self, factor: Array) -> RuleState:
        return RuleState.at_start(factor, factor if self.inertia > 0 else None)

    def step(self, factor: Array, equations: NormalEquations, state: RuleState) -> tuple[Array, RuleState]:
        point, eta = self._point(factor, state), self._eta(equations)
        moved = kernels.of(factor).descend(point, equations.gram, equations.cross, eta)
        return moved, state.advanced(factor if self.inertia > 0 else None)

    def proximal_step(
        self, factor: Array, equations: NormalEquations, state: RuleState, weight: float, center: Array
    ) -> tuple[Array, RuleState]:
        """The step followed by the proximal map of ½ weight ‖F − center‖² on F ≥ 0."""
        moved = _descend_towards(self._point(factor, state), equations, self._eta(equations), weight, center)
        return moved, state.advanced(factor if self.inertia > 0 else None)

    def _point(self, factor: Array, state: RuleState) -> Array:
        return factor if self.inertia == 0 else factor + self.inertia * (factor - state.previous)

    def _eta(self, equations: NormalEquations) -> Array:
        beta = self.inertia
        return (1.0 if beta == 0 else 2 * (1 - beta) / (1 + 2 * beta)) / _lipschitz(equations)


def _descend_towards(point: Array, equations: NormalEquations, eta: Array, weight: float, center: Array) -> Array:
    """[(Z + ηγC)/(1 + ηγ)]₊ with Z = Y − η(Y gram − cross): a step of η/(1 + ηγ) on the equations damped by γ at C."""
    damped = equations.damped(weight, center)
    return kernels.of(point).descend(point, damped.gram, damped.cross, eta / (1 + eta * weight))


def _lipschitz(equations: NormalEquations) -> Array:
    """‖gram‖₂, or 1 for a problem without any component: its gradient is −cross = 0 and no step moves it."""
    return _or_else(equations.curvature(), 1.0)


def _or_else(value: Array, other: Any) -> Array:
    """A 0-d value, or another one where it is zero."""
    on = kernels.of(value)
    return on.where(value != 0, value, other)


@dataclass(frozen=True, slots=True)
class Multiplicative:
    """F ← F ∘ cross / (F gram), `steps` times (Lee & Seung, 2001).

    Zeros stay zeros: a fixed point need not be a stationary point of the problem.
    """

    steps: int = 1

    @property
    def guarantees(self) -> frozenset[Guarantee]:
        return frozenset(Guarantee)

    @property
    def compiled_step(self) -> StepRule | None:
        return StepRule("multiply") if self.steps == 1 else None

    def init(self, factor: Array) -> RuleState:
        return RuleState.at_start(factor)

    def step(self, factor: Array, equations: NormalEquations, state: RuleState) -> tuple[Array, RuleState]:
        on = kernels.of(factor)
        for _ in range(self.steps):
            factor = on.multiply(factor, equations.gram, equations.cross)
        return factor, state.advanced()


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
    def guarantees(self) -> frozenset[Guarantee]:
        return frozenset(Guarantee)

    def init(self, factor: Array) -> RuleState:
        return RuleState.at_start(factor)

    def step(self, factor: Array, equations: NormalEquations, state: RuleState) -> tuple[Array, RuleState]:
        return kernels.of(factor).solve_exactly(factor, equations.gram, equations.cross), state.advanced()


@dataclass(frozen=True, slots=True)
class ProximalDescent:
    """Coordinate descent with a proximal weight in units of the first problem's own size.

        F_j ← max(0, (μ_t F⁰_j + cross_j − Σ_{l≠j} F_l gram_lj) / (gram_jj + μ_t)),   μ_t = (alpha + beta·t)·s

    s is the mean diagonal of the gram at the first step, so that nothing depends on the scale of the data. The settings
    of Qian et al. (2020), Alg. 3, are in the units of their data: `CoordinateDescent(alpha=…, beta=…)`.
    """

    sweeps: int = 1
    alpha: float = 0.01
    beta: float = 0.01

    def __post_init__(self) -> None:
        if self.sweeps < 1 or not (0 <= self.alpha < math.inf and 0 <= self.beta < math.inf):
            raise ParameterError(f"ProximalDescent needs sweeps ≥ 1, and alpha and beta ≥ 0 and finite; got {self}.")

    @property
    def guarantees(self) -> frozenset[Guarantee]:
        """Its weights scale with the problem, as the step does."""
        return frozenset({Guarantee.MONOTONE, Guarantee.ROW_SEPARABLE, Guarantee.SCALE_EQUIVARIANT})

    def init(self, factor: Array) -> RuleState:
        return RuleState.at_start(factor)

    def step(self, factor: Array, equations: NormalEquations, state: RuleState) -> tuple[Array, RuleState]:
        on = kernels.of(factor)
        scale = _or_else(on.scalar(state.scale, factor), _mean_diagonal(equations.gram))
        problem = equations
        if self.alpha > 0 or self.beta > 0:
            problem = equations.damped(self.alpha * scale + self.beta * scale * state.steps(factor), factor)
        moved = on.sweep(factor, problem.gram, problem.cross, self.sweeps, equations.out)
        return moved, replace(state.advanced(), scale=scale)


def _mean_diagonal(gram: Array) -> Array:
    """Zero for a problem without any component, whose scale is then asked for again."""
    return kernels.of(gram).scalar(gram.diagonal().sum(), gram) / gram.shape[0]


def converges_when_sketched(alpha: float, beta: float) -> bool:
    """Σ 1/μ_t = ∞ and Σ 1/μ_t² < ∞ for μ_t = alpha + beta·t (Qian et al., 2020, Thm. 1): true for every beta > 0.

    With beta = 0 the second sum is infinite: iterates keep moving about a stationary point, by some 1/μ.
    """
    if alpha < 0 or beta < 0:
        raise ParameterError(f"alpha and beta must be zero or more; got alpha={alpha}, beta={beta}.")
    return beta > 0


def warn_unless_convergent(alpha: float, beta: float) -> None:
    """Warn if Theorem 1 does not hold; the warning points at the caller that creates the program."""
    if not converges_when_sketched(alpha, beta):
        warnings.warn(
            f"With beta = 0 (alpha = {alpha:g}) the proximal weights do not grow, and sketched steps are not known to "
            "converge (Σ 1/μ² is infinite): they end in noise around a stationary point. Use beta > 0.",
            UserWarning,
            stacklevel=5,
        )


def warn_if_noisy(rule: Any) -> None:
    """Warn if a rule's steps do not shrink as Theorem 1 requires: constant proximal weights or step sizes."""
    if hasattr(rule, "alpha") and hasattr(rule, "beta"):
        warn_unless_convergent(rule.alpha, rule.beta)
    elif getattr(rule, "decay", 1.0) == 0:
        warnings.warn(
            f"{rule} has constant step sizes, with which sketched steps are not known to converge (Σ η² is infinite): "
            "they end in noise around a stationary point. Use decay > 0.",
            UserWarning,
            stacklevel=4,
        )


SWEEPS = 5
"""Sweeps per product; chosen together with the extrapolation on generated data (benchmarks/tuning/sweeps.py)."""

RULES = Choice(
    {
        "hals": CoordinateDescent(sweeps=SWEEPS),
        "cd": CoordinateDescent(),
        "mu": Multiplicative(),
        "pg": ProjectedGradient(),
        "ipalm": InertialPalm(inertia=0.3),
        "bpp": BlockPivoting(),
        "sanls": ProximalDescent(),
    },
    needed=("init", "step"),
)
"""One step per product unless the name says otherwise; "sanls" is for sketched products."""


@state("squared-error.momentum")
@dataclass(frozen=True, slots=True)
class MomentumState:
    """How far to extrapolate next, the largest amount allowed, the last amount that helped, the least objective so far.

    `must_restart`: the last step raised the objective and was taken back. All are 0-d values beside the factors.
    """

    amount: Array
    ceiling: Array
    trusted: Array
    objective: Array
    must_restart: Array

    @staticmethod
    def at_start(factor: Array, amount: float, ceiling: float) -> MomentumState:
        """Before the first iteration on a factor."""
        on = kernels.of(factor)
        first = on.scalar(amount, factor)
        return MomentumState(first, on.scalar(ceiling, factor), first, on.scalar(float("inf"), factor), first < 0)

    def cast_like(self, example: Array) -> MomentumState:
        """In the place of an array."""
        on = kernels.of(example)
        amount, ceiling, trusted = (on.scalar(one, example) for one in (self.amount, self.ceiling, self.trusted))
        objective, restart = on.scalar(self.objective, example), on.scalar(self.must_restart, example)
        return MomentumState(amount, ceiling, trusted, objective, restart > 0)


@dataclass(frozen=True, slots=True)
class Extrapolation:
    """Y = max(0, F + β (F − F⁻)), with β grown while the objective falls and cut when it rises (Ang & Gillis, 2019).

    A step that rises above the least objective so far is taken back: H returns to its last accepted value, W is fitted
    to that once without extrapolation, and β is divided by `cut`. (The paper goes on from the worse point, where
    components pushed to zero may never come back. It begins with β = 0.5; from a good start, smaller first steps end in
    better minima.)
    """

    start: float = 0.3
    growth: float = 1.05
    ceiling_growth: float = 1.01
    cut: float = 1.5

    def __post_init__(self) -> None:
        if not (0 < self.start < 1 and self.cut > self.growth > self.ceiling_growth >= 1):
            raise ParameterError(
                f"Extrapolation needs 0 < start < 1 and cut > growth > ceiling_growth ≥ 1; got {self}."
            )

    def begin(self, factor: Array) -> MomentumState:
        """The momentum of the first iteration."""
        return MomentumState.at_start(factor, self.start, 1.0)

    def next(self, momentum: MomentumState, objective: Array) -> MomentumState:
        """The momentum after an iteration that ended at `objective`."""
        on, rises = kernels.of(momentum.amount), objective > momentum.objective
        amount, ceiling = momentum.amount * self.growth, momentum.ceiling * self.ceiling_growth
        return MomentumState(
            on.where(rises, momentum.amount / self.cut, on.where(amount < momentum.ceiling, amount, momentum.ceiling)),
            on.where(rises, momentum.trusted, on.where(ceiling < 1.0, ceiling, 1.0)),
            on.where(rises, momentum.trusted, momentum.amount),
            on.where(rises, momentum.objective, objective),
            rises,
        )


@dataclass(frozen=True, slots=True)
class NoExtrapolation:
    """No extrapolation: plain alternation."""

    def begin(self, factor: Array) -> MomentumState:
        """At rest."""
        return MomentumState.at_start(factor, 0.0, 0.0)

    def next(self, momentum: MomentumState, objective: Array) -> MomentumState:
        """Still at rest."""
        return replace(momentum, objective=objective)
