"""Fig. 3 (right) of the FNMF paper on real data: the same number of local steps in fewer and fewer rounds.

python -m experiments.fnmf_local_steps --dataset mnist
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.datasets import DATASETS
from experiments.federation import ONCE, methods, play, pooled, shards_iid, spread

SCHEDULES = ((10, 100), (100, 10), (1000, 2))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all methods over all schedules and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="mnist", choices=tuple(DATASETS))
    parser.add_argument("--parties", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--strength", type=float, default=0.1, help="of the pull, for all methods that have one")
    parser.add_argument("--starts", default="independent,common")
    parser.add_argument("--methods", default="", help="names, separated by commas")
    parser.add_argument("--schedules", default="", help="steps x rounds, separated by commas: 100x10,1000x2")
    parser.add_argument("--quick", action="store_true", help="few rows, parties and steps")
    parser.add_argument("--output", type=Path, help="a JSON file for all numbers")
    chosen = parser.parse_args(arguments)
    dataset = DATASETS[chosen.dataset]
    X, _ = dataset.load()
    schedules = [tuple(map(int, s.split("x"))) for s in chosen.schedules.split(",") if s] or list(SCHEDULES)
    if chosen.quick:
        X, chosen.parties, chosen.seeds, schedules = X[:600], 5, 1, [(5, 2)]
    table = methods()
    names = [name for name in table if not chosen.methods or name in chosen.methods.split(",")]
    found: dict[str, list[Any]] = {}

    def note(label: str, result: Any) -> None:
        found.setdefault(label, []).append([result.rmsd_sum, result.seconds, result.bytes_up])
        print(f"{label:60s} {result.rmsd_sum:8.3f}  {result.seconds:7.1f} s", flush=True)

    for seed in range(chosen.seeds):
        shards = shards_iid(X, chosen.parties, seed)
        note("pooled", pooled(X, dataset.rank, shards, seed))
        for start in chosen.starts.split(","):
            for steps, rounds in schedules:
                for name in names:
                    program = table[name](dataset.rank, steps, chosen.strength, start == "independent")
                    note(f"{name} | {start} | {steps} x {rounds}", play(program, shards, rounds, seed))
            if not chosen.methods:
                for name, make in ONCE.items():
                    steps = max(s * r for s, r in schedules)
                    program = make(dataset.rank, steps, 0.0, start == "independent")
                    note(f"{name} | {start} | {steps} x 1", play(program, shards, 1, seed))
    for label, values in found.items():
        print(f"{label:60s} {spread([value[0] for value in values])}")
    if chosen.output is not None:
        chosen.output.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
