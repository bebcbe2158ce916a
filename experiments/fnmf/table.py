"""Table 1 of the FNMF paper: Σ RMSD at 50 parties on real data, all methods tuned alike.

    python -m experiments.fnmf.table --datasets fashion,tcga --output table.jsonl

Every method with a pull uses the strength from one grid with the least Σ RMSD on one seed, 20 parties and at most 3000
rows. Only the paper's variant pulls in the first round. One-shot methods average once, after as many steps as all
others make.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.fnmf.runs import Run, known, run_all
from experiments.shared.datasets import DATASETS
from experiments.shared.federations import EXACT, IN_ROUNDS, MIXTURES, ONCE, WITH_STRENGTH
from experiments.shared.metrics import spread

STRENGTHS = (0.01, 0.1, 1.0)
TUNING_SEED, TUNING_PARTIES, TUNING_ROWS = 1000, 20, 3000


def tuning_runs(data: str, start: str, steps: int, rounds: int) -> list[Run]:
    """Runs of all strengths and methods on a sample."""
    one = Run(data, "", start, steps, rounds, 0.0, TUNING_SEED, TUNING_PARTIES, DATASETS[data].rank, TUNING_ROWS)
    return [replace(one, method=method, strength=s) for method in WITH_STRENGTH for s in STRENGTHS]


def best_strengths(found: Mapping[Run, dict[str, Any]], data: str, start: str) -> dict[str, float]:
    """Find the strength with the least Σ RMSD for each method."""
    tried: dict[str, dict[float, float]] = {}
    for run, record in found.items():
        if run.data == data and run.start == start and run.seed == TUNING_SEED:
            tried.setdefault(run.method, {})[run.strength] = record["rmsd_sum"]
    return {method: min(values, key=lambda s: values[s]) for method, values in tried.items()}


def table_runs(data: str, start: str, strengths: Mapping[str, float], chosen: argparse.Namespace) -> list[Run]:
    """All runs of a dataset with one kind of start."""
    one = Run(data, "", start, chosen.steps, chosen.rounds, 0.0, 0, chosen.parties, DATASETS[data].rank, chosen.rows)
    methods = [*IN_ROUNDS, *MIXTURES]
    if start == "independent":
        methods += ["pooled", *EXACT, *ONCE]
    else:
        methods.remove("FNMF-LAP (paper)")
    return [
        replace(one, method=method, seed=seed, strength=strengths.get(MIXTURES.get(method, (method, 0))[0], 0.0))
        for method in methods
        for seed in range(chosen.seeds)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default=",".join(DATASETS), help="comma-separated names")
    parser.add_argument("--parties", type=int, default=50)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=0, help="maximum number of rows, sampled with the seed (0: all)")
    parser.add_argument("--starts", default="independent,common")
    parser.add_argument("--quick", action="store_true", help="few rows, parties and steps")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="start no run that would end later than after so many minutes",
    )
    parser.add_argument("--output", type=Path, help="a JSON Lines file; runs that it holds are not repeated")
    chosen = parser.parse_args(arguments)
    began = time.monotonic()
    if chosen.quick:
        chosen.parties, chosen.steps, chosen.rounds, chosen.seeds, chosen.rows = 4, 5, 2, 1, 200
    pairs = [(data, start) for data in chosen.datasets.split(",") for start in chosen.starts.split(",")]
    if chosen.quick:
        strengths = {pair: dict.fromkeys(WITH_STRENGTH, 0.1) for pair in pairs}
    else:
        tuning = [run for pair in pairs for run in tuning_runs(*pair, chosen.steps, chosen.rounds)]
        run_all(tuning, chosen.output, chosen.processes, chosen.minutes)
        found = known(chosen.output)
        strengths = {pair: best_strengths(found, *pair) for pair in pairs}
    runs = [run for pair in pairs for run in table_runs(*pair, strengths[pair], chosen)]
    left = chosen.minutes - (time.monotonic() - began) / 60
    found = run_all(runs, chosen.output, chosen.processes, left)
    values: dict[tuple[str, str, str], list[float]] = {}
    for run, record in found.items():
        values.setdefault((run.data, run.method, run.start), []).append(record["rmsd_sum"])
    for (data, method, start), numbers in values.items():
        print(f"{data:10s} {method:36s} {start:12s} {spread(numbers)}")


if __name__ == "__main__":
    main()
