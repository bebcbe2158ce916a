"""Fig. 4 of the game paper: 10 data sets × 4 starts, MU against the game, J-min and J-max.

    python -m experiments.game.datasets --output runs/game-datasets.jsonl

The paper does not state the number of sweeps; here 500, 2000 and (the game at the printed η) 20000.
Errors ‖X − W H‖ are written in the Frobenius and in the spectral norm, as "‖·‖₂" may mean either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.game.runs import (
    MU,
    PRINTED,
    SELF_PLAYS,
    Method,
    error_of,
    parser_of,
    planted,
    played,
    rounded,
    start,
    write_lines,
)

METHODS = (
    Method(MU),
    *(Method(name, "sequential", PRINTED) for name in SELF_PLAYS),
    Method("game", "simultaneous", PRINTED),
    *(Method(name, "sequential", eta) for eta in (0.1, 0.3) for name in SELF_PLAYS),
    *(Method(name, "sequential") for name in SELF_PLAYS),
)
LOOKS = (500, 2000)
LATE = 20_000


def run(number: int, which: int, method: Method, looks: Sequence[int]) -> dict[str, Any]:
    """Run a method; record the error in both norms after some sweeps."""
    X, errors = planted(number).X, []
    for sweep, (W, Ht) in enumerate(played(X, method, *start(number, which), looks[-1]), 1):
        if sweep in looks:
            errors.append([sweep, rounded(error_of(X, W, Ht)), rounded(error_of(X, W, Ht, 2))])
    return {"data": number, "start": which, **method.settings, "errors": errors}


def main(arguments: Sequence[str] | None = None) -> None:
    """Play and write the results."""
    parser = parser_of(__doc__)
    parser.add_argument("--first", type=int, default=100, help="the number of the first data set")
    parser.add_argument("--datasets", type=int, default=10)
    chosen = parser.parse_args(arguments)
    datasets, starts = (2, 2) if chosen.quick else (chosen.datasets, 4)
    records: list[dict[str, Any]] = []
    for number in range(chosen.first, chosen.first + datasets):
        for which in range(starts):
            for method in METHODS:
                is_late = method == Method("game", "sequential", PRINTED)
                looks = (5, 20) if chosen.quick else (*LOOKS, LATE) if is_late else LOOKS
                records.append(run(number, which, method, looks))
        summary = [f"{one['method']} {one['eta'] or ''} {one['errors'][1][1]:.3g}" for one in records[-len(METHODS) :]]
        print(f"data {number}: {', '.join(summary)}", flush=True)
        write_lines(chosen.output, records)


if __name__ == "__main__":
    main()
