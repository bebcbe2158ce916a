"""The matrices of the DSANLS experiments: real ones from the folder that PARTSONG_DATA names, and generated twins.

BOATS, GISETTE, RCV1 and DBLP as a whole are not available; their twins have their shape and sparsity, where
memory allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from experiments.shared.datasets import path_of
from partsong.core.streams import stream

PARTS = 40
"""Number of planted components of generated matrices."""


@dataclass(frozen=True, slots=True)
class DataSet:
    """A matrix by name; `rank` is the paper's 100 unless a set is too small for it."""

    title: str
    load: Callable[[], Any]
    rank: int = 100
    is_generated: bool = False


def _images(file: str, name: str) -> Callable[[], Any]:
    def load() -> Any:
        with np.load(path_of(file), allow_pickle=False) as held:
            return held[name].astype(np.float32) / np.float32(255)

    return load


def _sparse(file: str) -> Callable[[], Any]:
    return lambda: sparse.load_npz(path_of(file)).tocsr().astype(np.float32)


def dense_twin(rows: int, columns: int, noise: float = 0.1) -> Callable[[], Any]:
    """W H of sparse non-negative factors with exponential noise, float32."""

    def load() -> Any:
        draw = stream(0, "twin", rows, columns)
        H = draw.exponential(size=(PARTS, columns)).astype(np.float32) * (draw.random((PARTS, columns)) < 0.3)
        X = np.empty((rows, columns), np.float32)
        for start in range(0, rows, 8192):
            stop = min(rows, start + 8192)
            W = draw.exponential(size=(stop - start, PARTS)) * (draw.random((stop - start, PARTS)) < 0.2)
            X[start:stop] = W.astype(np.float32) @ H
            X[start:stop] += noise * draw.exponential(size=(stop - start, columns)).astype(np.float32)
        return X

    return load


def sparse_twin(rows: int, columns: int, stored: int) -> Callable[[], Any]:
    """Sample counts: each entry picks a component, then a row and a column by its long-tailed weights."""

    def load() -> Any:
        draw = stream(0, "sparse twin", rows, columns, stored)
        parts = draw.integers(PARTS, size=stored)
        rows_at, columns_at = (_long_tailed(size, parts, draw) for size in (rows, columns))
        X = sparse.coo_matrix((np.ones(stored, np.float32), (rows_at, columns_at)), (rows, columns)).tocsr()
        X.sum_duplicates()
        return X

    return load


def _long_tailed(size: int, parts: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Sample indices in 0 … size − 1; each component prefers its own."""
    place = np.minimum((size * draw.random(len(parts)) ** 2.5).astype(np.int64), size - 1)
    return (place * 2654435761 + parts.astype(np.int64) * (size // PARTS + 1)) % size


SETS = {
    "face": DataSet("FACE (MIT CBCL), 2429 × 361", _images("faces.npz", "X"), 60),
    "mnist": DataSet("MNIST, 60000 × 784", _images("mnist.npz", "X_train")),
    "rcv1-small": DataSet("RCV1, 1500 of 804414 documents × 11670, 0.7 %", _sparse("rcv1_small.npz")),
    "movielens": DataSet("MovieLens 1M, 6040 × 3706, 4.5 %", _sparse("movielens_1m.npz")),
    "facebook": DataSet("Facebook pages, 22470 × 22470, 0.07 %", _sparse("facebook_pages.npz")),
    "boats-twin": DataSet("generated, 216000 × 300 (as BOATS)", dense_twin(216_000, 300), is_generated=True),
    "gisette-twin": DataSet(
        "generated, 13500 × 5000, 13 % (as GISETTE)", sparse_twin(13_500, 5000, 9_000_000), is_generated=True
    ),
    "rcv1-twin": DataSet(
        "generated, 80441 × 47236, 0.16 % (a tenth of RCV1)", sparse_twin(80_441, 47_236, 6_100_000), is_generated=True
    ),
    "dblp-twin": DataSet(
        "generated, 317080 × 317080, 0.0024 % (as DBLP)", sparse_twin(317_080, 317_080, 2_416_812), is_generated=True
    ),
    **{
        f"square-{side}": DataSet(f"generated, {side} × {side}", dense_twin(side, side), 20, is_generated=True)
        for side in (1000, 3000, 10_000, 20_000)
    },
}  # fmt: skip
"""In the paper: BOATS, FACE, MNIST, GISETTE, RCV1, DBLP."""

QUICK = {
    "dense": DataSet("generated, 300 × 200", dense_twin(300, 200), 10, is_generated=True),
    "sparse": DataSet("generated, 400 × 300, sparse", sparse_twin(400, 300, 6000), 10, is_generated=True),
}
"""Small sets for --quick."""
