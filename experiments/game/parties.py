"""The game between four parties, against `exact` and `fedavg`: errors over rounds and bytes.

    PARTSONG_DATA=folder python -m experiments.game.parties --output runs/game-parties.jsonl

Rows are split at random. A round of the game is a sweep with one exchange per party. Errors are ‖X − W H‖ / ‖X‖ with
weights refitted at each party. Bytes count all messages up and down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.game.runs import looks, parser_of, planted, rounded, write_lines
from partsong.core.streams import stream
from partsong.estimators.federated_nmf import FederatedNMF

METHODS = ("game", "exact", "fedavg")
PARTIES = 4


def faces() -> np.ndarray:
    """MIT CBCL faces, 2429 × 361."""
    from experiments.shared.datasets import path_of

    with np.load(path_of("faces.npz"), allow_pickle=False) as held:
        return held["X"].astype(np.float32) / np.float32(255)


def run(name: str, X: np.ndarray, rank: int, method: str, setting: tuple[int, int]) -> dict[str, Any]:
    """Record (round, bytes, error) at some rounds."""
    seed, rounds = setting
    lot = stream(seed, "dealt out").permutation(len(X))
    parts = [X[part] for part in np.array_split(lot, PARTIES)]
    model = FederatedNMF(rank, method=method, rounds=rounds, tol=0, random_state=seed, dtype=X.dtype).fit(parts)
    points, sent, done, at = [], 0, 0, looks(rounds, 12)
    for row in model.history_:
        sent += row.bytes_up + PARTIES * row.bytes_down
        if np.isfinite(row.relative_error):
            done += 1
            if done in at:
                points.append([done, sent, rounded(row.relative_error)])
    return {"data": name, "rank": rank, "method": method, "seed": seed, "points": points}


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit and write the results."""
    chosen = parser_of(__doc__).parse_args(arguments)
    seeds, rounds = (1, 10) if chosen.quick else (5, 200)
    records = []
    for seed in range(seeds):
        sets = {"paper's generator": (planted(seed).X, 3)} | ({} if chosen.quick else {"faces": (faces(), 20)})
        for name, (X, rank) in sets.items():
            for method in METHODS:
                records.append(run(name, X, rank, method, (seed, rounds)))
                print(name, method, seed, records[-1]["points"][-1], flush=True)
    write_lines(chosen.output, records)


if __name__ == "__main__":
    main()
