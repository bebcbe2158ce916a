"""A critic of two networks that meet in an inner product."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from partsong.core import Array
from partsong.mutual.critics import Size, Theta, Trace, move, require_sizes
from partsong.mutual.documents import Bag, operations


@dataclass(frozen=True, slots=True)
class Separable:
    """s_ij = g(x_i) · h(w_j) for two networks with rectifiers: the critic of SMILE's own demonstration.

    g: V → 256 → 256 → 256 → 32 and h: k → 256 → 256 → 256 → 32; `layers` counts the inner ones.
    A pair costs 32 products.
    """

    hidden: int = 256
    embedding: int = 32
    layers: int = 2

    def __post_init__(self) -> None:
        require_sizes(hidden=self.hidden, embedding=self.embedding, layers=self.layers)

    @property
    def depth(self) -> int:
        """Products in each of the two networks."""
        return self.layers + 2

    def sizes(self, n_features: int, rank: int) -> dict[str, Size]:
        """A matrix and a shift for each layer of both networks."""
        found: dict[str, Size] = {}
        for side, inputs in (("document", n_features), ("weights", rank)):
            widths = [inputs, *[self.hidden] * (self.layers + 1), self.embedding]
            for i, (width, following) in enumerate(pairwise(widths)):
                found[f"{side}.{i}"] = Size((width, following), width)
                found[f"{side}.{i}.shift"] = Size((following,), width)
        return found

    def read(self, theta: Theta, bag: Bag) -> list[Array]:
        """What every layer of g makes of the documents."""
        on = operations(theta["document.0"])
        first = on.rectify(on.times(bag, theta["document.0"]) + theta["document.0.shift"])
        return self._forward(theta, "document", [None, first])

    def scores(self, theta: Theta, reading: list[Array], W: Array) -> tuple[Array, Trace]:
        """s (b × b), and what every layer gave."""
        seen = self._forward(theta, "weights", [W])
        return reading[-1] @ seen[-1].T, (reading, seen)

    def pull(self, theta: Theta, trace: Trace, slopes: Array) -> Array:
        """∂J/∂W (b × k)."""
        reading, seen = trace
        D, _ = self._backward(theta, "weights", seen, slopes.T @ reading[-1])
        return D @ theta["weights.0"].T

    def climb(self, theta: Theta, bag: Bag, trace: Trace, slopes: Array, rate: float) -> None:
        """θ ← θ + rate ∂J/∂θ, in place."""
        reading, seen = trace
        D_words, of_documents = self._backward(theta, "document", reading, slopes @ seen[-1])
        D_weights, of_weights = self._backward(theta, "weights", seen, slopes.T @ reading[-1])
        firsts = {
            "document.0.shift": D_words.sum(0),
            "weights.0": seen[0].T @ D_weights,
            "weights.0.shift": D_weights.sum(0),
        }
        operations(D_words).add_transposed(bag, D_words, rate, theta["document.0"])
        move(theta, {**of_documents, **of_weights, **firsts}, rate)

    def _forward(self, theta: Theta, side: str, seen: list[Any]) -> list[Array]:
        """The inputs of all layers from those of the first few, and the output."""
        for i in range(len(seen) - 1, self.depth):
            Z = seen[-1] @ theta[f"{side}.{i}"] + theta[f"{side}.{i}.shift"]
            seen = [*seen, operations(Z).rectify(Z) if i + 1 < self.depth else Z]
        return seen

    def _backward(self, theta: Theta, side: str, seen: list[Array], D: Array) -> tuple[Array, dict[str, Array]]:
        """∂J at the output of layer 0 before its rectifier, and the gradients of all later layers."""
        gradients: dict[str, Array] = {}
        for i in range(self.depth - 1, 0, -1):
            gradients[f"{side}.{i}"] = seen[i].T @ D
            gradients[f"{side}.{i}.shift"] = D.sum(0)
            D = operations(D).mask(D @ theta[f"{side}.{i}"].T, seen[i])
        return D, gradients
