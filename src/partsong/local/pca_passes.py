"""The PCA game played over data: one move after another until nobody wants to move, and a watch over steps too long."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from partsong.core import Outcome
from partsong.data.centred import Centred
from partsong.local.pca_game import EigenGame, Moved, Profile
from partsong.streams import stream

WINDOW = 10
"""Passes over which a step is judged."""

LEAST_GAIN = 0.1
"""The share of what a step promises that it has to bring; a safe one brings half."""

JUDGED = 1e-12
"""Promises below this share of the largest variance are too close to rounding to be judged."""


class PassRow(NamedTuple):
    """One line of `history_`: seconds since the game began, the largest residual of all players (`Profile.residuals`),
    and u_i of each, over all rows.
    """

    iteration: int
    seconds: float
    residual: float
    utilities: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """How a game ended; the profile is the last, or that of the largest total utility where the game diverged."""

    profile: Profile
    outcome: Outcome
    history: tuple[PassRow, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """A game of `rank` players over at most `max_iter` passes; converged once all residuals are at most `tol`.

    With a `batch_size`, rows are dealt anew in each pass, evenly, to n // batch_size batches of at least that many, and
    all players move once for each batch. Batches are less the mean of all rows. Residuals are over all rows.
    """

    game: EigenGame
    rank: int
    seed: int = 0
    max_iter: int = 1000
    tol: float = 1e-5
    batch_size: int | None = None

    def play(
        self,
        data: Centred,
        watch: Callable[[PassRow], None] = lambda row: None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> Played:
        """From random vectors to the end; the same bytes for the same seed."""
        began, judge = time.perf_counter(), Judge(self.tol)
        history: list[PassRow] = []
        V = self.game.start(data.shape[1], self.rank, self.seed)
        profile = best = Profile(V, data.covariance_times(V))
        most = float(best.utilities().sum())
        for index in range(self.max_iter):
            moved = self._pass(data, profile, index)
            if not moved.profile.is_finite:
                return Played(best, Outcome.DIVERGED, tuple(history))
            profile, utilities, residuals = moved.profile, moved.profile.utilities(), moved.profile.residuals()
            if (total := float(utilities.sum())) >= most:
                best, most = profile, total
            row = PassRow(index + 1, time.perf_counter() - began, float(residuals.max()), tuple(map(float, utilities)))
            history.append(row)
            watch(row)
            if self.tol > 0 and row.residual <= self.tol:
                return Played(profile, Outcome.CONVERGED, tuple(history))
            if judge.is_lost(moved, residuals):
                return Played(best, Outcome.DIVERGED, tuple(history))
            if is_interrupted():
                return Played(profile, Outcome.INTERRUPTED, tuple(history))
        return Played(profile, Outcome.MAX_ROUNDS, tuple(history))

    def _pass(self, data: Centred, profile: Profile, index: int) -> Moved:
        if self.batch_size is None:
            return self.game.move(profile, data.covariance_times, index)
        V, gains, promises = profile.V, np.zeros(self.rank), np.zeros(self.rank)
        count = data.shape[0] // self.batch_size
        for number, rows in enumerate(self._batches(data.shape[0], count, index)):
            batch = data.rows(rows)
            moved = self.game.move(
                Profile(V, batch.covariance_times(V)), batch.covariance_times, index * count + number
            )
            V, gains, promises = moved.profile.V, gains + moved.gains, promises + moved.promises
            if not moved.profile.is_finite:
                return moved
        return Moved(Profile(V, data.covariance_times(V)), gains, promises)

    def _batches(self, n: int, count: int, index: int) -> Iterator[np.ndarray]:
        order = stream(self.seed, "pca-game", "batches", index).permutation(n)
        return (np.sort(rows) for rows in np.array_split(order, count))


@dataclass(slots=True)
class Judge:
    """Whether a step is too long for the first player that is not at rest.

    Its parents are, so that its game stands still, and no safe step of it gains less than half of what it promises
    (`Moved`). A step too long overshoots: over a few passes it gains next to nothing, or loses.
    """

    tol: float
    player: int = -1
    seen: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def is_lost(self, moved: Moved, residuals: np.ndarray) -> bool:
        """Note a pass; whether the latest few have shown that this leads nowhere."""
        restless = np.flatnonzero(residuals > self.tol)
        first = int(restless[0]) if restless.size else -1
        if first != self.player:
            self.player = first
            self.seen.clear()
        if first < 0:
            return False
        self.seen.append((float(moved.gains[first]), float(moved.promises[first])))
        gain, promise = map(sum, zip(*self.seen, strict=True))
        is_judged = len(self.seen) == WINDOW and promise > JUDGED * float(moved.profile.variances.max())
        return bool(is_judged and gain < LEAST_GAIN * promise)


def safe_step(data: Centred, seed: int) -> float:
    """1 / (2 λ_max(M)), a step that is safe for all players once they are apart; λ_max by a short game of one."""
    first = Match(EigenGame(), 1, seed, max_iter=50, tol=0.01).play(data)
    largest = float(first.profile.variances[0])
    return 1 / (2 * largest * (1 + float(first.profile.residuals()[0])))
