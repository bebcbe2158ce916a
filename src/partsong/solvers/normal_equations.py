"""Normal equations (all that an update rule sees of a problem), penalties, and the state of a rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Protocol

from partsong import kernels
from partsong.core.interfaces import Array
from partsong.core.states import state
from partsong.errors import ParameterError
from partsong.kernels.fused_steps import StepRule


@dataclass(frozen=True, slots=True)
class Penalty:
    """l1 ‖F‖₁ + ½ l2 ‖F‖², in units that do not depend on the size of the data.

    On W both are multiplied by the number of columns m, on H by the number of rows n. The squared error of a row of X
    grows with m and that of a column with n, so the balance stays the same when rows or columns are added.
    """

    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        for name in ("l1", "l2"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not 0.0 <= float(value) < float("inf"):
                raise ParameterError(f"The {name} penalty must be zero or more, and finite; got {value!r}.")

    def __bool__(self) -> bool:
        return self.l1 > 0 or self.l2 > 0


@dataclass(frozen=True, slots=True)
class NormalEquations:
    """min over F ≥ 0 of ½‖A − F B‖², as gram = B Bᵀ (k × k) and cross = A Bᵀ (r × k).

    Equations of blocks of columns of A and B add up, which is why NMF distributes; a sketched problem is
    `of(A S, B S)`. `norm` returns ‖gram‖₂, computed once for all blocks that share one gram. `out` is memory (r × k)
    for the new F, which a rule may use.
    """

    gram: Array
    cross: Array
    norm: Callable[[], Array] | None = None
    out: Array | None = None

    @staticmethod
    def of(A: Array, B: Array) -> NormalEquations:
        """Return the equations of min ½‖A − F B‖² with A (r × c) and B (k × c)."""
        return NormalEquations(B @ B.T, A @ B.T)

    def __add__(self, other: NormalEquations) -> NormalEquations:
        return NormalEquations(self.gram + other.gram, self.cross + other.cross)

    def curvature(self) -> Array:
        """Return ‖gram‖₂ as a 0-d array, the Lipschitz constant of the gradient in F."""
        return self.norm() if self.norm is not None else kernels.of(self.gram).largest_eigenvalue(self.gram)

    def penalized(self, penalty: Penalty, size: Any) -> NormalEquations:
        """Add size·(l1 ‖F‖₁ + ½ l2 ‖F‖²): gram + size·l2·I, cross − size·l1, for a number or a 0-d size."""
        if not penalty:
            return self
        on = kernels.of(self.gram)
        gram = on.plus_diagonal(self.gram, penalty.l2 * size)
        cross = self.cross - on.cast(penalty.l1 * size, self.cross) if penalty.l1 else self.cross
        return NormalEquations(gram, cross)

    def damped(self, amount: Any, center: Array) -> NormalEquations:
        """Add ½ amount ‖F − center‖²: gram + amount·I, cross + amount·center, for a number or a 0-d amount."""
        on = kernels.of(self.gram)
        return NormalEquations(on.plus_diagonal(self.gram, amount), self.cross + on.cast(amount, center) * center)

    def objective(self, F: Array) -> float:
        """Return ½ tr(F gram Fᵀ) − ⟨F, cross⟩ in float64: half the squared error without the constant ½‖A‖²."""
        on = kernels.of(F)
        return float(0.5 * on.inner(F @ self.gram, F) - on.inner(F, self.cross))


@state("update-rule.memory")
@dataclass(frozen=True, slots=True)
class RuleState:
    """The state of a rule: number of steps, the factor before the last step (None: not used), the problem's scale.

    The scale is 0 before the first step and for rules that do not use it. Both numbers are 0-d arrays on the factor's
    device, or plain numbers before the first step.
    """

    count: Array = 0
    previous: Array | None = None
    scale: Array = 0.0

    @staticmethod
    def at_start(factor: Array, previous: Array | None = None) -> RuleState:
        """Return the state before the first step on a factor."""
        zero = kernels.of(factor).scalar(0, factor)
        return RuleState(zero, previous, zero)

    def cast_like(self, example: Array) -> RuleState:
        """Return this state with the dtype and device of an array."""
        on = kernels.of(example)
        previous = None if self.previous is None else on.cast(self.previous, example)
        return RuleState(on.scalar(self.count, example), previous, on.scalar(self.scale, example))

    def steps(self, like: Array) -> Array:
        """Return `count` as a 0-d array on the device of an array."""
        return kernels.of(like).scalar(self.count, like)

    def rows(self, at: slice) -> RuleState:
        """Return the state for a block of rows."""
        return self if self.previous is None else replace(self, previous=self.previous[at])

    def advanced(self, previous: Array | None = None, by: int = 1) -> RuleState:
        """Return the state after one or several steps."""
        return RuleState(self.count + by, previous, self.scale)


class CompilableRule(Protocol):
    """A rule that compiled code implements; each class must define `compiled_step` itself, not inherit it."""

    @property
    def compiled_step(self) -> StepRule | None:
        """The step for compiled code, or None if it does not support a setting of the rule."""
