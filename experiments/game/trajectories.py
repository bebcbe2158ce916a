"""Fig. 5 of the game paper: trajectories of the rows of H, in the space of their three principal components.

    python -m experiments.game.trajectories --output runs/game-trajectories.jsonl

The components come from the rows of H after every sweep, of all methods of a figure. Three measures of jaggedness: the
mean angle between consecutive steps in the full space; the same along pieces of equal length, because small steps hide
turns; and the length of the path over the distance of its ends. Paths are also recorded after every row of a sweep.
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
from partsong.solvers.game_orders import PairStep, build_cells

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
    """H after every row of every sweep, with a constant η."""
    cells, W, Ht = build_cells(as_matrix(X)), begin[0].copy(), np.ascontiguousarray(begin[1].T)
    way = [Ht.T.copy()]
    for _ in range(sweeps):
        for i in range(len(W)):
            cells.play(np.array([i]), 0, len(Ht), W, Ht, PairStep(eta, 0.0))
            way.append(Ht.T.copy())
    return np.stack(way)


def turning(path: np.ndarray) -> float:
    """Mean angle in degrees between consecutive steps of a path (t × m), without steps of zero length."""
    steps = np.diff(path, axis=0)
    lengths = np.linalg.norm(steps, axis=1)
    steps = steps[lengths > 1e-12 * max(lengths.max(initial=0.0), 1e-300)]
    if len(steps) < 2:
        return 0.0
    steps /= np.linalg.norm(steps, axis=1, keepdims=True)
    cosines = np.einsum("ij,ij->i", steps[1:], steps[:-1])
    return float(np.degrees(np.arccos(np.clip(cosines, -1.0, 1.0))).mean())


def evenly(path: np.ndarray, pieces: int = PIECES) -> np.ndarray:
    """Resample a path into pieces of equal length."""
    lengths = np.linalg.norm(np.diff(path, axis=0), axis=1)
    along = np.concatenate([[0.0], np.cumsum(lengths)])
    at = np.linspace(0.0, along[-1], pieces + 1)
    return np.stack([np.interp(at, along, path[:, j]) for j in range(path.shape[1])], axis=1)


def detour(path: np.ndarray) -> float:
    """Length of a path over the distance between its ends."""
    length = float(np.linalg.norm(np.diff(path, axis=0), axis=1).sum())
    return length / max(float(np.linalg.norm(path[-1] - path[0])), 1e-300)


def jaggedness(way: np.ndarray) -> dict[str, float]:
    """All three measures, means over the rows of H."""
    paths = [way[:, row] for row in range(way.shape[1])]
    return {
        "turning": rounded(np.mean([turning(path) for path in paths])),
        "turning_evenly": rounded(np.mean([turning(evenly(path)) for path in paths])),
        "detour": rounded(np.mean([detour(path) for path in paths])),
    }


def components(ways: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Mean of all points, their first three principal components (3 × m), and shares of the variance."""
    rows = np.concatenate([way.reshape(-1, way.shape[2]) for way in ways])
    mean = rows.mean(axis=0)
    values, vectors = np.linalg.eigh(np.cov((rows - mean).T))
    shares = values[::-1][:3] / values.sum()
    return mean, vectors[:, ::-1][:, :3].T, [rounded(share) for share in shares]


def figure(number: int, name: str, sweeps: int) -> list[dict[str, Any]]:
    """Run MU and the three games of one figure; keep the projected paths of the first data set for drawing."""
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
        summary = f"{record['turning']:6.2f}° {record['turning_evenly']:6.2f}° {record['detour']:6.2f}"
        print(f"data {record['data']}, {record['figure']}: {record['method']} {summary} {record.get('shares', '')}")
    write_lines(chosen.output, records)


if __name__ == "__main__":
    main()
