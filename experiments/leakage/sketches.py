"""What an honest-but-curious server recovers from recorded uploads: over T·d/n for sketches, over rows for the rest.

    python -m experiments.leakage.sketches [--quick] [--output docs/results/leakage.jsonl]

Theorem 3 of Qian et al. (2020) needs T·d ≥ n sketched numbers of a column of n; rows that are non-negative and sparse
need fewer. Small parties disclose rows in other methods too (docs/reference/exposure.md).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from partsong.aggregation.plaintext import PlainReduction
from partsong.attacks.moment import row_span, unit_of
from partsong.attacks.reconstruction import equations, linear_rows, sparse_rows
from partsong.attacks.runner import attack
from partsong.core.interfaces import Layout, Program, Schedule, Shard
from partsong.core.streams import stream
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.methods import build
from partsong.sketch.kinds import Gaussian, Hadamard

ROWS, COLUMNS, DIMENSION = 100, 12, 5
DENSITIES = (0.05, 0.1, 0.2, 0.4, 1.0)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
SEEDS = 5
SAME = 1e-6
RANK, FEATURES = 4, 40


def sketched(seed: int, kind: Any, density: float) -> Iterator[dict[str, Any]]:
    """Relative errors and the share of columns found exactly, over the number of sketches of one X."""
    draw = stream(seed, "leakage", "sketches", int(100 * density))
    X = draw.gamma(1.0, size=(ROWS, COLUMNS)) * (draw.random((ROWS, COLUMNS)) < density)
    operators = [kind(DIMENSION).draw(ROWS, seed, "S", turn) for turn in range(ROWS // DIMENSION)]
    sketches = [operator.sketch_transposed(X) for operator in operators]
    for share in SHARES:
        count = max(1, round(share * ROWS / DIMENSION))
        S, seen = equations(sketches[:count], operators[:count], ROWS)
        found = {
            "linear": linear_rows(sketches[:count], operators[:count], ROWS),
            "sparse": sparse_rows(S, seen),
        }
        record: dict[str, Any] = {"kind": "sketches", "sketch": kind.__name__, "density": density, "share": share}
        for name, rows in found.items():
            sizes = np.maximum(np.linalg.norm(X, axis=0), 1e-300)
            errors = np.linalg.norm(rows - X, axis=0) / sizes
            record[name] = float(np.linalg.norm(rows - X) / np.linalg.norm(X))
            record[f"{name}_columns"] = float((errors < SAME).mean())
        yield {**record, "seed": seed}


def parties(seed: int, rows: int, density: float) -> list[np.ndarray]:
    """A small party and two of 30 rows: planted components and noise, some cells set to zero."""
    draw = stream(seed, "leakage", "parties", rows, int(100 * density))
    H = draw.gamma(0.5, size=(RANK, FEATURES))
    sizes = (rows, 30, 30)
    parts = [draw.gamma(0.5, size=(n, RANK)) @ H + 0.1 * draw.random((n, FEATURES)) for n in sizes]
    return [part * (draw.random(part.shape) < density) for part in parts]


def small_party(seed: int, name: str, program: Program, rows: int, density: float) -> dict[str, Any]:
    """The smallest error with which the small party's rows, or their span, are recovered."""
    parts = parties(seed, rows, density)
    shards = [Shard(f"p{i}", as_matrix(part), seed + i) for i, part in enumerate(parts)]
    rounds = 2 * len(shards) if name == "game" else 5
    done = Sequential(record=True).run(program, shards, Schedule(rounds, seed), reduction=PlainReduction())
    truth = {"p0": parts[0]}
    found = attack([each.traffic for each in done], program, Layout.of(shards, seed), truth=truth)
    errors = {finding.array: finding.error for finding in found if finding.party == "p0" and finding.error is not None}
    kept = {array: errors[array] for array in ("X_p", "X_p up to a factor", "span of X_p") if array in errors}
    doubts = {finding.array: finding.doubt for finding in found if finding.party == "p0"}
    others = {
        finding.array: min(_distance(finding.recovered, row) for row in np.vstack(parts[1:]))
        for finding in found
        if finding.party == "p0" and finding.array in kept and finding.recovered is not None
    }
    return {
        "kind": "small party",
        "method": name,
        "rows": rows,
        "density": density,
        "seed": seed,
        **kept,
        "doubts": doubts,
        "nearest_other": others,
    }


def _distance(found: np.ndarray, row: np.ndarray) -> float:
    """The share of a row outside the span of what was found."""
    basis = np.linalg.svd(found, full_matrices=False)[2]
    return float(np.linalg.norm(row - row @ basis.T @ basis) / max(float(np.linalg.norm(row)), 1e-300))


def span_of_sums(seed: int, rows: int, rounds: int) -> dict[str, Any]:
    """Share of a row outside the span of sums of WᵀX: the largest of all members, the smallest of strangers."""
    draw = stream(seed, "leakage", "spans", rows)
    H = draw.gamma(0.5, size=(10, 500))
    X, strangers = (draw.gamma(0.5, size=(n, 10)) @ H + 0.1 * draw.random((n, 500)) for n in (rows, 20))
    shards = [Shard(f"p{i}", as_matrix(part)) for i, part in enumerate(np.array_split(X, 4))]
    program = build("exact", 10, local_steps=5)
    done = Sequential(record=True).run(program, shards, Schedule(rounds, seed), reduction=PlainReduction())
    sums = [np.sum([message["cross"] for _, _, message in each.traffic], axis=0) for each in done]
    span = row_span(sums, min(rows, 10 * rounds), unit_of("float64"))
    assert span is not None
    far, near = (
        np.linalg.norm(A - A @ span.basis.T @ span.basis, axis=1) / np.linalg.norm(A, axis=1) for A in (X, strangers)
    )
    record = {"kind": "span of sums", "rows": rows, "rounds": rounds, "farthest_member": float(far.max())}
    return {**record, "nearest_stranger": float(near.min()), "seed": seed}


def records(is_quick: bool) -> Iterator[dict[str, Any]]:
    """All records."""
    seeds = range(1 if is_quick else SEEDS)
    cases = [(Gaussian, density) for density in (DENSITIES[:1] if is_quick else DENSITIES)]
    for seed, (kind, density) in product(seeds, cases if is_quick else [*cases, (Hadamard, 0.1)]):
        yield from sketched(seed, kind, density)
    methods = {
        "exact": build("exact", RANK, local_steps=5),
        "fedavg": build("fedavg", RANK, local_steps=10),
        "fnmf": build("fnmf-local", RANK, align="assignment"),
        "syn-sd": build("syn-sd", RANK),
        "game": build("game", RANK),
    }
    for seed, rows, density in product(seeds, (1,) if is_quick else (1, 2, 3), (0.5, 1.0)):
        for name, program in methods.items():
            yield small_party(seed, name, program, rows, density)
    for seed, (rows, rounds) in product(seeds, ((40, 4),) if is_quick else ((40, 4), (40, 8), (80, 8), (80, 16))):
        yield span_of_sums(seed, rows, rounds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the attacks and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a single seed, few settings")
    parser.add_argument("--output", type=Path, help="a JSON Lines file")
    chosen = parser.parse_args(arguments)
    lines = [json.dumps(record) for record in records(chosen.quick)]
    print("\n".join(lines))
    if chosen.output is not None:
        chosen.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
