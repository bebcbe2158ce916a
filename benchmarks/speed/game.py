"""Time of a sweep of the game over MovieLens ratings, on one thread and on all, against a plain NumPy loop."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import sparse

from benchmarks.machine import cores
from partsong.core import runtime
from partsong.data.observed import ObservedMatrix, observed
from partsong.kernels import game as compiled_game
from partsong.solvers.game import ConstantStep, Game, GameState, SafeStep
from partsong.solvers.game_orders import Alternating, Raster, Shuffled, Simultaneous, Stratified

GOAL_SECONDS, GOAL_RATIO = 0.1, 50.0
RANK, REPEATS = 20, 7
LOOP_CELLS = 20_000
"""Number of cells for timing the plain loop; its time per cell is constant."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """One kind of sweep: its name, seconds by number of threads, and cells played."""

    name: str
    seconds: dict[int, float]
    cells: int

    def row(self) -> str:
        """Format a row of the table."""
        shown = " | ".join(f"{1000 * self.seconds[count]:.1f} ms" for count in sorted(self.seconds))
        best = min(self.seconds.values())
        return f"| {self.name} | {shown} | {1e9 * best / self.cells:.1f} ns |"


def plain_loop(
    rows: np.ndarray, columns: np.ndarray, values: np.ndarray, W: np.ndarray, Ht: np.ndarray, eta: float
) -> None:
    """The two loops of the paper in NumPy."""
    for i, j, x in zip(rows.tolist(), columns.tolist(), values.tolist(), strict=True):
        w, h = W[i], Ht[j]
        pull = eta * (x - w @ h)
        W[i], Ht[j] = np.maximum(0, w + pull * h), np.maximum(0, h + pull * w)


def ratings(quick: bool) -> ObservedMatrix:
    """MovieLens 1M (6040 × 3706, 1,000,209 ratings), or as many generated ones without PARTSONG_DATA."""
    folder = os.environ.get("PARTSONG_DATA", "")
    path = Path(folder, "movielens_1m.npz")
    if quick:
        return observed(sparse.random_array((300, 200), density=0.05, format="csr", rng=np.random.default_rng(0)))
    if folder and path.exists():
        return observed(sparse.load_npz(path).tocsr().astype(np.float32))
    generated = sparse.random_array((6040, 3706), density=0.0447, format="csr", rng=np.random.default_rng(0))
    return observed(generated, np.float32)


def measure(quick: bool = False, say: Callable[[str], None] = print) -> list[str]:
    """All measurements, as lines of text."""
    cells, rank = ratings(quick), 4 if quick else RANK
    draw = np.random.default_rng(0)
    W, Ht = (draw.random((size, rank)).astype(cells.dtype) for size in cells.shape)
    counts = sorted({1, cores()})
    lines = [
        f"{cells.shape[0]} × {cells.shape[1]}, {cells.stored} known cells, k = {rank}, {cells.dtype}; medians of "
        f"{REPEATS} that took turns",
        "",
        f"| order, step | {' | '.join(f'{count} thread(s)' for count in counts)} | a cell |",
        "|---|" + "---|" * (len(counts) + 1),
    ]
    games = {
        "stratified, safe": Game(Stratified(), SafeStep()),
        "stratified, constant": Game(Stratified(), ConstantStep(1e-3)),
        "sequential, constant": Game(Raster(), ConstantStep(1e-3)),
        "random, constant": Game(Shuffled(), ConstantStep(1e-3)),
        "stratified, rows lead": Game(Stratified(), ConstantStep(1e-3), leader="rows"),
        "simultaneous, constant": Game(Simultaneous(), ConstantStep(1e-6)),
        "alternating, constant": Game(Alternating(), ConstantStep(1e-6)),
    }
    timed = _timed(games, cells, W, Ht, counts, 2 if quick else REPEATS)
    lines += [Sweep(name, seconds, cells.stored).row() for name, seconds in timed.items()]
    loop = _loop_seconds(cells, W, Ht) * cells.stored
    ratio = loop / timed["sequential, constant"][1]
    sweep = timed["stratified, safe"][counts[-1]]
    floor = _floor_seconds(W, Ht, cells)
    lines += [
        "",
        f"A plain NumPy loop takes {loop:.2f} s for as many cells: {ratio:.0f} times as long as the compiled play of "
        f"the same order on one thread (goal: {GOAL_RATIO:.0f}).",
        f"A stratified sweep takes {sweep:.4f} s on {counts[-1]} threads (goal: {GOAL_SECONDS} s). Half of a meeting, "
        f"e and the pull on w for every cell in a frozen profile, takes {floor:.4f} s on one.",
    ]
    for line in lines:
        say(line)
    return lines


def _timed(
    games: dict[str, Game], cells: ObservedMatrix, W: np.ndarray, Ht: np.ndarray, counts: list[int], repeats: int
) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, list[float]]] = {name: {count: [] for count in counts} for name in games}
    for turn in range(repeats + 1):
        for name, game in games.items():
            for count in counts:
                with runtime.limit_kernel_threads(count):
                    began = time.perf_counter()
                    game.sweep(cells, GameState(W, Ht), 0, residual_norm=1.0, generator=np.random.default_rng(turn))
                    if turn:  # the first call compiles
                        found[name][count].append(time.perf_counter() - began)
    return {name: {n: statistics.median(times) for n, times in by.items()} for name, by in found.items()}


def _loop_seconds(cells: ObservedMatrix, W: np.ndarray, Ht: np.ndarray) -> float:
    """Seconds of the plain loop for each cell."""
    side = cells.by_row
    count = min(LOOP_CELLS, cells.stored)
    rows = np.repeat(np.arange(side.shape[0]), np.diff(side.indptr))[:count]
    times = []
    for _ in range(3):
        factors = W.copy(), Ht.copy()
        began = time.perf_counter()
        plain_loop(rows, side.indices[:count], side.data[:count], *factors, 1e-3)
        times.append(time.perf_counter() - began)
    return statistics.median(times) / count


def _floor_seconds(W: np.ndarray, Ht: np.ndarray, cells: ObservedMatrix) -> float:
    """Seconds of a pass that reads both players of every cell and changes neither."""
    side, out = cells.by_row, np.empty_like(W)
    times = []
    for turn in range(4):
        began = time.perf_counter()
        compiled_game.pull_stored(side.indptr, side.indices, side.data, 0, len(W), W, Ht, out)
        if turn:
            times.append(time.perf_counter() - began)
    return statistics.median(times)
