"""Table 1 of the FNMF paper: Σ RMSD at 50 parties on real data, all methods tuned alike.

    python -m experiments.fnmf_table --datasets fashion,tcga

Every method that pulls takes the strength with the least Σ RMSD on the first seed and a sample of rows, from one grid;
nothing is pulled in the first round by any of them. iPALM and MUR average once after as many steps as all others make.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.datasets import DATASETS, Dataset
from experiments.federation import ONCE, Result, methods, play, pooled, shards_iid, spread
from partsong import recipes
from partsong.streams import stream

STRENGTHS = (0.01, 0.1, 1.0)
SAMPLE = 3000


def sample_of(X: Any, seed: int) -> Any:
    """At most SAMPLE rows."""
    if X.shape[0] <= SAMPLE:
        return X
    rows = stream(seed, "sample").choice(X.shape[0], SAMPLE, replace=False)
    rows.sort()
    return X[rows]


def tuned(dataset: Dataset, X: Any, parties: int, steps: int, rounds: int, independent: bool) -> dict[str, float]:
    """The best strength of each method that has one."""
    shards = shards_iid(sample_of(X, 0), min(parties, 20), 0)
    best = {}
    for name, make in methods().items():
        if name == "FedAvg":
            best[name] = 0.0
            continue
        tried = {s: play(make(dataset.rank, steps, s, independent), shards, rounds, 0).rmsd_sum for s in STRENGTHS}
        best[name] = min(tried, key=lambda strength: tried[strength])
    return best


def measure(dataset: Dataset, chosen: argparse.Namespace) -> dict[str, Any]:
    """All methods on one dataset."""
    X, _ = dataset.load()
    if chosen.quick:
        X = X[:300]
    found: dict[str, Any] = {"settings": {"rank": dataset.rank, "steps": chosen.steps, "rounds": chosen.rounds}}

    def note(label: str, result: Result) -> None:
        found.setdefault(label, []).append([result.rmsd_sum, result.seconds, result.bytes_up])
        print(f"  {label:40s} {result.rmsd_sum:9.3f} {result.seconds:7.1f} s", flush=True)

    for start in chosen.starts.split(","):
        independent = start == "independent"
        strengths = tuned(dataset, X, chosen.parties, chosen.steps, chosen.rounds, independent)
        found[f"strengths, {start}"] = strengths
        for seed in range(chosen.seeds):
            shards = shards_iid(X, chosen.parties, seed)
            if independent:
                note("pooled", pooled(X, dataset.rank, shards, seed))
                exact = recipes.shared_statistics(dataset.rank, accelerate=True)
                note("exact", play(exact, shards, chosen.steps * chosen.rounds // 5, seed))
                for name, make in ONCE.items():
                    note(name, play(make(dataset.rank, chosen.steps * chosen.rounds, 0.0, True), shards, 1, seed))
            for name, make in methods().items():
                program = make(dataset.rank, chosen.steps, strengths[name], independent)
                note(f"{name}, {start}", play(program, shards, chosen.rounds, seed))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default=",".join(DATASETS), help="names, separated by commas")
    parser.add_argument("--parties", type=int, default=50)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--starts", default="independent,common")
    parser.add_argument("--quick", action="store_true", help="few rows, parties and steps")
    parser.add_argument("--output", type=Path, help="a JSON file for all numbers")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.parties, chosen.steps, chosen.rounds, chosen.seeds = 4, 5, 2, 1
    everything = {}
    for name in chosen.datasets.split(","):
        print(DATASETS[name].title, flush=True)
        everything[name] = measure(DATASETS[name], chosen)
        for label, values in everything[name].items():
            if isinstance(values, list):
                print(f"    {label:40s} {spread([value[0] for value in values])}", flush=True)
        if chosen.output is not None:
            chosen.output.write_text(json.dumps(everything, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
