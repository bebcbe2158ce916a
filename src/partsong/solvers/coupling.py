"""Proximal terms that keep a party's H near the shared model during local steps (FedProx, aligned FedProx)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from partsong import kernels
from partsong.aggregation.alignment import Assignment
from partsong.core.interfaces import Alignment, Array, Plan, UpdateRule
from partsong.core.parameters import whole_number
from partsong.errors import CompositionError, ParameterError
from partsong.kernels.fused_steps import Pull
from partsong.solvers.normal_equations import NormalEquations, RuleState


@runtime_checkable
class Proximal(Protocol):
    """A rule that can take a step with ½ weight ‖F − center‖² added, exactly."""

    def proximal_step(
        self, factor: Array, equations: NormalEquations, state: RuleState, weight: float, center: Array
    ) -> tuple[Array, RuleState]:
        """Take the step, then the proximal map of that term on F ≥ 0."""


@dataclass(frozen=True, slots=True, eq=False)
class ProximalAnchor:
    """The shared model during local steps: Hᵀ (m × k), the current alignment plan P, and its number of uses.

    `aligned` is (P·H)ᵀ in the order of the party's own components.
    """

    Ht: Array
    plan: Plan | None = None
    aligned: Array = None
    steps_used: int = 0


class Coupling(Protocol):
    """One step of a rule on Hᵀ (m × k) with a term that pulls it towards the shared model."""

    def check(self, rule: UpdateRule) -> None:
        """Raise if the rule does not support this term."""

    def step(
        self, rule: UpdateRule, Ht: Array, equations: NormalEquations, state: RuleState, anchor: ProximalAnchor
    ) -> tuple[Array, RuleState, ProximalAnchor]:
        """Return the next Hᵀ, the rule's state, and the anchor with its current plan."""


class CompilableCoupling(Protocol):
    """A coupling that compiled code implements; each class must define `compiled_pull` itself, not inherit it."""

    def compiled_pull(self, Ht: Array, anchor: ProximalAnchor, most: int) -> tuple[Pull, ProximalAnchor, int]:
        """Return the pull, the number of steps it is valid for (at most `most`), and the anchor after these steps."""


@dataclass(frozen=True, slots=True)
class NoCoupling:
    """No coupling: the rule alone."""

    def check(self, rule: UpdateRule) -> None:
        """Accept any rule."""

    def step(
        self, rule: UpdateRule, Ht: Array, equations: NormalEquations, state: RuleState, anchor: ProximalAnchor
    ) -> tuple[Array, RuleState, ProximalAnchor]:
        after, memory = rule.step(Ht, equations, state)
        return after, memory, anchor

    def compiled_pull(self, Ht: Array, anchor: ProximalAnchor, most: int) -> tuple[Pull, ProximalAnchor, int]:
        return Pull(), anchor, most


@dataclass(frozen=True, slots=True)
class ProximalTerm:
    """½ μ ‖H − H̄‖² without alignment, added to the normal equations: FedProx (Li et al., 2020).

    μ = strength · ‖WᵀW‖₂, so that it does not depend on the scale of the data. Gradient rules then take the step
    H ← [H − (∇ + μ(H − H̄)) / (L + μ)]₊. With `absolute`, μ = strength.
    """

    strength: float = 0.1
    absolute: bool = False

    def __post_init__(self) -> None:
        _require_strength(self.strength)

    def check(self, rule: UpdateRule) -> None:
        """Accept any rule."""

    def step(
        self, rule: UpdateRule, Ht: Array, equations: NormalEquations, state: RuleState, anchor: ProximalAnchor
    ) -> tuple[Array, RuleState, ProximalAnchor]:
        weight = self.strength * (1.0 if self.absolute else equations.curvature())
        after, memory = rule.step(Ht, equations.damped(weight, anchor.Ht), state)
        return after, memory, anchor

    def compiled_pull(self, Ht: Array, anchor: ProximalAnchor, most: int) -> tuple[Pull, ProximalAnchor, int]:
        return Pull("damped absolutely" if self.absolute else "damped", self.strength, anchor.Ht), anchor, most


