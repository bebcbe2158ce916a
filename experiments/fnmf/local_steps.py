"""Fig. 3 of the FNMF paper on real data: error per round, and the same local steps in fewer and fewer rounds.

python -m experiments.fnmf.local_steps --dataset mnist --output steps.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from experiments.fnmf.runs import Run, run_all
from experiments.shared.datasets import DATASETS
from experiments.shared.federations import ONCE
from experiments.shared.metrics import spread

SCHEDULES = ("10x100", "100x10", "1000x2")
METHODS = ("FedAvg", "FedProx", "FNMF-LAP (paper)", "FNMF-LAP", "FNMF-SK")
STRENGTHS = {"FedAvg": 0.0, "FNMF-LAP (paper)": 0.01}
"""Strength of the pull: 0.01 for the printed variant, 0.1 for all others."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all methods over all schedules and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="mnist", choices=tuple(DATASETS))
    parser.add_argument("--parties", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=0, help="maximum number of rows, sampled with the seed (0: all)")
    parser.add_argument("--starts", default="independent,common")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated names")
    parser.add_argument(
        "--schedules", default=",".join(SCHEDULES), help="comma-separated pairs of local steps x rounds"
    )
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
    if chosen.quick:
        chosen.rows, chosen.parties, chosen.seeds, chosen.schedules = 300, 5, 1, "5x2"
    schedules = [tuple(int(number) for number in one.split("x")) for one in chosen.schedules.split(",")]
    rank, runs = DATASETS[chosen.dataset].rank, []
    for seed in range(chosen.seeds):
        same = {"seed": seed, "parties": chosen.parties, "rank": rank, "most_rows": chosen.rows}
        for start in chosen.starts.split(","):
            for steps, rounds in schedules:
                runs += [
                    Run(chosen.dataset, method, start, steps, rounds, STRENGTHS.get(method, 0.1), **same,
                         with_curve=(steps, rounds) == (100, 10))
                    for method in chosen.methods.split(",")
                ]  # fmt: skip
        longest = max(schedules, key=lambda one: one[0] * one[1])
        runs += [Run(chosen.dataset, method, "independent", *longest, 0.0, **same) for method in ("pooled", *ONCE)]
    values: dict[str, list[float]] = {}
    for run, record in run_all(runs, chosen.output, chosen.processes, chosen.minutes).items():
        rounds = "" if run.method == "pooled" else f" | {run.start} | {run.steps} x {run.rounds}"
        values.setdefault(run.method + rounds, []).append(record["rmsd_sum"])
    for label, numbers in values.items():
        print(f"{label:60s} {spread(numbers)}")


if __name__ == "__main__":
    main()
