"""Critics: networks that score how well a document and a vector of topic weights go together.

A critic is its sizes; its parameters θ travel as named arrays. For a batch of b documents all b² scores are formed from
b sparse products. `read` looks at the documents, `scores` pairs them with weights W (b × k); `pull` and `climb` take
slopes ∂J/∂s (b × b) back to W, and to θ. A trace is good for one way back: its memory is used again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from partsong.core import Array
from partsong.errors import ParameterError
from partsong.mutual.documents import Bag, operations

Theta = Mapping[str, Array]
Trace = Any


class Size(NamedTuple):
    """The shape of a parameter, and how many inputs its layer has."""

    shape: tuple[int, ...]
    inputs: int


class Critic(Protocol):
    """T_θ(x, w) for all pairs of a batch."""

    def sizes(self, n_features: int, rank: int) -> dict[str, Size]:
        """The arrays of θ, by name."""

    def read(self, theta: Theta, bag: Bag) -> Any:
        """What it makes of the documents alone."""

    def scores(self, theta: Theta, reading: Any, W: Array) -> tuple[Array, Trace]:
        """s (b × b), and what the way back needs."""

    def pull(self, theta: Theta, trace: Trace, slopes: Array) -> Array:
        """∂J/∂W (b × k)."""

    def climb(self, theta: Theta, bag: Bag, trace: Trace, slopes: Array, rate: float) -> None:
        """θ ← θ + rate ∂J/∂θ, in place."""


def draw_parameters(
    critic: Critic, n_features: int, rank: int, draw: np.random.Generator, dtype: str
) -> dict[str, np.ndarray]:
    """U(−1/√inputs, 1/√inputs) for weights and shifts: torch's own start of a linear layer, without torch."""

    def drawn(size: Size) -> np.ndarray:
        reach = size.inputs**-0.5
        return draw.uniform(-reach, reach, size.shape).astype(dtype, copy=False)

    return {name: drawn(size) for name, size in critic.sizes(n_features, rank).items()}


@dataclass(frozen=True, slots=True)
class Concat:
    """[x; w] → 32 → 256 → 1 with rectifiers: the critic of the FedNMF+MI paper, taken by the letter.

        s_ij = last · [middleᵀ [P x_i + Q w_j + shift]₊ + middle_shift]₊ + last_shift

    P x_i and Q w_j are formed once for each document, so that a pair costs 32·256 products and none with x.
    P is `words` (V × 32), Q `weights` (k × 32).
    """

    first: int = 32
    second: int = 256

    def __post_init__(self) -> None:
        require_sizes(first=self.first, second=self.second)

    def sizes(self, n_features: int, rank: int) -> dict[str, Size]:
        """Seven arrays: 32(V + k + 1) + 32·256 + 256 + 257 numbers."""
        c, d, inputs = self.first, self.second, n_features + rank
        return {
            "words": Size((n_features, c), inputs),
            "weights": Size((rank, c), inputs),
            "shift": Size((c,), inputs),
            "middle": Size((c, d), c),
            "middle_shift": Size((d,), c),
            "last": Size((d,), d),
            "last_shift": Size((1,), d),
        }

    def read(self, theta: Theta, bag: Bag) -> Array:
        """P x_i + shift (b × 32)."""
        return operations(theta["words"]).times(bag, theta["words"]) + theta["shift"]

    def scores(self, theta: Theta, reading: Array, W: Array) -> tuple[Array, Trace]:
        """s (b × b), and what the way back needs."""
        on, b = operations(W), len(W)
        A = on.pair_up(reading, W @ theta["weights"])
        Z = A @ theta["middle"]
        flat = on.rectify_and_weigh(Z, theta["middle_shift"], theta["last"])
        return flat.reshape(b, b) + theta["last_shift"], (W, A, Z)

    def pull(self, theta: Theta, trace: Trace, slopes: Array) -> Array:
        """∂J/∂W (b × k)."""
        W, A, Z = trace
        on = operations(W)
        on.spread(Z, slopes.reshape(-1), theta["last"])
        _, d_V = on.fold(Z @ theta["middle"].T, A, len(W))
        return d_V @ theta["weights"].T

    def climb(self, theta: Theta, bag: Bag, trace: Trace, slopes: Array, rate: float) -> None:
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
        on.add_transposed(bag, d_U, rate, theta["words"])
        move(theta, gradients, rate)


def move(theta: Theta, gradients: Theta, rate: float) -> None:
    """θ ← θ + rate · gradient, in place."""
    for name, gradient in gradients.items():
        parameter = theta[name]
        parameter += rate * gradient


def require_sizes(**sizes: int) -> None:
    """Refuse layers without units."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise ParameterError(f"A critic needs a whole number {name} ≥ 1; got {size!r}.")
