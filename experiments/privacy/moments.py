"""One noisy second moment against noisy rounds, DP-SGD and pooled NMF: error over ε and the number of rows.

    PARTSONG_DATA=folder python -m experiments.privacy.moments --processes 16 --output privacy-moments.jsonl

All rows are at one party, which adds all of the noise: equivalent to noise shares under secure aggregation. Noise is
that of the library, on the grid, from a seed. Errors are ‖X − WH‖/‖X‖ on up to 2000 of the training rows, with W
refitted. Text and ratings also get a score of what they are for: coherence of topics, hits among hidden items.

DP-SGD: 30 rounds on all rows; the gradient of each row, w (wᵀH − x), is clipped and summed, with float noise. Its clip
and step are the best of nine on other data of the same kind with as many rows (`--tune`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from experiments.privacy.moment_tables import line_of
from experiments.shared.datasets import path_of
from partsong import kernels, methods
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Layout, Schedule, Shard
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.methods.privacy_request import RowPrivacy
from partsong.methods.registry import Problem
from partsong.privacy.accounting import largest_mu
from partsong.privacy.randomness import InsecureSource
from partsong.privacy.second_moment import MeanOfDirections, Noise

DELTA, SHOWN_ROWS, SEEDS, EPSILONS = 1e-5, 2000, 5, (0.3, 1.0, 3.0, 10.0)
SGD_ROUNDS, SGD_CLIPS, SGD_STEPS = 30, (0.03, 0.1, 0.3), (0.3, 1.0, 3.0)
WORDS, ITEMS, HIDDEN, TOP = 2000, 1000, 0.2, 10
TEXTS = ("stack_overflow", "rt_polarity", "google_news", "bbc_news")
STOP = "the of to and in for that on is with was by he it at from his as be are has have an not this they you but i we"


@dataclass(frozen=True)
class Cell:
    """One fit: data, rows, ε, rank, seed, and how."""

    data: str
    n: int
    epsilon: float
    rank: int
    seed: int
    how: str


@cache
def table(name: str) -> Any:
    """The rows of a data set: images, profiles, tf-idf of public words, or ratings of popular items."""
    if name in ("mnist", "fashion", "tcga", "brain", "faces"):
        files = {"mnist": "mnist.npz", "fashion": "fashion_mnist.npz", "tcga": "tcga_brca.npz"}
        files |= {"brain": "zeisel_brain.npz", "faces": "faces.npz"}
        with np.load(path_of(files[name]), allow_pickle=False) as held:
            X = held["X_train" if name == "mnist" else "X"].astype(np.float64)
        return np.log2(X + 1) if name == "brain" else X / 255 if name != "tcga" else X
    if name == "cifar":
        with np.load(path_of("cifar10.npz"), allow_pickle=False) as held:
            return held["X"].astype(np.float64).reshape(-1, 3, 1024).mean(axis=1) / 255
    if name == "hpa":
        with np.load(path_of("hpa_tissue.npz"), allow_pickle=False) as held:
            X = np.log2(held["X"].astype(np.float64) + 1)
        return X[X.any(axis=1)]
    if name in TEXTS:
        return _texts(name)
    file = "movielens_1m.npz" if name == "movielens" else "goodreads.npz"
    R = sparse.load_npz(path_of(file)).tocsr().astype(np.float64)
    popular = np.argsort(-np.asarray((R > 0).sum(axis=0)).ravel(), kind="stable")[:ITEMS]
    rows = R[:, np.sort(popular)].toarray()
    return rows[rows.any(axis=1)]


@cache
def public_words() -> tuple[str, ...]:
    """The most frequent words of GloVe, without stop words: a public choice of columns."""
    with np.load(path_of("glove_subset.npz"), allow_pickle=False) as held:
        words = [str(word) for word in held["words"]]
    stop = set(STOP.split())
    return tuple(w for w in words if w.isalpha() and len(w) > 2 and w not in stop)[:WORDS]


@cache
def _counts(name: str) -> Any:
    import csv
    import gzip
    import re

    column = {word: j for j, word in enumerate(public_words())}
    with gzip.open(path_of(f"{name}.csv.gz"), "rt", encoding="utf-8", newline="") as file:
        texts = [row["text"] for row in csv.DictReader(file)]
    rows, columns = [], []
    for i, text in enumerate(texts):
        for word in re.findall("[a-z]{2,}", text.lower()):
            if word in column:
                rows.append(i)
                columns.append(column[word])
    return sparse.csr_array((np.ones(len(rows)), (rows, columns)), (len(texts), WORDS)).toarray()


def _texts(name: str) -> Any:
    """Counts times the inverse document frequencies of the other corpus, so that weights of words are public."""
    other = _counts("rt_polarity" if name == "stack_overflow" else "stack_overflow")
    idf = np.log((1 + len(other)) / (1 + (other > 0).sum(axis=0))) + 1
    rows = _counts(name) * idf
    rows = rows[rows.any(axis=1)]
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def some_rows(cell: Cell) -> Any:
    """The training rows of a seed."""
    X = table(cell.data)
    return X[np.random.default_rng(1000 + cell.seed).permutation(len(X))[: cell.n]]


def weights(X: Any, H: Any, sweeps: int = 100) -> Any:
    """W ≥ 0 for given H."""
    gram, cross = H @ H.T, X @ H.T
    start = np.tile((cross.sum(axis=1) / max(gram.sum(), 1e-300))[:, None], (1, len(H)))
    return kernels.of(X).sweep(np.ascontiguousarray(start), gram, cross, sweeps)


def error_of(X: Any, H: Any) -> float:
    few = np.ascontiguousarray(X[:SHOWN_ROWS])
    return float(np.linalg.norm(few - weights(few, H) @ H) / np.linalg.norm(few))


def pooled(X: Any, rank: int, seed: int, passes: int = 100) -> Any:
    """H by coordinate descent on all rows."""
    draw, sweep = np.random.default_rng(seed), kernels.of(X).sweep
    Ht, W = draw.random((X.shape[1], rank)), draw.random((len(X), rank))
    for _ in range(passes):
        W = sweep(W, Ht.T @ Ht, np.ascontiguousarray(X @ Ht), 1)
        Ht = sweep(Ht, W.T @ W, np.ascontiguousarray(X.T @ W), 1)
    return np.ascontiguousarray(Ht.T)


def unit(X: Any) -> Any:
    norms = np.linalg.norm(X, axis=1, keepdims=True)
    return X / np.where(norms > 0, norms, 1)


def by_mechanism(cell: Cell, X: Any, **settings: Any) -> tuple[Any, int]:
    """H of a mechanism of the library, with nearly all rows cut to the bound, and the visible directions."""
    plain = methods.method("exact").build(Problem(cell.rank))
    asked = RowPrivacy(cell.epsilon, 1.0, mechanism=cell.how, **settings)
    made: Any = asked.program(plain, 10, 1, False)
    object.__setattr__(made, "source", lambda party, release: InsecureSource(cell.seed, cell.how, party, release))
    shard = Shard("p", as_matrix(unit(X) if cell.how == "rounds" else X / X.max() * 1e3))
    schedule = Schedule(made.exchanges(10, 1), seed=cell.seed)
    *_, last = Sequential().run(made, [shard], schedule, reduction=PlainReduction())
    server = last.checkpoint.server
    visible = -1 if cell.how == "rounds" else server.spectrum.visible
    return np.ascontiguousarray(made.components(server)), visible


def noisy_mean(cell: Cell, X: Any) -> Any:
    """One component: the mean direction, released with the whole budget."""
    mean = MeanOfDirections(Noise(1 / largest_mu(cell.epsilon, DELTA)))
    noisy = mean.add_noise(mean.sums(mean.quantize(X)), InsecureSource(cell.seed, "mean"))
    return np.maximum(mean.centre(noisy)[0], 1e-12)[None]


def sgd(cell: Cell, X: Any, clip: float, step: float) -> Any:
    """DP-SGD: H ← max(0, H − step · noisy mean of clipped gradients), rows of H to norm 1; X has rows of norm 1."""
    draw = np.random.default_rng((cell.seed, 9))
    X, H = unit(X), unit(draw.random((cell.rank, X.shape[1])))
    sigma = clip * math.sqrt(SGD_ROUNDS) / largest_mu(cell.epsilon, DELTA)
    for _ in range(SGD_ROUNDS):
        W = weights(X, H, 30)
        R = W @ H - X
        sizes = np.linalg.norm(W, axis=1) * np.linalg.norm(R, axis=1)
        W = W * np.minimum(1, clip / np.maximum(sizes, 1e-12))[:, None]
        gradient = (W.T @ R + sigma * draw.normal(size=H.shape)) / (clip * len(X))
        H = np.maximum(H - step * gradient, 0)
        H = unit(np.where(H.any(axis=1, keepdims=True), H, draw.random(H.shape)))
    return H


def npmi(H: Any, X: Any) -> float:
    """Mean normalized pointwise mutual information of the ten largest words of each topic, over all documents."""
    present, scores = (X > 0).astype(np.float32), []
    for row in H:
        top = np.argsort(-row)[:TOP]
        joint = present[:, top].T @ present[:, top] / len(X)
        single = np.diagonal(joint)
        for a, b in itertools.combinations(range(TOP), 2):
            if joint[a, b] > 0:
                scores.append(math.log(joint[a, b] / (single[a] * single[b])) / -math.log(joint[a, b]))
            else:
                scores.append(-1.0)
    return float(np.mean(scores))


def hits(H: Any, X: Any, seed: int) -> float:
    """Recall at 10: of a fifth of each user's items, hidden, how many are among the ten best that are not shown."""
    draw, found, users = np.random.default_rng((seed, 5)), 0.0, 0
    rows = X[:SHOWN_ROWS].copy()
    hidden = (rows > 0) & (draw.random(rows.shape) < HIDDEN)
    shown = np.where(hidden, 0, rows)
    scores = weights(np.ascontiguousarray(shown), H) @ H
    scores[shown > 0] = -1
    for user in range(len(rows)):
        wanted = np.flatnonzero(hidden[user])
        if wanted.size:
            best = np.argpartition(-scores[user], TOP)[:TOP]
            found += np.isin(best, wanted).sum() / min(TOP, wanted.size)
            users += 1
    return found / max(1, users)


