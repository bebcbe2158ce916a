"""Server updates: replace H, relax towards it, or step adaptively (FedOpt: Reddi et al., 2021, Alg. 2).

Adaptive server updates: the mean of what parties have learned, as a gradient (FedOpt: Reddi et al., 2021, Alg. 2).

    Δ = aggregate − model
    first  ← β₁ first + (1 − β₁) Δ
    second ← one rule or another, from τ²
    model  ← model + rate · first / (√second + τ)

No correction for the zeros that `first` begins with. Every array has moments of its own, so that a critic's do not
mix with those of H. A step may lead below zero: programs project what must not be negative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from partsong import kernels
from partsong.core.interfaces import Array, Message
from partsong.errors import ParameterError

# ---- adaptive ---------------------------------------------------------------------------------------------------

STEADY = 1e-3


@dataclass(frozen=True, slots=True)
class Moments:
    """Running means of Δ and of Δ², by the name of the array."""

    first: Mapping[str, Array]
    second: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Adagrad:
    """second ← second + Δ². As in FedOpt there is no inertia, β₁ = 0, unless asked for."""

    rate: float = 0.03
    tau: float = STEADY
    beta_1: float = 0.0

    def __post_init__(self) -> None:
        _require(self.rate, self.tau, beta_1=self.beta_1)

    def init(self, model: Message) -> Moments:
        """first = 0, second = τ²."""
        return _begin(model, self.tau)

    def step(self, model: Message, aggregate: Message, state: Moments) -> tuple[Message, Moments]:
        """A little further along the running mean of Δ."""
        return _advance(self, model, aggregate, state, lambda v, square: v + square)


@dataclass(frozen=True, slots=True)
class Yogi:
    """second ← second − (1 − β₂) Δ² sign(second − Δ²): it rises as Adam's, and falls slowly."""

    rate: float = 0.03
    tau: float = STEADY
    beta_1: float = 0.9
    beta_2: float = 0.99

    def __post_init__(self) -> None:
        _require(self.rate, self.tau, beta_1=self.beta_1, beta_2=self.beta_2)

    def init(self, model: Message) -> Moments:
        """first = 0, second = τ²."""
        return _begin(model, self.tau)

    def step(self, model: Message, aggregate: Message, state: Moments) -> tuple[Message, Moments]:
        """A little further along the running mean of Δ."""
        share = 1.0 - self.beta_2

        def later(v: Array, square: Array) -> Array:
            is_above = 1.0 * (v > square) - 1.0 * (v < square)
            return v - kernels.of(v).like(kernels.of(v).to_numpy(is_above), v) * square * share

        return _advance(self, model, aggregate, state, later)


@dataclass(frozen=True, slots=True)
class Adam:
    """second ← β₂ second + (1 − β₂) Δ²."""

    rate: float = 0.03
    tau: float = STEADY
    beta_1: float = 0.9
    beta_2: float = 0.99

    def __post_init__(self) -> None:
        _require(self.rate, self.tau, beta_1=self.beta_1, beta_2=self.beta_2)

    def init(self, model: Message) -> Moments:
        """first = 0, second = τ²."""
        return _begin(model, self.tau)

    def step(self, model: Message, aggregate: Message, state: Moments) -> tuple[Message, Moments]:
        """A little further along the running mean of Δ."""
        share = 1.0 - self.beta_2
        return _advance(self, model, aggregate, state, lambda v, square: self.beta_2 * v + share * square)


def _begin(model: Message, tau: float) -> Moments:
    zeros = {name: array * 0 for name, array in model.arrays.items()}
    return Moments(zeros, {name: array + tau**2 for name, array in zeros.items()})


def _advance(
    rule: Adagrad | Yogi | Adam,
    model: Message,
    aggregate: Message,
    state: Moments,
    later: Callable[[Array, Array], Array],
) -> tuple[Message, Moments]:
    moved, first, second = {}, dict(state.first), dict(state.second)
    for name, array in aggregate.arrays.items():
        before, m, v = (_beside(array, held[name]) for held in (model.arrays, first, second))
        delta = array - before
        first[name] = rule.beta_1 * m + (1.0 - rule.beta_1) * delta
        second[name] = later(v, delta * delta)
        moved[name] = before + rule.rate * first[name] / (second[name] ** 0.5 + rule.tau)
    return Message(moved), Moments(first, second)


def _beside(example: Array, values: Array) -> Array:
    """In the type and place of what has come."""
    return kernels.of(example).like(kernels.of(values).to_numpy(values), example)


def _require(rate: float, tau: float, **betas: float) -> None:
    for name, value in (("rate", rate), ("tau", tau)):
        if not 0 < value < float("inf"):
            raise ParameterError(f"An adaptive server needs a finite {name} above 0; got {value!r}.")
    for name, value in betas.items():
        if not 0 <= value < 1:
            raise ParameterError(f"{name} must be at least 0 and below 1; got {value!r}.")


# ---- server -----------------------------------------------------------------------------------------------------
#
# Server updates: how the aggregate moves the model.


@dataclass(frozen=True, slots=True)
class Replace:
    """The aggregate is the new model."""

    def init(self, model: Message) -> tuple[()]:
        return ()

    def step(self, model: Message, aggregate: Message, state: tuple[()]) -> tuple[Message, tuple[()]]:
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
