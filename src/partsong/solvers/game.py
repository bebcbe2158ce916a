"""NMF as a game between rows of W and columns of H: step sizes, self-play of columns, one sweep over the cells."""

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
from partsong.solvers.squared_error import constant_rows

if TYPE_CHECKING:
    from partsong.solvers.game_orders import Order


@dataclass(frozen=True, slots=True)
class NoSelfPlay:
    """No self-play: columns play only against rows."""

    def __call__(self, Ht: Array) -> Array:
        return Ht


@dataclass(frozen=True, slots=True)
class _Shrinking(ABC):
    """Multiply some entries of each column of H by `factor`."""

    factor: float = 0.99

    def __post_init__(self) -> None:
        if not isinstance(self.factor, Real) or isinstance(self.factor, bool) or not 0 <= self.factor <= 1:
            raise ParameterError(f"The shrink factor must be between 0 and 1; got {self.factor!r}.")

    def __call__(self, Ht: Array) -> Array:
        """Return Hᵀ (m × k) after self-play; rows of Hᵀ are columns of H."""
        values = kernels.of(Ht).to_numpy(Ht)
        moved = np.where(self._shrink(values), values * values.dtype.type(self.factor), values)
        return kernels.of(Ht).cast(moved, Ht)

    @abstractmethod
    def _shrink(self, values: np.ndarray) -> np.ndarray:
        """Return a mask of the entries of Hᵀ that shrink."""


@dataclass(frozen=True, slots=True)
class ShrinkSmallest(_Shrinking):
    """J-min: multiply the smallest entry of each column of H by `factor` (the first one in a tie)."""

    def _shrink(self, values: np.ndarray) -> np.ndarray:
        return np.arange(values.shape[1]) == values.argmin(axis=1)[:, None]


@dataclass(frozen=True, slots=True)
class ShrinkOthers(_Shrinking):
    """J-max: multiply all entries of each column of H except the largest (the first one in a tie) by `factor`.

    This drives the rows of H towards disjoint supports. The shrinkage keeps the error above a positive limit.
    """

    def _shrink(self, values: np.ndarray) -> np.ndarray:
        return np.arange(values.shape[1]) != values.argmax(axis=1)[:, None]


SelfPlay = NoSelfPlay | ShrinkSmallest | ShrinkOthers


MAX_RELAXATION = 1.6
"""A pair step does not increase the pair's own error for a relaxation up to 2, but at 2 it may oscillate for ever."""


class StepSize(Protocol):
    """The step size η of a pair of players or of a whole side, and how the pace changes between sweeps.

    `is_balanced`: W and H are rescaled to equal mean norms before each sweep, so that the result does not depend on
    how the scale of the model is split between them.
    """

    @property
    def is_balanced(self) -> bool:
        """Whether η follows from the players' norms instead of a fixed value."""

    def pair_step(self, sweep: int, pace: float, size: float = 0.0) -> tuple[float, float]:
        """Return (η, 0) for a fixed step, or (c, θ) for η = θ / (‖w‖² + ‖h‖² + |e| + c) from the pair's own norms.

        `size` is the mean of ‖w‖² + ‖h‖² over pairs.
        """

    def simultaneous_step(self, sweep: int, curvature: float, residual_norm: float) -> float:
        """Return η when all players move at once: `curvature` is max(‖WᵀW‖₂, ‖HHᵀ‖₂), `residual_norm` ‖X − W H‖."""

    def alternating_step(self, sweep: int, curvature: float) -> float:
        """Return η for one side while the other is fixed; `curvature` is ‖gram of the fixed side‖₂."""

    def next_pace(self, pace: float, sweep: int, before: float, after: float) -> float:
        """Return the pace for the next sweep, from the squared errors measured in the previous and in this sweep."""


@dataclass(frozen=True, slots=True)
class ConstantStep:
    """The same η for all pairs and sweeps (0.001 in the paper). Pair steps are stable for η up to 2 / (‖w‖² + ‖h‖²)."""

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
    """η_t = η / (1 + decay · t) in sweep t = 0, 1, …: Σ η_t diverges and Σ η_t² converges, as noisy data require."""

    eta: float = 0.1
    decay: float = 0.01

    def __post_init__(self) -> None:
        _require_positive("eta", self.eta)
        _require_positive("decay", self.decay)

    def _at(self, sweep: int) -> float:
        return self.eta / (1 + self.decay * sweep)


