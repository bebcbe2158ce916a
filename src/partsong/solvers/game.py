"""The game between rows of W and columns of H: how far players move, what columns play against themselves, a sweep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from partsong import kernels
from partsong.core.interfaces import Array, Matrix, Sums
from partsong.core.parameters import Above, Choice, WordOrNumber
from partsong.data.observed import ObservedMatrix
from partsong.errors import CompositionError, ParameterError
from partsong.kernels import game
from partsong.solvers.game_orders import LEADERS, ORDERS, Stratified, SweepContext
from partsong.solvers.squared_error import start_rows

if TYPE_CHECKING:
    from partsong.solvers.game_orders import Order


@dataclass(frozen=True, slots=True)
class NoSelfPlay:
    """Columns play against rows alone."""

    def __call__(self, Ht: Array) -> Array:
        return Ht


@dataclass(frozen=True, slots=True)
class _Shrinking(ABC):
    """Some entries of every column of H are multiplied by `factor`."""

    factor: float = 0.99

    def __post_init__(self) -> None:
        if not isinstance(self.factor, Real) or isinstance(self.factor, bool) or not 0 <= self.factor <= 1:
            raise ParameterError(f"A shrink factor lies between 0 and 1; got {self.factor!r}.")

    def __call__(self, Ht: Array) -> Array:
        """Hᵀ (m × k) after it; rows of Hᵀ are columns of H."""
        values = kernels.of(Ht).to_numpy(Ht)
        moved = np.where(self._shrink(values), values * values.dtype.type(self.factor), values)
        return kernels.of(Ht).cast(moved, Ht)

    @abstractmethod
    def _shrink(self, values: np.ndarray) -> np.ndarray:
        """Which entries of Hᵀ shrink."""


@dataclass(frozen=True, slots=True)
class ShrinkSmallest(_Shrinking):
    """J-min: the smallest entry of every column of H is multiplied by `factor`, the first of equal ones."""

    def _shrink(self, values: np.ndarray) -> np.ndarray:
        return np.arange(values.shape[1]) == values.argmin(axis=1)[:, None]


@dataclass(frozen=True, slots=True)
class ShrinkOthers(_Shrinking):
    """J-max: all entries of every column of H but the largest, the first of equal ones, are multiplied by `factor`.

    Rows of H are driven towards disjoint supports. The shrinking puts a floor under the error.
    """

    def _shrink(self, values: np.ndarray) -> np.ndarray:
        return np.arange(values.shape[1]) != values.argmax(axis=1)[:, None]


SelfPlay = NoSelfPlay | ShrinkSmallest | ShrinkOthers


MAX_RELAXATION = 1.6
"""Meetings never raise the pair's own error up to a relaxation of 2, at which they may swing for ever."""


class StepSize(Protocol):
    """η of a meeting of two players, of a whole side at once, and how a pace changes from sweep to sweep.

    `is_balanced`: rows and columns are brought to one size before they play, so that it does not matter how the scale
    of the model was shared out between them.
    """

    @property
    def is_balanced(self) -> bool:
        """Whether norms decide, and nobody has chosen η."""

    def pair_step(self, sweep: int, pace: float, size: float = 0.0) -> tuple[float, float]:
        """(η, 0) of single meetings; or (c, θ), and the pair's own norms decide: θ / (‖w‖² + ‖h‖² + |e| + c).

        `size` is ‖w‖² + ‖h‖² of a pair on average.
        """

    def simultaneous_step(self, sweep: int, curvature: float, residual_norm: float) -> float:
        """η of all players at once; `curvature` is max(‖WᵀW‖₂, ‖HHᵀ‖₂), `miss` is ‖X − W H‖."""

    def alternating_step(self, sweep: int, curvature: float) -> float:
        """η of one side while the other waits, whose gram has this norm."""

    def next_pace(self, pace: float, sweep: int, before: float, after: float) -> float:
        """The pace after this sweep, from the errors (squared) that players saw in the one before and in it."""


