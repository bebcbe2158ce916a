"""Principal components as the equilibrium of a game (EigenGame; Gemp et al., 2020; Singh, 2021, section 2, Alg. 1).

k players own unit vectors v_i in R^d, the columns of a profile V (d × k). With M = X_cᵀ X_c / n, player i maximizes

    u_i(v_i | v_l, l < i) = ⟨v_i, M v_i⟩ − Σ_{l<i} ⟨v_i, M v_l⟩² / ⟨v_l, M v_l⟩  =  ⟨v_i, A_i v_i⟩,
    A_i = M − Σ_{l<i} (M v_l)(M v_l)ᵀ / ⟨v_l, M v_l⟩,

moves along the gradient on the sphere, and broadcasts v_i, d numbers:

    ∇ = 2 (A_i v_i − u_i v_i),     v_i ← (v_i + α ∇) / ‖v_i + α ∇‖.

The printed gradient is n times this one; here a step does not depend on the number of rows. A parent without variance
penalizes nobody. Vectors are in float64; products with the data are in the type of the data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from partsong.core.interfaces import Outcome
from partsong.core.streams import stream
from partsong.data.centered import CenteredMatrix
from partsong.errors import ParameterError

PLAYS = ("sequential", "simultaneous")

ROUNDING = 4 * float(np.finfo(np.float64).eps)
"""A variance, as a share of the largest one, that is nothing but rounding."""

Covariance = Callable[[np.ndarray], np.ndarray]
"""M V, for V (d × c)."""


@dataclass(frozen=True, slots=True, eq=False)
class PlayerView:
    """What player i observes: its v and M v, its parents' V (d × i) and M V, and the largest variance among these.

    A parent's v_l is known up to rounding of M, which is that of λ_1; a child's gradient is known up to what this makes
    of the penalty, λ_1/λ_l times as much: `floor`. So variances below about 3e-8 λ_1 are out of reach.
    """

    v: np.ndarray
    MV: np.ndarray
    parents: np.ndarray
    parents_MV: np.ndarray
    largest: float

    @property
    def variances(self) -> np.ndarray:
        """⟨v_l, M v_l⟩ of the parents; infinite where it is nothing, so that its inverse is zero."""
        found = np.einsum("dl,dl->l", self.parents, self.parents_MV)
        return np.where(found > ROUNDING * self.largest, found, np.inf)

    @property
    def floor(self) -> float:
        """The length of half a gradient that is nothing but rounding."""
        return ROUNDING * self.largest * (self.largest / float(self.variances.min(initial=self.largest)))

    def response(self, v: np.ndarray, MV: np.ndarray) -> np.ndarray:
        """A_i v, for any v with its M v."""
        return MV - self.parents_MV @ ((v @ self.parents_MV) / self.variances)

    def utility(self, v: np.ndarray, MV: np.ndarray) -> float:
        """u_i(v) = ⟨v, A_i v⟩."""
        return float(v @ self.response(v, MV))

    def gradient(self) -> tuple[float, np.ndarray]:
        """u_i where the player stands, and its gradient on the sphere, 2 (A_i v − u_i v)."""
        response = self.response(self.v, self.MV)
        utility = float(self.v @ response)
        return utility, 2 * (response - utility * self.v)

    def safe_shift(self) -> float:
        """c ≥ 0 with A_i + c I ⪰ 0; zero where parents do not overlap, as at the equilibrium.

        Let Y have the columns M v_l / √⟨v_l, M v_l⟩, and G the overlaps ⟨v_l, M v_m⟩ / √(⟨v_l, M v_l⟩ ⟨v_m, M v_m⟩).
        M − Y G⁻¹ Yᵀ ⪰ 0 (a Schur complement), hence A_i = M − Y Yᵀ ⪰ −Y (I − G⁻¹) Yᵀ, so that
        −λ_min(A_i) ≤ c = λ_max(Y (I − G⁻¹) Yᵀ). Eigenvalues of G that are next to nothing are raised, which raises c.
        """
        variances = self.variances
        alive = np.flatnonzero(np.isfinite(variances))
        if alive.size < 2:
            return 0.0
        scale = 1 / np.sqrt(variances[alive])
        MV = self.parents_MV[:, alive] * scale
        overlaps = (self.parents[:, alive] * scale).T @ MV
        gammas, Z = np.linalg.eigh((overlaps + overlaps.T) / 2)
        turned = np.linalg.qr(MV, mode="r") @ Z
        bound = (turned * (1 - 1 / np.maximum(gammas, ROUNDING))) @ turned.T
        return max(0.0, float(np.linalg.eigvalsh(bound)[-1]))


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """All players' vectors V (d × k) and M V."""

    V: np.ndarray
    MV: np.ndarray

    @property
    def variances(self) -> np.ndarray:
        """⟨v_i, M v_i⟩ for each player."""
        return np.asarray(np.einsum("di,di->i", self.V, self.MV))

    @property
    def is_finite(self) -> bool:
        """Whether all entries are finite."""
        return bool(np.isfinite(self.V).all() and np.isfinite(self.MV).all())

    def view(self, i: int) -> PlayerView:
        """What player i sees: itself and its parents, never its children."""
        largest = float(self.variances[: i + 1].max())
        return PlayerView(self.V[:, i], self.MV[:, i], self.V[:, :i], self.MV[:, :i], largest)

    def utilities(self) -> np.ndarray:
        """u_i of every player."""
        return np.array([view.utility(view.v, view.MV) for view in map(self.view, range(self.V.shape[1]))])

    def residuals(self) -> np.ndarray:
        """‖∇ u_i‖ / 2 u_i = ‖A_i v_i − u_i v_i‖ / u_i of every player, rounding taken off: zero at equilibrium."""
        found = []
        for view in map(self.view, range(self.V.shape[1])):
            utility, gradient = view.gradient()
            length = max(0.0, _length(gradient) / 2 - view.floor)
            found.append(length / max(utility, view.floor))
        return np.array(found)


