"""The factorized data: real data if PARTSONG_DATA is set, and generated data.

Real data come from the folder PARTSONG_DATA; without it, `Workload.missing` says what is missing.
"""

from __future__ import annotations

import csv
import gzip
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "PARTSONG_DATA"
WORDS = r"(?u)\b[a-z]{2,}\b"


@dataclass(frozen=True, slots=True)
class Workload:
    """A matrix and a rank. `share`: part of the time limit per run for this size."""

    name: str
    description: str
    rank: int
    load: Callable[[bool], Any]
    share: float = 1.0
    file: str = ""
    quick_rank: int = 6

    def rank_for(self, quick: bool) -> int:
        return self.quick_rank if quick else self.rank

    def missing(self) -> str:
        """Why the data are not available, or an empty string."""
        if not self.file:
            return ""
        folder = os.environ.get(FOLDER, "")
        if not folder:
            return f"skipped: set {FOLDER} to the folder that holds {self.file}"
        return "" if (Path(folder) / self.file).is_file() else f"skipped: no {self.file} in the folder {FOLDER} names"


def _file(name: str) -> Path:
    return Path(os.environ[FOLDER]) / name


def _mnist(quick: bool) -> Any:
    import numpy as np

    with np.load(_file("mnist.npz"), allow_pickle=False) as held:
        return held["X_train"][: 400 if quick else 10_000].astype(np.float32) / np.float32(255)


def _faces(quick: bool) -> Any:
    import numpy as np

    with np.load(_file("faces.npz"), allow_pickle=False) as held:
        return held["X"][: 400 if quick else None].astype(np.float32) / np.float32(255)


def _stack_overflow(quick: bool) -> Any:
    import numpy as np
    from sklearn.feature_extraction.text import TfidfVectorizer

    with gzip.open(_file("stack_overflow.csv.gz"), "rt", encoding="utf-8", newline="") as lines:
        texts = [row["text"] for row in csv.DictReader(lines)]
    texts = texts[::40] if quick else texts
    return TfidfVectorizer(dtype=np.float32, token_pattern=WORDS, stop_words="english").fit_transform(texts)


def _planted_dense(quick: bool) -> Any:
    import numpy as np

    from experiments.shared.synthetic import gamma_factors

    rows, columns, rank = (600, 80, 6) if quick else (20_000, 2_000, 40)
    return gamma_factors(rows, columns, rank, np.random.default_rng(7)).X


def _generated_text(quick: bool) -> Any:
    import numpy as np

    from experiments.shared.synthetic import sparse_topics

    rows, columns, topics = (800, 300, 6) if quick else (20_000, 10_000, 50)
    return sparse_topics(rows, columns, topics, np.random.default_rng(8), words=12 if quick else 30).X


def _small(quick: bool) -> Any:
    import numpy as np
    from sklearn.datasets import load_digits

    return load_digits().data[: 300 if quick else None].astype(np.float32)


ALL = (
    Workload("mnist", "MNIST, first 10000 training images, 10000 × 784, k = 50", 50, _mnist, file="mnist.npz"),
    Workload(
        "stack-overflow",
        "Stack Overflow titles, tf-idf, 20000 × about 10000, sparse, k = 50",
        50,
        _stack_overflow,
        file="stack_overflow.csv.gz",
    ),
    Workload("faces", "CBCL faces, 2429 × 361, k = 49", 49, _faces, share=0.4, file="faces.npz"),
    Workload("planted-dense", "generated, rank 40 plus noise, 20000 × 2000, k = 40", 40, _planted_dense, share=0.75),
    Workload("generated-text", "generated documents of 30 words, 20000 × 10000, sparse, k = 50", 50, _generated_text),
    Workload("small", "scikit-learn's digits, 1797 × 64, k = 16", 16, _small, share=0.2),
)


def chosen(names: str) -> list[Workload]:
    """Select workloads by comma-separated names; an empty list selects all."""
    known = {workload.name: workload for workload in ALL}
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(known)
    strange = [name for name in wanted if name not in known]
    if strange:
        raise SystemExit(f"Unknown workload {', '.join(strange)}; choose from {', '.join(known)}.")
    return [known[name] for name in wanted]
