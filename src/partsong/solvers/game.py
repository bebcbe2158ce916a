"""Non-negative matrix factorization as a game of row players and column players (Singh, 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Protocol

import numpy as np

from partsong import kernels
from partsong.core.interfaces import Array, Matrix
from partsong.data.observed import ObservedMatrix
from partsong.errors import CompositionError, ParameterError, StepTooLarge
from partsong.kernels import game
from partsong.solvers.game_orders import LEADERS, Occasion, Stratified, board_of, distance, gram_norm
from partsong.solvers.squared_error import start_rows

if TYPE_CHECKING:
    from partsong.solvers.game_orders import Order


# ---- self play --------------------------------------------------------------------------------------------------
#
# Games that column players play against themselves: they shape H, once per column in each sweep.


@dataclass(frozen=True, slots=True)
class NoSelfPlay:
    """Columns play against rows alone."""

    def __call__(self, Ht: Array) -> Array:
        return Ht


@dataclass(frozen=True, slots=True)
class ShrinkSmallest:
    """J-min: the smallest entry of every column of H is multiplied by `factor`, the first of equal ones."""

    factor: float = 0.99

    def __post_init__(self) -> None:
        _require_share(self.factor)

    def __call__(self, Ht: Array) -> Array:
        """Hᵀ (m × k) after it; rows of Hᵀ are columns of H."""
        return _scaled(Ht, lambda values: values.argmin(axis=1), self.factor, is_chosen=True)


@dataclass(frozen=True, slots=True)
class ShrinkOthers:
    """J-max: all entries of every column of H but the largest, the first of equal ones, are multiplied by `factor`.

    Rows of H are driven towards disjoint supports. The shrinking puts a floor under the error.
    """

    factor: float = 0.99

    def __post_init__(self) -> None:
        _require_share(self.factor)

    def __call__(self, Ht: Array) -> Array:
        """Hᵀ (m × k) after it; rows of Hᵀ are columns of H."""
        return _scaled(Ht, lambda values: values.argmax(axis=1), self.factor, is_chosen=False)


SelfPlay = NoSelfPlay | ShrinkSmallest | ShrinkOthers


def _scaled(Ht: Array, choose, factor: float, *, is_chosen: bool) -> Array:  # type: ignore[no-untyped-def]
    values = kernels.of(Ht).to_numpy(Ht)
    chosen = np.zeros(values.shape, bool)
    chosen[np.arange(len(values)), choose(values)] = True
    moved = np.where(chosen == is_chosen, values * values.dtype.type(factor), values)
    return kernels.of(Ht).like(moved, Ht)


def _require_share(factor: float) -> None:
    if not isinstance(factor, Real) or isinstance(factor, bool) or not 0 <= factor <= 1:
        raise ParameterError(f"A shrink factor lies between 0 and 1; got {factor!r}.")


# ---- step sizes -------------------------------------------------------------------------------------------------
#
# How far players of the game move: η as it is given, falling, or safe by the players' own norms.

MOST_SAFE = 1.6
"""Meetings never raise the pair's own error up to a relaxation of 2, at which they may swing for ever."""


class StepSize(Protocol):
    """η of a meeting of two players, of a whole side at once, and how a pace changes from sweep to sweep.

    `is_balanced`: rows and columns are brought to one size before they play, so that it does not matter how the scale
    of the model was shared out between them.
    """

    @property
    def is_balanced(self) -> bool:
        """Whether norms decide, and nobody has chosen η."""

    def meeting(self, sweep: int, pace: float, size: float = 0.0) -> tuple[float, float]:
        """(η, 0) of single meetings; or (c, θ), and the pair's own norms decide: θ / (‖w‖² + ‖h‖² + |e| + c).

        `size` is ‖w‖² + ‖h‖² of a pair on average.
        """

    def together(self, sweep: int, curvature: float, miss: float) -> float:
        """η of all players at once; `curvature` is max(‖WᵀW‖₂, ‖HHᵀ‖₂), `miss` is ‖X − W H‖."""

    def in_turn(self, sweep: int, curvature: float) -> float:
        """η of one side while the other waits, whose gram has this norm."""

    def paced(self, pace: float, sweep: int, before: float, after: float) -> float:
        """The pace after this sweep, from the errors (squared) that players saw in the one before and in it."""


@dataclass(frozen=True, slots=True)
class ConstantStep:
    """η, the same in all meetings and sweeps; the paper has 0.001. Meetings are stable to about 2 / (‖w‖² + ‖h‖²)."""

    eta: float = 1e-3

    is_balanced = False

    def __post_init__(self) -> None:
        _require_positive("eta", self.eta)

    def meeting(self, sweep: int, pace: float, size: float = 0.0) -> tuple[float, float]:
        return self.eta, 0.0

    def together(self, sweep: int, curvature: float, miss: float) -> float:
        return self.eta

    def in_turn(self, sweep: int, curvature: float) -> float:
        return self.eta

    def paced(self, pace: float, sweep: int, before: float, after: float) -> float:
        return pace