@dataclass(frozen=True, slots=True)
class ConstantStep:
    """η, the same in all meetings and sweeps; the paper has 0.001. Meetings are stable to about 2 / (‖w‖² + ‖h‖²)."""

    eta: float = 1e-3

    is_balanced = False

    def __post_init__(self) -> None:
        _require_positive("eta", self.eta)

    def _at(self, sweep: int) -> float:
        return self.eta

    def pair_step(self, sweep: int, pace: float, size: float = 0.0) -> tuple[float, float]:
        return self._at(sweep), 0.0

    def simultaneous_step(self, sweep: int, curvature: float, residual_norm: float) -> float:
        return self._at(sweep)

    def alternating_step(self, sweep: int, curvature: float) -> float:
        return self._at(sweep)

    def next_pace(self, pace: float, sweep: int, before: float, after: float) -> float:
        return pace


@dataclass(frozen=True, slots=True)
class DecayingStep(ConstantStep):
    """η_t = η / (1 + decay · t) in sweep t = 0, 1, …: Σ η_t diverges and Σ η_t² does not, as noise asks for."""

    eta: float = 0.1
    decay: float = 0.01

    def __post_init__(self) -> None:
        _require_positive("eta", self.eta)
        _require_positive("decay", self.decay)

    def _at(self, sweep: int) -> float:
        return self.eta / (1 + self.decay * sweep)


