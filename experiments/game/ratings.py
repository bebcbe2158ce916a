"""The game over known ratings, and its error on held-out ratings.

    PARTSONG_DATA=folder python -m experiments.game.ratings --output runs/game-ratings.jsonl

A tenth of the known cells is held out per seed, and another twentieth decides when to stop and chooses the step or
penalty. Errors are root mean squares over held-out cells whose row and column have a known cell left, with predictions
clipped to 1 … 5. Baselines: the mean of all ratings, the mean with row and column offsets, and alternating exact
solves of known cells, without a penalty and with the best of five.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.game.runs import parser_of, rounded, write_lines
from experiments.game.workers import ratings
from partsong.core import runtime
from partsong.core.streams import stream
from partsong.data.observed import ObservedMatrix
from partsong.solvers.game import ConstantStep, Game, GameState, SafeStep, StepSize, balance, initial_weights
from partsong.solvers.normal_equations import Penalty
from partsong.solvers.observed import ObservedRowSolver
from partsong.solvers.squared_error import SquaredError

SETS = {"MovieLens 100k": "movielens_100k.npz", "MovieLens 1M": "movielens_1m.npz"}
PENALTIES = (0.0, 0.02, 0.05, 0.1, 0.2)
STEPS = (0.001, 0.003, 0.01, 0.03)
BELOW, ABOVE = 1.0, 5.0
Model = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class Cells:
    """Single cells (row, column, value)."""

    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray

    def rmse(self, forecasts: np.ndarray) -> float:
        """Root mean square error of predictions, clipped to the scale of ratings."""
        return float(np.sqrt(np.mean((self.values - np.clip(forecasts, BELOW, ABOVE)) ** 2)))

    def rmse_of(self, model: Model) -> float:
        """Root mean square error of W H at these cells."""
        return self.rmse(np.einsum("ij,ij->i", model[0][self.rows], model[1][self.columns], dtype=np.float64))


def split(whole: ObservedMatrix, seed: int) -> tuple[ObservedMatrix, Cells, Cells]:
    """Split the cells into training cells, a twentieth for validation and a held-out tenth."""
    from scipy.sparse import coo_array, csr_array

    cells = coo_array(whole.by_row)
    lot = stream(seed, "held out").permutation(cells.nnz)
    cuts = cells.nnz // 10, cells.nnz // 10 + cells.nnz // 20
    held, stopping, kept = lot[: cuts[0]], lot[cuts[0] : cuts[1]], lot[cuts[1] :]
    learned = csr_array((cells.data[kept], (cells.row[kept], cells.col[kept])), shape=cells.shape)
    learned.sort_indices()
    matrix = ObservedMatrix.of_rows(learned)
    is_known = (
        np.diff(learned.indptr)[cells.row] * np.bincount(learned.indices, minlength=cells.shape[1])[cells.col] > 0
    )

    def picked(which: np.ndarray) -> Cells:
        here = which[is_known[which]]
        return Cells(cells.row[here], cells.col[here], cells.data[here].astype(np.float64))

    return matrix, picked(stopping), picked(held)


def offsets(matrix: ObservedMatrix, cells: Cells, weight: float = 5.0, passes: int = 10) -> np.ndarray:
    """Predict μ + a_i + b_j at these cells, with ridge offsets of rows and columns."""
    side = matrix.by_row
    rows, columns = np.repeat(np.arange(side.shape[0]), np.diff(side.indptr)), side.indices
    mean, a, b = matrix.mean, np.zeros(side.shape[0]), np.zeros(side.shape[1])
    for _ in range(passes):
        a = np.bincount(rows, side.data - mean - b[columns], len(a)) / (np.bincount(rows, minlength=len(a)) + weight)
        b = np.bincount(columns, side.data - mean - a[rows], len(b)) / (np.bincount(columns, minlength=len(b)) + weight)
    return mean + a[cells.rows] + b[cells.columns]


def game_sweeps(matrix: ObservedMatrix, rank: int, seed: int, sweeps: int, step: StepSize) -> Iterator[Model]:
    """Run the stratified game from random columns and constant rows, rescaled to equal norms."""
    game = Game(step=step)
    Ht = stream(seed, "columns").random((matrix.shape[1], rank)).astype(matrix.dtype)
    W = initial_weights(matrix, Ht)
    scale = matrix.dtype.type(balance(W, Ht))
    game_state, pace, before = GameState(W * scale, Ht / scale), 1.0, float("inf")
    for sweep in range(sweeps):
        game_state = game.sweep(matrix, game_state, sweep, pace=pace)
        pace, before = game.step.next_pace(pace, sweep, before, game_state.squared_error), game_state.squared_error
        yield game_state.W, game_state.Ht


def exact_sweeps(matrix: ObservedMatrix, rank: int, seed: int, sweeps: int, penalty: float) -> Iterator[Model]:
    """Alternate exact solves of all rows and all columns, with a ridge penalty per known cell."""
    ridge = Penalty(l2=penalty)
    solver = ObservedRowSolver(SquaredError(penalty_W=ridge, penalty_H=ridge))
    Ht = stream(seed, "columns").random((matrix.shape[1], rank)).astype(matrix.dtype)
    for _ in range(sweeps):
        W = solver.solve_rows(matrix, Ht)
        Ht = solver.solve_columns(matrix, W)
        yield W, Ht


def best_of(models: Iterator[Model], stopping: Cells, held: Cells) -> dict[str, Any]:
    """The held-out error at the best validation error, and at the end."""
    errors = [(stopping.rmse_of(model), held.rmse_of(model)) for model in models]
    at = int(np.argmin([first for first, _ in errors]))
    found = {
        "stopped_at": at + 1,
        "sweeps": len(errors),
        "rmse": rounded(errors[at][1]),
        "last": rounded(errors[-1][1]),
    }
    return {**found, "stopping": rounded(errors[at][0]), "curve": [rounded(error, 4) for _, error in errors]}


def runs(name: str, whole: ObservedMatrix, seed: int, ranks: Sequence[int], sweeps: int) -> Iterator[dict[str, Any]]:
    """All methods on one split."""
    matrix, stopping, held = split(whole, seed)
    common = {"data": name, "seed": seed}
    yield {**common, "method": "mean", "rank": 0, "rmse": rounded(held.rmse(np.full(len(held.values), matrix.mean)))}
    yield {**common, "method": "offsets", "rank": 0, "rmse": rounded(held.rmse(offsets(matrix, held)))}
    for rank in ranks:
        here = {**common, "rank": rank}
        safe = best_of(game_sweeps(matrix, rank, seed, sweeps, SafeStep()), stopping, held)
        yield {**here, "method": "game, safe step", **safe}
        played = {e: best_of(game_sweeps(matrix, rank, seed, sweeps, ConstantStep(e)), stopping, held) for e in STEPS}
        best = min(STEPS, key=lambda eta: played[eta]["stopping"])
        yield {**here, "method": "game, η", "setting": best, **played[best]}
        few = max(3, sweeps // 4)
        solved = {p: best_of(exact_sweeps(matrix, rank, seed, few, p), stopping, held) for p in PENALTIES}
        yield {**here, "method": "exact", **solved[0.0]}
        best = min(PENALTIES, key=lambda penalty: solved[penalty]["stopping"])
        yield {**here, "method": "exact, ridge", "setting": best, **solved[best]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, predict and write the results."""
    parser = parser_of(__doc__)
    parser.add_argument("--sets", default=",".join(SETS), help="comma-separated names")
    parser.add_argument("--ranks", default="5,10,20")
    parser.add_argument("--sweeps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.sets, chosen.ranks, chosen.sweeps, chosen.seeds = "MovieLens 100k", "3", 4, 1
    records = []
    for name in chosen.sets.split(","):
        whole = ratings(SETS[name])
        with runtime.limit_kernel_threads(runtime.available_threads()):
            for seed in range(chosen.first_seed, chosen.first_seed + chosen.seeds):
                for record in runs(name, whole, seed, [int(k) for k in chosen.ranks.split(",")], chosen.sweeps):
                    records.append(record)
                    print({key: value for key, value in record.items() if key != "curve"}, flush=True)
                write_lines(chosen.output, records)


if __name__ == "__main__":
    main()
