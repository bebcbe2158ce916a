"""What the sums of `exact` disclose (rows, XᵀX, lone columns, membership, differences), beside the exposure level.

    python -m experiments.leakage.invertibility [--quick] [--parts phase,real] [--output FILE]
    python -m experiments.leakage.invertibility --report docs/results/invertibility.jsonl

Every sum comes from a recorded run of the program. One party of n rows is attacked; other parties hold other rows.
--parts measures some parts and keeps the lines of the others in the output. --report prints the tables.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix, issparse, load_npz

from experiments.shared.datasets import DATASETS, path_of
from partsong.aggregation.plaintext import PlainReduction
from partsong.attacks.exact_sums import attack_differences
from partsong.attacks.findings import rows_within
from partsong.attacks.membership import auc_of, membership
from partsong.attacks.moment import Moment, Pair, row_span, rows_by_rotation, second_moment
from partsong.attacks.runner import RecordedRun, by_law, findings
from partsong.attacks.sparse_rows import DIRECTIONS, lone_columns, rows_by_dictionary
from partsong.attacks.sums import attack_complete_sums
from partsong.attacks.transcript import AttackContext, to_float64
from partsong.core.interfaces import Layout, Schedule, Shard
from partsong.core.streams import stream
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.methods import build
from partsong.privacy.exposure import Exposure, Support, worst
from partsong.secure_aggregation.protocol import SecureSum
from partsong.topics.tokenizer import Words
from partsong.topics.vocabulary import Vocabulary, count_words, tf_idf

Record = dict[str, Any]
VICTIM = "p0"
OTHERS = (100, 100)
"""Number of rows of the other parties, if available."""
RECOVERED, NEAR = 0.01, 0.1
TELLS = 0.75
"""AUC from which a test counts as `membership`; below, it is a `guess`."""

# ---- recorded runs ----------------------------------------------------------------------------------------------


def recorded(parts: Sequence[Any], rank: int, rounds: int, seed: int, *, masked: bool = False) -> RecordedRun:
    """Run `exact` on these parts (rows × columns) and record it; the rows of all parties are kept as truth."""
    program = build("exact", rank, local_steps=3)
    shards = [Shard(f"p{i}", as_matrix(part), seed + i) for i, part in enumerate(parts)]
    reduction = SecureSum() if masked else PlainReduction()
    done = Sequential(record=True).run(program, shards, Schedule(rounds, seed), reduction=reduction)
    truth = {f"p{i}": dense(part) for i, part in enumerate(parts)}
    return RecordedRun([each.traffic for each in done], program, Layout.of(shards, seed), reduction, truth=truth)


def dense(rows: Any) -> np.ndarray:
    """Rows as a float64 array."""
    return np.asarray(rows.toarray() if issparse(rows) else rows, np.float64)


def pairs_of(context: AttackContext) -> list[Pair]:
    """WᵀW and WᵀX of every round of the attacked party."""
    return [
        (to_float64(upload["gram"]), to_float64(upload["cross"])) for _, upload in context.seen(VICTIM, "gram", "cross")
    ]


def word_of(context: AttackContext, rank: int) -> Record:
    """The exposure level, and the values that it is computed from."""
    support = Support.of(context.truth[VICTIM])
    return {
        "law": str(by_law(context, VICTIM)[0]),
        "directions": rank * len(context.exchanges),
        "rarest": support.rarest,
        "mean_support": support.mean,
    }


def by_moment(context: AttackContext, seconds: float = 60.0) -> Record:
    """Attack by XᵀX and signs: its error, rows found to 1 % and 10 %, and those that the attacker calls found."""
    X, pairs, began = context.truth[VICTIM], pairs_of(context), time.monotonic()
    unit = context.unit(pairs[0][1])
    out: Record = {"moment_error": None, "doubt": None, "is_recovered": False, "seconds": None}
    out |= {"within_1": 0, "within_10": 0, "labelled": 0, "labelled_right": 0}
    span = row_span([cross for _, cross in pairs], len(X), unit) if len(X) <= X.shape[1] else None
    out["is_span"] = span is not None
    moment = None if span is None else second_moment(pairs, span, unit, began + seconds)
    if moment is not None:
        out |= {"moment_error": moment_error(moment, X), "doubt": moment.doubt, "is_recovered": moment.is_recovered}
        turned = rows_by_rotation(moment, pairs, deadline=began + seconds)
        if turned is not None:
            found = turned.rows[turned.is_found]
            out |= {
                "within_1": rows_within("X", turned.rows, X, RECOVERED),
                "within_10": rows_within("X", turned.rows, X, NEAR),
                "labelled": turned.n_found,
                "labelled_right": rows_within("X", found, X, RECOVERED) if len(found) else 0,
            }
    level = Exposure.ROWS if out["within_1"] else Exposure.MEMBERSHIP if out["is_span"] else Exposure.BOUNDED
    return out | {"found": found_word(level), "seconds": time.monotonic() - began}


def found_word(level: Exposure) -> str:
    """The level of a finding."""
    return "nothing" if level is Exposure.BOUNDED else str(level)


def moment_error(moment: Moment, X: np.ndarray) -> float:
    """‖M − XᵀX‖ / ‖XᵀX‖, in an orthonormal basis of both, so that large m costs nothing and small errors are seen."""
    basis = np.linalg.qr(np.vstack([moment.basis, X]).T)[0]
    own, found = X @ basis, moment.basis @ basis
    M = found.T @ np.linalg.pinv(moment.Q, hermitian=True) @ found
    return float(np.linalg.norm(M - own.T @ own) / np.linalg.norm(own.T @ own))


# ---- rows -------------------------------------------------------------------------------------------------------


def generated(seed: int, sizes: Sequence[int], columns: int, density: float) -> list[np.ndarray]:
    """Parts with entries from Gamma(1), each cell nonzero with this probability."""
    draw = stream(seed, "invertibility", columns, int(1000 * density), *sizes)
    return [draw.gamma(1.0, size=(n, columns)) * (draw.random((n, columns)) < density) for n in sizes]


def evenly(seed: int, sizes: Sequence[int], columns: int, support: int) -> list[np.ndarray]:
    """Parts with entries from Gamma(1), every column in exactly `support` rows of each part."""
    draw = stream(seed, "invertibility", "evenly", columns, support, *sizes)
    parts = []
    for n in sizes:
        rows = np.argsort(draw.random((n, columns)), axis=0)[:support]
        part = np.zeros((n, columns))
        np.put_along_axis(part, rows, draw.gamma(1.0, size=rows.shape), axis=0)
        parts.append(part)
    return parts


def _texts(file: str) -> csr_matrix:
    with gzip.open(path_of(file), "rt", encoding="utf-8", newline="") as held:
        texts = [row["text"] for row in csv.DictReader(held)]
    words = Words()
    counted = count_words(texts, words, Vocabulary.of_documents(texts, words))
    frequencies = np.bincount(counted.rows.indices, minlength=counted.rows.shape[1])
    return tf_idf(counted, frequencies, len(texts)).rows


def _shared(name: str) -> Callable[[], Any]:
    return lambda: DATASETS[name].load()[0]


def _sparse(file: str) -> Callable[[], Any]:
    return lambda: load_npz(path_of(file)).tocsr().astype(np.float32)


def _faces() -> np.ndarray:
    with np.load(path_of("faces.npz"), allow_pickle=False) as held:
        return held["X_leeseung"].astype(np.float32) / np.float32(held["X_leeseung"].max())


TABLES: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "mnist": ("MNIST digits", _shared("mnist")),
    "fashion": ("Fashion-MNIST", _shared("fashion")),
    "cifar": ("CIFAR-10", _shared("cifar")),
    "faces": ("CBCL faces", _faces),
    "brain": ("brain cells, log counts", _shared("brain")),
    "tcga": ("TCGA expression", _shared("tcga")),
    "hpa": ("HPA tissues, log", _shared("hpa")),
    "movielens": ("MovieLens 100K", _sparse("movielens_100k.npz")),
    "goodreads": ("Goodreads", _sparse("goodreads.npz")),
    "rcv1": ("RCV1 tf-idf", _sparse("rcv1_small.npz")),
    "bbc": ("BBC news tf-idf", lambda: _texts("bbc_news.csv.gz")),
    "so": ("Stack Overflow tf-idf", lambda: _texts("stack_overflow.csv.gz")),
}


@lru_cache(maxsize=2)
def table(name: str) -> Any:
    """Rows of a shared set that have a value."""
    X = TABLES[name][1]()
    return X[np.flatnonzero(np.asarray(X.sum(axis=1)).ravel() > 0)]


def drawn(
    name: str, seed: int, sizes: Sequence[int], dtype: str = "float64", *, least: int = 1, common: float | None = None
) -> list[Any]:
    """Disjoint random rows of a shared set in parts of these sizes; the last may be shorter.

    Columns are those that at least `least` rows of the first part use; or, if `common` is given, those that more than
    this share of all rows of the set use, which does not depend on the first part.
    """
    X = table(name)
    order = stream(seed, "invertibility", name).permutation(X.shape[0])
    cuts = np.cumsum([0, *sizes])
    counted = X if common is not None else X[order[: sizes[0]]]
    supports = np.asarray((counted > 0).sum(axis=0)).ravel()
    kept = np.flatnonzero(supports > common * X.shape[0] if common is not None else supports >= least)
    chosen = [np.sort(order[first:last]) for first, last in itertools.pairwise(cuts) if first < len(order)]
    parts = [X[rows][:, kept].astype(dtype) for rows in chosen]
    return [part if issparse(part) else np.ascontiguousarray(part) for part in parts]


def filled(rows: Any) -> float:
    """Share of cells above zero."""
    return float((dense(rows) > 0).mean())


# ---- 1: phase diagram -------------------------------------------------------------------------------------------

PHASE_ROWS, PHASE_DENSITIES = (10, 20, 40), (0.05, 0.1, 0.3, 0.5, 0.7, 0.85, 0.95, 1.0)
RATIOS = (0.8, 0.95, 1.05, 1.5, 3.0)
LARGE = ((60, 10), (80, 10), (100, 20), (120, 40), (150, 20))
"""Rows and rank beyond the diagram."""


def rounds_for(ratio: float, n: int, rank: int) -> int:
    """Rounds T with T k(k+1) ≥ ratio · n(n+1)."""
    return math.ceil(ratio * n * (n + 1) / (rank * (rank + 1)))


def rank_and_rounds(ratio: float, n: int, ranks: Sequence[int] = (10, 9, 8, 7)) -> tuple[int, int]:
    """The largest rank, and rounds, within 5 % of this ratio T k(k+1) / n(n+1), or else the nearest."""
    tried = [(k, T) for k in ranks for T in (rounds_for(ratio, n, k) - 1, rounds_for(ratio, n, k)) if T * k >= n]
    away = [abs(ratio_of(k, T, n) / ratio - 1) if (ratio_of(k, T, n) < 1) == (ratio < 1) else 9.0 for k, T in tried]
    near = [(-each[0], off, each) for each, off in zip(tried, away, strict=True) if off <= 0.05]
    return min(near)[2] if near else tried[int(np.argmin(away))]


def ratio_of(rank: int, rounds: int, n: int) -> float:
    """T k(k+1) / n(n+1)."""
    return rounds * rank * (rank + 1) / (n * (n + 1))


def cell(
    seed: int, n: int, density: float, rank: int, rounds: int, columns: int = 300, seconds: float = 60.0
) -> Record:
    """One generated party, attacked by XᵀX and signs."""
    context = recorded(generated(seed, (n, *OTHERS), columns, density), rank, rounds, seed).context()
    about = {"rows": n, "density": density, "rank": rank, "rounds": rounds, "ratio": ratio_of(rank, rounds, n)}
    return about | {"seed": seed} | word_of(context, rank) | by_moment(context, seconds)


def phase(is_quick: bool) -> Iterator[Record]:
    """Share of rows found over n and density, over the ratio, and for more rows."""
    seeds = range(1 if is_quick else 5)
    for n in PHASE_ROWS[:1] if is_quick else PHASE_ROWS:
        for density in (0.3, 1.0) if is_quick else PHASE_DENSITIES:
            for seed in seeds:
                yield {"kind": "phase", **cell(seed, n, density, 10, rounds_for(1.5, n, 10))}
    for n in (20,) if is_quick else (20, 40):
        for ratio in (0.8, 1.5) if is_quick else RATIOS:
            for seed in seeds:
                yield {"kind": "ratio", "wanted": ratio, **cell(seed, n, 0.1, *rank_and_rounds(ratio, n))}
    for n, rank in () if is_quick else LARGE:
        for seed in range(3):
            yield {"kind": "large", **cell(seed, n, 0.3, rank, rounds_for(1.5, n, rank), 300, 40.0)}


# ---- 2: real rows -----------------------------------------------------------------------------------------------

REAL = ("bbc", "movielens", "mnist", "brain", "fashion", "faces", "tcga", "hpa", "cifar")
ROWS, RANK, ROUNDS = 40, 15, 10


def real_rows(seed: int, name: str, dtype: str, rows: int = ROWS, rank: int = RANK, rounds: int = ROUNDS) -> Record:
    """Attack rows of a shared set; also count those that rows of others already match within 10 %."""
    parts = drawn(name, seed, (rows, *OTHERS), dtype)
    context = recorded(parts, rank, rounds, seed).context()
    X, strangers = context.truth[VICTIM], dense(parts[1])[:rows]
    about = {"set": name, "dtype": dtype, "rows": rows, "columns": X.shape[1], "density": filled(X), "rank": rank}
    about |= {"rounds": rounds, "ratio": ratio_of(rank, rounds, rows), "seed": seed}
    return about | word_of(context, rank) | by_moment(context) | {"strangers_10": rows_within("X", strangers, X, NEAR)}


def real(is_quick: bool) -> Iterator[Record]:
    """Real rows, in both number types."""
    for name in REAL[3:4] if is_quick else REAL:
        for dtype in ("float64", "float32"):
            for seed in range(1 if is_quick else 3):
                size = (12, 5, 8) if is_quick else (ROWS, RANK, ROUNDS)
                yield {"kind": "real", **real_rows(seed, name, dtype, *size)}


# ---- 3: dictionary ----------------------------------------------------------------------------------------------


def by_dictionary(parts: Sequence[Any], rank: int, rounds: int, seed: int, seconds: float) -> Record:
    """Run the dictionary search; rows are found up to a factor, or with their scale if the grams give it."""
    context = recorded(parts, rank, rounds, seed).context()
    X, began = context.truth[VICTIM], time.monotonic()
    out: Record = {"is_scaled": False, "reported": 0, "within_1": 0, "within_10": 0, "failed": 0}
    try:
        found = rows_by_dictionary(pairs_of(context), len(X), deadline=began + seconds)
    except RuntimeError:  # SciPy's NNLS fails on some columns; the search then has no answer
        found, out["failed"] = None, 1
    if found is not None:
        array = "X" if found.is_scaled else "X up to a factor"
        out |= {"is_scaled": found.is_scaled, "reported": len(found.rows), "held_out": found.held_out}
        out |= {"within_1": rows_within(array, found.rows, X, RECOVERED)}
        out |= {"within_10": rows_within(array, found.rows, X, NEAR)}
    out["labelled"] = out["reported"] if out["is_scaled"] else 0
    about = {"rows": len(X), "columns": X.shape[1], "rank": rank, "rounds": rounds, "seed": seed}
    level = Exposure.ROWS if out["within_1"] else Exposure.BOUNDED
    ended = {"found": found_word(level), "seconds": time.monotonic() - began}
    return about | {"ratio": ratio_of(rank, rounds, len(X))} | word_of(context, rank) | out | ended


def dictionary(is_quick: bool) -> Iterator[Record]:
    """Columns of exactly s rows, and sparse real sets."""
    n, m = (20, 500) if is_quick else (60, 4000)
    for s in (3,) if is_quick else (3, 5, 8):
        for rounds in (2,) if is_quick else (2, 3, 5):
            for seed in range(1 if is_quick else 5):
                parts = evenly(seed, (n, 100), m, s)
                yield {"kind": "dictionary", "support": s, **by_dictionary(parts, 10, rounds, seed, 20.0)}
    for name in () if is_quick else ("bbc", "rcv1", "movielens", "goodreads"):
        for seed in range(3):
            parts = drawn(name, seed, (60, *OTHERS), least=2)
            yield {"kind": "dictionary real", "set": name, **by_dictionary(parts, 10, 3, seed, 20.0)}


# ---- 4: lone columns --------------------------------------------------------------------------------------------


def lone(seed: int, name: str, parts: Sequence[Any], least: int, rounds: int = 1, rank: int = 10) -> Record:
    """Columns that only one row uses: rows with two or more of them, groups found, and rows recovered as a whole.

    `right`: groups of one row; `shared`: columns that several rows use in proportion; `mistaken`: all others.
    """
    context = recorded(parts, rank, rounds, seed).context()
    X = context.truth[VICTIM]
    supports = (X > 0).sum(axis=0)
    own = (X[:, supports == 1] > 0).sum(axis=1)
    dtype = str(context.layout.dtype)
    found = lone_columns([cross for _, cross in pairs_of(context)], DIRECTIONS[dtype])
    right, whole, shared, mistaken, half = set(), 0, 0, 0, 0
    for group, values in zip(found.groups, found.values, strict=True):
        part = X[:, group]
        i = int(np.argmax((part**2).sum(axis=1)))
        is_lone = bool((supports[group] == 1).all() and (part[i] > 0).all())
        fit = float(part[i] @ values) * values
        if not is_lone or np.linalg.norm(fit - part[i]) > RECOVERED * np.linalg.norm(part[i]):
            is_proportional = np.linalg.norm(part - part @ np.outer(values, values)) <= RECOVERED * np.linalg.norm(part)
            shared, mistaken = shared + is_proportional, mistaken + (not is_proportional)
            continue
        right.add(i)
        missing = 1 - float((part[i] ** 2).sum() / (X[i] ** 2).sum())
        whole, half = whole + (missing <= RECOVERED**2), half + (missing <= 0.5)
    about = {"set": name, "least": least, "rows": len(X), "columns": X.shape[1], "rank": rank, "rounds": rounds}
    about |= {"dtype": dtype, "seed": seed} | word_of(context, rank)
    counts = {"lone": int((supports == 1).sum()), "with_two": int((own >= 2).sum()), "groups": len(found.groups)}
    counts |= {"right": len(right), "shared": int(shared), "mistaken": int(mistaken)}
    counts |= {"rows_whole": whole, "rows_half": half}
    level = Exposure.ROWS if whole else Exposure.ENTRIES if right else Exposure.BOUNDED
    return about | counts | {"found": found_word(level)}


def lone_part(is_quick: bool) -> Iterator[Record]:
    """Texts and ratings, one round in float32, with and without columns of a single row."""
    if is_quick:
        for least in (1, 2):
            parts = [rows.astype(np.float32) for rows in generated(0, (60, 40), 300, 0.02)]
            kept = np.flatnonzero((parts[0] > 0).sum(axis=0) >= least)
            yield {"kind": "lone", **lone(0, "generated", [rows[:, kept] for rows in parts], least)}
        return
    for name, n in (("bbc", 2000), ("so", 2000), ("rcv1", 1200), ("movielens", 800), ("goodreads", 2000)):
        for least, rounds in ((1, 1), (1, 5), (2, 1)):
            for seed in range(5):
                parts = drawn(name, seed, (n, 200), "float32", least=least)
                yield {"kind": "lone", **lone(seed, name, parts, least, rounds)}


# ---- 5: membership ----------------------------------------------------------------------------------------------

SHARES = (0.02, 0.1, 0.25, 0.5, 1.0, 1.5)
MEMBERS = 400


def member_tests(seed: int, name: str, common: float, members: int = MEMBERS, most: float = 1.5) -> Iterator[Record]:
    """AUC of both tests over L/n; the last part holds the remaining rows, the second are strangers."""
    parts = drawn(name, seed, (members, members, members), common=common)
    X, strangers, others = parts[0], dense(parts[1]), parts[2:]
    runs: dict[int, AttackContext] = {}
    for share in SHARES:
        rank = max(1, min(10, round(share * members)))
        if rank not in runs:
            rounds = round(most * members / 10) if rank == 10 else 1
            runs[rank] = recorded([X, *others], rank, rounds, seed).context()
        context = replace(runs[rank], exchanges=runs[rank].exchanges[: max(1, round(share * members / rank))])
        tests = {test.test: test.auc for test in membership(context, VICTIM, strangers)}
        best = max(tests["residual"] or 0.0, tests["signs"] or 0.0)
        about = {"set": name, "common": common, "rows": members, "columns": X.shape[1], "density": filled(X)}
        about |= {"rank": rank, "rounds": len(context.exchanges), "share": share, "seed": seed}
        found = "membership" if best >= TELLS else "guess"
        yield about | word_of(context, rank) | {**tests, "found": found}


MEMBER_SETS = (
    ("tcga", 0.0),
    ("tcga", 0.5),
    ("tcga", 0.999),
    ("brain", 0.0),
    ("brain", 0.25),
    ("mnist", 0.0),
    ("mnist", 0.25),
    ("faces", 0.5),
    ("bbc", 0.0),
    ("bbc", 0.05),
)
"""Sets, and the share of all rows that must use a column; at 0, rare columns decide the level."""


def member_part(is_quick: bool) -> Iterator[Record]:
    """Expression, cells, images and texts, with all columns and with common ones alone."""
    for name, common in (("brain", 0.0),) if is_quick else MEMBER_SETS:
        for seed in range(1 if is_quick else 3):
            for record in member_tests(seed, name, common, 20 if is_quick else MEMBERS):
                yield {"kind": "membership", **record}


def factor_tests(seed: int, name: str, members: int = MEMBERS, most: float = 1.5) -> Iterator[Record]:
    """AUC of the residual to the span of all H_p that a party sent by `fedavg`, over T·k/n."""
    X, strangers, others = drawn(name, seed, (members, members, members))
    shards = [Shard(f"p{i}", as_matrix(part), seed + i) for i, part in enumerate((X, others))]
    rounds = round(most * members / 10)
    program = build("fedavg", 10, local_steps=10)
    run = Sequential(record=True).run(program, shards, Schedule(rounds, seed), reduction=PlainReduction())
    sent = [to_float64(message["H"]) for done in run for party, _, message in done.traffic if party == VICTIM]
    rows, is_member = np.vstack([dense(X), dense(strangers)]), np.arange(2 * members) < members
    for share in SHARES[1:]:
        stacked = np.vstack([H / np.linalg.norm(H) for H in sent[: max(1, round(share * members / 10))]])
        _, values, basis = np.linalg.svd(stacked, full_matrices=False)
        kept = basis[values > 1e-12 * values[0]]
        left = np.linalg.norm(rows - rows @ kept.T @ kept, axis=1) / np.linalg.norm(rows, axis=1)
        yield {"set": name, "share": share, "seed": seed, "residual": auc_of(-left, is_member)}


def factor_part(is_quick: bool) -> Iterator[Record]:
    """Uploads of H, for which no exposure level exists."""
    for name in ("brain",) if is_quick else ("tcga", "brain", "mnist", "bbc"):
        for seed in range(1 if is_quick else 3):
            for record in factor_tests(seed, name, 20 if is_quick else MEMBERS):
                yield {"kind": "factors", **record}


# ---- 6: differences ---------------------------------------------------------------------------------------------


def difference(
    seed: int, kind: str, parts: Sequence[np.ndarray], rank: int, *, masked: bool, is_same_seed: bool
) -> Record:
    """Two runs, the second with one more row at the first party: the error with which that row is read."""
    before = [parts[0][:-1], *parts[1:]]
    first = recorded(before, rank, 1, seed, masked=masked)
    second = recorded(parts, rank, 1, seed if is_same_seed else seed + 1000, masked=masked)
    context = replace(second.context(), others=(first.context(),))
    found = attack_complete_sums(context) if masked else attack_differences(context, VICTIM)
    x = parts[0][-1]
    errors = [
        float(np.linalg.norm(row - x) / np.linalg.norm(x))
        for each in found
        if each.attack == "difference of two runs" and each.array.startswith("X") and each.recovered is not None
        for row in each.recovered
    ]
    about = {"set": kind, "masked": masked, "same_seed": is_same_seed, "rows": len(parts[0]), "rank": rank}
    support = Support.of(parts[0][:-1])
    about |= {"law": str(by_law(context, VICTIM)[0]), "directions": 2 * rank, "rarest": support.rarest}
    error = min(errors, default=None)
    is_read = error is not None and error <= RECOVERED
    level = Exposure.ROWS if is_read else Exposure.BOUNDED
    return about | {"mean_support": support.mean, "seed": seed, "error": error, "found": found_word(level)}


def difference_part(is_quick: bool) -> Iterator[Record]:
    """Dense generated rows, expression and cells; plain and under secure aggregation; the same and another seed."""
    for seed in range(1 if is_quick else 5):
        for kind in ("dense",) if is_quick else ("dense", "tcga", "brain", "bbc"):
            sizes = (31, 30, 30) if is_quick else (201, 100, 100)
            if kind == "dense":
                parts = [rows + 0.01 for rows in generated(seed, sizes, 100, 1.0)]
            else:
                parts = [dense(rows) for rows in drawn(kind, seed, sizes)]
            for rank in (2, 10):
                for masked in (False, True):
                    for is_same in (True, False):
                        record = difference(seed, kind, parts, rank, masked=masked, is_same_seed=is_same)
                        yield {"kind": "difference", **record}


# ---- 7: at the limit --------------------------------------------------------------------------------------------


def at_limit(seed: int, kind: str, parts: Sequence[Any], rank: int, limit: Exposure, seconds: float) -> Record:
    """Run as many rounds as a limit allows, then every attack; return the worst finding, judged by the truth."""
    support = Support.of(dense(parts[0]))
    rounds = (support.max_directions(limit) or 0) // rank
    about: Record = {"set": kind, "limit": str(limit), "rows": parts[0].shape[0], "columns": parts[0].shape[1]}
    about |= {"rank": rank, "rounds": rounds, "seed": seed}
    if not rounds:
        return {**about, "law": None, "found": None}
    run = recorded(parts, rank, rounds, seed)
    (found,) = findings(run, parties=[VICTIM], seconds=seconds)
    counted = max((each.rows_recovered or 0 for each in found.recovered), default=0)
    level = worst([found.found_level or Exposure.BOUNDED, Exposure.ROWS if counted else Exposure.BOUNDED])
    more = {"within_1": counted, "largest_share": found.largest_share, "found": found_word(level)}
    return about | word_of(run.context(), rank) | more


def limit_part(is_quick: bool) -> Iterator[Record]:
    """Generated columns of exactly s rows, and the common columns of real sets."""
    seeds = range(1 if is_quick else 3)
    supports = ((40, 20),) if is_quick else ((60, 10), (60, 20), (60, 30), (60, 60), (150, 40), (150, 150))
    limits = (Exposure.GUESS, Exposure.MEMBERSHIP)
    for limit in limits:
        for n, s in supports:
            for rank in (2,) if is_quick else (2, 5, 10):
                for seed in seeds:
                    parts = evenly(seed, (n, 100), 400, s)
                    yield {"kind": "limit", **at_limit(seed, f"{n} rows, s = {s}", parts, rank, limit, 20.0)}
        for name in () if is_quick else ("mnist", "brain", "tcga", "faces", "movielens"):
            for seed in seeds:
                parts = drawn(name, seed, (100, *OTHERS), least=40)
                yield {"kind": "limit", **at_limit(seed, name, parts, 2 if limit in limits[:1] else 5, limit, 20.0)}
    for name in () if is_quick else ("bbc", "goodreads", "brain", "tcga"):
        for seed in seeds:
            parts = drawn(name, seed, (400, *OTHERS))
            yield {"kind": "limit", **at_limit(seed, name, parts, 2, Exposure.ENTRIES, 20.0)}


# ---- 8: odd rows ----------------------------------------------------------------------------------------------


def alike(seed: int, n: int = 200, m: int = 200) -> list[np.ndarray]:
    """Rows of one direction and several sizes with noise of up to a tenth, all cells above zero."""
    draw = stream(seed, "invertibility", "alike", n)
    mean = draw.gamma(1.0, size=m) + 0.01
    return [mean * (1 + 0.1 * draw.random((count, m))) * (0.5 + draw.random((count, 1))) for count in (n, 100)]


def odd_row(seed: int, kind: str, parts: Sequence[np.ndarray], factor: float, rank: int, rounds: int) -> Record:
    """One row unlike the others (columns permuted, times a factor; 0: unchanged) and the error with which it is read.

    The attack reads C_t[l] / √G_t[l, l] for every component l and round t, which is x if row x alone uses component l.
    `error` is that of the odd row, `nearest` the smallest of all other rows.
    """
    rows = np.array(parts[0])
    if factor:
        rows[0] = factor * stream(seed, "invertibility", "odd").permutation(rows[0])
    context = recorded([rows, *parts[1:]], rank, rounds, seed).context()
    X = context.truth[VICTIM]
    read = np.vstack([C / np.sqrt(np.maximum(np.diag(G), 1e-300))[:, None] for G, C in pairs_of(context)])
    errors = [float(np.linalg.norm(read - x, axis=1).min() / np.linalg.norm(x)) for x in X]
    about = {"set": kind, "factor": factor, "rows": len(X), "rank": rank, "rounds": rounds, "seed": seed}
    best = min(errors)
    level = Exposure.ROWS if best <= RECOVERED else Exposure.BOUNDED
    measured = {"error": errors[0], "nearest": min(errors[1:]), "found": found_word(level)}
    return about | word_of(context, rank) | measured


ODD_SETS = (("alike", 0), ("tcga", 200), ("brain", 100), ("faces", 150), ("mnist", 60))
"""Sets, and the least support of their columns."""


def odd_part(is_quick: bool) -> Iterator[Record]:
    """An odd row of the size of others, or larger; one round of rank 2, and as many of rank 10 as `membership` has."""
    for kind, least in ODD_SETS[:1] if is_quick else ODD_SETS:
        for factor in (0.0, 100.0) if is_quick else (0.0, 1.0, 10.0, 100.0):
            for seed in range(1 if is_quick else 5):
                parts = (
                    alike(seed) if kind == "alike" else [dense(a) for a in drawn(kind, seed, (200, 100), least=least)]
                )
                most = Support.of(parts[0]).max_directions(Exposure.MEMBERSHIP) or 0
                for rank, rounds in ((2, 1), (10, max(1, (most - 5) // 10))):
                    yield {"kind": "odd", **odd_row(seed, kind, parts, factor, rank, rounds)}


PARTS: Mapping[str, Callable[[bool], Iterator[Record]]] = {
    "phase": phase,
    "real": real,
    "dictionary": dictionary,
    "lone": lone_part,
    "membership": member_part,
    "factors": factor_part,
    "difference": difference_part,
    "limit": limit_part,
    "odd": odd_part,
}


def records(is_quick: bool, parts: Sequence[str] = tuple(PARTS)) -> Iterator[Record]:
    """All records, each with the name of its part."""
    for part in parts:
        for record in PARTS[part](is_quick):
            yield {"part": part, **record}


# ---- report -----------------------------------------------------------------------------------------------------


def report(rows: Sequence[Record]) -> str:
    """All tables under their names; cells are means over seeds [smallest–largest]."""
    return "\n\n".join(f"### {name}\n\n{make(rows)}" for name, make in REPORTS.items())


Key = tuple[Any, ...]


def grouped(rows: Sequence[Record], kind: str, *names: str) -> dict[Key, list[Record]]:
    """Group records of a kind by these fields, in order of appearance."""
    out: dict[Key, list[Record]] = {}
    for row in rows:
        if row["kind"] == kind:
            out.setdefault(tuple(row[name] for name in names), []).append(row)
    return out


def markdown(heads: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """Format a Markdown table."""
    marks = [list(heads), ["---"] * len(heads), *[[str(cell) for cell in line] for line in lines]]
    return "\n".join(f"| {' | '.join(line)} |" for line in marks)


def over(rows: Sequence[Record], name: str, form: str = ".3g", share_of: str | None = None) -> str:
    """Mean over records, with smallest and largest in brackets if they differ."""
    values = [float(row[name]) / (float(row[share_of]) if share_of else 1.0) for row in rows if row[name] is not None]
    if not values:
        return "–"
    mean, low, high = (format(value, form) for value in (float(np.mean(values)), min(values), max(values)))
    return mean if low == high else f"{mean} [{low}–{high}]"


def median(rows: Sequence[Record], name: str) -> str:
    """Median over records, with smallest and largest in brackets."""
    values = [float(row[name]) for row in rows if row[name] is not None]
    if not values:
        return "–"
    low, middle, high = (f"{value:.0e}" for value in (min(values), float(np.median(values)), max(values)))
    return middle if low == high else f"{middle} [{low}–{high}]"


def words(rows: Sequence[Record], name: str = "law") -> str:
    """Distinct levels of these records."""
    return ", ".join(dict.fromkeys(str(row[name]) for row in rows))


GENERATED = {"dense": "generated, all cells", "alike": "generated, rows alike"}


def title(name: str) -> str:
    """Title of a set."""
    return TABLES[name][0] if name in TABLES else GENERATED.get(name, name)


def _phase(rows: Sequence[Record], name: str) -> str:
    found = grouped(rows, "phase", "rows", "density")
    densities = sorted({density for _, density in found})
    lines = [
        [n, *[over(found[n, density], name, ".2f", "rows") if (n, density) in found else "–" for density in densities]]
        for n in sorted({n for n, _ in found})
    ]
    return markdown(["n \\ d", *[f"{density:g}" for density in densities]], lines)


def _ratio(rows: Sequence[Record]) -> str:
    lines = [
        [
            n,
            f"{few[0]['ratio']:.2f}",
            f"{few[0]['rank']} × {few[0]['rounds']}",
            median(few, "moment_error"),
            over(few, "within_1", ".2f", "rows"),
            over(few, "within_10", ".2f", "rows"),
            words(few),
        ]
        for (n, _), few in grouped(rows, "ratio", "rows", "wanted").items()
    ]
    return markdown(["n", "ratio", "k × T", "error of XᵀX", "rows to 1 %", "to 10 %", "level"], lines)


def _large(rows: Sequence[Record]) -> str:
    lines = [
        [
            n,
            f"{rank} × {rounds}",
            median(few, "moment_error"),
            over(few, "within_1"),
            over(few, "labelled"),
            over(few, "seconds", ".0f"),
            words(few),
        ]
        for (n, rank, rounds), few in grouped(rows, "large", "rows", "rank", "rounds").items()
    ]
    return markdown(["n", "k × T", "error of XᵀX", "rows to 1 %", "called found", "seconds", "level"], lines)


def _real(rows: Sequence[Record]) -> str:
    lines = []
    for (name, dtype), few in grouped(rows, "real", "set", "dtype").items():
        mistaken = [{"wrong": row["labelled"] - row["labelled_right"]} for row in few]
        lines.append(
            [
                title(name),
                over(few, "density", ".2f"),
                dtype,
                median(few, "moment_error"),
                over(few, "within_1"),
                over(few, "within_10"),
                over(few, "strangers_10"),
                over(few, "labelled"),
                over(mistaken, "wrong"),
                words(few),
            ]
        )
    heads = ["set", "density", "type", "error of XᵀX", "rows to 1 %", "to 10 %", "strangers to 10 %", "called found"]
    return markdown([*heads, "of these wrong", "level"], lines)


def _dictionary(rows: Sequence[Record], kind: str, name: str) -> str:
    lines = [
        [
            title(which) if kind != "dictionary" else which,
            rounds,
            f"{few[0]['directions'] / few[0]['rows']:.2f}",
            f"{few[0]['ratio']:.2f}",
            over(few, "within_1"),
            over(few, "within_10"),
            over(few, "reported"),
            over(few, "labelled"),
            sum(row["failed"] for row in few),
            words(few),
        ]
        for (which, rounds), few in grouped(rows, kind, name, "rounds").items()
    ]
    head = "s" if kind == "dictionary" else "set"
    heads = [
        head,
        "T",
        "L/n",
        "ratio",
        "rows to 1 %",
        "to 10 %",
        "answered",
        "with scale",
        "searches broken off",
        "level",
    ]
    return markdown(heads, lines)


def _lone(rows: Sequence[Record]) -> str:
    lines = [
        [title(name), few[0]["rows"], least, rounds, over(few, "lone", ".0f"), over(few, "with_two", ".0f")]
        + [over(few, name_, ".0f") for name_ in ("right", "shared", "mistaken", "rows_half", "rows_whole")]
        + [words(few)]
        for (name, least, rounds), few in grouped(rows, "lone", "set", "least", "rounds").items()
    ]
    heads = [
        "set",
        "n",
        "least support",
        "T",
        "lone columns",
        "rows with ≥ 2",
        "groups right",
        "in proportion",
        "wrong",
    ]
    return markdown([*heads, "half of the row", "whole row", "level"], lines)


def _membership(rows: Sequence[Record]) -> str:
    found = grouped(rows, "membership", "set", "common", "share")
    shares = sorted({share for _, _, share in found})
    lines = []
    for name, common in dict.fromkeys((name, common) for name, common, _ in found):
        few = [found[name, common, share] for share in shares]
        about = [title(name), f"{common:g}", over(few[0], "rarest", ".0f")]
        lines += [[*about, test, *[over(each, test, ".2f") for each in few]] for test in ("residual", "signs")]
        lines.append([*about, "level", *[words(each) for each in few]])
    return markdown(["set", "columns in more than", "s", "test", *[f"L/n {share:g}" for share in shares]], lines)


def _factors(rows: Sequence[Record]) -> str:
    found = grouped(rows, "factors", "set", "share")
    shares = sorted({share for _, share in found})
    lines = [
        [title(name), *[over(found[name, share], "residual", ".2f") for share in shares]]
        for name in dict.fromkeys(name for name, _ in found)
    ]
    return markdown(["set", *[f"T·k/n {share:g}" for share in shares]], lines)


def _difference(rows: Sequence[Record]) -> str:
    lines = [
        [
            title(name),
            rank,
            "masks" if masked else "open",
            "same" if is_same else "another",
            median(few, "error") if few[0]["error"] is not None else "no common model: not possible",
            words(few),
        ]
        for (name, rank, masked, is_same), few in grouped(
            rows, "difference", "set", "rank", "masked", "same_seed"
        ).items()
    ]
    return markdown(["set", "k", "sums", "seed of the second run", "error of the row", "level"], lines)


def _limit(rows: Sequence[Record]) -> str:
    lines = [
        [
            limit,
            title(name),
            rank,
            over(few, "rounds", ".0f"),
            words(few),
            words(few, "found"),
            over(few, "within_1"),
            over(few, "largest_share", ".2f"),
        ]
        for (limit, name, rank), few in grouped(
            [row for row in rows if row.get("law")], "limit", "limit", "set", "rank"
        ).items()
    ]
    heads = ["limit kept", "rows", "k", "T", "level", "found by any attack", "rows to 1 %", "largest share of a row"]
    return markdown(heads, lines)


def _odd(rows: Sequence[Record]) -> str:
    lines = []
    for (name, factor, rank), few in grouped(rows, "odd", "set", "factor", "rank").items():
        read = sum(row["error"] <= RECOVERED for row in few)
        other = sum(row["nearest"] <= RECOVERED for row in few)
        size = f"× {factor:g}" if factor else "none"
        about = [title(name), size, f"{rank} × {over(few, 'rounds', '.0f')}", words(few)]
        counts = [f"{read} of {len(few)}" if factor else "–", f"{other} of {len(few)}", median(few, "nearest")]
        lines.append([*about, median(few, "error") if factor else "–", *counts])
    heads = ["rows", "odd row", "k × T", "level", "error of the odd row", "read to 1 %", "another row read to 1 %"]
    return markdown([*heads, "error of the nearest other"], lines)


def is_worse(row: Record) -> bool:
    """Whether more was found than the exposure level says."""
    if not row.get("law") or row["found"] == "nothing":
        return False
    return not Exposure(row["found"]).within(Exposure(row["law"]))


def _law(rows: Sequence[Record]) -> str:
    judged = [row for row in rows if row.get("law")]
    lines = []
    for part in dict.fromkeys(row["part"] for row in judged):
        for law in (str(level) for level in Exposure):
            few = [row for row in judged if (row["part"], row["law"]) == (part, law)]
            if few:
                found = [sum(row["found"] == word for row in few) for word in FOUND]
                lines.append([part, law, len(few), *found, sum(map(is_worse, few))])
    return markdown(["part", "level", "runs", *FOUND, "found more than the level says"], lines)


FOUND = ("nothing", "guess", "membership", "entries", "rows")


def _exceptions(rows: Sequence[Record]) -> str:
    out: dict[Key, list[Record]] = {}
    for row in filter(is_worse, rows):
        about = [
            f"{name} {row[name]}" for name in ("factor", "share", "common", "least", "masked", "rank") if name in row
        ]
        out.setdefault((row["part"], row.get("set", "generated"), "; ".join(about)), []).append(row)
    lines = [
        [part, title(name), about, words(few), words(few, "found"), len(few)]
        for (part, name, about), few in out.items()
    ]
    return markdown(["part", "rows", "setting", "level", "found", "runs"], lines)


REPORTS: Mapping[str, Callable[[Sequence[Record]], str]] = {
    "phase, 1 %": lambda rows: _phase(rows, "within_1"),
    "phase, 10 %": lambda rows: _phase(rows, "within_10"),
    "phase, called found": lambda rows: _phase(rows, "labelled"),
    "ratio": _ratio,
    "large": _large,
    "real": _real,
    "dictionary": lambda rows: _dictionary(rows, "dictionary", "support"),
    "dictionary, real": lambda rows: _dictionary(rows, "dictionary real", "set"),
    "lone": _lone,
    "membership": _membership,
    "factors": _factors,
    "difference": _difference,
    "limit": _limit,
    "odd": _odd,
    "law": _law,
    "exceptions": _exceptions,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the results, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a single seed, few settings")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated parts to measure")
    parser.add_argument("--output", type=Path, help="a JSON Lines file")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print the tables of this file without measuring")
    chosen = parser.parse_args(arguments)
    if chosen.report is not None:
        print(report(lines_of(chosen.report)))
        return
    parts = chosen.parts.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"--parts has unknown names: {', '.join(unknown)}. Use {', '.join(PARTS)}.")
    kept = [] if chosen.output is None or not chosen.output.exists() else lines_of(chosen.output)
    found = [record for record in kept if record["part"] not in parts]
    for record in records(chosen.quick, parts):
        print(json.dumps(record), flush=True)
        found.append(record)
    if chosen.output is not None:
        found.sort(key=lambda record: list(PARTS).index(record["part"]))
        chosen.output.write_text("".join(json.dumps(record) + "\n" for record in found), encoding="utf-8")


def lines_of(file: Path) -> list[Record]:
    """Read a JSON Lines file."""
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


if __name__ == "__main__":
    main()
