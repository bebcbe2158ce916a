"""How far players of the game move: η as it is given, falling, or safe by the players' own norms."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Protocol

from partsong.errors import ParameterError

MOST_SAFE = 1.6
"""Meetings never raise the pair's own error up to a relaxation of 2, at which they may swing for ever."""


class StepSize(Protocol):
    """η of a meeting of two players, of a whole side at once, and how a pace changes from sweep to sweep.

    `is_balanced`: rows and columns are brought to one size before they play, so that it does not matter how the scale
    of the model was shared out between them.
    """

    @property
    def is_balanced(self) -> bool:
        """Whether norms decide, and nobody has chosen η."""

    def meeting(self, sweep: int, pace: float, size: float = 0.0) -> tuple[float, float]:
        """(η, 0) of single meetings; or (c, θ), and the pair's own norms decide: θ / (‖w‖² + ‖h‖² + |e| + c).

        `size` is ‖w‖² + ‖h‖² of a pair on average.
        """

    def together(self, sweep: int, curvature: float, miss: float) -> float:
        """η of all players at once; `curvature` is max(‖WᵀW‖₂, ‖HHᵀ‖₂), `miss` is ‖X − W H‖."""

    def in_turn(self, sweep: int, curvature: float) -> float:
        """η of one side while the other waits, whose gram has this norm."""

    def paced(self, pace: float, sweep: int, before: float, after: float) -> float:
        """The pace after this sweep, from the errors (squared) that players saw in the one before and in it."""


@dataclass(frozen=True, slots=True)
class ConstantStep:
    """η, the same in all meetings and sweeps; the paper has 0.001. Meetings are stable to about 2 / (‖w‖² + ‖h‖²)."""

    eta: float = 1e-3

    is_balanced = False

    def __post_init__(self) -> None:
        _require_positive("eta", self.eta)

    def meeting(self, sweep: int, pace: float, size: float = 0.0) -> tuple[float, float]:
        """η."""
        return self.eta, 0.0

    def together(self, sweep: int, curvature: float, miss: float) -> float:
        """η."""
        return self.eta

    def in_turn(self, sweep: int, curvature: float) -> float:
        """η."""
        return self.eta

    def paced(self, pace: float, sweep: int, before: float, after: float) -> float:
        """As it was."""
        return pace


@dataclass(frozen=True, slots=True)
class DecayingStep:
    """η_t = η / (1 + decay · t) in sweep t = 0, 1, …: Σ η_t diverges and Σ η_t² does not, as noise asks for."""

    eta: float = 0.1
    decay: float = 0.01

    is_balanced = False

    def __post_init__(self) -> None:
        _require_positive("eta", self.eta)
        _require_positive("decay", self.decay)

    def _at(self, sweep: int) -> float:
        return self.eta / (1 + self.decay * sweep)

    def meeting(self, sweep: int, pace: float, size: float = 0.0) -> tuple[float, float]:
        """η_t."""
        return self._at(sweep), 0.0

    def together(self, sweep: int, curvature: float, miss: float) -> float:
        """η_t."""
        return self._at(sweep)

    def in_turn(self, sweep: int, curvature: float) -> float:
        """η_t."""
        return self._at(sweep)

    def paced(self, pace: float, sweep: int, before: float, after: float) -> float:
        """As it was."""
        return pace


@dataclass(frozen=True, slots=True)
class SafeStep:
    """Steps that need no tuning, from the norms of those who move.

    Two players who meet: η = θ / (s + |e|) with s = ‖w‖² + ‖h‖². **Neither ever loses by it**: the error e′ after the
    meeting has |e′| ≤ |e| for 0 < θ ≤ 2 (docs/game.md, Theorem 1). For e > 0 nothing is clipped, and as w·h ≤ s/2

        1 − e′/e = η s + η² e w·h ≤ θ u + ½ θ² u (1 − u) ≤ θ,   u = s / (s + e).

    For e = −a < 0 no entry grows, so e′ ≥ e, and w′h′ ≥ wh − η a (w² + h²) in each, so that e′ ≤ (θ − 1) a.

    All at once: η = θ / (2 max(‖WᵀW‖₂, ‖HHᵀ‖₂) + ‖X − W H‖), in turn: η = θ / ‖gram of the other side‖₂. For θ ≤ 1
    neither ever raises ½‖X − W H‖² (docs/game.md has the proof of the first; the second is projected gradient).

    Meetings that each fit one cell well disturb others, so that in noise they have to slow down: at a pace p ≤ 1

        η = θ / (‖w‖² + ‖h‖² + |e| + c (1/p − 1)),   c = ‖w‖² + ‖h‖² on average,

    which is never more than before, and the slower the more alike for all cells. Steps shorter where norms and
    errors are large would end where Σ e h / (s + |e|) vanishes, which is no equilibrium. The pace falls to `slower` of
    itself after a sweep in which players saw the error fall by less than `least` of it, not below 3 / (t + 6) after
    sweep t = 0, 1, … (so that steps add up to any length), and else grows by `faster` up to 1.
    """

    relaxation: float = 1.0
    slower: float = 0.9
    faster: float = 1.05
    least: float = 3e-3

    is_balanced = True

    def __post_init__(self) -> None:
        for name in ("relaxation", "slower", "faster", "least"):
            _require_number(f"SafeStep needs a number {name}", getattr(self, name))
        if not 0 < self.relaxation <= MOST_SAFE:
            raise ParameterError(f"SafeStep needs 0 < relaxation ≤ {MOST_SAFE}; got {self.relaxation!r}.")
        if not (0 < self.slower <= 1 <= self.faster < float("inf") and self.least >= 0):
            told = f"slower={self.slower!r}, faster={self.faster!r}, least={self.least!r}"
            raise ParameterError(f"SafeStep needs 0 < slower ≤ 1 ≤ faster and least ≥ 0; got {told}.")

    def meeting(self, sweep: int, pace: float, size: float = 0.0) -> tuple[float, float]:
        """Held back by the size of a pair on average."""
        return size * (1 / pace - 1), self.relaxation

    def together(self, sweep: int, curvature: float, miss: float) -> float:
        """θ / (2 curvature + miss)."""
        return min(1.0, self.relaxation) / (2 * curvature + miss or 1.0)

    def in_turn(self, sweep: int, curvature: float) -> float:
        """θ / curvature."""
        return min(1.0, self.relaxation) / (curvature or 1.0)

    def paced(self, pace: float, sweep: int, before: float, after: float) -> float:
        """Slower where little was won, but not below 3 / (sweep + 6); else faster, up to where it began."""
        if after <= (1 - self.least) * before:
            return min(1.0, pace * self.faster)
        return min(pace, max(pace * self.slower, 3 / (sweep + 6)))


def _require_number(told: str, value: object) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ParameterError(f"{told}; got {value!r}.")


def _require_positive(name: str, value: float) -> None:
    _require_number(f"{name} must be a number above 0", value)
    if not 0 < value < float("inf"):
        raise ParameterError(f"{name} must be above 0 and finite; got {value!r}.")
