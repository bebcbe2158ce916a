"""Server updates: replace the model by the aggregate, relax towards it, or take an adaptive step.

Adaptive updates treat the mean change of the parties as a gradient (FedOpt: Reddi et al., 2021, Alg. 2):

    Δ = aggregate − model
    first  ← β₁ first + (1 − β₁) Δ
    second ← by the rule, starting at τ²
    model  ← model + rate · first / (√second + τ)

There is no bias correction for the zeros that `first` starts with. Every array has its own moments, so those of a
critic do not mix with those of H. A step may lead below zero: programs project arrays that must be non-negative.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields

from partsong import kernels
from partsong.core.interfaces import Array, Message
from partsong.core.parameters import Choice, whole_number
from partsong.core.states import state
from partsong.errors import ParameterError

DEFAULT_TAU = 1e-3


@state("server-update.moments")
@dataclass(frozen=True, slots=True)
class Moments:
    """Running means of Δ and of Δ², by the name of the array."""

    first: Mapping[str, Array]
    second: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class AdaptiveStep(ABC):
    """A step along the running mean of Δ, divided by the root of `second`; rules differ in how `second` is updated."""

    rate: float = 0.03
    tau: float = DEFAULT_TAU
    beta_1: float = 0.9

    def __post_init__(self) -> None:
        for name, value in ((field.name, getattr(self, field.name)) for field in fields(self)):
            if name.startswith("beta"):
                if not 0 <= value < 1:
                    raise ParameterError(f"{name} must be at least 0 and below 1; got {value!r}.")
            elif not 0 < value < float("inf"):
                raise ParameterError(f"{name} must be finite and above 0; got {value!r}.")

    @abstractmethod
    def second(self, v: Array, square: Array) -> Array:
        """Update the running mean of Δ² with a new Δ²."""

    def init(self, model: Message) -> Moments:
        """first = 0, second = τ²."""
        zeros = {name: array * 0 for name, array in model.arrays.items()}
        return Moments(zeros, {name: array + self.tau**2 for name, array in zeros.items()})

    def step(self, model: Message, aggregate: Message, state: Moments) -> tuple[Message, Moments]:
        """One step along the running mean of Δ."""
        moved, first, second = {}, dict(state.first), dict(state.second)
        for name, array in aggregate.arrays.items():
            before, m, v = (_beside(array, held[name]) for held in (model.arrays, first, second))
            delta = array - before
            first[name] = self.beta_1 * m + (1.0 - self.beta_1) * delta
            second[name] = self.second(v, delta * delta)
            moved[name] = before + self.rate * first[name] / (second[name] ** 0.5 + self.tau)
        return Message(moved), Moments(first, second)


@dataclass(frozen=True, slots=True)
class Adagrad(AdaptiveStep):
    """second ← second + Δ². As in FedOpt, the default has no momentum: β₁ = 0."""

    beta_1: float = 0.0

    def second(self, v: Array, square: Array) -> Array:
        return v + square


@dataclass(frozen=True, slots=True)
class Yogi(AdaptiveStep):
    """second ← second − (1 − β₂) Δ² sign(second − Δ²): it rises as in Adam and falls slowly."""

    beta_2: float = 0.99

    def second(self, v: Array, square: Array) -> Array:
        is_above = 1.0 * (v > square) - 1.0 * (v < square)
        return v - kernels.of(v).cast(kernels.of(v).to_numpy(is_above), v) * square * (1.0 - self.beta_2)


@dataclass(frozen=True, slots=True)
class Adam(AdaptiveStep):
    """second ← β₂ second + (1 − β₂) Δ²."""

    beta_2: float = 0.99

    def second(self, v: Array, square: Array) -> Array:
        return self.beta_2 * v + (1.0 - self.beta_2) * square


def _beside(example: Array, values: Array) -> Array:
    """Convert values to the type and device of `example`."""
    return kernels.of(example).cast(kernels.of(values).to_numpy(values), example)


@dataclass(frozen=True, slots=True)
class Replace:
    """The aggregate is the new model."""

    def init(self, model: Message) -> tuple[()]:
        return ()

    def step(self, model: Message, aggregate: Message, state: tuple[()]) -> tuple[Message, tuple[()]]:
        return Message(aggregate.arrays), state


@dataclass(frozen=True, slots=True)
class Relaxation:
    """Each aggregate moves the model a little less than the one before: Asyn-SD (Qian et al., 2020, Alg. 6).

        model ← (1 − ω_t) model + ω_t aggregate,   ω_t = ρ / (ρ + t),   t = offset, offset + 1, …

    Σ ω_t = ∞ for every ρ > 0, so the start is always forgotten, and ω_t → 0. offset = 0 is as printed: the first
    arrival overwrites the start, and with ρ = 1 the model is the mean of all arrivals. The published code counts
    from offset = 2 with ρ = 1. A larger ρ forgets the past sooner: on synthetic data 3 to 10 performed best.

    If every round has one participant, the mean of its uploads is that upload, and this is the asynchronous server.
    The weight depends on the number of arrivals, not on the staleness of an upload.
    """

    rho: float = 1.0
    offset: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rho < float("inf"):
            raise ParameterError(f"rho must be finite and above 0; got {self.rho!r}.")
        whole_number("offset", self.offset, least=0)

    def init(self, model: Message) -> int:
        return self.offset

    def step(self, model: Message, aggregate: Message, state: int) -> tuple[Message, int]:
        """Move the model towards the aggregate."""
        share = self.rho / (self.rho + state)
        if share == 1.0:
            return Message(aggregate.arrays), state + 1
        moved = {name: _between(model[name], array, share) for name, array in aggregate.arrays.items()}
        return Message(moved), state + 1


def _between(before: Array, after: Array, share: float) -> Array:
    """(1 − share) before + share after, in the type and on the device of `after`."""
    here = kernels.of(after).cast(kernels.of(before).to_numpy(before), after)
    return (1.0 - share) * here + share * after


SERVER_UPDATES = Choice({"average": Replace, "adagrad": Adagrad, "yogi": Yogi, "adam": Adam})
"""Server update classes: FedAvg, FedAdagrad, FedYogi and FedAdam; FedAvg has no rate."""
