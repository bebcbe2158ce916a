"""Non-negative matrix factorization as a game of row players and column players (Singh, 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import numpy as np

from partsong import kernels
from partsong.core import Array, Matrix
from partsong.data.observed import ObservedMatrix
from partsong.errors import CompositionError, ParameterError, StepTooLarge
from partsong.kernels import compiled_game
from partsong.local.alternate import start_rows
from partsong.local.board import LEADERS, board_of
from partsong.local.orders import Occasion, Order, Stratified, distance, gram_norm
from partsong.local.self_play import NoSelfPlay, SelfPlay
from partsong.local.step_sizes import SafeStep, StepSize

ORDERS = "Raster(), Shuffled(), Stratified(), Simultaneous() and Alternating()"
STEPS = "SafeStep(), ConstantStep(0.1) and DecayingStep(0.1, 0.01)"
SELF_PLAYS = "NoSelfPlay(), ShrinkSmallest() and ShrinkOthers()"
TWICE = 2.0
"""Meetings with a constant step settle around a solution; an error of more than twice the least is no settling."""
NOTHING = 1e-9
"""A share of ‖X‖² that is nothing but rounding."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How a game stands: W (n × k), Hᵀ (m × k), and the sum of e² that players saw in the last sweep."""

    W: Array
    Ht: Array
    seen: float = float("nan")


@dataclass(frozen=True, slots=True)
class Game:
    """Row player i owns w_i = W[i, :], column player j owns h_j = H[:, j]; both are paid u_ij = −½ (x_ij − w_i·h_j)².

    A meeting moves both along their own gradient and back to what is not negative (Alg. 3 of the paper, without its
    transpose of W[i, :]):

        e = x_ij − w_i·h_j,    w_i ← [w_i + η e h_j]₊,    h_j ← [h_j + η e w_i]₊

    It is a potential game: what a player gains, −½‖X − W H‖² gains. O(k) operations a meeting, O(cells · k) a sweep.
    `order` says who plays when, `step` how far, `self_play` what columns do alone once a sweep. With a `leader` ("rows"
    or "columns") the leader moves first and tells the other x_ij, so that the leader alone needs the data.
    """

    order: Order = Stratified()
    step: StepSize = SafeStep()
    self_play: SelfPlay = NoSelfPlay()
    leader: str | None = None

    def __post_init__(self) -> None:
        _require_part(self.order, ("sweep", "plays_cells"), "order", ORDERS)
        _require_part(self.step, ("meeting", "is_balanced"), "step", STEPS)
        if not isinstance(self.self_play, SelfPlay):
            raise ParameterError(f"self_play must be one of {SELF_PLAYS}; got {self.self_play!r}.")
        if not (self.leader is None or isinstance(self.leader, str)) or self.leader not in LEADERS:
            raise ParameterError(f'leader must be "rows", "columns" or None; got {self.leader!r}.')
        if self.leader is not None and not self.order.plays_cells:
            raise CompositionError("A leader is for meetings of two; here all players of a side move at once.")

    def sweep(
        self,
        matrix: Matrix,
        standing: Standing,
        number: int,
        *,
        pace: float = 1.0,
        miss: float = float("nan"),
        draw: np.random.Generator | None = None,
        columns: tuple[int, int] | None = None,
        row_size: float | None = None,
    ) -> Standing:
        """One sweep over all cells, or over those of a range of columns; what comes in is left as it is.

        `row_size` is ‖w‖² on average over all rows, where these are some of them: steps are then alike everywhere.
        """
        first, last = (0, matrix.shape[1]) if columns is None else columns
        sizes = mean_size(standing.W) if row_size is None else row_size, mean_size(standing.Ht)
        scale = even_scale(*sizes) if self.step.is_balanced else 1.0
        W, Ht = standing.W * scale, standing.Ht / scale
        size = sizes[0] * scale**2 + sizes[1] / scale**2
        on = Occasion(number, self.step, pace, miss, draw, self.leader, size)
        seen = self.order.sweep(matrix, first, last, W, Ht, on)
        if scale != 1:
            W, Ht = W / scale, Ht * scale
        Ht[first:last] = self.self_play(Ht[first:last])
        return Standing(W, Ht, seen)

    def curvature(self, matrix: Matrix, W: Array, Ht: Array) -> float:
        """1/η of a constant step that is safe from here on.

        For meetings max ‖w‖² + max ‖h‖² + max x: SafeStep's for every pair, since |e| ≤ max(x, w·h). Else SafeStep's
        for all at once, 2 max(‖WᵀW‖₂, ‖HHᵀ‖₂) + ‖X − W H‖.
        """
        if self.order.plays_cells:
            return largest_size(W) + largest_size(Ht) + board_of(matrix).largest
        return 2 * max(gram_norm(W), gram_norm(Ht)) + distance(matrix, W, Ht)

    @property
    def shapes_columns(self) -> bool:
        """Whether columns play against themselves, which may raise the error."""
        return not isinstance(self.self_play, NoSelfPlay)

    def most_error(self, first_error: float, squared_norm: float) -> float:
        """The largest squared error that is no run-away from where it began.

        All at once never raise it by a step that is safe. Meetings under a constant step end up near the solution, and
        may settle a little above where they have been.
        """
        if self.shapes_columns:
            return TWICE * max(first_error, squared_norm)
        return (TWICE if self.order.plays_cells else 1.0) * first_error + NOTHING * squared_norm

    def oversteps(self, sweep: int, curvature: float) -> bool:
        """Whether a step was given that is larger in this sweep than what is safe under a curvature."""
        return not self.step.is_balanced and self.step.meeting(sweep, 1.0)[0] > _safe_step(curvature)

    def too_large(self, told: str, curvature: float, *, has_collapsed: bool = False) -> StepTooLarge:
        """The error of a game that has run away, with the η that would have been safe where a larger one was given."""
        is_larger = self.oversteps(0, curvature)
        way_out = (
            f"A step of {_safe_step(curvature):.2g} is safe from the same start; SafeStep() needs none to be given."
        )
        if has_collapsed and self.shapes_columns:
            raised = "Raise its factor, take more components, or play without it."
            cause = f"Self-play by {self.self_play} has shrunk all columns away: {told}. {raised}"
            return StepTooLarge(f"{cause} {way_out}" if is_larger else cause)
        if is_larger:
            return StepTooLarge(f"The step of {self.step} is too large: {told}. {way_out}")
        if self.shapes_columns:
            reason = f"Self-play by {self.self_play} or the data are the reason, not the step: raise its factor."
        elif self.step.is_balanced:
            reason = "Check the scale of the data."
        else:
            reason = f"{self.step} was safe where it began, but wanders about near a solution; SafeStep() settles."
        return StepTooLarge(f"The game has run away: {told}. {reason}")


