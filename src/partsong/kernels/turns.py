"""The turns of W and H at a party, in the words of compiled code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Move:
    """A rule's step: "descend" (with inertia), "multiply", or "sweep" (so many times over)."""

    kind: str
    sweeps: int = 1
    inertia: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Towards:
    """A pull on Hᵀ (m × k) that stays the same for some turns; centre is m × k, weights k.

    "alone"               none
    "damped"              ½μ‖H − C‖² in the equations, μ = strength · ‖gram‖₂
    "damped absolutely"   the same with μ = strength
    "mixed"               H ← (H + strength·C) / (1 + strength·weights) after the step
    "proximal"            the proximal map of strength·½‖H − C‖² with the step
    """

    kind: str = "alone"
    strength: float = 0.0
    centre: Any = None
    weights: Any = None


@dataclass(frozen=True, slots=True)
class Turns:
    """What happens in each of `count` turns: the rule's step, penalties in the unit of the sums, the pull on H."""

    count: int
    move: Move
    l1_W: float
    l2_W: float
    l1_H: float
    l2_H: float
    towards: Towards


LONG_CALL = 2e9
"""Operations that one call may take, about a tenth of a second, before Ctrl-C is looked at."""
EVERY_TURN = 5e5
"""What a turn takes however small it is, in operations."""


def most_turns(products: float, shape: tuple[int, int], rank: int, move: Move) -> int:
    """How many turns fit a call, if the two products of one take so many operations."""
    steps = 2.0 * sum(shape) * rank**2 * move.sweeps + 250.0 * rank**2
    return max(1, int(LONG_CALL / (products + steps + EVERY_TURN)))