def measure(cell: Cell, tuned: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """Fit a cell, and measure it."""
    began = time.perf_counter()
    X, visible = some_rows(cell), -1
    if cell.how == "pooled":
        H = pooled(X, cell.rank, cell.seed)
    elif cell.how == "mean":
        H = noisy_mean(cell, X)
    elif cell.how.startswith("sgd"):
        given = cell.how.split(":")[1:]
        clip, step = map(float, given) if given else tuned[f"{cell.data} {cell.n} {cell.epsilon}"]
        H = sgd(cell, X, clip, step)
    else:
        H, visible = by_mechanism(cell, X, **({"centre_radius": 0.1} if cell.how == "centred" else {}))
    record = {**asdict(cell), "error": error_of(X, H), "visible": visible, "seconds": time.perf_counter() - began}
    if cell.data in TEXTS:
        record["npmi"] = npmi(H, table(cell.data))
    if cell.data in ("movielens", "goodreads"):
        record["hits"] = hits(H, X, cell.seed)
    return record


SIZES: dict[str, tuple[int, ...]] = {
    "mnist": (300, 1000, 3000, 10000, 60000), "fashion": (300, 1000, 3000, 10000), "tcga": (844,),
    "stack_overflow": (1000, 3000, 10000, 19000), "rt_polarity": (1000, 3000, 10000), "movielens": (1000, 3000, 6000),
}  # fmt: skip
HELD_OUT: dict[str, tuple[int, ...]] = {
    "faces": (500, 2429), "cifar": (500, 2000), "hpa": (1000, 5000, 17000), "brain": (1464,), "goodreads": (2600,),
    "google_news": (3000, 10000), "bbc_news": (2200,),
}  # fmt: skip
"""Sets on which nothing was chosen: for the forecasts and the choice of "auto"."""
TUNED_ON = {"mnist": "fashion", "fashion": "mnist", "tcga": "brain", "stack_overflow": "rt_polarity",
            "rt_polarity": "stack_overflow", "movielens": "stack_overflow"}  # fmt: skip


def cells(names: list[str], seeds: int) -> Iterator[Cell]:
    """All cells of the table."""
    for name in names:
        for n, seed in itertools.product(SIZES[name], range(seeds)):
            yield Cell(name, n, math.inf, 10, seed, "pooled")
            yield Cell(name, n, math.inf, 1, seed, "pooled")
            for epsilon in EPSILONS:
                yield Cell(name, n, epsilon, 1, seed, "mean")
                for how in ("moment", "hybrid", "rounds", *(("centred",) if name == "tcga" else ())):
                    yield Cell(name, n, epsilon, 10, seed, how)
                yield Cell(name, n, epsilon, 1, seed, "moment")
                if n <= 10000:
                    yield Cell(name, n, epsilon, 10, seed, "sgd")


def held_out(seeds: int) -> Iterator[Cell]:
    """Cells of the sets left out of all choices."""
    for name, sizes in HELD_OUT.items():
        for n, seed, rank in itertools.product(sizes, range(seeds), (5, 10, 20)):
            yield Cell(name, n, math.inf, rank, seed, "pooled")
            if rank == 5:
                yield Cell(name, n, math.inf, 1, seed, "pooled")
            for epsilon in EPSILONS:
                if rank == 5:
                    yield Cell(name, n, epsilon, 1, seed, "mean")
                for how in ("moment", "hybrid", "rounds"):
                    yield Cell(name, n, epsilon, rank, seed, how)


def tune(names: list[str], pool: Any) -> dict[str, tuple[float, float]]:
    """Clip and step of DP-SGD with the least error on other data with as many rows, for each ε."""
    jobs = {}
    for name in names:
        for n, epsilon, clip, step in itertools.product(SIZES[name], EPSILONS, SGD_CLIPS, SGD_STEPS):
            if n <= 10000:
                cell = Cell(TUNED_ON[name], n, epsilon, 10, 77, f"sgd:{clip}:{step}")
                jobs[pool.submit(measure, cell, {})] = (f"{name} {n} {epsilon}", (clip, step))
    best: dict[str, tuple[float, tuple[float, float]]] = {}
    for job in as_completed(jobs):
        key, setting = jobs[job]
        best[key] = min(best.get(key, (math.inf, setting)), (job.result()["error"], setting))
    return {key: setting for key, (_, setting) in best.items()}


def timing() -> Iterator[str]:
    """Seconds and bytes of one party, and seconds of the server, for a moment with noise."""
    for m, n, buckets in ((784, 10000, None), (5000, 5000, None), (20000, 5000, 200)):
        draw = np.random.default_rng(0)
        shard = Shard("p", as_matrix(draw.random((n, 10)) @ draw.random((10, m))))
        layout = Layout(("p", "q", "r"), m, 0)
        asked = RowPrivacy(3.0, 1.0, mechanism="moment", buckets=buckets)
        made: Any = asked.program(methods.method("exact").build(Problem(10)), 1, 3, False)
        server, model = made.start_server(layout)
        began = time.perf_counter()
        _, upload = made.local(shard, made.start_party(shard, layout), model)
        sent = time.perf_counter()
        made.finish(server, upload)
        ended = time.perf_counter()
        yield f"m = {m}, n = {n}, buckets {buckets}: party {sent - began:.1f} s, {upload.nbytes} bytes; " + (
            f"server {ended - sent:.1f} s"
        )


@lru_cache(maxsize=1)
def _quiet() -> None:
    from threadpoolctl import threadpool_limits

    threadpool_limits(1)


def main() -> None:
    """Run all cells, and append a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", default=list(SIZES))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("privacy-moments.jsonl"))
    parser.add_argument("--timing", action="store_true", help="print seconds and bytes of a moment, and end")
    parser.add_argument("--held-out", action="store_true", help="the sets on which nothing was chosen")
    asked = parser.parse_args()
    if asked.timing:
        for line in timing():
            print(line, flush=True)
        return
    with ProcessPoolExecutor(asked.processes, initializer=_quiet) as pool, asked.output.open("a") as file:
        tuned = {} if asked.held_out else tune(asked.data, pool)
        file.write(json.dumps({"tuned": tuned}) + "\n")
        wanted = held_out(asked.seeds) if asked.held_out else cells(asked.data, asked.seeds)
        jobs = sorted(wanted, key=lambda cell: -cell.n)
        running = [pool.submit(measure, cell, tuned) for cell in jobs]
        for number, job in enumerate(as_completed(running), 1):
            file.write(line_of(job.result()) + "\n")
            file.flush()
            if number % 50 == 0:
                print(f"{number} of {len(running)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