def _require_part(part: object, needed: tuple[str, ...], name: str, choices: str) -> None:
    """An instance of something that can do what is needed, and no class, name or number."""
    if isinstance(part, type) or not all(hasattr(part, one) for one in needed):
        is_number = name == "step" and isinstance(part, Real) and not isinstance(part, bool)
        hint = f" For a fixed step write ConstantStep({part!r})." if is_number else ""
        raise ParameterError(f"{name} must be one of {choices}; got {part!r}.{hint}")


def mean_size(factor: Array) -> float:
    """‖·‖² of the players on average."""
    return float(kernels.of(factor).inner(factor, factor)) / max(1, len(factor))


def largest_size(factor: Array) -> float:
    """max ‖·‖² of the players."""
    values = kernels.of(factor).to_numpy(factor).astype(np.float64)
    return float(np.einsum("ip,ip->i", values, values).max(initial=0.0))


def _safe_step(curvature: float) -> float:
    """1 / curvature, rounded down to two digits; 1 where there is none."""
    value = 1 / (curvature or 1.0)
    unit = 10.0 ** (np.floor(np.log10(value)) - 1) if 0 < value < float("inf") else 1.0
    return float(np.floor(value / unit) * unit)


def balance(W: Array, Ht: Array) -> float:
    """`even_scale` of these players."""
    return even_scale(mean_size(W), mean_size(Ht))


def even_scale(row_size: float, column_size: float) -> float:
    """The power of two a for which players of a·W and H/a are of one size on average: scaling by it is exact.

    A step of η moves rows and columns in one unit, and a model's scale is arbitrary. Without rows or columns of any
    size it is 1.
    """
    if not all(0 < size < float("inf") for size in (row_size, column_size)):
        return 1.0
    return float(2.0 ** round(0.25 * (np.log2(column_size) - np.log2(row_size))))


def first_weights(matrix: Matrix, Ht: Array) -> Array:
    """w_i = c·1 with the c ≥ 0 that fits row i best, from H and the row alone."""
    W = kernels.of(Ht).empty((matrix.shape[0], Ht.shape[1]), Ht)
    if isinstance(matrix, ObservedMatrix):
        side = matrix.by_row
        compiled_game.level_stored(side.indptr, side.indices, side.data, Ht, W)
        return W
    gram = kernels.of(Ht).gram(Ht)

    def update(start: int, stop: int, cross: Array) -> None:
        W[start:stop] = start_rows(gram, cross)

    matrix.walk(Ht, update)
    return W
