"""Fig. 3 of the DSANLS paper on a machine with many cores: iterations per second over ranks, each one process.

    python -m experiments.dsanls.speeds --output dsanls-speeds.jsonl

Every run is a separate `mpiexec` with one thread per rank, as in `experiments.dsanls.ranks`. Its time is the median
over the iterations of rank 0.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from experiments.dsanls.ranks import METHODS, RANKS, seconds_of, started


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default="mnist,face,square-3000,gisette-twin", help="comma-separated names")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--ranks", default=",".join(str(ranks) for ranks in RANKS), help="numbers of processes")
    parser.add_argument("--rank", type=int, default=50, help="k (the paper has 100)")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path, help="a JSON Lines file; runs are appended")
    chosen = parser.parse_args(arguments)
    runs = [
        (name, method, int(ranks), repeat)
        for repeat in range(chosen.repeats)
        for name in chosen.sets.split(",")
        for method in chosen.methods.split(",")
        for ranks in chosen.ranks.split(",")
    ]
    for name, method, ranks, repeat in runs:
        seconds = seconds_of(started(name, method, chosen.rank, chosen.iterations, ranks))
        record = {
            "data": name,
            "method": method,
            "rank": chosen.rank,
            "ranks": ranks,
            "seed": repeat,
            "seconds": seconds,
        }
        print(f"{name:14s} {method:10s} {ranks:2d} ranks: {1000 * seconds:.2f} ms")
        if chosen.output is not None:
            with chosen.output.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
