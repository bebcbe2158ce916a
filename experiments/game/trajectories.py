"""Fig. 5 of the game paper: the ways that rows of H go, in the space of their three principal components.

    python -m experiments.game.trajectories --output runs/game-trajectories.jsonl

Rows of H after every sweep, of all methods of a figure stacked, give the components. How jagged a way is: the mean
angle by which it turns from one step to the next, in the full space; small steps hide that, so once more along the way
cut into pieces of equal length; and how many times longer it is than the line from its first to its last point. Ways
are also recorded after every row of a sweep, where single meetings show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.game.runs import (
    MU,
    PRINTED,
    SELF_PLAYS,
    Method,
    parser_of,
    planted,
    played,
    rounded,
    start,
    write_lines,
)
from partsong.data.conversion import as_matrix
from partsong.solvers.game_orders import Meeting, board_of

PIECES = 200
POINTS_DRAWN = 120
FIGURES = {
    "printed": [Method(name, "sequential", PRINTED) for name in SELF_PLAYS],
    "printed, simultaneous": [Method(name, "simultaneous", PRINTED) for name in SELF_PLAYS],
    "practical": [Method(name, "sequential", 0.1) for name in SELF_PLAYS],
    "large": [Method(name, "sequential", 0.3) for name in SELF_PLAYS],
    "safe": [Method(name, "sequential") for name in SELF_PLAYS],
    "safe, simultaneous": [Method(name, "simultaneous") for name in SELF_PLAYS],
}


def way_of(X: np.ndarray, method: Method, begin: tuple[np.ndarray, np.ndarray], sweeps: int) -> np.ndarray:
    """H after each sweep, and at the start (sweeps + 1 × k × m)."""
    return np.stack([begin[1], *(Ht.T.copy() for _, Ht in played(X, method, *begin, sweeps))])


def way_within(X: np.ndarray, eta: float, begin: tuple[np.ndarray, np.ndarray], sweeps: int) -> np.ndarray:
    """H after every row that has played, sweep by sweep, row by row, with a constant η."""
    board, W, Ht = board_of(as_matrix(X)), begin[0].copy(), np.ascontiguousarray(begin[1].T)
    way = [Ht.T.copy()]
    for _ in range(sweeps):
        for i in range(len(W)):
            board.play(np.array([i]), 0, len(Ht), W, Ht, Meeting(eta, 0.0))
            way.append(Ht.T.copy())
    return np.stack(way)


def turning(path: np.ndarray) -> float:
    """The mean angle, in degrees, between one step of a path (t × m) and the next; steps of no length are left out."""
    steps = np.diff(path, axis=0)
    lengths = np.linalg.norm(steps, axis=1)
    steps = steps[lengths > 1e-12 * max(lengths.max(initial=0.0), 1e-300)]
    if len(steps) < 2:
        return 0.0
    steps /= np.linalg.norm(steps, axis=1, keepdims=True)
    cosines = np.einsum("ij,ij->i", steps[1:], steps[:-1])
    return float(np.degrees(np.arccos(np.clip(cosines, -1.0, 1.0))).mean())


def evenly(path: np.ndarray, pieces: int = PIECES) -> np.ndarray:
    """The same way in pieces of equal length."""
    lengths = np.linalg.norm(np.diff(path, axis=0), axis=1)
    along = np.concatenate([[0.0], np.cumsum(lengths)])
    at = np.linspace(0.0, along[-1], pieces + 1)
    return np.stack([np.interp(at, along, path[:, j]) for j in range(path.shape[1])], axis=1)


def detour(path: np.ndarray) -> float:
    """The length of a way over the distance between its ends."""
    length = float(np.linalg.norm(np.diff(path, axis=0), axis=1).sum())
    return length / max(float(np.linalg.norm(path[-1] - path[0])), 1e-300)


def jaggedness(way: np.ndarray) -> dict[str, float]:
    """All three numbers, means over the rows of H."""
    paths = [way[:, row] for row in range(way.shape[1])]
    return {
        "turning": rounded(np.mean([turning(path) for path in paths])),
        "turning_evenly": rounded(np.mean([turning(evenly(path)) for path in paths])),
        "detour": rounded(np.mean([detour(path) for path in paths])),
    }


def components(ways: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """The mean of all rows of all ways, their first three principal components (3 × m), and shares of the variance."""
    rows = np.concatenate([way.reshape(-1, way.shape[2]) for way in ways])
    mean = rows.mean(axis=0)
    values, vectors = np.linalg.eigh(np.cov((rows - mean).T))
    shares = values[::-1][:3] / values.sum()
    return mean, vectors[:, ::-1][:, :3].T, [rounded(share) for share in shares]


def figure(number: int, name: str, sweeps: int) -> list[dict[str, Any]]:
    """MU and the three games of one figure; paths in the plane of the first data set are kept for drawing."""
    X, begin = planted(number).X, start(number, 0)
    methods = [Method(MU), *FIGURES[name]]
    ways = [way_of(X, method, begin, sweeps) for method in methods]
    mean, axes, shares = components(ways)
    records = []
    for method, way in zip(methods, ways, strict=True):
        record = {
            "data": number,
            "figure": name,
            **method.settings,
            "sweeps": sweeps,
            "shares": shares,
            **jaggedness(way),
        }
        if number == 0:
            paths = [(evenly(way[:, row], POINTS_DRAWN) - mean) @ axes[:2].T for row in range(way.shape[1])]
            record["paths"] = [[[rounded(float(v), 4) for v in point] for point in path] for path in paths]
        records.append(record)
    return records


def within(number: int, eta: float, sweeps: int) -> dict[str, Any]:
    """The game, recorded after every row."""
    way = way_within(planted(number).X, eta, start(number, 0), sweeps)
    return {
        "data": number,
        "figure": "after every row",
        "method": "game",
        "eta": eta,
        "sweeps": sweeps,
        **jaggedness(way),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Play and write the results."""
    chosen = parser_of(__doc__).parse_args(arguments)
    datasets, sweeps, inner = (1, 20, 2) if chosen.quick else (5, 2000, 20)
    records = []
    for number in range(datasets):
        for name in FIGURES:
            records += figure(number, name, sweeps)
        records += [within(number, eta, inner) for eta in (PRINTED, 0.1, 0.3)]
    for record in records:
        told = f"{record['turning']:6.2f}° {record['turning_evenly']:6.2f}° {record['detour']:6.2f}"
        print(f"data {record['data']}, {record['figure']}: {record['method']} {told} {record.get('shares', '')}")
    write_lines(chosen.output, records)


if __name__ == "__main__":
    main()
