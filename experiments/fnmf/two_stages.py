"""Exact rounds alone, and after one or two rounds of FNMF, compared with pooled NMF.

python -m experiments.fnmf.two_stages --output relay.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.fnmf.runs import Run, run_all
from experiments.shared.datasets import DATASETS
from experiments.shared.federations import EXACT, MIXTURES
from experiments.shared.metrics import spread

ROUNDS, SHOWN = 20, (2, 5, 10, 20)
METHODS = (EXACT[0], *(name for name, (_, leg) in MIXTURES.items() if leg))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and print ratios of Σ RMSD to the pooled one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default=",".join(DATASETS), help="comma-separated names")
    parser.add_argument("--parties", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few rows, parties and steps")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--output", type=Path, help="a JSON Lines file; runs that it holds are not repeated")
    chosen = parser.parse_args(arguments)
    parties, seeds, steps, rows = (4, 1, 5, 200) if chosen.quick else (chosen.parties, chosen.seeds, 100, 0)
    runs = [
        Run(name, method, start, steps, ROUNDS, 0.1, seed, parties, DATASETS[name].rank, rows, method != "pooled")
        for name in chosen.datasets.split(",")
        for method, start in (
            ("pooled", "independent"),
            *((one, "independent") for one in METHODS),
            (METHODS[1], "common"),
        )
        for seed in range(seeds)
    ]
    found = run_all(runs, chosen.output, chosen.processes)
    pooled = {(run.data, run.seed): record["rmsd_sum"] for run, record in found.items() if run.method == "pooled"}
    ratios: dict[str, list[np.ndarray]] = {}
    for run, record in found.items():
        if run.method != "pooled":
            curve = np.array(record["curve"]) / pooled[run.data, run.seed]
            ratios.setdefault(f"{run.data} | {run.method}, {run.start}", []).append(curve)
    for label, curves in ratios.items():
        ratios = ", ".join(f"{after}: {spread([curve[after - 1] for curve in curves])}" for after in SHOWN)
        print(f"{label:72s} {ratios}", flush=True)


if __name__ == "__main__":
    main()
