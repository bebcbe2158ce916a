"""The synthetic data of the FNMF paper: dense blocks under noise, at parties that may lack some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partsong.errors import ParameterError

NOISES = ("binomial", "gaussian", "exponential")


@dataclass(frozen=True, slots=True)
class BlockFederation:
    """One matrix per party, the parts H (k × m) they were made from, and which of them each party has (c × k)."""

    matrices: tuple[np.ndarray, ...]
    H: np.ndarray
    present: np.ndarray


def block_federation(
    rows: Sequence[int],
    columns: int,
    rank: int,
    generator: np.random.Generator,
    *,
    absent: float = 0.0,
    noise: str = "gaussian",
    level: float = 0.1,
) -> BlockFederation:
    """X_p = Σ_j w_pj h_j + noise: part j is 1 on an interval of the columns and at a party on an interval of its rows.

    Parts cover between 1/20 and 1/6 of the columns, and at a party that has them as large a share of its rows; entries
    of w are drawn from U(0.5, 1.5). Each party lacks each part with probability `absent`, but never all of them. Noise:
    "binomial" adds Bernoulli(level), "gaussian" max(0, N(0, level²)), "exponential" Exp with mean `level`.
    """
    _check(rows, columns, rank, absent, noise, level)
    H = np.zeros((rank, columns))
    for part in H:
        part[_interval(columns, generator)] = 1.0
    present = generator.random((len(rows), rank)) >= absent
    for party in present:
        if not party.any():
            party[generator.integers(rank)] = True
    matrices = []
    for n, has in zip(rows, present, strict=True):
        W = np.zeros((n, rank))
        for j in np.flatnonzero(has):
            where = _interval(n, generator)
            W[where, j] = generator.uniform(0.5, 1.5, where.stop - where.start)
        matrices.append(W @ H + _noise(noise, level, (n, columns), generator))
    return BlockFederation(tuple(matrices), H, present)


def _interval(length: int, generator: np.random.Generator) -> slice:
    low, high = max(1, length // 20), max(1, length // 6)
    size = int(generator.integers(low, high + 1))
    start = int(generator.integers(length - size + 1))
    return slice(start, start + size)


def _noise(kind: str, level: float, shape: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
    if kind == "binomial":
        return (generator.random(shape) < level).astype(np.float64)
    if kind == "gaussian":
        return np.maximum(0.0, level * generator.standard_normal(shape))
    return generator.exponential(level, shape) if level > 0 else np.zeros(shape)


def _check(rows: Sequence[int], columns: int, rank: int, absent: float, noise: str, level: float) -> None:
    if not rows or min(rows) < 1 or columns < 1 or rank < 1:
        raise ParameterError(f"Blocks need rows, columns and a rank of at least 1; got {rows}, {columns}, {rank}.")
    if not 0 <= absent < 1:
        raise ParameterError(f"absent is a probability below 1; got {absent}.")
    if noise not in NOISES:
        raise ParameterError(f"Unknown noise {noise!r}; choose one of {', '.join(NOISES)}.")
    if not level >= 0 or (noise == "binomial" and level > 1):
        raise ParameterError(f"The level of noise must be 0 or more (and a probability for binomial); got {level}.")
