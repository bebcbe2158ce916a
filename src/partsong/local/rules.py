"""Rule state shared by all rules: a step count, and the previous factor where a rule looks back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from partsong.core import Array
from partsong.kernels.turns import Move


@dataclass(frozen=True, slots=True)
class RuleState:
    """How often a rule has stepped, and the factor before the last step (None where it is not used)."""

    count: int = 0
    previous: Array | None = None

    def rows(self, start: int, stop: int) -> RuleState:
        """The state of a block of rows."""
        return self if self.previous is None else RuleState(self.count, self.previous[start:stop])

    def advanced(self, previous: Array | None = None) -> RuleState:
        """One step later."""
        return RuleState(self.count + 1, previous)


class PlainRule(Protocol):
    """A rule whose step compiled code knows; a subclass is such a rule only if it says so itself."""

    @property
    def compiled_move(self) -> Move | None:
        """The step, or None where a setting of the rule is not among what compiled code knows."""
