"""Generated matrices with planted factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Planted:
    """X with the factors it was made from."""

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

    Neighbours in a row of H are weighed by a Gaussian window of length 3 and standard deviation `width` (for 1: 0.274,
    0.452, 0.274), mirrored at both ends with the last one repeated. The paper gives the length of the window alone.
    """
    W = generator.random((rows, rank))
    padded = np.pad(generator.random((rank, columns)), ((0, 0), (1, 1)), mode="symmetric")
    side = float(np.exp(-0.5 / width**2))
    H = (side * (padded[:, :-2] + padded[:, 2:]) + padded[:, 1:-1]) / (1 + 2 * side)
    return Planted(W @ H, W, H)