@dataclass(frozen=True, slots=True)
class SafeStep:
    """Steps that need no tuning, from the norms of those who move.

    Two players who meet: η = θ / (s + |e|) with s = ‖w‖² + ‖h‖². **Neither ever loses by it**: the error e′ after the
    meeting has |e′| ≤ |e| for 0 < θ ≤ 2 (docs/reference/game.md, Theorem 1). For e > 0 nothing is clipped,
    and as w·h ≤ s/2

        1 − e′/e = η s + η² e w·h ≤ θ u + ½ θ² u (1 − u) ≤ θ,   u = s / (s + e).

    For e = −a < 0 no entry grows, so e′ ≥ e, and w′h′ ≥ wh − η a (w² + h²) in each, so that e′ ≤ (θ − 1) a.

    All at once: η = θ / (2 max(‖WᵀW‖₂, ‖HHᵀ‖₂) + ‖X − W H‖), in turn: η = θ / ‖gram of the other side‖₂. For θ ≤ 1
    neither ever raises ½‖X − W H‖² (first: docs/reference/game.md; second: projected gradient).

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
        if not 0 < self.relaxation <= MAX_RELAXATION:
            raise ParameterError(f"SafeStep needs 0 < relaxation ≤ {MAX_RELAXATION}; got {self.relaxation!r}.")
        if not (0 < self.slower <= 1 <= self.faster < float("inf") and self.least >= 0):
            told = f"slower={self.slower!r}, faster={self.faster!r}, least={self.least!r}"
            raise ParameterError(f"SafeStep needs 0 < slower ≤ 1 ≤ faster and least ≥ 0; got {told}.")

    def pair_step(self, sweep: int, pace: float, size: float = 0.0) -> tuple[float, float]:
        """Held back by the size of a pair on average."""
        return size * (1 / pace - 1), self.relaxation

    def simultaneous_step(self, sweep: int, curvature: float, residual_norm: float) -> float:
        """θ / (2 curvature + miss)."""
        return min(1.0, self.relaxation) / (2 * curvature + residual_norm or 1.0)

    def alternating_step(self, sweep: int, curvature: float) -> float:
        """θ / curvature."""
        return min(1.0, self.relaxation) / (curvature or 1.0)

    def next_pace(self, pace: float, sweep: int, before: float, after: float) -> float:
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
        raise ParameterError(f"{name} must be above 0 and finite; got {value!r}.", parameter=name)


KNOWN_ORDERS = "Raster(), Shuffled(), Stratified(), Simultaneous() and Alternating()"
KNOWN_STEPS = "SafeStep(), ConstantStep(0.1) and DecayingStep(0.1, 0.01)"
KNOWN_SELF_PLAYS = "NoSelfPlay(), ShrinkSmallest() and ShrinkOthers()"


@dataclass(frozen=True, slots=True)
class GameState:
    """How a game stands: W (n × k), Hᵀ (m × k), and the sum of e² that players saw in the last sweep."""

    W: Array
    Ht: Array
    squared_error: float = float("nan")


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
        _require_protocol(self.order, ("sweep", "plays_cells"), "order", KNOWN_ORDERS)
        _require_protocol(self.step, ("meeting", "is_balanced"), "step", KNOWN_STEPS)
        if not isinstance(self.self_play, SelfPlay):
            raise ParameterError(
                f"self_play must be one of {KNOWN_SELF_PLAYS}; got {self.self_play!r}.", parameter="self_play"
            )
        if not (self.leader is None or isinstance(self.leader, str)) or self.leader not in LEADERS:
            raise ParameterError(f'leader must be "rows", "columns" or None; got {self.leader!r}.', parameter="leader")
        if self.leader is not None and not self.order.plays_cells:
            raise CompositionError(
                "A leader is for meetings of two; here all players of a side move at once.", parameter="leader"
            )

    def settings(self) -> dict[str, Any]:
        """What a file says of the game: its parts by name, or all of it as text where a part has none."""
        step, alone = self.step, self.self_play
        settings = {
            "play": ORDERS.name_of(self.order),
            "step": getattr(step, "eta", SAFE),
            "step_decay": getattr(step, "decay", None),
            "self_play": next((name for name, one in SELF_PLAYS.values.items() if type(one) is type(alone)), None),
            "shrink": getattr(alone, "factor", None),
            "leader": self.leader,
        }
        try:
            is_whole = game_from_settings(settings) == self
        except (ParameterError, TypeError):
            is_whole = False
        return settings if is_whole else {"game": repr(self)}

    def sweep(
        self,
        matrix: Matrix,
        game_state: GameState,
        number: int,
        *,
        pace: float = 1.0,
        residual_norm: float = float("nan"),
        generator: np.random.Generator | None = None,
        columns: tuple[int, int] | None = None,
        row_size: float | None = None,
    ) -> GameState:
        """One sweep over all cells, or over those of a range of columns; what comes in is left as it is.

        `row_size` is ‖w‖² on average over all rows, where these are some of them: steps are then alike everywhere.
        """
        first, last = (0, matrix.shape[1]) if columns is None else columns
        sizes = mean_squared_norm(game_state.W) if row_size is None else row_size, mean_squared_norm(game_state.Ht)
        scale = balancing_scale(*sizes) if self.step.is_balanced else 1.0
        W, Ht = game_state.W * scale, game_state.Ht / scale
        size = sizes[0] * scale**2 + sizes[1] / scale**2
        on = SweepContext(number, self.step, pace, residual_norm, generator, self.leader, size)
        seen = self.order.sweep(matrix, first, last, W, Ht, on)
        if scale != 1:
            W, Ht = W / scale, Ht * scale
        Ht[first:last] = self.self_play(Ht[first:last])
        return GameState(W, Ht, seen)

    @property
    def divergence_advice(self) -> str:
        """What to change in a game that has diverged."""
        return "Check the scale of the data." if self.step.is_balanced else "Take a smaller step, or a safe one."


def _require_protocol(part: object, needed: tuple[str, ...], name: str, choices: str) -> None:
    """An instance of something that can do what is needed, and no class, name or number."""
    if isinstance(part, type) or not all(hasattr(part, one) for one in needed):
        is_number = name == "step" and isinstance(part, Real) and not isinstance(part, bool)
        hint = f" For a fixed step write ConstantStep({part!r})." if is_number else ""
        raise ParameterError(f"{name} must be one of {choices}; got {part!r}.{hint}", parameter=name)


def mean_squared_norm(factor: Array) -> float:
    """‖·‖² of the players on average."""
    return float(kernels.of(factor).inner(factor, factor)) / max(1, len(factor))


def balance(W: Array, Ht: Array) -> float:
    """`balancing_scale` of these players."""
    return balancing_scale(mean_squared_norm(W), mean_squared_norm(Ht))


def balancing_scale(row_size: float, column_size: float) -> float:
    """The power of two a for which players of a·W and H/a are of one size on average: scaling by it is exact.

    A step of η moves rows and columns in one unit, and a model's scale is arbitrary. Without rows or columns of any
    size it is 1.
    """
    if not all(0 < size < float("inf") for size in (row_size, column_size)):
        return 1.0
    return float(2.0 ** round(0.25 * (np.log2(column_size) - np.log2(row_size))))


def initial_weights(matrix: Matrix, Ht: Array) -> Array:
    """w_i = c·1 with the c ≥ 0 that fits row i best, from H and the row alone."""
    W = kernels.of(Ht).empty((matrix.shape[0], Ht.shape[1]), Ht)
    if isinstance(matrix, ObservedMatrix):
        side = matrix.by_row
        game.level_stored(side.indptr, side.indices, side.data, Ht, W)
        return W
    gram = kernels.of(Ht).gram(Ht)

    def step(at: slice, cross: Array) -> Sums:
        W[at] = start_rows(gram, cross)
        return ()

    matrix.walk(Ht, step)
    return W


SELF_PLAYS = Choice({"none": NoSelfPlay(), "min": ShrinkSmallest(), "max": ShrinkOthers()}, needed=("__call__",))
"""What columns of H do alone, once a sweep."""

SAFE = "safe"
STEP_SIZES = WordOrNumber(SAFE, Above(0))
"""The step of a game: by the players' norms, or η."""

