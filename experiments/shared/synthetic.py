"""Generated matrices with planted factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.errors import ParameterError

NOISES = ("binomial", "gaussian", "exponential")


@dataclass(frozen=True, slots=True)
class BlockFederation:
    """One matrix per party, their components H (k × m), and which components each party has (c × k)."""

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
    """The data of the FNMF paper, X_p = Σ_j w_pj h_j + noise.

    Component j is 1 on an interval of the columns, and present on an interval of the rows of a party.

    Components cover between 1/20 and 1/6 of the columns, and as large a share of the rows of a party that has them.
    Entries of w are drawn from U(0.5, 1.5). A party lacks each component with probability `absent`, but never all of
    them. Noise:
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
        raise ParameterError(f"absent={absent} must be a probability below 1.")
    if noise not in NOISES:
        raise ParameterError(f"Unknown noise {noise!r}; choose one of {', '.join(NOISES)}.")
    if not level >= 0 or (noise == "binomial" and level > 1):
        raise ParameterError(f"The level of noise must be 0 or more (and a probability for binomial); got {level}.")


@dataclass(frozen=True, slots=True)
class Planted:
    """X and its planted factors."""

    X: Any
    W: np.ndarray
    H: np.ndarray


def gamma_factors(
    rows: int,
    columns: int,
    rank: int,
    generator: np.random.Generator,
    noise: float = 0.1,
    shape: float = 0.5,
    dtype: Any = np.float32,
) -> Planted:
    """X = max(0, W H + noise·σ·N(0, 1)) with Gamma(shape) factors, σ the standard deviation of W H."""
    W = generator.gamma(shape, size=(rows, rank))
    H = generator.gamma(shape, size=(rank, columns))
    X = W @ H
    scale = float(X.std()) or 1.0
    X += noise * scale * generator.standard_normal(X.shape)
    return Planted(np.maximum(X, 0, out=X).astype(dtype), W, H)


def sparse_topics(
    rows: int,
    columns: int,
    rank: int,
    generator: np.random.Generator,
    words: float = 8.0,
    dtype: Any = np.float32,
) -> Planted:
    """Documents as tf-idf-like CSR rows: each has a few topics, topics have Zipf-distributed words."""
    from scipy.sparse import coo_array

    popularity = 1.0 / np.arange(1, columns + 1)
    H = np.empty((rank, columns))
    for k in range(rank):
        H[k] = generator.permutation(popularity) * 0.7 + 0.3 * popularity
    H /= H.sum(axis=1, keepdims=True)
    W = generator.dirichlet(np.full(rank, 0.05), size=rows)
    lengths = 1 + generator.poisson(words - 1, size=rows)
    documents = np.repeat(np.arange(rows), lengths)
    cumulative = np.cumsum(W, axis=1)
    topics = np.minimum((generator.random(len(documents))[:, None] > cumulative[documents]).sum(axis=1), rank - 1)
    ladders = np.cumsum(H, axis=1)
    picks = generator.random(len(documents))
    terms = np.empty(len(documents), np.int64)
    for k in range(rank):
        here = topics == k
        terms[here] = np.minimum(np.searchsorted(ladders[k], picks[here]), columns - 1)
    counts = coo_array((np.ones(len(documents)), (documents, terms)), shape=(rows, columns)).tocsr()
    counts.sum_duplicates()
    seen = np.bincount(counts.indices, minlength=columns)
    weights = np.log((1 + rows) / (1 + seen)) + 1
    counts.data *= weights[counts.indices]
    sizes = np.sqrt(np.asarray(counts.multiply(counts).sum(axis=1)).ravel())
    counts.data /= np.repeat(np.where(sizes > 0, sizes, 1), np.diff(counts.indptr))
    return Planted(counts.astype(dtype), W, H)


def smoothed_factors(
    rows: int = 100, columns: int = 20, rank: int = 3, *, generator: np.random.Generator, width: float = 1.0
) -> Planted:
    """X = W H with W from U(0, 1), and H from U(0, 1) smoothed along its rows (Singh, 2021: 100 × 20, rank 3).

    Neighbors in a row of H are weighed by a Gaussian window of length 3 and standard deviation `width` (for 1: 0.274,
    0.452, 0.274), mirrored at both ends with the last one repeated. The paper gives only the length of the window.
    """
    W = generator.random((rows, rank))
    padded = np.pad(generator.random((rank, columns)), ((0, 0), (1, 1)), mode="symmetric")
    side = float(np.exp(-0.5 / width**2))
    H = (side * (padded[:, :-2] + padded[:, 2:]) + padded[:, 1:-1]) / (1 + 2 * side)
    return Planted(W @ H, W, H)