@dataclass(frozen=True, slots=True)
class AlignedProximalTerm:
    """A proximal term towards P·H̄, with P = align(H_j, H̄) recomputed every `every` steps (Dalleiger & Gionis, 2025).

        prox="paper":  H ← (rule(H) + γ P H̄) / (1 + γ)                         any rule; γ has no unit
        prox="exact":  H ← [(Z + ηγ P H̄) / (1 + ηγ)]₊,  Z = H − η∇            gradient rules; γ in units of ∇²

    The exact form is the proximal map of γ·½‖H − P H̄‖², with which the party's objective never increases. The paper
    prints the first form, which lacks η. Rows without a partner have no term; soft rows are weighted.
    """

    strength: float = 0.1
    align: Alignment = Assignment()
    prox: str = "paper"
    every: int = 1

    def __post_init__(self) -> None:
        _require_strength(self.strength)
        if self.prox not in ("paper", "exact"):
            raise ParameterError(f'prox must be "paper" or "exact"; got {self.prox!r}.', parameter="prox")
        whole_number("every", self.every)

    def check(self, rule: UpdateRule) -> None:
        """Raise if prox="exact" and the rule has no step size."""
        if self.prox == "exact" and not isinstance(rule, Proximal):
            raise CompositionError(
                f'prox="exact" needs a rule with a gradient step; got {rule}. Use InertialPalm, ProjectedGradient, or '
                'prox="paper".'
            )

    def step(
        self, rule: UpdateRule, Ht: Array, equations: NormalEquations, state: RuleState, anchor: ProximalAnchor
    ) -> tuple[Array, RuleState, ProximalAnchor]:
        anchor = self._aligned(Ht, anchor)
        on = kernels.of(Ht)
        assert anchor.plan is not None
        weights = self.strength * anchor.plan.weights
        if self.prox == "paper":
            moved, memory = rule.step(Ht, equations, state)
            pulled = (moved + self.strength * anchor.aligned) / on.cast(1.0 + weights, Ht)
            return pulled, memory, anchor
        assert isinstance(rule, Proximal)
        pulled, memory = rule.step(Ht, equations, state)
        # One proximal step for each distinct weight; a hard alignment has one. Other components keep the plain step.
        for weight in np.unique(weights[weights > 0]):
            columns = np.flatnonzero(weights == weight)
            center = anchor.aligned * on.cast(np.array(self.strength / weight), Ht)
            other, _ = rule.proximal_step(Ht, equations, state, float(weight), center)
            pulled = other if len(columns) == len(weights) else _with_columns(pulled, other, columns)
        return pulled, memory, anchor

    def compiled_pull(self, Ht: Array, anchor: ProximalAnchor, most: int) -> tuple[Pull, ProximalAnchor, int]:
        """Return a pull towards the aligned model, valid until the next alignment."""
        anchor = self._aligned(Ht, anchor)
        assert anchor.plan is not None
        turns = min(most, self.every - anchor.steps_used + 1)
        weights = kernels.of(Ht).cast(anchor.plan.weights, Ht)
        towards = Pull("mixed" if self.prox == "paper" else "proximal", self.strength, anchor.aligned, weights)
        return towards, replace(anchor, steps_used=anchor.steps_used + turns - 1), turns

    def _aligned(self, Ht: Array, anchor: ProximalAnchor) -> ProximalAnchor:
        if anchor.plan is not None and anchor.steps_used < self.every:
            return replace(anchor, steps_used=anchor.steps_used + 1)
        plan = self.align.plan(Ht.T, anchor.Ht.T)
        return ProximalAnchor(anchor.Ht, plan, kernels.of(Ht).rows_of(plan.apply(anchor.Ht.T)), 1)


def _with_columns(base: Array, other: Array, columns: np.ndarray) -> Array:
    # A copy of an array or tensor.
    base = base + 0
    for j in columns.tolist():
        base[:, j] = other[:, j]
    return base


def _require_strength(strength: float) -> None:
    if not 0 <= strength < float("inf"):
        raise ParameterError(f"strength must be zero or more, and finite; got {strength}.", parameter="strength")
