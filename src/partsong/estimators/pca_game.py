"""`partsong.PCAGame`: principal component analysis as a game (EigenGame), as a scikit-learn estimator."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from partsong.core import runtime
from partsong.core.interfaces import Outcome
from partsong.core.parameters import real_number, whole_number
from partsong.core.runtime import graceful_interrupt
from partsong.data.centered import CenteredMatrix, require_finite, require_variance
from partsong.data.conversion import as_matrix, float_type
from partsong.data.scan import column_names
from partsong.errors import DivergenceWarning, ParameterError
from partsong.estimators.validation import (
    DEFAULT_RANK,
    agree_on_columns,
    check_weights,
    numbers_of,
    precision_of,
    require_verbosity,
    stop_of,
    whole_seed,
)
from partsong.solvers.pca_game import EigenGame, GameResult, GameRun, PassRow
from partsong.training.loop import HistoryRow, progress

BATCH_DECAY = 0.03
"""Default `decay` with minibatches: step sizes eventually fall as 33/t."""


class PCAGame(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Principal component analysis as a game (EigenGame): player i owns a unit vector v_i and maximizes

    u_i = ⟨v_i, M v_i⟩ − Σ_{l<i} ⟨v_i, M v_l⟩² / ⟨v_l, M v_l⟩,     M = X_cᵀ X_c / n,

    the variance along v_i minus what its parents l < i already explain (Gemp et al., 2020; Alg. 1 of Singh, 2021). X_c
    is X minus its mean row. Dense arrays, CSR, CSC and memory maps are supported; sparse data are never made dense.

    Parameters
    ----------
    n_components : int or None, default=None
        Number of players k, at most min(n, d); None takes min(n, d, 20).
    play : {"sequential", "simultaneous"}, default="sequential"
        Players move one after another and see their parents' new positions, or all at once.
    step : "safe" or float, default="safe"
        "safe" takes for each player the longest step that cannot lower its utility. A number is the step size α, for
        the mean over rows. A number above 1/λ_max(M) does not converge; the vectors of largest total utility are kept.
    decay : float or None, default=None
        Steps are divided by 1 + decay · t in move t. None takes 0, and 0.03 with minibatches.
    batch_size : int or None, default=None
        Rows per move, between n_components (better: several times that) and n; None takes all.
    max_iter : int, default=1000
        Maximum number of passes over the rows.
    tol : float, default=1e-5
        Stop when ‖∇ u_i‖ ≤ 2 tol u_i for all players: v_i is then within tol λ_i / gap of an eigenvector.
    center : bool, default=True
        Subtract the mean row. False gives singular vectors of X itself.
    random_state : int, RandomState, Generator or None, default=None
        Seed. The same seed gives identical results for a fixed number of threads.
    verbose : int, default=0
        1 shows progress and the estimated remaining time on standard error.
    dtype : {"float32", "float64"} or None, default=None
        Number type of results; None keeps that of X. Computations use float64.

    Attributes
    ----------
    components_ : ndarray of shape (k, d)
        The v_i, orthonormalized in the order of players (at the equilibrium they already are), then sorted by variance;
        the entry of largest magnitude is positive.
    explained_variance_ : ndarray of shape (k,)
        ‖X_c v_i‖² / (n − 1).
    explained_variance_ratio_ : ndarray of shape (k,)
        ‖X_c v_i‖² / ‖X_c‖².
    singular_values_ : ndarray of shape (k,)
        ‖X_c v_i‖.
    mean_ : ndarray of shape (d,)
        The mean row; zeros if `center=False`.
    utilities_ : ndarray of shape (k,)
        Final u_i, in the order of players.
    n_iter_ : int
        Number of passes.
    outcome_ : Outcome
        Why the game ended.
    history_ : list of PassRow
        (iteration, seconds, residual, utilities) of each pass.
    seed_, n_samples_, n_components_ : int
        The seed used, the number of rows, and k.

    Examples
    --------
    >>> import numpy as np
    >>> import partsong
    >>> X = np.random.default_rng(0).random((60, 8))
    >>> game = partsong.PCAGame(2, random_state=0).fit(X)
    >>> game.transform(X).shape
    (60, 2)
    """

    def __init__(
        self,
        n_components: int | None = None,
        *,
        play: str = "sequential",
        step: str | float = "safe",
        decay: float | None = None,
        batch_size: int | None = None,
        max_iter: int = 1000,
        tol: float = 1e-5,
        center: bool = True,
        random_state: Any = None,
        verbose: int = 0,
        dtype: Any = None,
    ) -> None:
        self.n_components = n_components
        self.play = play
        self.step = step
        self.decay = decay
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.tol = tol
        self.center = center
        self.random_state = random_state
        self.verbose = verbose
        self.dtype = dtype

    def fit(self, X: Any, y: Any = None) -> PCAGame:
        """Play until all players have converged, or `max_iter` is reached."""
        self._fit(X)
        return self

    def fit_transform(self, X: Any, y: Any = None) -> np.ndarray:
        """Fit and return the scores of the same rows."""
        return self._fit(X)

    def transform(self, X: Any) -> np.ndarray:
        """Return scores (X − 1 μᵀ) Vᵀ (n × k)."""
        check_is_fitted(self)
        rows = self._read(X, reset=False)
        with runtime.limit_kernel_threads(runtime.available_threads()):
            data = CenteredMatrix(as_matrix(rows, np.float64), self.mean_.astype(np.float64), math.nan)
            return data.times(self.components_.T.astype(np.float64)).astype(self.components_.dtype)

    def inverse_transform(self, X: Any) -> np.ndarray:
        """Return rows X V + 1 μᵀ from scores (called X as in scikit-learn)."""
        check_is_fitted(self)
        return check_weights(X, len(self.components_)) @ self.components_ + self.mean_

    def _fit(self, X: Any) -> np.ndarray:
        game, precision = self._check_settings(), precision_of(self.dtype)
        rows = self._read(X, reset=True)
        seed = whole_seed(self.random_state)
        with runtime.limit_kernel_threads(runtime.available_threads()), graceful_interrupt() as interrupts:
            data = CenteredMatrix.of(rows, center=bool(self.center))
            require_variance(data, center=bool(self.center))
            match = self._match(game, data.shape, seed)
            with progress(self.verbose, match.max_iter, None, f"PCA game of {data.shape[0]} × {data.shape[1]}") as bar:
                played = match.play(data, _shown(bar, data), lambda: interrupts.count > 0)
            if played.outcome is Outcome.DIVERGED:
                trouble = f"The game diverged with step={self.step!r}. The best vectors so far are kept."
                warnings.warn(f"{trouble} Use step='safe'.", DivergenceWarning, stacklevel=3)
            scores = self._keep(played, data, float_type(rows.dtype, precision))
        self.seed_ = seed
        return scores

    def _read(self, X: Any, *, reset: bool) -> Any:
        rows = numbers_of(X)
        agree_on_columns(self, X, reset=reset)
        require_finite(rows, column_names(X))
        return rows

    def _check_settings(self) -> EigenGame:
        """Validate all parameters that need no data."""
        for name in ("n_components", "batch_size"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), " (or None)")
        whole_number("max_iter", self.max_iter)
        stop_of(self.tol, None)
        require_verbosity(self.verbose)
        if not isinstance(self.center, bool | np.bool_):
            raise ParameterError(f"center must be True or False; got {self.center!r}.", parameter="center")
        step = None if isinstance(self.step, str) and self.step == "safe" else real_number("step", self.step)
        default_decay = 0.0 if self.batch_size is None else BATCH_DECAY
        return EigenGame(self.play, step, default_decay if self.decay is None else real_number("decay", self.decay))

    def _match(self, game: EigenGame, shape: tuple[int, int], seed: int) -> GameRun:
        n, d = shape
        rank = min(n, d, DEFAULT_RANK) if self.n_components is None else int(self.n_components)
        if rank > min(n, d):
            raise ParameterError(
                f"n_components={rank} exceeds min(n, d) = {min(n, d)} of the {n} × {d} matrix X. "
                f"Use n_components ≤ {min(n, d)}.",
                parameter="n_components",
            )
        if self.batch_size is not None and not rank <= self.batch_size <= n:
            raise ParameterError(
                f"batch_size={self.batch_size} must be between the number of components, {rank}, and the number of "
                f"rows, {n}. Use None for all rows.",
                parameter="batch_size",
            )
        batch = None if self.batch_size is None else int(self.batch_size)
        return GameRun(game, rank, seed, int(self.max_iter), float(self.tol), batch)

    def _keep(self, played: GameResult, data: CenteredMatrix, precision: np.dtype[Any]) -> np.ndarray:
        V = np.linalg.qr(played.profile.V)[0]
        scores = data.times(V)
        energies = np.square(scores).sum(axis=0)
        order = np.argsort(-energies, kind="stable")
        signs = np.where(V[np.abs(V).argmax(axis=0), np.arange(V.shape[1])] < 0, -1.0, 1.0)[order]
        self.components_ = np.ascontiguousarray((V[:, order] * signs).T, precision)
        self.explained_variance_ = (energies[order] / max(1, data.shape[0] - 1)).astype(precision)
        self.explained_variance_ratio_ = (energies[order] / data.energy).astype(precision)
        self.singular_values_ = np.sqrt(energies[order]).astype(precision)
        self.mean_ = data.mean.astype(precision)
        self.utilities_ = played.profile.utilities().astype(precision)
        self.n_samples_, self.n_components_ = data.shape[0], V.shape[1]
        self.n_iter_, self.outcome_, self.history_ = len(played.history), played.outcome, list(played.history)
        return (scores[:, order] * signs).astype(precision)

    @property
    def _n_features_out(self) -> int:
        return int(self.components_.shape[0])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def _shown(bar: Any, data: CenteredMatrix) -> Any:
    """Show a pass in the progress bar, with the projection error √(1 − Σ u_i / tr M)."""
    variance = data.energy / data.shape[0]

    def watch(row: PassRow) -> None:
        rest = min(1.0, max(0.0, 1 - sum(row.utilities) / variance))
        bar(None, HistoryRow(row.iteration, row.seconds, math.sqrt(rest), rest, 0, 0))

    return watch
