"""Mechanisms of differential privacy for a party's message: clip around a public reference, then add noise.

    d = value − reference      all arrays of the message as one vector
    K = ⌊c d / grid⌋           toward zero, with 0 < c ≤ 1 such that ‖K‖ · grid ≤ clip, checked in whole numbers
    sent: max(0, reference + grid · (K + J)),   J whole-numbered noise

Everything after K + J is post-processing with public numbers. Unit: the party.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Protocol

import numpy as np

from partsong import kernels
from partsong.core.interfaces import Array
from partsong.core.parameters import Choice
from partsong.errors import DivergenceError, ParameterError, ShapeError
from partsong.privacy.accounting import Release, check_relation
from partsong.privacy.discrete_noise import RoundedGaussian, RoundedLaplace
from partsong.privacy.randomness import Source, system_source

SMALLEST_CLIP, LARGEST_CLIP = 1e-100, 1e100
MIN_NOISE_MULTIPLIER, MAX_NOISE_MULTIPLIER = 1e-4, 1e6
SHRINK = 1 - 2.0**-40


class Mechanism(Protocol):
    """A mechanism that protects a whole message; `release` is the privacy cost of one use."""

    @property
    def release(self) -> Release:
        """The privacy cost of one message."""

    def protect(
        self, arrays: Mapping[str, Array], reference: Mapping[str, Array], source: Source = system_source
    ) -> dict[str, Array]:
        """Return the protected message; `reference` has the public reference of each array."""


@dataclass(frozen=True, slots=True)
class NoNoise:
    """Sends messages unchanged: no noise, no privacy guarantee."""

    @property
    def release(self) -> Release:
        return Release("none", 0.0)

    def protect(
        self, arrays: Mapping[str, Array], reference: Mapping[str, Array], source: Source = system_source
    ) -> dict[str, Array]:
        return dict(arrays)


@dataclass(frozen=True, slots=True)
class ClippedNoise(ABC):
    """A message within `clip` of its reference in one norm, and noise on the grid of noise_multiplier · sensitivity."""

    kind: ClassVar[str]
    order: ClassVar[int]
    bits: ClassVar[int]

    clip: float
    noise_multiplier: float
    relation: str = "replace"

    def __post_init__(self) -> None:
        check_relation("party", self.relation)
        if not SMALLEST_CLIP <= self.clip <= LARGEST_CLIP:
            raise ParameterError(
                f"clip must be a number from {SMALLEST_CLIP:g} to {LARGEST_CLIP:g}; got {self.clip!r}. It is the "
                "largest distance of an upload from the public reference. Choose it from public knowledge, not from "
                "the data.",
                parameter="clip",
            )
        if not MIN_NOISE_MULTIPLIER <= self.noise_multiplier <= MAX_NOISE_MULTIPLIER:
            raise ParameterError(
                f"noise_multiplier must be a number from {MIN_NOISE_MULTIPLIER:g} to {MAX_NOISE_MULTIPLIER:g}; got "
                f"{self.noise_multiplier!r}. Use `noise_multiplier_for` to find one for a budget, or NoNoise().",
                parameter="noise_multiplier",
            )

    @property
    def grid(self) -> float:
        """A power of two between clip / 2^(bits + 1) and clip / 2^bits."""
        return math.ldexp(1.0, math.frexp(self.clip)[1] - 1 - self.bits)

    @property
    def sensitivity(self) -> float:
        """How far one party can move the clipped vector, in the norm that is clipped."""
        return 2 * self.clip if self.relation == "replace" else self.clip

    @property
    def release(self) -> Release:
        return Release(self.kind, self.noise_multiplier, "party", self.relation)

    @property
    @abstractmethod
    def noise(self) -> RoundedGaussian | RoundedLaplace:
        """What is added."""

    @property
    def _spread(self) -> float:
        return math.nextafter(self.noise_multiplier * self.sensitivity, math.inf)

    def protect(
        self, arrays: Mapping[str, Array], reference: Mapping[str, Array], source: Source = system_source
    ) -> dict[str, Array]:
        names, noise = sorted(arrays), self.noise
        public = {name: _plain(reference[name]) for name in names if name in reference}
        private = {name: _plain(arrays[name]) for name in names}
        _check_shapes(private, public)
        with np.errstate(over="ignore", invalid="ignore"):
            difference = np.concatenate([(private[name] - public[name]).ravel() for name in names])
        if not np.isfinite(difference).all():
            raise DivergenceError(
                f"The message has NaN or infinite numbers ({', '.join(names)}) and cannot be protected; nothing was "
                "drawn and nothing was sent. Check the party's data and step sizes."
            )
        cells = clipped_cells(difference, noise.grid, self.clip / self.grid, self.order)
        noisy = cells + noise.draw(difference.size, source)
        pieces = np.split(noisy, np.cumsum([private[name].size for name in names])[:-1])
        return {
            name: kernels.of(arrays[name]).cast(
                public[name] + (noise.grid * piece).reshape(public[name].shape), arrays[name]
            )
            for name, piece in zip(names, pieces, strict=True)
        }


@dataclass(frozen=True, slots=True)
class ClippedGaussian(ClippedNoise):
    """‖d‖₂ ≤ clip over all arrays of the message, then N(0, σ²) on the grid, σ = noise_multiplier · sensitivity.

    The grid is below clip / 2²⁰: what is cut off is below √size / 10⁶ of the clip.
    """

    kind, order, bits = "gaussian", 2, 20

    @property
    def sigma(self) -> float:
        """The standard deviation of the noise, rounded up."""
        return self._spread

    @property
    def noise(self) -> RoundedGaussian:
        return RoundedGaussian(self.sigma, self.grid)


@dataclass(frozen=True, slots=True)
class ClippedLaplace(ClippedNoise):
    """‖d‖₁ ≤ clip over all arrays of the message, then Laplace noise on the grid: ε = 1 / noise_multiplier a message.

    The grid is below clip / 2³²: finer than for Gaussian noise, since the L1 norm counts every entry.
    """

    kind, order, bits = "laplace", 1, 32

    @property
    def scale(self) -> float:
        """The scale of the noise, rounded up; its standard deviation is √2 of it."""
        return self._spread

    @property
    def noise(self) -> RoundedLaplace:
        return RoundedLaplace(self.scale, self.grid)


def clipped_cells(difference: Any, grid: float, radius: float, order: int) -> Any:
    """K (int64): the difference in cells of the grid, cut toward zero, its norm at most `radius` cells, exactly."""
    limit = math.floor(Fraction(radius) ** order)
    largest = float(np.abs(difference).max(initial=0.0))
    if largest == 0:
        return np.zeros(difference.size, np.int64)
    shape = difference / largest
    norm = float(np.linalg.norm(shape, order))
    if largest / grid * norm <= radius:
        cells = np.trunc(difference / grid).astype(np.int64)
        if _power_sum(cells, order) <= limit:
            return cells
    factor = radius / norm
    while True:
        cells = np.trunc(shape * factor).astype(np.int64)
        if _power_sum(cells, order) <= limit:
            return cells
        factor *= SHRINK


def _plain(array: Array) -> Any:
    return np.asarray(kernels.of(array).to_numpy(array), np.float64)


def _power_sum(cells: Any, order: int) -> int:
    """Σ |K|^order; of numbers below 2²² squared, or below 2³⁴, so that int64 holds it."""
    return int((cells * cells).sum() if order == 2 else np.abs(cells).sum())


def _check_shapes(private: Mapping[str, Any], public: Mapping[str, Any]) -> None:
    for name, values in private.items():
        if name not in public:
            raise ShapeError(
                f"{name!r} has no public reference, which noise needs. Pass one of the same shape (zeros if nothing is "
                "known)."
            )
        if public[name].shape != values.shape:
            raise ShapeError(f"{name!r} has shape {values.shape}, but its public reference {public[name].shape}.")
        if not np.isfinite(public[name]).all():
            raise DivergenceError(f"The public reference of {name!r} has NaN or infinite numbers; nothing was drawn.")
    if not private:
        raise ShapeError("There is nothing to protect: the message has no arrays.")


MECHANISMS = Choice({"gaussian": ClippedGaussian, "laplace": ClippedLaplace})
"""Mechanisms by name; "laplace" clips and adds noise in the L1 norm, and needs no δ."""
