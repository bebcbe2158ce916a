"""Rule state shared by all rules: a step count, the previous factor where a rule looks back, a scale it has seen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from partsong.core import Array
from partsong.kernels.turns import Move


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