@dataclass(frozen=True, slots=True)
class SafeStep:
    """Step sizes without tuning, from the norms of the players that move.

    A pair of players: η = θ / (s + |e|) with s = ‖w‖² + ‖h‖². **The pair's error never grows**: the error e′ after the
    step has |e′| ≤ |e| for 0 < θ ≤ 2 (docs/reference/game.md, Theorem 1). For e > 0 nothing is clipped,
    and as w·h ≤ s/2

        1 − e′/e = η s + η² e w·h ≤ θ u + ½ θ² u (1 − u) ≤ θ,   u = s / (s + e).

    For e = −a < 0 no entry grows, so e′ ≥ e, and w′h′ ≥ wh − η a (w² + h²) in each, so that e′ ≤ (θ − 1) a.

    All players at once: η = θ / (2 max(‖WᵀW‖₂, ‖HHᵀ‖₂) + ‖X − W H‖). One side after the other: η = θ / ‖gram of the
    other side‖₂. For θ ≤ 1 neither increases ½‖X − W H‖² (first: docs/reference/game.md; second: projected gradient).

    A pair step fits one cell and disturbs others, so steps must shrink on noisy data. With a pace p ≤ 1

        η = θ / (‖w‖² + ‖h‖² + |e| + c (1/p − 1)),   c = mean of ‖w‖² + ‖h‖²,

    which is at most the η above. As p falls, η becomes the same for all cells. (Steps that stay shorter where norms and
    errors are large would converge to Σ e h / (s + |e|) = 0, which is not an equilibrium.) The pace is multiplied by
    `slower` after a sweep in which the error falls by less than the share `least`, but stays at least 3 / (t + 6) after
    sweep t = 0, 1, …, so that the sum of steps is unbounded. Otherwise it grows by `faster`, up to 1.
    """

    relaxation: float = 1.0
    slower: float = 0.9
    faster: float = 1.05
    least: float = 3e-3

    is_balanced = True

    def __post_init__(self) -> None:
        for name in ("relaxation", "slower", "faster", "least"):
            _require_number(f"{name} of SafeStep must be a number", getattr(self, name))
        if not 0 < self.relaxation <= MAX_RELAXATION:
            raise ParameterError(f"SafeStep needs 0 < relaxation ≤ {MAX_RELAXATION}; got {self.relaxation!r}.")
        if not (0 < self.slower <= 1 <= self.faster < float("inf") and self.least >= 0):
            got = f"slower={self.slower!r}, faster={self.faster!r}, least={self.least!r}"
            raise ParameterError(f"SafeStep needs 0 < slower ≤ 1 ≤ faster and least ≥ 0; got {got}.")

    def pair_step(self, sweep: int, pace: float, size: float = 0.0) -> tuple[float, float]:
        """Return (c, θ), with c from the mean size of a pair."""
        return size * (1 / pace - 1), self.relaxation

    def simultaneous_step(self, sweep: int, curvature: float, residual_norm: float) -> float:
        """θ / (2 curvature + residual_norm)."""
        return min(1.0, self.relaxation) / (2 * curvature + residual_norm or 1.0)

    def alternating_step(self, sweep: int, curvature: float) -> float:
        """θ / curvature."""
        return min(1.0, self.relaxation) / (curvature or 1.0)

    def next_pace(self, pace: float, sweep: int, before: float, after: float) -> float:
        """Reduce the pace after little progress, to at least 3 / (sweep + 6); otherwise increase it, up to 1."""
        if after <= (1 - self.least) * before:
            return min(1.0, pace * self.faster)
        return min(pace, max(pace * self.slower, 3 / (sweep + 6)))


def _require_number(requirement: str, value: object) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ParameterError(f"{requirement}; got {value!r}.")


def _require_positive(name: str, value: float) -> None:
    _require_number(f"{name} must be a number above 0", value)
    if not 0 < value < float("inf"):
        raise ParameterError(f"{name} must be above 0 and finite; got {value!r}.", parameter=name)


KNOWN_ORDERS = "Raster(), Shuffled(), Stratified(), Simultaneous() and Alternating()"
KNOWN_STEPS = "SafeStep(), ConstantStep(0.1) and DecayingStep(0.1, 0.01)"
KNOWN_SELF_PLAYS = "NoSelfPlay(), ShrinkSmallest() and ShrinkOthers()"


@dataclass(frozen=True, slots=True)
class GameState:
    """W (n × k), Hᵀ (m × k), and the sum of e² measured during the last sweep, while players moved."""

    W: Array
    Ht: Array
    squared_error: float = float("nan")