@dataclass(frozen=True, slots=True)
class EigenGame:
    """The rules: who sees what, and how far a move goes.

    In "sequential" play parents move first, and children see where they went; in "simultaneous" play all players answer
    the profile as it stood. `step` is α, divided by 1 + `decay` · t in move t = 0, 1, …; None takes the safe step

        α_i = 1 / (2 (u_i + c_i)),     c_i as in `PlayerView.safe_shift`.

    v + α ∇ is (A_i + s I) v times 2 α, with s = 1/(2 α) − u_i: a move is a turn of power iteration, shifted by s. Where
    A_i + s I ⪰ 0 such a turn never lowers ⟨v, A_i v⟩ = u_i. The safe step is the longest that is known to be so:
    s = c_i, and gains at least half of α‖∇‖² / (1 + α²‖∇‖²). Any α ≤ 1 / (2 λ_max(M)) is as safe once parents do not
    overlap, but slow for players of little variance.
    """

    play: str = "sequential"
    step: float | None = None
    decay: float = 0.0

    def __post_init__(self) -> None:
        if self.play not in PLAYS:
            raise ParameterError(f"Unknown play {self.play!r}; choose one of {', '.join(PLAYS)}.", parameter="play")
        if self.step is not None and not 0 < self.step < float("inf"):
            raise ParameterError(
                f"step must be 'safe', or a finite number above 0; got {self.step!r}.", parameter="step"
            )
        if not 0 <= self.decay < float("inf"):
            raise ParameterError(f"decay must be zero or more, and finite; got {self.decay!r}.", parameter="decay")

    @staticmethod
    def start(n_features: int, rank: int, seed: int) -> np.ndarray:
        """Unit vectors in random directions, each player's from a stream of its own."""
        drawn = [stream(seed, "pca-game", "start", i).standard_normal(n_features) for i in range(rank)]
        return np.column_stack([direction / np.linalg.norm(direction) for direction in drawn])

    def move(self, profile: Profile, covariance: Covariance, time: int = 0) -> Profile:
        """Every player moves once; `profile` is not changed."""
        play = self._in_turn if self.play == "sequential" else self._at_once
        with np.errstate(over="ignore", invalid="ignore"):
            return play(profile, covariance, self.decay * time)

    def _in_turn(self, profile: Profile, covariance: Covariance, decayed: float) -> Profile:
        fresh = Profile(profile.V.copy(), profile.MV.copy())
        for i in range(profile.V.shape[1]):
            fresh.V[:, i] = self._turn(fresh.view(i), decayed)
            fresh.MV[:, i] = covariance(fresh.V[:, [i]])[:, 0]
        return fresh

    def _at_once(self, profile: Profile, covariance: Covariance, decayed: float) -> Profile:
        V = np.column_stack([self._turn(profile.view(i), decayed) for i in range(profile.V.shape[1])])
        return Profile(V, covariance(V))

    def _turn(self, view: PlayerView, decayed: float) -> np.ndarray:
        """Return the player's next vector; it does not move if the gradient is only rounding."""
        utility, gradient = view.gradient()
        if _length(gradient) <= 2 * view.floor:
            return view.v
        step = 1 / (2 * max(utility + view.safe_shift(), view.floor)) if self.step is None else self.step
        moved = view.v + step / (1 + decayed) * gradient
        return moved / _length(moved)


