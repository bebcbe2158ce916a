"""Barycenters by clustering all rows of all matrices: the baselines of the FNMF paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partsong import kernels
from partsong.align.likeness import squared_distances
from partsong.core import Array, Message
from partsong.errors import ParameterError
from partsong.streams import stream


@dataclass(frozen=True, slots=True)
class KMeans:
    """The k centres of Lloyd's iteration on the c·k stacked rows, started by k-means++ (Arthur & Vassilvitskii, 2007).

    Rows of one matrix may fall into the same cluster: it is no alignment.
    """

    iterations: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ParameterError(f"KMeans needs at least one iteration; got {self.iterations}.")

    def solve(self, matrices: Sequence[Array]) -> np.ndarray:
        """Centres (k × m) of the rows of matrices (each k × m)."""
        (rows, power), k = _stacked(matrices), len(matrices[0])
        centres = _spread_out(rows, k, stream(self.seed, "barycenter", "k-means"))
        owner = np.full(len(rows), -1)
        for _ in range(self.iterations):
            nearest = np.argmin(squared_distances(rows, centres), axis=1)
            if (nearest == owner).all():
                break
            owner = nearest
            for j in range(k):
                if (owner == j).any():
                    centres[j] = rows[owner == j].mean(axis=0)
        return np.ldexp(centres, power)

    def __call__(self, uploads: Sequence[Message], model: Message) -> Message:
        """Of uploads H_j (k × m)."""
        return _aggregate(self.solve([upload["H"] for upload in uploads]), uploads)


@dataclass(frozen=True, slots=True)
class FuzzyCMeans:
    """Centres c_l = Σ u_il² v_i / Σ u_il² with memberships u_il = 1 / Σ_r (‖v_i − c_l‖/‖v_i − c_r‖)² (Dunn, 1974)."""

    iterations: int = 100
    tol: float = 1e-6
    seed: int = 0

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.tol < 0:
            raise ParameterError(f"FuzzyCMeans needs iterations ≥ 1 and tol ≥ 0; got {self}.")

    def solve(self, matrices: Sequence[Array]) -> np.ndarray:
        """Centres (k × m) of the rows of matrices (each k × m)."""
        (rows, power), k = _stacked(matrices), len(matrices[0])
        centres = _spread_out(rows, k, stream(self.seed, "barycenter", "fuzzy"))
        floor = 1e-12 * float(np.square(rows).mean(axis=0).sum() or 1.0)
        for _ in range(self.iterations):
            closeness = 1.0 / np.maximum(squared_distances(rows, centres), floor)
            shares = np.square(closeness / closeness.sum(axis=1, keepdims=True))
            before, centres = centres, (shares.T @ rows) / shares.sum(axis=0)[:, None]
            if np.linalg.norm(centres - before) <= self.tol * np.linalg.norm(before):
                break
        return np.ldexp(centres, power)

    def __call__(self, uploads: Sequence[Message], model: Message) -> Message:
        """Of uploads H_j (k × m)."""
        return _aggregate(self.solve([upload["H"] for upload in uploads]), uploads)


def _spread_out(rows: np.ndarray, k: int, draw: np.random.Generator) -> np.ndarray:
    """k rows, each drawn in proportion to its squared distance from those before."""
    chosen = [int(draw.integers(len(rows)))]
    distance = squared_distances(rows, rows[chosen])[:, 0]
    for _ in range(1, k):
        total = float(distance.sum())
        weights = distance / total if total > 0 else np.full(len(rows), 1.0 / len(rows))
        chosen.append(int(draw.choice(len(rows), p=weights)))
        distance = np.minimum(distance, squared_distances(rows, rows[chosen[-1:]])[:, 0])
    return rows[chosen].copy()


def _stacked(matrices: Sequence[Array]) -> tuple[np.ndarray, int]:
    """All rows over 2^power, of which the largest entry is less than 1, so that squares stay in float64; and power."""
    rows = np.vstack([np.asarray(kernels.of(H).to_numpy(H), np.float64) for H in matrices])
    power = math.frexp(float(np.abs(rows).max(initial=0.0)))[1]
    return np.ldexp(rows, -power), power


def _aggregate(centres: np.ndarray, uploads: Sequence[Message]) -> Message:
    H = kernels.of(uploads[0]["H"]).like(centres, uploads[0]["H"])
    return Message({"H": H}, sum(upload.weight for upload in uploads))
