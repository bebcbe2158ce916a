"""Fig. 2 of the FNMF paper: more parties for the same data, more parties with more data, missing components.

    python -m experiments.fnmf.scaling --output scaling.jsonl

Generated blocks, rank 10, 100 columns, 100 local steps × 10 rounds; the strength of the pull is 0.1.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from experiments.fnmf.runs import Run, blocks, run_all
from experiments.shared.federations import EXACT, IN_ROUNDS, ONCE
from experiments.shared.metrics import spread

RANK = 10
PARTIES = (5, 10, 20, 50, 100)
ROWS_IN_ALL, ROWS_EACH = 2000, 60
ABSENT = (0.0, 0.2, 0.4, 0.6, 0.8)
METHODS = ("pooled", EXACT[-1], *ONCE, *(name for name in IN_ROUNDS if "paper" not in name))


def cases() -> list[tuple[str, int]]:
    """Data and parties: shortage, surplus, growing heterogeneity."""
    shortage = [(blocks(ROWS_IN_ALL // parties), parties) for parties in PARTIES]
    surplus = [(blocks(ROWS_EACH), parties) for parties in PARTIES]
    return [*shortage, *surplus, *((blocks(100, absent), 20) for absent in ABSENT)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all methods on all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one small case, few steps")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="start no run that would end later than after so many minutes",
    )
    parser.add_argument("--output", type=Path, help="a JSON Lines file; runs that it holds are not repeated")
    chosen = parser.parse_args(arguments)
    taken, steps, rounds = (cases(), 100, 10) if not chosen.quick else ([(blocks(20, 0.2), 3)], 5, 2)
    seeds = 1 if chosen.quick else chosen.seeds
    runs = [
        Run(data, method, "independent", steps, rounds, 0.1, seed, parties, RANK)
        for data, parties in dict.fromkeys(taken)
        for method in METHODS
        for seed in range(seeds)
    ]
    values: dict[str, list[tuple[float, float]]] = {}
    for run, record in run_all(runs, chosen.output, chosen.processes, chosen.minutes).items():
        label = f"{run.data}, {run.parties} parties | {run.method}"
        values.setdefault(label, []).append((record["rmsd_sum"] / run.parties, record["seconds"]))
    for label, pairs in values.items():
        errors, seconds = zip(*pairs, strict=True)
        print(f"{label:70s} mean RMSD {spread(errors, 4)}   {sum(seconds) / len(seconds):7.2f} s")


if __name__ == "__main__":
    main()