def _length(vector: np.ndarray) -> float:
    """‖vector‖, also where squares leave the range of numbers."""
    largest = float(np.abs(vector).max())
    return largest * float(np.linalg.norm(vector / largest)) if largest > 0 else 0.0


class PassRow(NamedTuple):
    """One line of `history_`: seconds since the game began, the largest residual of all players (`Profile.residuals`),
    and u_i of each, over all rows.
    """

    iteration: int
    seconds: float
    residual: float
    utilities: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class GameResult:
    """The result of a game: the last profile, or the one with the largest total utility if it did not converge."""

    profile: Profile
    outcome: Outcome
    history: tuple[PassRow, ...]


@dataclass(frozen=True, slots=True)
class GameRun:
    """A game of `rank` players over at most `max_iter` passes; converged once all residuals are at most `tol`.

    With a `batch_size`, each pass splits the rows at random into n // batch_size batches of at least that size, and
    all players move once per batch. Batches are centered by the mean of all rows. Residuals are over all rows.
    """

    game: EigenGame
    rank: int
    seed: int = 0
    max_iter: int = 1000
    tol: float = 1e-5
    batch_size: int | None = None

    def play(
        self,
        data: CenteredMatrix,
        watch: Callable[[PassRow], None] = lambda row: None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> GameResult:
        """From random vectors to the end; the same bytes for the same seed."""
        began = time.perf_counter()
        history: list[PassRow] = []
        V = self.game.start(data.shape[1], self.rank, self.seed)
        profile = best = Profile(V, data.covariance_times(V))
        most = float(best.utilities().sum())
        for index in range(self.max_iter):
            profile = self._pass(data, profile, index)
            if not profile.is_finite:
                return GameResult(best, Outcome.DIVERGED, tuple(history))
            utilities, residuals = profile.utilities(), profile.residuals()
            if (total := float(utilities.sum())) >= most:
                best, most = profile, total
            row = PassRow(index + 1, time.perf_counter() - began, float(residuals.max()), tuple(map(float, utilities)))
            history.append(row)
            watch(row)
            if self.tol > 0 and row.residual <= self.tol:
                return GameResult(profile, Outcome.CONVERGED, tuple(history))
            if is_interrupted():
                return GameResult(profile, Outcome.INTERRUPTED, tuple(history))
        return GameResult(profile if self.game.step is None else best, Outcome.MAX_ROUNDS, tuple(history))

    def _pass(self, data: CenteredMatrix, profile: Profile, index: int) -> Profile:
        if self.batch_size is None:
            return self.game.move(profile, data.covariance_times, index)
        count, V = data.shape[0] // self.batch_size, profile.V
        for number, rows in enumerate(self._batches(data.shape[0], count, index)):
            batch = data.rows(rows)
            seen = Profile(V, batch.covariance_times(V))
            moved = self.game.move(seen, batch.covariance_times, index * count + number)
            if not moved.is_finite:
                return moved
            V = moved.V
        return Profile(V, data.covariance_times(V))

    def _batches(self, n: int, count: int, index: int) -> Iterator[np.ndarray]:
        order = stream(self.seed, "pca-game", "batches", index).permutation(n)
        return (np.sort(rows) for rows in np.array_split(order, count))
