"""Fig. 8 and 9 of the DSANLS paper: iterations per second over the number of parties, equal shares and half at one.

    python -m experiments.dsanls.rates --output dsanls-rates.jsonl

Virtual clock and split of the rows are those of `experiments.dsanls.secure`. A rate is the number of iterations of all
parties, divided by the number of parties and by the virtual seconds. For a synchronous method it is the reciprocal of
the time of an iteration; for an asynchronous one, the mean rate of the parties. Only finished pieces of work count, so
that after T virtual seconds an asynchronous rate is too low by less than STEPS / T. Proximal weights are fixed, as they
do not change the time. Errors are not computed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.dsanls.datasets import QUICK, SETS
from experiments.dsanls.secure import METHODS, is_whole, iterations_in, program_of, rounds_of, shards_of
from partsong.core.interfaces import Shard
from partsong.solvers.update_rules import ProximalDescent

RULE = ProximalDescent(1, 0.1, 0.1)
PARTIES = "2,4,8,16"


def rate(method: str, shards: Sequence[Shard], rank: int, seconds: float, seed: int) -> float:
    """Iterations per virtual second, mean over parties, in the first whole rounds of that duration."""
    program, clock = program_of(method, rank, RULE), 0.0
    for done, taken in rounds_of(method, program, shards, seed):
        clock += taken
        if clock >= seconds and is_whole(program, done):
            pieces = sum(len(times) for times in program.taken.values())
            return iterations_in(program, pieces) / len(shards) / clock
    raise AssertionError("the schedule has no end")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default="face,mnist,gisette-twin", help="comma-separated names")
    parser.add_argument("--splits", default="equal,half")
    parser.add_argument("--parties", default=PARTIES, help="comma-separated numbers of parties")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rank", type=int, default=20, help="k (the paper has 100)")
    parser.add_argument("--rows", type=int, default=10_000, help="use the first rows, up to this number (0: all)")
    parser.add_argument("--seconds", type=float, default=1.0, help="virtual seconds per run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="small generated sets, few parties")
    parser.add_argument("--output", type=Path, help="a JSON Lines file; runs that it holds are not repeated")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.parties, chosen.rank, chosen.seconds, chosen.seeds = "2,3", 4, 0.02, 1
    sets = QUICK if chosen.quick else SETS
    there: set[tuple[Any, ...]] = set()
    if chosen.output is not None and chosen.output.exists():
        for line in chosen.output.read_text("utf-8").splitlines():
            found = json.loads(line)
            there.add(tuple(found[part] for part in ("data", "split", "parties", "method", "seed")))
    for name in sets if chosen.quick else chosen.sets.split(","):
        X = sets[name].load()
        X = X[: chosen.rows] if chosen.rows else X
        for method in chosen.methods.split(","):
            rate(method, shards_of(X, 2, "equal", 0), chosen.rank, 1e-3, 0)  # compile first
        for split, parties, method, seed in _runs(chosen):
            if (name, split, parties, method, seed) in there:
                continue
            found = rate(method, shards_of(X, parties, split, seed), chosen.rank, chosen.seconds, seed)
            record = {
                "data": name, "split": split, "parties": parties, "method": method, "seed": seed,
                "rank": chosen.rank, "rows": X.shape[0], "rate": found,
            }  # fmt: skip
            print(f"{name:14s} {split:6s} {parties:3d} {method:11s} seed {seed}: {found:.1f} iterations a second")
            if chosen.output is not None:
                with chosen.output.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(record) + "\n")


def _runs(chosen: argparse.Namespace) -> list[tuple[str, int, str, int]]:
    """(split, parties, method, seed); methods take turns, so that all see the same machine load."""
    return [
        (split, int(parties), method, seed)
        for split in chosen.splits.split(",")
        for parties in chosen.parties.split(",")
        for seed in range(chosen.first_seed, chosen.first_seed + chosen.seeds)
        for method in chosen.methods.split(",")
    ]


if __name__ == "__main__":
    main()
