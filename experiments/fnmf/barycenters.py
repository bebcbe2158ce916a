"""Fig. 1 of the FNMF paper: barycenters of permuted copies (idealized) and of independent factors (realistic).

python -m experiments.fnmf.barycenters [--quick]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.shared.federations import ALIGNMENTS
from experiments.shared.metrics import spread
from experiments.shared.synthetic import block_federation
from partsong.aggregation.alignment import Assignment, Nearest, orthogonality_gap
from partsong.aggregation.barycenter import (
    FixedPoint,
    FromMean,
    FromMedoid,
    FuzzyCMeans,
    Hierarchical,
    KMeans,
    Streaming,
    loss_of,
)
from partsong.core import runtime
from partsong.core.streams import stream

METHODS: dict[str, Any] = {
    **{name: FixedPoint(align, FromMean()) for name, align in ALIGNMENTS.items()},
    **{f"{name}, from a medoid": FixedPoint(align, FromMedoid()) for name, align in ALIGNMENTS.items()},
    "nearest": FixedPoint(Nearest(), FromMedoid()),
    "streaming": Streaming(),
    "hierarchical": Hierarchical(),
    "k-means": KMeans(),
    "fuzzy c-means": FuzzyCMeans(),
}


def idealised(parties: int, rank: int, columns: int, seed: int) -> list[np.ndarray]:
    """Generate permuted copies of one factor."""
    draw = stream(seed, "idealised", parties, rank, columns)
    H = block_federation([40], columns, rank, draw).H * draw.uniform(0.5, 1.5, (rank, 1))
    return [H[draw.permutation(rank)] for _ in range(parties)]


def realistic(parties: int, rank: int, columns: int, seed: int) -> list[np.ndarray]:
    """Generate independent factors."""
    draw = stream(seed, "realistic", parties, rank, columns)
    return [block_federation([40], columns, rank, draw).H * draw.uniform(0.5, 1.5, (rank, 1)) for _ in range(parties)]


def measured(method: Any, matrices: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """Loss per party under the method's own plans (assignment for clusterings), orthogonality gap, seconds."""
    began = time.perf_counter()
    if isinstance(method, KMeans | FuzzyCMeans):
        H = method.solve(matrices)
        seconds = time.perf_counter() - began
        plans = [Assignment().plan(H, one) for one in matrices]
    else:
        found = method.solve(matrices, [1.0] * len(matrices))
        seconds = time.perf_counter() - began
        H, plans = found.H, found.plans
    weights = np.full(len(matrices), 1.0 / len(matrices))
    return loss_of(H, matrices, plans, weights), float(np.mean([orthogonality_gap(p) for p in plans])), seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Print loss, gap and seconds of every method over growing numbers of parties and sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one small case")
    parser.add_argument("--output", type=Path, help="a JSON file for all values")
    chosen = parser.parse_args(arguments)
    cases = [(c, 10, 200) for c in (2, 10, 50, 200)] + [(20, 10, 2000), (20, 40, 400)]
    if chosen.quick:
        cases, chosen.seeds = [(4, 4, 60)], 1
    found: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for kind, make in (("idealised", idealised), ("realistic", realistic)):
        for parties, rank, columns in cases:
            title = f"{kind}: {parties} parties, {rank} × {columns}"
            with runtime.limit_kernel_threads(1):
                found[title] = {
                    name: [measured(method, make(parties, rank, columns, seed)) for seed in range(chosen.seeds)]
                    for name, method in METHODS.items()
                }
            print(title, flush=True)
            for name, values in found[title].items():
                losses, gaps, seconds = zip(*values, strict=True)
                print(
                    f"  {name:22s} loss {spread(losses):>18s}   gap {spread(gaps):>16s}   {np.mean(seconds):8.4f} s",
                    flush=True,
                )
    if chosen.output is not None:
        chosen.output.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