@dataclass(frozen=True, slots=True)
class Game:
    """Row player i owns w_i = W[i, :], column player j owns h_j = H[:, j]; the utility of both is −½ (x_ij − w_i·h_j)².

    A pair step moves both along their own gradient and projects onto w, h ≥ 0 (Alg. 3 of the paper, without its
    transpose of W[i, :]):

        e = x_ij − w_i·h_j,    w_i ← [w_i + η e h_j]₊,    h_j ← [h_j + η e w_i]₊

    It is a potential game with potential −½‖X − W H‖². A pair step costs O(k) operations, a sweep O(cells · k).
    `order` sets who plays when, `step` how far players move, `self_play` what columns do alone once per sweep. With a
    `leader` ("rows" or "columns") the leader moves first and sends x_ij to the other player, so that only the leader
    needs the data.
    """

    order: Order = Stratified()
    step: StepSize = SafeStep()
    self_play: SelfPlay = NoSelfPlay()
    leader: str | None = None

    def __post_init__(self) -> None:
        _require_protocol(self.order, ("sweep", "plays_cells"), "order", KNOWN_ORDERS)
        _require_protocol(self.step, ("pair_step", "is_balanced"), "step", KNOWN_STEPS)
        if not isinstance(self.self_play, SelfPlay):
            raise ParameterError(
                f"self_play must be one of {KNOWN_SELF_PLAYS}; got {self.self_play!r}.", parameter="self_play"
            )
        if not (self.leader is None or isinstance(self.leader, str)) or self.leader not in LEADERS:
            raise ParameterError(f'leader must be "rows", "columns" or None; got {self.leader!r}.', parameter="leader")
        if self.leader is not None and not self.order.plays_cells:
            raise CompositionError(
                "leader needs an order that plays single cells; here all players of a side move at once. "
                "Remove leader, or use Raster(), Shuffled() or Stratified().",
                parameter="leader",
            )

    def settings(self) -> dict[str, Any]:
        """Return the settings for a file: each part by name, or the repr of the game if a part has no name."""
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
        """Play one sweep over all cells, or over those of a range of columns; inputs are not changed.

        `row_size` is the mean of ‖w‖² over the rows of all parties, if `matrix` has only some of them. All parties
        then use the same step sizes.
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
        return "Check the scale of the data." if self.step.is_balanced else "Use a smaller step, or a safe step."


def _require_protocol(part: object, needed: tuple[str, ...], name: str, choices: str) -> None:
    """Raise unless `part` is an instance with all needed attributes (a class, name or number is not)."""
    if isinstance(part, type) or not all(hasattr(part, one) for one in needed):
        is_number = name == "step" and isinstance(part, Real) and not isinstance(part, bool)
        hint = f" For a fixed step, pass ConstantStep({part!r})." if is_number else ""
        raise ParameterError(f"{name} must be one of {choices}; got {part!r}.{hint}", parameter=name)


def mean_squared_norm(factor: Array) -> float:
    """Return the mean of ‖·‖² over the rows of a factor, that is over players."""
    return float(kernels.of(factor).inner(factor, factor)) / max(1, len(factor))


def balance(W: Array, Ht: Array) -> float:
    """Return `balancing_scale` for these factors."""
    return balancing_scale(mean_squared_norm(W), mean_squared_norm(Ht))


def balancing_scale(row_size: float, column_size: float) -> float:
    """Return the power of two a for which a·W and H/a have nearly equal mean norms; scaling by it is exact.

    One η serves rows and columns, but the scale of a model is arbitrary. Returns 1 if a mean norm is 0 or infinite.
    """
    if not all(0 < size < float("inf") for size in (row_size, column_size)):
        return 1.0
    return float(2.0 ** round(0.25 * (np.log2(column_size) - np.log2(row_size))))


def initial_weights(matrix: Matrix, Ht: Array) -> Array:
    """Return W (n × k) with w_i = c·1, where c ≥ 0 fits row i best; it depends on H and the row only."""
    W = kernels.of(Ht).empty((matrix.shape[0], Ht.shape[1]), Ht)
    if isinstance(matrix, ObservedMatrix):
        side = matrix.by_row
        game.level_stored(side.indptr, side.indices, side.data, Ht, W)
        return W
    gram = kernels.of(Ht).gram(Ht)

    def step(at: slice, cross: Array) -> Sums:
        W[at] = constant_rows(gram, cross)
        return ()

    matrix.walk(Ht, step)
    return W


SELF_PLAYS = Choice({"none": NoSelfPlay(), "min": ShrinkSmallest(), "max": ShrinkOthers()}, needed=("__call__",))
"""What columns of H do alone, once per sweep."""

SAFE = "safe"
STEP_SIZES = WordOrNumber(SAFE, Above(0))
"""The step of a game: "safe" (from the players' norms), or η."""

LEADER_NAMES = Choice.of(*(name for name in LEADERS if name is not None))
"""Which side moves first in a pair step."""


def compose_game(
    order: Any = None,
    step: str | float | None = None,
    step_decay: float | None = None,
    self_play: Any = None,
    shrink: float | None = None,
    leader: str | None = None,
) -> Game:
    """Build a game from its parts, by name or as values; None means the default."""
    alone = SELF_PLAYS.parse("self_play", "none" if self_play is None else self_play)
    if step_decay is not None and step in (SAFE, None):
        raise ParameterError(
            'step_decay needs a numeric step; step="safe" adapts its own pace.', parameter="step_decay"
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
    """Build the game that `Game.settings` describes; missing parts get their defaults."""
    play, self_play = settings.get("play") or "stratified", settings.get("self_play") or "none"
    if play not in ORDERS.values or self_play not in SELF_PLAYS.values:
        raise ParameterError(
            f"Unknown order {play!r} or self_play {self_play!r}. Use an order among {', '.join(ORDERS.names)} and "
            f"self_play among {', '.join(SELF_PLAYS.names)}."
        )
    parts = {name: settings.get(name) for name in ("step", "step_decay", "shrink", "leader")}
    parts["step_decay"] = None if parts["step"] in (SAFE, None) else parts["step_decay"]
    return compose_game(play, self_play=self_play, **parts)


def game_solver_from_settings(settings: Mapping[str, Any]) -> Game | str:
    """Return the solver of a model learned by a game: "game" for the default game or incomplete settings."""
    try:
        game = game_from_settings(settings)
    except (ParameterError, TypeError, ValueError):
        return "game"
    return "game" if game == Game() else game
