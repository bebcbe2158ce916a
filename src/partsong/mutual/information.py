"""Mutual information between documents and their weights, as a part of the objective; or none of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

from partsong.core import Array
from partsong.errors import ParameterError
from partsong.mutual.critics import Concat, Critic, Size, Theta, draw_parameters
from partsong.mutual.documents import Bag
from partsong.mutual.smile import Bound, ClippedBound


@dataclass(frozen=True, slots=True)
class NoInformation:
    """λ = 0: there is no critic, and nothing of one is computed or sent."""

    strength: float = field(default=0.0, init=False)

    def sizes(self, n_features: int, rank: int) -> dict[str, Size]:
        """No parameters."""
        return {}

    def start(self, n_features: int, rank: int, draw: np.random.Generator, dtype: str) -> dict[str, np.ndarray]:
        """No parameters."""
        return {}

    def read(self, theta: Theta, bag: Bag) -> None:
        """Nothing."""

    def pull(self, theta: Theta, reading: Any, W: Array) -> Array | float:
        """0."""
        return 0.0

    def learn(self, theta: Theta, bag: Bag, reading: Any, W: Array, rate: float) -> Array | float:
        """Nothing; there is no estimate."""
        return float("nan")


@dataclass(frozen=True, slots=True)
class MutualInformation:
    """−λ Î(θ; X, W) in the objective: W descends on it, θ climbs on Î alone, with the step of W unless `rate` is given.

    A batch of one document has no other to be told from: it is left as it is.
    """

    strength: float = 0.1
    critic: Critic = Concat()
    bound: Bound = ClippedBound()
    rate: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.strength, Real) or not 0 < self.strength < float("inf"):
            raise ParameterError(
                f"The strength λ of mutual information must be a number above 0; got {self.strength!r}. "
                "Without it: NoInformation()."
            )
        if self.rate is not None and not (isinstance(self.rate, Real) and 0 < self.rate < float("inf")):
            raise ParameterError(f"The critic's rate must be a number above 0; got {self.rate!r}.")

    def sizes(self, n_features: int, rank: int) -> dict[str, Size]:
        """The critic's parameters."""
        return self.critic.sizes(n_features, rank)

    def start(self, n_features: int, rank: int, draw: np.random.Generator, dtype: str) -> dict[str, np.ndarray]:
        """θ before the first step."""
        return draw_parameters(self.critic, n_features, rank, draw, dtype)

    def read(self, theta: Theta, bag: Bag) -> Any:
        """The critic's look at the documents, which serves both steps."""
        return self.critic.read(theta, bag) if len(bag) > 1 else None

    def pull(self, theta: Theta, reading: Any, W: Array) -> Array | float:
        """λ ∂Î/∂W (b × k)."""
        if len(W) < 2:
            return 0.0
        scores, trace = self.critic.scores(theta, reading, W)
        return self.strength * self.critic.pull(theta, trace, self.bound.slopes(scores))

    def learn(self, theta: Theta, bag: Bag, reading: Any, W: Array, rate: float) -> Array | float:
        """θ ← θ + rate ∂Î/∂θ, in place; returns Î before that."""
        if len(W) < 2:
            return float("nan")
        scores, trace = self.critic.scores(theta, reading, W)
        step = rate if self.rate is None else self.rate
        self.critic.climb(theta, bag, trace, self.bound.slopes(scores), step)
        return self.bound.value(scores)
