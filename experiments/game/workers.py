"""Section 3.3 of the game paper: players divided among workers, on threads of one machine and between parties.

    PARTSONG_DATA=folder python -m experiments.game.workers --output runs/game-workers.jsonl

Measured: seconds of stratified sweeps on one thread, on two, and of two games side by side, in turns. Counted: what
parties send in a sweep, from the messages of a run. Maps: errors for different assignments of players to workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Thread
from typing import Any

import numpy as np

from experiments.game.runs import error_of, parser_of, planted, rounded, start, write_lines
from experiments.shared.datasets import path_of
from experiments.shared.synthetic import gamma_factors
from partsong.aggregation.plaintext import PlainReduction
from partsong.core import runtime
from partsong.core.interfaces import Matrix, Schedule, Shard
from partsong.core.streams import stream
from partsong.data.conversion import as_matrix
from partsong.data.observed import ObservedMatrix
from partsong.engines.local import Sequential
from partsong.methods.game import FederatedGame
from partsong.solvers.game import ConstantStep, Game, GameState
from partsong.solvers.game_orders import Order, Raster, Stratified

WORKERS = (1, 2, 4, 8, 16)
RANK = 20


def ratings(file: str = "movielens_1m.npz") -> ObservedMatrix:
    """Known ratings, in float32."""
    from scipy.sparse import csr_array, load_npz

    known = csr_array(load_npz(path_of(file))).astype(np.float32)
    known.sort_indices()
    return ObservedMatrix.of_rows(known)


def boards(is_quick: bool) -> Iterator[tuple[str, Matrix]]:
    """A dense matrix and one of which some cells are known."""
    side = 100 if is_quick else 2000
    yield f"dense {side} × {side}", as_matrix(gamma_factors(side, side, RANK, stream(0, "workers")).X)
    if not is_quick:
        yield "MovieLens 1M, known cells", ratings()


def seconds_of(matrix: Matrix, number: int, sweeps: int) -> list[float]:
    """Seconds of single sweeps on this many threads, after one that compiles."""
    draw, game, taken = stream(0, "begin"), Game(Stratified()), []
    W, Ht = (draw.random((side, RANK)).astype(np.float32) for side in matrix.shape)
    game_state = GameState(W, Ht)
    with runtime.limit_kernel_threads(number):
        for sweep in range(sweeps + 1):
            began = time.perf_counter()
            game_state = game.sweep(matrix, game_state, sweep)
            taken.append(time.perf_counter() - began)
    return taken[1:]


def both_at_once(matrix: Matrix, sweeps: int) -> list[float]:
    """Seconds of single sweeps while two games with one thread each run side by side: the machine's ceiling."""
    taken: list[list[float]] = []
    games = [Thread(target=lambda: taken.append(seconds_of(matrix, 1, sweeps))) for _ in range(2)]
    for game in games:
        game.start()
    for game in games:
        game.join()
    return [seconds for one in taken for seconds in one]


def measured(is_quick: bool) -> Iterator[dict[str, Any]]:
    """Medians over turns of one thread, of two, and of two games side by side; and processor time for each sweep.

    Wall-clock time includes other processes; processor time does not.
    """
    turns, sweeps = (1, 1) if is_quick else (6, 4)
    for name, matrix in boards(is_quick):
        kinds: dict[str, Callable[[], list[float]]] = {
            "1": partial(seconds_of, matrix, 1, sweeps),
            "2": partial(seconds_of, matrix, 2, sweeps),
            "two games": partial(both_at_once, matrix, sweeps),
        }
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        used: dict[str, list[float]] = {kind: [] for kind in kinds}
        kinds["2"]()  # compile first
        for _ in range(turns):
            for kind, play in kinds.items():
                began = time.process_time()
                seconds = play()
                games = 2 if kind == "two games" else 1
                used[kind].append((time.process_time() - began) / (games * (sweeps + 1)))
                taken[kind] += seconds
        for kind in kinds:
            times = {"seconds": rounded(float(np.median(taken[kind]))), "best": rounded(min(taken[kind]))}
            times["processor"] = rounded(float(np.median(used[kind])))
            yield {"kind": "measured", "data": name, "threads": kind, "cells": float(matrix.stored), **times}


def counted(rows: int, columns: int, rank: int) -> Iterator[dict[str, Any]]:
    """Messages and numbers in one sweep, from all parties together and to each of them."""
    X = gamma_factors(rows, columns, rank, stream(0, "counted")).X
    for parties in WORKERS:
        shards = [Shard(f"{p:02d}", as_matrix(part)) for p, part in enumerate(np.array_split(X, parties))]
        rounds = list(
            Sequential(record=True).run(FederatedGame(rank), shards, Schedule(parties), reduction=PlainReduction())
        )
        uploads = [message for done in rounds for who, _, message in done.traffic if who != "server"]
        sizes = [int(np.prod(message["H"].shape)) for message in uploads]
        yield {
            "kind": "counted",
            "parties": parties,
            "shape": [rows, columns, rank],
            "exchanges": len(rounds),
            "uploads": len(uploads),
            "player_numbers_up": sum(sizes),
            "bytes_up": sum(sum(done.bytes_up.values()) for done in rounds),
            "bytes_down_each": sum(done.bytes_down for done in rounds),
        }


def maps(sweeps: int, starts: int) -> Iterator[dict[str, Any]]:
    """Errors after some sweeps, by the assignment of players to four workers."""
    for seed in range(starts):
        X, (W, H) = planted(seed).X, start(seed, 0)
        draw = stream(seed, "map")
        lot = [tuple(draw.integers(0, 4, size).tolist()) for size in X.shape]
        uneven = [tuple(np.minimum(3, draw.geometric(0.6, size) - 1).tolist()) for size in X.shape]
        orders: dict[str, Order] = {
            "nobody: row by row": Raster(),
            "4 equal ranges": Stratified(4),
            "16 equal ranges": Stratified(16),
            "4 workers, drawn by lot": Stratified(4, *lot),
            "4 workers, uneven": Stratified(4, *uneven),
            "4 workers, every fourth": Stratified(4, *(tuple((np.arange(size) % 4).tolist()) for size in X.shape)),
        }
        for name, order in orders.items():
            game, game_state = Game(order, ConstantStep(0.1)), GameState(W, np.ascontiguousarray(H.T))
            for sweep in range(sweeps):
                game_state = game.sweep(as_matrix(X), game_state, sweep)
            error = rounded(error_of(X, game_state.W, game_state.Ht))
            yield {"kind": "maps", "data": seed, "map": name, "sweeps": sweeps, "error": error}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, count and write the results."""
    chosen = parser_of(__doc__).parse_args(arguments)
    shape = (64, 48, 3) if chosen.quick else (1600, 800, 20)
    records = []
    for part in (maps(*((10, 2) if chosen.quick else (500, 10))), counted(*shape), measured(chosen.quick)):
        for record in part:
            records.append(record)
            print(record, flush=True)
    write_lines(chosen.output, records)


if __name__ == "__main__":
    main()
