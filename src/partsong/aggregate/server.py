"""Server updates: how the aggregate moves the model."""

from __future__ import annotations

from dataclasses import dataclass

from partsong import kernels
from partsong.core import Array, Message
from partsong.errors import ParameterError


@dataclass(frozen=True, slots=True)
class Replace:
    """The aggregate is the new model."""

    def init(self, model: Message) -> tuple[()]:
        """Nothing is remembered."""
        return ()

    def step(self, model: Message, aggregate: Message, state: tuple[()]) -> tuple[Message, tuple[()]]:
        """The aggregate."""
        return Message(aggregate.arrays), state


@dataclass(frozen=True, slots=True)
class Relaxation:
    """Every aggregate moves the model a little less than the one before: Asyn-SD (Qian et al., 2020, Alg. 6).

        model ← (1 − ω_t) model + ω_t aggregate,   ω_t = ρ / (ρ + t),   t = offset, offset + 1, …

    Σ ω_t = ∞ for every ρ > 0, so that no start is ever beyond reach, and ω_t → 0. offset = 0 is as printed: the first
    arrival overwrites the start, and with ρ = 1 the model is the mean of all that has come. The published code counts
    from offset = 2 with ρ = 1. A larger ρ forgets the past sooner: on generated data 3 to 10 did best.

    Where every round has one participant, the mean of its uploads is that upload, and this is the asynchronous server.
    """

    rho: float = 1.0
    offset: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rho < float("inf"):
            raise ParameterError(f"Relaxation needs a finite rho above 0; got {self.rho!r}.")
        if isinstance(self.offset, bool) or not isinstance(self.offset, int) or self.offset < 0:
            raise ParameterError(f"Relaxation counts from a whole number offset ≥ 0; got {self.offset!r}.")

    def init(self, model: Message) -> int:
        """Where counting begins."""
        return self.offset

    def step(self, model: Message, aggregate: Message, state: int) -> tuple[Message, int]:
        """The model a little nearer to the aggregate."""
        share = self.rho / (self.rho + state)
        if share == 1.0:
            return Message(aggregate.arrays), state + 1
        moved = {name: _between(model[name], array, share) for name, array in aggregate.arrays.items()}
        return Message(moved), state + 1


def _between(before: Array, after: Array, share: float) -> Array:
    """(1 − share) before + share after, in the type and place of what has come."""
    here = kernels.of(after).like(kernels.of(before).to_numpy(before), after)
    return (1.0 - share) * here + share * after
