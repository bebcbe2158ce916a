"""Fused local steps: many steps of W and H in one compiled call, for rules, couplings and data that support it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from partsong import kernels
from partsong.core.interfaces import Array, Matrix, UpdateRule
from partsong.kernels.fused_steps import FusedSteps, Pull, StepRule
from partsong.solvers.normal_equations import CompilableRule, Penalty, RuleState

if TYPE_CHECKING:
    from partsong.solvers.coupling import CompilableCoupling, Coupling, ProximalAnchor


@runtime_checkable
class SupportsFusedSteps(Protocol):
    """A matrix that can take many steps in one compiled call."""

    def max_steps_per_call(self, rank: int, move: StepRule) -> int:
        """Return the most steps per call, so that Ctrl-C is handled in time; 0: take steps one by one."""

    def run_fused_steps(self, W: Array, W_before: Array, Ht: Array, Ht_before: Array, steps: FusedSteps) -> None:
        """Take all `steps` in place; keep the factors before the last step if the rule uses them."""


def max_fused_steps(matrix: Matrix, rule: UpdateRule, coupling: Coupling | None, Ht: Array) -> int:
    """Return the most steps per compiled call on these data; 0 if compiled code does not support the step."""
    move = _compiled_step(rule, coupling)
    if move is None or not isinstance(matrix, SupportsFusedSteps) or "compiled" not in kernels.capabilities(Ht):
        return 0
    return matrix.max_steps_per_call(Ht.shape[1], move)


def take_fused_steps(
    matrix: Matrix,
    rule: UpdateRule,
    penalties: tuple[Penalty, Penalty],
    factors: tuple[Array, Array],
    memories: tuple[RuleState, RuleState],
    count: int,
    coupling: Coupling | None = None,
    anchor: ProximalAnchor | None = None,
) -> tuple[Array, Array, RuleState, RuleState]:
    """Take `count` steps of W and Hᵀ in calls of at most `max_fused_steps`; return both factors and both rule states.

    Pairs are for W and H. Inputs are not changed; a coupling pulls H to the anchor.
    """
    (n, m), (penalty_W, penalty_H) = matrix.shape, penalties
    move = _compiled_step(rule, coupling)
    fused, pull = cast(SupportsFusedSteps, matrix), cast("CompilableCoupling | None", coupling)
    # Copies: the compiled steps work in place.
    W, Ht = (factor + 0 for factor in factors)
    W_before, Ht_before = (_previous_factor(memory, factor) for memory, factor in zip(memories, (W, Ht), strict=True))
    assert move is not None
    most, left = fused.max_steps_per_call(Ht.shape[1], move), count
    while left > 0:
        towards, several = Pull(), min(left, most)
        if pull is not None and anchor is not None:
            towards, anchor, several = pull.compiled_pull(Ht, anchor, several)
        steps = FusedSteps(
            several, move, penalty_W.l1 * m, penalty_W.l2 * m, penalty_H.l1 * n, penalty_H.l2 * n, towards
        )
        fused.run_fused_steps(W, W_before, Ht, Ht_before, steps)
        left -= several
    after_W, after_H = (
        memory.advanced(None if memory.previous is None else before, count)
        for memory, before in zip(memories, (W_before, Ht_before), strict=True)
    )
    return W, Ht, after_W, after_H


def _compiled_step(rule: Any, coupling: Coupling | None) -> StepRule | None:
    """Return the rule's compiled step, or None if compiled code does not support the step or the coupling.

    Inherited attributes do not count: a subclass may take other steps than its parent.
    """
    knows_pull = coupling is None or "compiled_pull" in vars(type(coupling))
    return cast(CompilableRule, rule).compiled_step if knows_pull and "compiled_step" in vars(type(rule)) else None


def _previous_factor(memory: RuleState, factor: Array) -> Array:
    """Return the factor before the last step if the rule uses it, else an empty array."""
    if memory.previous is None:
        return kernels.of(factor).empty((0, factor.shape[1]), factor)
    return memory.previous + 0
