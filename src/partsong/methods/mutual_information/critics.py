"""Critics: networks that score how well a document and a vector of topic weights match.

A critic object holds only layer sizes; its parameters θ are named arrays. For a batch of b documents, all b² scores
need only b sparse products. `read` encodes the documents, `scores` pairs them with weights W (b × k); `pull` and
`ascend` backpropagate slopes ∂J/∂s (b × b) to W and to θ. A trace serves one backward pass: its memory is reused.

Bounds of mutual information use scores s_ij = T(x_i, w_j) of all pairs in a batch (b × b): diagonal pairs belong
together, all others are drawn from the product of the marginals (Song & Ermon, 2020).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Real
from typing import Any, NamedTuple, Protocol

import numpy as np

from partsong.core.interfaces import Array
from partsong.core.parameters import Choice, whole_number
from partsong.errors import ParameterError
from partsong.methods.mutual_information.batches import Batch, operations

Theta = Mapping[str, Array]
Trace = Any


class ParameterShape(NamedTuple):
    """The shape of a parameter, and the number of inputs of its layer."""

    shape: tuple[int, ...]
    inputs: int


class Critic(Protocol):
    """T_θ(x, w) for all pairs of a batch."""

    def sizes(self, n_features: int, rank: int) -> dict[str, ParameterShape]:
        """The arrays of θ, by name."""

    def read(self, theta: Theta, batch: Batch) -> Any:
        """The encoding of the documents."""

    def scores(self, theta: Theta, reading: Any, W: Array) -> tuple[Array, Trace]:
        """s (b × b), and the trace for the backward pass."""

    def pull(self, theta: Theta, trace: Trace, slopes: Array) -> Array:
        """∂J/∂W (b × k)."""

    def ascend(self, theta: Theta, batch: Batch, trace: Trace, slopes: Array, rate: float) -> None:
        """θ ← θ + rate ∂J/∂θ, in place."""


def draw_parameters(
    critic: Critic, n_features: int, rank: int, draw: np.random.Generator, dtype: str
) -> dict[str, np.ndarray]:
    """Draw weights and shifts from U(−1/√inputs, 1/√inputs), as torch initializes a linear layer."""

    def drawn(size: ParameterShape) -> np.ndarray:
        reach = size.inputs**-0.5
        return draw.uniform(-reach, reach, size.shape).astype(dtype, copy=False)

    return {name: drawn(size) for name, size in critic.sizes(n_features, rank).items()}


@dataclass(frozen=True, slots=True)
class Concat:
    """[x; w] → 32 → 256 → 1 with rectifiers: the critic of the FedNMF+MI paper, as printed.

        s_ij = last · [middleᵀ [P x_i + Q w_j + shift]₊ + middle_shift]₊ + last_shift

    P x_i and Q w_j are formed once for each document, so a pair costs 32·256 products, none with x.
    P is `words` (V × 32), Q `weights` (k × 32).
    """

    first: int = 32
    second: int = 256

    def __post_init__(self) -> None:
        require_sizes(first=self.first, second=self.second)

    def sizes(self, n_features: int, rank: int) -> dict[str, ParameterShape]:
        """Seven arrays: 32(V + k + 1) + 32·256 + 256 + 257 numbers."""
        c, d, inputs = self.first, self.second, n_features + rank
        return {
            "words": ParameterShape((n_features, c), inputs),
            "weights": ParameterShape((rank, c), inputs),
            "shift": ParameterShape((c,), inputs),
            "middle": ParameterShape((c, d), c),
            "middle_shift": ParameterShape((d,), c),
            "last": ParameterShape((d,), d),
            "last_shift": ParameterShape((1,), d),
        }

    def read(self, theta: Theta, batch: Batch) -> Array:
        """P x_i + shift (b × 32)."""
        return operations(theta["words"]).times(batch, theta["words"]) + theta["shift"]

    def scores(self, theta: Theta, reading: Array, W: Array) -> tuple[Array, Trace]:
        """s (b × b), and the trace for the backward pass."""
        on, b = operations(W), len(W)
        A = on.pair_up(reading, W @ theta["weights"])
        Z = A @ theta["middle"]
        flat = on.rectify_and_weigh(Z, theta["middle_shift"], theta["last"])
        return flat.reshape(b, b) + theta["last_shift"], (W, A, Z)

    def pull(self, theta: Theta, trace: Trace, slopes: Array) -> Array:
        W, A, Z = trace
        on = operations(W)
        on.spread(Z, slopes.reshape(-1), theta["last"])
        _, d_V = on.fold(Z @ theta["middle"].T, A, len(W))
        return d_V @ theta["weights"].T

    def ascend(self, theta: Theta, batch: Batch, trace: Trace, slopes: Array, rate: float) -> None:
        """θ ← θ + rate ∂J/∂θ, in place; of `words` only rows of words in the batch move."""
        W, A, Z = trace
        on = operations(W)
        d_last, d_middle_shift = on.spread(Z, slopes.reshape(-1), theta["last"])
        d_middle = A.T @ Z
        d_U, d_V = on.fold(Z @ theta["middle"].T, A, len(W))
        gradients = {
            "weights": W.T @ d_V,
            "shift": d_U.sum(0),
            "middle": d_middle,
            "middle_shift": d_middle_shift,
            "last": d_last,
            "last_shift": slopes.sum(),
        }
        on.add_transposed(batch, d_U, rate, theta["words"])
        move(theta, gradients, rate)


def move(theta: Theta, gradients: Theta, rate: float) -> None:
    """θ ← θ + rate · gradient, in place."""
    for name, gradient in gradients.items():
        parameter = theta[name]
        parameter += rate * gradient


def require_sizes(**sizes: int) -> None:
    """Refuse layers without units."""
    for name, size in sizes.items():
        whole_number(f"A critic's {name}", size)


FAR = 60.0
"""Beyond this score the sigmoid is 0 or 1 in floating point."""


@dataclass(frozen=True, slots=True)
class Bound(ABC):
    """SMILE's estimate Î of mutual information, and the gradient with which a critic learns.

        Î = (1/b) Σ_i s_ii − log[ (1/(b(b−1))) Σ_{i≠j} exp(min(max(s_ij, −τ), τ)) ]

    τ is `clip`. The paper prints max(min(v, l), u), which is u for every v; the first term is not clipped.
    """

    clip: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.clip <= FAR:
            raise ParameterError(f"clip must be above 0 and at most {FAR:g}; got {self.clip!r}.")

    def value(self, scores: Array) -> Array:
        """Î, a scalar; needs at least two documents."""
        on, b = operations(scores), len(scores)
        apart = 1.0 - on.unit(b, scores)
        mean = (on.exp(scores.clip(-self.clip, self.clip)) * apart).sum() / (b * (b - 1))
        return scores.diagonal().sum() / b - on.log(mean)

    @abstractmethod
    def slopes(self, scores: Array) -> Array:
        """The gradient with respect to the scores (b × b)."""


@dataclass(frozen=True, slots=True)
class ClippedBound(Bound):
    """The gradient of SMILE itself: "dv", as printed in the FedNMF+MI paper (Eq. 2), except for the clip.

    ∂Î/∂s_ii = 1/b,   ∂Î/∂s_ij = −exp(s_ij) [|s_ij| < τ] / Σ_{i≠j} exp(clipped s_ij)
    """

    def slopes(self, scores: Array) -> Array:
        on, b = operations(scores), len(scores)
        unit = on.unit(b, scores)
        shares = on.exp(scores.clip(-self.clip, self.clip)) * (1.0 - unit)
        is_free = (scores < self.clip) & (scores > -self.clip)
        return unit / b - shares * is_free / shares.sum()


@dataclass(frozen=True, slots=True)
class JensenShannon(Bound):
    """The gradient of the Jensen–Shannon bound: "js", as in the code of SMILE's authors; more stable.

    J = −(1/b) Σ_i softplus(−s_ii) − (1/(b(b−1))) Σ_{i≠j} softplus(s_ij)
    ∂J/∂s_ii = σ(−s_ii)/b,   ∂J/∂s_ij = −σ(s_ij) / (b(b−1))
    """

    def slopes(self, scores: Array) -> Array:
        on, b = operations(scores), len(scores)
        unit = on.unit(b, scores)
        rising = 1.0 / (1.0 + on.exp(-scores.clip(-FAR, FAR)))
        return unit * (1.0 - rising) / b - (1.0 - unit) * rising / (b * (b - 1))


@dataclass(frozen=True, slots=True)
class NoInformation:
    """λ = 0: no critic is computed or sent."""

    strength: float = field(default=0.0, init=False)

    def sizes(self, n_features: int, rank: int) -> dict[str, ParameterShape]:
        return {}

    def start(self, n_features: int, rank: int, draw: np.random.Generator, dtype: str) -> dict[str, np.ndarray]:
        return {}

    def read(self, theta: Theta, batch: Batch) -> None:
        return None

    def pull(self, theta: Theta, reading: Any, W: Array) -> Array | float:
        return 0.0

    def learn(self, theta: Theta, batch: Batch, reading: Any, W: Array, rate: float) -> Array | float:
        return float("nan")


@dataclass(frozen=True, slots=True)
class MutualInformation:
    """−λ Î(θ; X, W) in the objective: W descends on it, θ climbs on Î alone, with the step of W unless `rate` is given.

    A batch of one document is skipped: the estimate needs other documents.
    """

    strength: float = 0.1
    critic: Critic = Concat()
    bound: Bound = ClippedBound()
    rate: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.strength, Real) or not 0 < self.strength < float("inf"):
            raise ParameterError(
                f"strength (λ) must be a number above 0; got {self.strength!r}. Use NoInformation() for no term."
            )
        if self.rate is not None and not (isinstance(self.rate, Real) and 0 < self.rate < float("inf")):
            raise ParameterError(f"rate, the critic's learning rate, must be a number above 0; got {self.rate!r}.")

    def sizes(self, n_features: int, rank: int) -> dict[str, ParameterShape]:
        return self.critic.sizes(n_features, rank)

    def start(self, n_features: int, rank: int, draw: np.random.Generator, dtype: str) -> dict[str, np.ndarray]:
        return draw_parameters(self.critic, n_features, rank, draw, dtype)

    def read(self, theta: Theta, batch: Batch) -> Any:
        """Encode the documents, for both steps."""
        return self.critic.read(theta, batch) if len(batch) > 1 else None

    def pull(self, theta: Theta, reading: Any, W: Array) -> Array | float:
        """λ ∂Î/∂W (b × k)."""
        if len(W) < 2:
            return 0.0
        scores, trace = self.critic.scores(theta, reading, W)
        return self.strength * self.critic.pull(theta, trace, self.bound.slopes(scores))

    def learn(self, theta: Theta, batch: Batch, reading: Any, W: Array, rate: float) -> Array | float:
        """θ ← θ + rate ∂Î/∂θ, in place; return Î before the step."""
        if len(W) < 2:
            return float("nan")
        scores, trace = self.critic.scores(theta, reading, W)
        step = rate if self.rate is None else self.rate
        self.critic.ascend(theta, batch, trace, self.bound.slopes(scores), step)
        return self.bound.value(scores)


@dataclass(frozen=True, slots=True)
class Separable:
    """s_ij = g(x_i) · h(w_j) for two networks with rectifiers: the critic of SMILE's demonstration code.

    g: V → 256 → 256 → 256 → 32 and h: k → 256 → 256 → 256 → 32; `layers` counts the inner layers.
    A pair costs 32 products.
    """

    hidden: int = 256
    embedding: int = 32
    layers: int = 2

    def __post_init__(self) -> None:
        require_sizes(hidden=self.hidden, embedding=self.embedding, layers=self.layers)

    @property
    def depth(self) -> int:
        """Matrix products in each of the two networks."""
        return self.layers + 2

    def sizes(self, n_features: int, rank: int) -> dict[str, ParameterShape]:
        """A matrix and a shift for each layer of both networks."""
        found: dict[str, ParameterShape] = {}
        for side, inputs in (("document", n_features), ("weights", rank)):
            widths = [inputs, *[self.hidden] * (self.layers + 1), self.embedding]
            for i, (width, following) in enumerate(pairwise(widths)):
                found[f"{side}.{i}"] = ParameterShape((width, following), width)
                found[f"{side}.{i}.shift"] = ParameterShape((following,), width)
        return found

    def read(self, theta: Theta, batch: Batch) -> list[Array]:
        """The outputs of all layers of g for the documents."""
        on = operations(theta["document.0"])
        first = on.rectify(on.times(batch, theta["document.0"]) + theta["document.0.shift"])
        return self._forward(theta, "document", [None, first])

    def scores(self, theta: Theta, reading: list[Array], W: Array) -> tuple[Array, Trace]:
        """s (b × b), and the outputs of all layers."""
        seen = self._forward(theta, "weights", [W])
        return reading[-1] @ seen[-1].T, (reading, seen)

    def pull(self, theta: Theta, trace: Trace, slopes: Array) -> Array:
        reading, seen = trace
        D, _ = self._backward(theta, "weights", seen, slopes.T @ reading[-1])
        return D @ theta["weights.0"].T

    def ascend(self, theta: Theta, batch: Batch, trace: Trace, slopes: Array, rate: float) -> None:
        """θ ← θ + rate ∂J/∂θ, in place."""
        reading, seen = trace
        D_words, of_documents = self._backward(theta, "document", reading, slopes @ seen[-1])
        D_weights, of_weights = self._backward(theta, "weights", seen, slopes.T @ reading[-1])
        firsts = {
            "document.0.shift": D_words.sum(0),
            "weights.0": seen[0].T @ D_weights,
            "weights.0.shift": D_weights.sum(0),
        }
        operations(D_words).add_transposed(batch, D_words, rate, theta["document.0"])
        move(theta, {**of_documents, **of_weights, **firsts}, rate)

    def _forward(self, theta: Theta, side: str, seen: list[Any]) -> list[Array]:
        """Run the remaining layers; return all layer inputs and the output."""
        for i in range(len(seen) - 1, self.depth):
            Z = seen[-1] @ theta[f"{side}.{i}"] + theta[f"{side}.{i}.shift"]
            seen = [*seen, operations(Z).rectify(Z) if i + 1 < self.depth else Z]
        return seen

    def _backward(self, theta: Theta, side: str, seen: list[Array], D: Array) -> tuple[Array, dict[str, Array]]:
        """Return ∂J at the output of layer 0 before its rectifier, and the gradients of all later layers."""
        gradients: dict[str, Array] = {}
        for i in range(self.depth - 1, 0, -1):
            gradients[f"{side}.{i}"] = seen[i].T @ D
            gradients[f"{side}.{i}.shift"] = D.sum(0)
            D = operations(D).mask(D @ theta[f"{side}.{i}"].T, seen[i])
        return D, gradients


CRITICS = Choice({"concat": Concat(), "separable": Separable()})
"""Critics by name."""

BOUNDS = Choice({"dv": ClippedBound(), "js": JensenShannon()})
"""Bounds whose gradients train a critic, by name."""
