"""Extrapolation of both factors between half-steps, with restart: how far the next step begins ahead of the last."""

from __future__ import annotations

from dataclasses import dataclass, replace

from partsong import kernels
from partsong.core.interfaces import Array
from partsong.core.states import state
from partsong.errors import ParameterError


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

    def beside(self, example: Array) -> MomentumState:
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
    """Plain alternation."""

    def begin(self, factor: Array) -> MomentumState:
        """At rest."""
        return MomentumState.at_start(factor, 0.0, 0.0)

    def next(self, momentum: MomentumState, objective: Array) -> MomentumState:
        """Still at rest."""
        return replace(momentum, objective=objective)
