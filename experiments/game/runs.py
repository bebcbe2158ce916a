"""Shared by the experiments with the game: the paper's data, the methods, and a loop over sweeps."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.shared.synthetic import Planted, smoothed_factors
from partsong.aggregation.alignment import Assignment, correlations
from partsong.core.streams import stream
from partsong.data.conversion import as_matrix
from partsong.data.dense import DenseMatrix
from partsong.solvers.game import ConstantStep, Game, GameState, NoSelfPlay, SafeStep, ShrinkOthers, ShrinkSmallest
from partsong.solvers.game_orders import Raster, Simultaneous, Stratified
from partsong.solvers.normal_equations import NormalEquations
from partsong.solvers.update_rules import Multiplicative

PRINTED = 1e-3
ORDERS = {"sequential": Raster(), "stratified": Stratified(blocks=4), "simultaneous": Simultaneous()}
SELF_PLAYS = {"game": NoSelfPlay(), "J-min": ShrinkSmallest(), "J-max": ShrinkOthers()}
MU = "MU"
MARKS = (10, 50, 100, 200, 500, 2000, 5000, 20_000, 100_000)


@dataclass(frozen=True, slots=True)
class Method:
    """MU, or a variant of the game with its order and step: η, or None for the safe step."""

    name: str
    order: str = ""
    eta: float | None = None

    @property
    def label(self) -> str:
        """Short name for tables and figures."""
        if self.name == MU:
            return MU
        return f"{self.name}, {self.order}, {'safe step' if self.eta is None else f'η = {self.eta:g}'}"

    @property
    def game(self) -> Game:
        """The game of this method."""
        step = SafeStep() if self.eta is None else ConstantStep(self.eta)
        return Game(ORDERS[self.order], step, SELF_PLAYS[self.name])

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of a record."""
        return {"method": self.name, "order": self.order, "eta": self.eta}


def planted(number: int) -> Planted:
    """The data set with this number, 100 × 20 of rank 3."""
    return smoothed_factors(generator=stream(number, "game data"))


def start(number: int, which: int, shape: tuple[int, int] = (100, 20), rank: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """W and H from U(0, 1), the start of all methods."""
    draw = stream(number, "game start", which)
    return draw.random((shape[0], rank)), draw.random((rank, shape[1]))


def played(X: np.ndarray, method: Method, W: np.ndarray, H: np.ndarray, sweeps: int) -> Iterator[tuple[Any, Any]]:
    """Yield (W, Hᵀ) after each sweep, without stopping rules."""
    if method.name == MU:
        yield from _multiplied(X, W, np.ascontiguousarray(H.T), sweeps)
        return
    matrix, game = as_matrix(X), method.game
    game_state, pace, before = GameState(W, np.ascontiguousarray(H.T)), 1.0, float("inf")
    for sweep in range(sweeps):
        needs_miss = method.order == "simultaneous" and method.eta is None
        residual_norm = error_of(X, game_state.W, game_state.Ht) if needs_miss else float("nan")
        game_state = game.sweep(matrix, game_state, sweep, pace=pace, residual_norm=residual_norm)
        pace = game.step.next_pace(pace, sweep, before, game_state.squared_error)
        before = game_state.squared_error
        yield game_state.W, game_state.Ht


def _multiplied(X: np.ndarray, W: np.ndarray, Ht: np.ndarray, sweeps: int) -> Iterator[tuple[Any, Any]]:
    """Alg. 2 of the paper: H first, and W with the new H."""
    rule = Multiplicative()
    state = rule.init(W)
    for _ in range(sweeps):
        Ht, _ = rule.step(Ht, NormalEquations(W.T @ W, X.T @ W), state)
        W, _ = rule.step(W, NormalEquations(Ht.T @ Ht, X @ Ht), state)
        yield W, Ht


def error_of(X: np.ndarray, W: np.ndarray, Ht: np.ndarray, order: Any = None) -> float:
    """‖X − W H‖: Frobenius, or spectral for order 2."""
    return float(np.linalg.norm(X - W @ Ht.T, order))


def recovered(truth: np.ndarray, H: np.ndarray) -> list[float]:
    """Correlation of each true row of H with its assigned row."""
    plan = Assignment(unit=True).plan(truth, H)
    return [float(r) for r in np.diag(correlations(truth, plan.apply(H)))]


def overlap(H: np.ndarray) -> float:
    """The mean cosine between different rows of H: 0 for disjoint supports."""
    rows = H / np.maximum(np.linalg.norm(H, axis=1, keepdims=True), 1e-300)
    return float((rows @ rows.T)[np.triu_indices(len(H), 1)].mean())


def looks(sweeps: int, each_decade: int = 20) -> frozenset[int]:
    """Sweeps at which an error is recorded: logarithmically spaced, and those of the tables."""
    count = max(2, int(each_decade * np.log10(sweeps)))
    spaced = np.unique(np.rint(np.geomspace(1, sweeps, count)).astype(int)).tolist()
    return frozenset([*spaced, *(mark for mark in MARKS if mark <= sweeps)])


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON Lines file; empty if there is none."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def write_lines(path: Path | None, records: Sequence[dict[str, Any]]) -> None:
    """Write records to a JSON Lines file, replacing its content."""
    if path is not None:
        path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")


def rounded(value: float, digits: int = 5) -> float:
    """Round to significant digits for a file."""
    return float(f"{value:.{digits}g}")


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Build a parser with --quick and --output."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="little data and few sweeps")
    parser.add_argument("--output", type=Path, help="a JSON Lines file")
    return parser


def dense(X: np.ndarray) -> DenseMatrix:
    """Dense rows as a matrix."""
    return DenseMatrix(X, X.dtype)
