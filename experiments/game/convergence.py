"""Fig. 3 of the game paper: errors over sweeps from one common start, and the bases that are recovered.

    python -m experiments.game.convergence --output runs/game-convergence.jsonl

MU, the game, J-min and J-max at the printed η = 0.001, in three orders of play, and at practical steps.
Errors are ‖X − W H‖ (Frobenius). Data sets are numbered; the first is shown in docs/results/game.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.game.runs import (
    MU,
    ORDERS,
    PRINTED,
    SELF_PLAYS,
    Method,
    error_of,
    looks,
    overlap,
    parser_of,
    planted,
    played,
    recovered,
    rounded,
    start,
    write_lines,
)

AS_PRINTED = tuple(Method(name, order, PRINTED) for order in ORDERS for name in SELF_PLAYS)
PRACTICAL = (
    *(Method(name, order, eta) for eta in (0.1, 0.3) for order in ("sequential", "stratified") for name in SELF_PLAYS),
    *(Method("game", "simultaneous", eta) for eta in (0.01, 0.02)),
    *(Method(name, order) for order in ORDERS for name in SELF_PLAYS),
)
LONG = (Method(MU), *(Method(name, "sequential", PRINTED) for name in SELF_PLAYS))
"""The four methods of the paper, which also run far longer."""


def curve(number: int, method: Method, sweeps: int) -> dict[str, Any]:
    """Run a method; record errors and how well the rows of H are recovered at the end."""
    data = planted(number)
    first_W, first_H = start(number, 0)
    at, points, Ht = looks(sweeps), [[0, rounded(error_of(data.X, first_W, first_H.T))]], first_H.T
    for sweep, (W, Ht) in enumerate(played(data.X, method, first_W, first_H, sweeps), 1):
        if sweep in at:
            points.append([sweep, rounded(error_of(data.X, W, Ht))])
    found = [rounded(r) for r in recovered(data.H, Ht.T)]
    ends: dict[str, Any] = {
        "correlations": found,
        "overlap": rounded(overlap(Ht.T)),
        "true_overlap": rounded(overlap(data.H)),
    }
    ends["H"] = [[rounded(float(h), 4) for h in row] for row in Ht.T]
    return {"data": number, **method.settings, "sweeps": sweeps, **ends, "points": points}


def main(arguments: Sequence[str] | None = None) -> None:
    """Play and write the results."""
    parser = parser_of(__doc__)
    parser.add_argument("--datasets", type=int, default=5, help="the first runs in all orders, the others in one")
    chosen = parser.parse_args(arguments)
    datasets, printed, practical, longest = (chosen.datasets, 20_000, 5_000, 100_000)
    if chosen.quick:
        datasets, printed, practical, longest = 1, 50, 50, 100
    runs = [(0, method, longest) for method in LONG]
    for number in range(datasets):
        runs.append((number, Method(MU), printed))
        for method in (*AS_PRINTED, *PRACTICAL):
            if number == 0 or method.order == "sequential":
                runs.append((number, method, printed if method.eta == PRINTED else practical))
    records = []
    for number, method, sweeps in runs:
        records.append(curve(number, method, sweeps))
        print(f"data {number}, {method.label}: {records[-1]['points'][-1][1]:.4g} after {sweeps}", flush=True)
    write_lines(chosen.output, records)


if __name__ == "__main__":
    main()
