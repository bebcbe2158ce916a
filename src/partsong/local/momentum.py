"""Extrapolation of both factors between half-steps, with restart."""

from __future__ import annotations

from dataclasses import dataclass, replace

from partsong.errors import ParameterError


@dataclass(frozen=True, slots=True)
class Pace:
    """How far to extrapolate next, the largest amount allowed, the last amount that helped, the least objective so far.

    `must_restart`: the last step raised the objective and was taken back.
    """

    amount: float
    ceiling: float
    trusted: float
    objective: float = float("inf")
    must_restart: bool = False


@dataclass(frozen=True, slots=True)
class Extrapolation:
    """Y = max(0, F + β (F − F⁻)), with β grown while the objective falls and cut when it rises (Ang & Gillis, 2019).

    A step that rises above the least objective so far is taken back: H returns to its last accepted value, W is fitted
    to that once without extrapolation, and β is divided by `cut`. (The paper goes on from the worse point, where
    components pushed to zero may never come back.)
    """

    start: float = 0.7
    growth: float = 1.05
    ceiling_growth: float = 1.01
    cut: float = 1.5

    def __post_init__(self) -> None:
        if not (0 < self.start < 1 and self.cut > self.growth > self.ceiling_growth >= 1):
            raise ParameterError(
                f"Extrapolation needs 0 < start < 1 and cut > growth > ceiling_growth ≥ 1; got {self}."
            )

    def begin(self) -> Pace:
        """The pace of the first iteration."""
        return Pace(self.start, 1.0, self.start)

    def next(self, pace: Pace, objective: float) -> Pace:
        """The pace after an iteration that ended at `objective`."""
        if objective > pace.objective:
            return Pace(pace.amount / self.cut, pace.trusted, pace.trusted, pace.objective, must_restart=True)
        return Pace(
            min(pace.ceiling, pace.amount * self.growth),
            min(1.0, pace.ceiling * self.ceiling_growth),
            pace.amount,
            objective,
        )


@dataclass(frozen=True, slots=True)
class NoExtrapolation:
    """Plain alternation."""

    def begin(self) -> Pace:
        """At rest."""
        return Pace(0.0, 0.0, 0.0)

    def next(self, pace: Pace, objective: float) -> Pace:
        """Still at rest."""
        return replace(pace, objective=objective)