@dataclass(frozen=True, slots=True)
class DecayingStep:
    """η_t = η / (1 + decay · t) in sweep t = 0, 1, …: Σ η_t diverges and Σ η_t² does not, as noise asks for."""

    eta: float = 0.1
    decay: float = 0.01

    is_balanced = False

    def __post_init__(self) -> None:
        _require_positive("eta", self.eta)
        _require_positive("decay", self.decay)

    def _at(self, sweep: int) -> float:
        return self.eta / (1 + self.decay * sweep)

    def meeting(self, sweep: int, pace: float, size: float = 0.0) -> tuple[float, float]:
        return self._at(sweep), 0.0

    def together(self, sweep: int, curvature: float, miss: float) -> float:
        return self._at(sweep)

    def in_turn(self, sweep: int, curvature: float) -> float:
        return self._at(sweep)

    def paced(self, pace: float, sweep: int, before: float, after: float) -> float:
        return pace


@dataclass(frozen=True, slots=True)
class SafeStep:
    """Steps that need no tuning, from the norms of those who move.

    Two players who meet: η = θ / (s + |e|) with s = ‖w‖² + ‖h‖². **Neither ever loses by it**: the error e′ after the
    meeting has |e′| ≤ |e| for 0 < θ ≤ 2 (docs/game.md, Theorem 1). For e > 0 nothing is clipped, and as w·h ≤ s/2

        1 − e′/e = η s + η² e w·h ≤ θ u + ½ θ² u (1 − u) ≤ θ,   u = s / (s + e).

    For e = −a < 0 no entry grows, so e′ ≥ e, and w′h′ ≥ wh − η a (w² + h²) in each, so that e′ ≤ (θ − 1) a.

    All at once: η = θ / (2 max(‖WᵀW‖₂, ‖HHᵀ‖₂) + ‖X − W H‖), in turn: η = θ / ‖gram of the other side‖₂. For θ ≤ 1
    neither ever raises ½‖X − W H‖² (docs/game.md has the proof of the first; the second is projected gradient).

    Meetings that each fit one cell well disturb others, so that in noise they have to slow down: at a pace p ≤ 1

        η = θ / (‖w‖² + ‖h‖² + |e| + c (1/p − 1)),   c = ‖w‖² + ‖h‖² on average,

    which is never more than before, and the slower the more alike for all cells. Steps shorter where norms and
    errors are large would end where Σ e h / (s + |e|) vanishes, which is no equilibrium. The pace falls to `slower` of
    itself after a sweep in which players saw the error fall by less than `least` of it, not below 3 / (t + 6) after
    sweep t = 0, 1, … (so that steps add up to any length), and else grows by `faster` up to 1.
    """

    relaxation: float = 1.0
    slower: float = 0.9
    faster: float = 1.05
    least: float = 3e-3

    is_balanced = True

    def __post_init__(self) -> None:
        for name in ("relaxation", "slower", "faster", "least"):
            _require_number(f"SafeStep needs a number {name}", getattr(self, name))
        if not 0 < self.relaxation <= MOST_SAFE:
            raise ParameterError(f"SafeStep needs 0 < relaxation ≤ {MOST_SAFE}; got {self.relaxation!r}.")
        if not (0 < self.slower <= 1 <= self.faster < float("inf") and self.least >= 0):
            told = f"slower={self.slower!r}, faster={self.faster!r}, least={self.least!r}"
            raise ParameterError(f"SafeStep needs 0 < slower ≤ 1 ≤ faster and least ≥ 0; got {told}.")

    def meeting(self, sweep: int, pace: float, size: float = 0.0) -> tuple[float, float]:
        """Held back by the size of a pair on average."""
        return size * (1 / pace - 1), self.relaxation

    def together(self, sweep: int, curvature: float, miss: float) -> float:
        """θ / (2 curvature + miss)."""
        return min(1.0, self.relaxation) / (2 * curvature + miss or 1.0)

    def in_turn(self, sweep: int, curvature: float) -> float:
        """θ / curvature."""
        return min(1.0, self.relaxation) / (curvature or 1.0)

    def paced(self, pace: float, sweep: int, before: float, after: float) -> float:
        """Slower where little was won, but not below 3 / (sweep + 6); else faster, up to where it began."""
        if after <= (1 - self.least) * before:
            return min(1.0, pace * self.faster)
        return min(pace, max(pace * self.slower, 3 / (sweep + 6)))


def _require_number(told: str, value: object) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ParameterError(f"{told}; got {value!r}.")


def _require_positive(name: str, value: float) -> None:
    _require_number(f"{name} must be a number above 0", value)
    if not 0 < value < float("inf"):
        raise ParameterError(f"{name} must be above 0 and finite; got {value!r}.")


# ---- game -------------------------------------------------------------------------------------------------------

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
        game.level_stored(side.indptr, side.indices, side.data, Ht, W)
        return W
    gram = kernels.of(Ht).gram(Ht)

    def update(start: int, stop: int, cross: Array) -> None:
        W[start:stop] = start_rows(gram, cross)

    matrix.walk(Ht, update)
    return W
