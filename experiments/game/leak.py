"""What one exchange of the game between parties discloses about a party's rows.

    python -m experiments.game.leak

In the game between parties, a block of H (k × m) is seen before and after one party's rows have played it, row by row.
If that party has a single row and the step η is known, one exchange discloses the whole row:

    meeting j moves h_j by d_j = η e_j w_j, where w_j is the row's w before it, and w_{j+1} = w_j + η e_j h_j.

d_j has the direction of w_j. With a_j = ‖w_j‖ and s_j = ± ‖d_j‖ = η e_j a_j, that w_{j+1} is along d_{j+1} reads

    a_j² u_j + s_j h_j  =  b u_{j+1}        (u_j = w_j / a_j, known; a_j² and b unknown: two numbers, k equations)

and then e_j = s_j / (η a_j), x_j = e_j + a_j u_j·h_j. With more rows the difference is a sum over rows, to first
order η W_pᵀ(X_p − W_p H): it lies in the span of the rows of W_p, and consists of the two sums that `exact` sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from experiments.game.runs import dense, parser_of, planted, rounded, write_lines
from partsong.aggregation.linear import block_span
from partsong.core.interfaces import Layout, Message, Shard
from partsong.methods.game import FederatedGame
from partsong.solvers.game import ConstantStep, Game
from partsong.solvers.game_orders import Raster

ETA = 0.05


def exchange(X: np.ndarray, H: np.ndarray, W: np.ndarray, eta: float = ETA) -> tuple[np.ndarray, np.ndarray]:
    """The block of H (k × w) that one of two parties sends, and its value before."""
    program = FederatedGame(len(H), Game(Raster(), ConstantStep(eta)))
    shard, layout = Shard("a", dense(X)), Layout(("a", "b"), X.shape[1], 0)
    party = replace(program.start_party(shard, layout), W=W)
    _, model = program.start_from(np.ascontiguousarray(H.T), 2)
    _, upload = program.local(shard, party, Message(model.arrays))
    first, last = block_span(0, 2, X.shape[1])
    return np.asarray(upload["H"])[:, : last - first], H[:, first:last]


def row_behind(before: np.ndarray, after: np.ndarray, eta: float = ETA) -> tuple[np.ndarray, np.ndarray]:
    """Recover w before the exchange and x (all columns of the block but the last) of a party with a single row.

    Exact if nothing was clipped at zero; e has the sign of d, because w is non-negative.
    """
    moved = (after - before).T
    sizes = np.linalg.norm(moved, axis=1) * np.sign(moved.sum(axis=1))
    directions, x, first = moved / sizes[:, None], [], np.empty(0)
    for j in range(len(moved) - 1):
        h = before[:, j]
        unknowns = np.stack([directions[j], -directions[j + 1]], axis=1)
        (square, _), *_ = np.linalg.lstsq(unknowns, -sizes[j] * h, rcond=None)
        a = float(np.sqrt(max(square, 0.0)))
        first = a * directions[0] if j == 0 else first
        x.append(sizes[j] / (eta * a) + a * float(directions[j] @ h))
    return first, np.array(x)


def one_row(number: int) -> dict[str, Any]:
    """Error of the recovered row."""
    data, draw = planted(number), np.random.default_rng(number)
    X, W, H = data.X[:1], draw.random((1, 3)), draw.random((3, data.X.shape[1]))
    after, before = exchange(X, H, W)
    w, x = row_behind(before, after)
    errors = {"w": np.abs(w - W[0]).max() / W.max(), "x": np.abs(x - X[0, : len(x)]).max() / X.max()}
    return {"kind": "one row", "data": number, **{name: rounded(float(e)) for name, e in errors.items()}}


def several_rows(number: int, rows: int, eta: float) -> dict[str, Any]:
    """How far the difference is from η W_pᵀ(X_p − W_p H), and how much of it lies in the span of rows of W_p."""
    data, draw = planted(number), np.random.default_rng(number)
    X, W, H = data.X[:rows], draw.random((rows, 3)), draw.random((3, data.X.shape[1]))
    after, before = exchange(X, H, W, eta)
    moved, width = after - before, before.shape[1]
    gradient = eta * W.T @ (X[:, :width] - W @ before)
    basis = np.linalg.svd(W.T, full_matrices=False)[0][:, :rows]
    away = np.linalg.norm(moved - basis @ (basis.T @ moved)) / np.linalg.norm(moved)
    miss = np.linalg.norm(moved - gradient) / np.linalg.norm(gradient)
    found = {"away_from_span": rounded(float(away), 3), "away_from_gradient": rounded(float(miss), 3)}
    return {"kind": "several rows", "data": number, "rows": rows, "eta": eta, **found}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the attacks and write the results."""
    chosen = parser_of(__doc__).parse_args(arguments)
    numbers = range(1 if chosen.quick else 5)
    records = [one_row(number) for number in numbers]
    records += [several_rows(number, rows, eta) for number in numbers for rows in (2, 10, 50) for eta in (1e-3, ETA)]
    for record in records:
        print(record)
    write_lines(chosen.output, records)


if __name__ == "__main__":
    main()
