"""The matrices of the experiments, from the folder that PARTSONG_DATA names."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = "PARTSONG_DATA"


@dataclass(frozen=True, slots=True)
class Dataset:
    """A matrix with row labels (or none), its rank in the experiments, and its scaling."""

    name: str
    title: str
    rank: int
    scale: str
    load: Callable[[], tuple[Any, np.ndarray | None]]


def path_of(file: str) -> Path:
    """A file in the folder of data."""
    folder = os.environ.get(FOLDER, "")
    if not folder:
        raise SystemExit(f"Set {FOLDER} to the folder that holds {file}.")
    return Path(folder) / file


def _images(file: str, X: str, y: str) -> Callable[[], tuple[Any, np.ndarray | None]]:
    def load() -> tuple[Any, np.ndarray | None]:
        with np.load(path_of(file), allow_pickle=False) as held:
            return held[X].astype(np.float32) / np.float32(255), held[y]

    return load


def _dense(file: str, labels: str | None, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[], Any]:
    def load() -> tuple[Any, np.ndarray | None]:
        with np.load(path_of(file), allow_pickle=False) as held:
            return change(held["X"]).astype(np.float32), None if labels is None else held[labels]

    return load


def _ratings(file: str) -> Callable[[], Any]:
    def load() -> tuple[Any, np.ndarray | None]:
        from scipy.sparse import load_npz

        return load_npz(path_of(file)).tocsr().astype(np.float32), None

    return load


DATASETS = {
    one.name: one
    for one in (
        Dataset("mnist", "MNIST, 60000 × 784", 20, "grey values in [0, 1]", _images("mnist.npz", "X_train", "y_train")),
        Dataset(
            "fashion", "Fashion-MNIST, 20000 × 784", 20, "grey values in [0, 1]", _images("fashion_mnist.npz", "X", "y")
        ),
        Dataset("cifar", "CIFAR-10, 2000 × 3072", 20, "colour values in [0, 1]", _images("cifar10.npz", "X", "y")),
        Dataset("goodreads", "Goodreads, 2672 × 9990, sparse", 20, "ratings 1 to 5", _ratings("goodreads.npz")),
        Dataset("movielens", "MovieLens 1M, 6040 × 3706, sparse", 20, "ratings 1 to 5", _ratings("movielens_1m.npz")),
        Dataset("tcga", "TCGA breast cancer, 844 × 1000", 10, "log2(x + 1)", _dense("tcga_brca.npz", "y", np.asarray)),
        Dataset(
            "hpa", "HPA tissues, 17229 × 61", 10, "log2(x + 1)",
            _dense("hpa_tissue.npz", None, lambda X: np.log2(X + 1.0)),
        ),
        Dataset(
            "brain", "mouse brain cells, 1464 × 1000", 10, "log2(x + 1)",
            _dense("zeisel_brain.npz", "y", lambda X: np.log2(X + 1.0)),
        ),
    )
}  # fmt: skip