LEADER_NAMES = Choice.of(*(name for name in LEADERS if name is not None))
"""Who moves first where two players meet."""


def compose_game(
    order: Any = None,
    step: str | float | None = None,
    step_decay: float | None = None,
    self_play: Any = None,
    shrink: float | None = None,
    leader: str | None = None,
) -> Game:
    """A game of its parts, by name or as values; what is None is as in any game."""
    alone = SELF_PLAYS.parse("self_play", "none" if self_play is None else self_play)
    if step_decay is not None and step in (SAFE, None):
        raise ParameterError(
            "step_decay needs a number as step: safe steps set their own pace.", parameter="step_decay"
        )
    if shrink is not None:
        if isinstance(alone, NoSelfPlay):
            raise ParameterError('shrink needs self_play = "min" or "max".', parameter="shrink")
        alone = replace(alone, factor=shrink)
    pace: StepSize = SafeStep()
    if step is not None and step != SAFE:
        eta = float(step)
        pace = ConstantStep(eta) if step_decay is None else DecayingStep(eta, step_decay)
    return Game(ORDERS.parse("order", "stratified" if order is None else order), pace, alone, leader)


def game_from_settings(settings: Mapping[str, Any]) -> Game:
    """The game that `Game.settings` describes; parts that are left out are those of any game."""
    play, self_play = settings.get("play") or "stratified", settings.get("self_play") or "none"
    if play not in ORDERS.values or self_play not in SELF_PLAYS.values:
        raise ParameterError(f"There is no play {play!r} with self-play {self_play!r}.")
    parts = {name: settings.get(name) for name in ("step", "step_decay", "shrink", "leader")}
    parts["step_decay"] = None if parts["step"] in (SAFE, None) else parts["step_decay"]
    return compose_game(play, self_play=self_play, **parts)


def game_solver_from_settings(settings: Mapping[str, Any]) -> Game | str:
    """The solver of a model that was learned by a game: "game" for the usual one, and where the file does not say."""
    try:
        game = game_from_settings(settings)
    except (ParameterError, TypeError, ValueError):
        return "game"
    return "game" if game == Game() else game
