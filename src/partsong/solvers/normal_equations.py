"""Normal equations: all that an update rule may see of a problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Protocol

from partsong import kernels
from partsong.core.interfaces import Array
from partsong.errors import ParameterError
from partsong.kernels.fused_steps import Move

# ---- equations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Penalty:
    """l1 ‖F‖₁ + ½ l2 ‖F‖², in units that do not change with the size of the data.

    On W both are multiplied by the number of columns m, on H by the number of rows n: the squared error of a row
    of X grows with m and that of a column with n, so the balance stays when rows or columns are added.
    """

    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        for name in ("l1", "l2"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not 0.0 <= float(value) < float("inf"):
                raise ParameterError(f"The {name} penalty must be a number, zero or more and finite; got {value!r}.")

    def __bool__(self) -> bool:
        return self.l1 > 0 or self.l2 > 0


@dataclass(frozen=True, slots=True)
class NormalEquations:
    """min over F ≥ 0 of ½‖A − F B‖², as gram = B Bᵀ (k × k) and cross = A Bᵀ (r × k).

    Blocks of columns of A and B add up, which is why NMF distributes; a sketched problem is `of(A S, B S)`.
    `norm` gives ‖gram‖₂ where many blocks share one gram and should work it out once,
    `place` memory (r × k) for the new F, which a rule may use or leave.
    """

    gram: Array
    cross: Array
    norm: Callable[[], float] | None = None
    place: Array | None = None

    @staticmethod
    def of(A: Array, B: Array) -> NormalEquations:
        """The equations of min ½‖A − F B‖² with A (r × c) and B (k × c)."""
        return NormalEquations(B @ B.T, A @ B.T)

    def __add__(self, other: NormalEquations) -> NormalEquations:
        return NormalEquations(self.gram + other.gram, self.cross + other.cross)

    def curvature(self) -> float:
        """‖gram‖₂, the Lipschitz constant of the gradient in F."""
        return self.norm() if self.norm is not None else kernels.of(self.gram).largest_eigenvalue(self.gram)

    def penalised(self, penalty: Penalty, size: float) -> NormalEquations:
        """With size·(l1 ‖F‖₁ + ½ l2 ‖F‖²) added: gram + size·l2·I, cross − size·l1."""
        if not penalty:
            return self
        gram = kernels.of(self.gram).plus_diagonal(self.gram, penalty.l2 * size)
        cross = self.cross - penalty.l1 * size if penalty.l1 else self.cross
        return NormalEquations(gram, cross)

    def damped(self, amount: float, centre: Array) -> NormalEquations:
        """With ½ amount ‖F − centre‖² added: gram + amount·I, cross + amount·centre."""
        if amount == 0:
            return self
        return NormalEquations(kernels.of(self.gram).plus_diagonal(self.gram, amount), self.cross + amount * centre)

    def objective(self, F: Array) -> float:
        """½ tr(F gram Fᵀ) − ⟨F, cross⟩, in float64: the squared error up to the constant ½‖A‖²."""
        on = kernels.of(F)
        return 0.5 * on.inner(F @ self.gram, F) - on.inner(F, self.cross)


# ---- rules ------------------------------------------------------------------------------------------------------
#
# Rule state shared by all rules: a step count, the previous factor where a rule looks back, a scale it has seen.


@dataclass(frozen=True, slots=True)
class RuleState:
    """How often a rule has stepped, the factor before the last step (None where it is not used), and a problem's scale.

    The scale is 0 before the first step, and wherever a rule does not ask for it.
    """

    count: int = 0
    previous: Array | None = None
    scale: float = 0.0

    def rows(self, start: int, stop: int) -> RuleState:
        """The state of a block of rows."""
        return self if self.previous is None else replace(self, previous=self.previous[start:stop])

    def advanced(self, previous: Array | None = None) -> RuleState:
        """One step later."""
        return RuleState(self.count + 1, previous, self.scale)


class PlainRule(Protocol):
    """A rule whose step compiled code knows; a subclass is such a rule only if it says so itself."""

    @property
    def compiled_move(self) -> Move | None:
        """The step, or None where a setting of the rule is not among what compiled code knows."""
