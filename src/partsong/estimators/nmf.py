"""`partsong.NMF`: non-negative matrix factorization as a scikit-learn estimator."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from partsong.core import runtime
from partsong.core.interfaces import Matrix, Outcome, UpdateRule
from partsong.core.parameters import whole_number
from partsong.errors import ParameterError
from partsong.estimators.persistence import fitted_attributes, load_fitted, save_fitted
from partsong.estimators.validation import (
    INITS,
    check_factor,
    check_init_factors,
    check_weights,
    is_game,
    matrix_of,
    non_negative_tags,
    one_of,
    penalties_of,
    precision_of,
    rank_of,
    require_missing,
    require_sketch,
    require_squared_error,
    require_verbosity,
    row_solver_of,
    stop_of,
    threads_of,
    whole_seed,
)
from partsong.solvers.initialization import InitialFactors
from partsong.solvers.observed import ObservedRowSolver
from partsong.solvers.squared_error import SquaredError
from partsong.training.centralized import Build, CentralizedConfig, CentralizedFit, fit_centralized
from partsong.training.loop import WINDOW, Fit, FitObserver, StoppingRule, Training, progress
from partsong.training.result import FitResult, top_features

SLOW_SOLVERS, SLOW_SHARE = ("cd", "mu", "bpp"), 0.01
"""Solvers with short steps, and the share of `tol` that makes them stop about where scikit-learn's do."""

SETTINGS_IN_FILES = ("solver", "missing", "init", "tol", "sketch", "sketch_ratio", "max_iter")
"""Settings that model files store under these names; penalties are stored separately."""

NEGLIGIBLE = (1e-6, 1e-3)
"""Relative errors, for float64 and float32, below which no ConvergenceWarning is issued."""


class NMF(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Non-negative matrix factorization X ≈ W H with scikit-learn's interface.

    minimize ½‖X − W H‖² + m (α_W ρ ‖W‖₁ + ½ α_W (1−ρ) ‖W‖²) + n (α_H ρ ‖H‖₁ + ½ α_H (1−ρ) ‖H‖²),   W, H ≥ 0

    with X (n × m) and ρ = `l1_ratio`. Dense arrays in C or F order, CSR, CSC and memory maps are used without a copy;
    float32 stays float32. Data frames keep their column names; dense torch tensors are converted to NumPy.

    Parameters
    ----------
    n_components : int, "auto" or None, default=None
        Rank k. None and "auto" take the rank of a given H (init="custom"), otherwise min(n, m, 20).
    solver : {"hals", "cd", "mu", "pg", "ipalm", "bpp", "sanls", "game"}, update rule or Game, default="hals"
        "hals" makes five sweeps per product (one on sparse data) and extrapolates; the others do neither. "sanls" uses
        a random sketch of X in each step, with steps that shrink over time (Qian et al., 2020), for matrices where one
        product with all of X is expensive. "game" plays a game over single cells between rows of W and columns of H
        (Singh, 2021): an iteration is a sweep over all cells; `partsong.solvers.game.Game` has its variants.
    init : {"auto", "anchors", "random", "nndsvd", "nndsvda", "nndsvdar", "custom"} or None, default="auto"
        "auto" and None take "nndsvda" if fewer than a tenth of the entries are non-zero, otherwise "anchors" (columns
        of X chosen by successive projection). "custom" uses W and H passed to `fit`; the others ignore them with a
        warning.
    beta_loss : {"frobenius"} or 2, default="frobenius"
        The squared error. Other losses are not implemented.
    tol : float, default=1e-4
        Stop when the objective falls by less than this share per iteration, over ten iterations. The share is of the
        explained or of the unexplained part f of the objective, whichever is smaller; f counts as √(f/5) below 1/5.
        "sanls" checks every tenth iteration. "cd", "mu" and "bpp" do not extrapolate and use tol / 100, which makes
        them stop about where scikit-learn's solvers do.
    max_iter : int, default=500
        Maximum number of iterations. Reaching it before `tol` issues a ConvergenceWarning.
    time_budget : float or None, default=None
        Maximum seconds of the whole fit; one iteration and the final solve always run.
    alpha_W : float, default=0.0
        Penalty on W, in units that do not depend on the numbers of rows and columns. A penalty on one factor alone has
        no optimal model, because that factor can shrink while the other grows; it issues an IllPosedWarning.
    alpha_H : float or "same", default="same"
        Penalty on H; "same" takes `alpha_W`.
    l1_ratio : float, default=0.0
        Share of L1 in the penalties, from 0 to 1.
    sketch : {"subsampling", "gaussian", "count", "hadamard"}, default="subsampling"
        Kind of sketch of "sanls"; subsampling is the cheapest.
    sketch_ratio : float, default=0.1
        Columns (rows) of a sketch as a share of those of X, above 0 and at most 1; never fewer than n_components.
    missing : {"refuse", "ignore"}, default="refuse"
        For solver="game": "ignore" treats NaN in a dense X, and entries that a sparse X does not store, as unknown
        cells, which are not played. Errors then cover known cells; a column without any is zero in `components_`.
    random_state : int, RandomState, Generator or None, default=None
        Seed. The same seed gives identical results for a fixed number of threads.
    verbose : int, default=0
        1 shows progress and the estimated remaining time on standard error.
    shuffle : bool, default=False
        Update components in a random order, the same in all iterations.
    dtype : {"float32", "float64"} or None, default=None
        Number type of the computation; None keeps that of X.
    n_threads : int or None, default=None
        Threads for kernels and products. None takes PARTSONG_NUM_THREADS, otherwise all cores, within the limits of
        OMP_NUM_THREADS, NUMBA_NUM_THREADS, threadpoolctl and joblib workers.

    Attributes
    ----------
    components_ : ndarray of shape (k, m)
        H, sorted by explained share, largest first (where W is unique). Without penalties each row has Euclidean norm 1
        and W carries the units; with penalties the scale is the one that they determine.
    component_shares_ : ndarray of shape (k,)
        ⟨w_j h_j, W H⟩ / ‖W H‖²: non-negative, with sum 1.
    reconstruction_err_ : float
        ‖X − W H‖.
    relative_error_ : float
        ‖X − W H‖ / ‖X‖.
    explained_variance_ : float
        1 − ‖X − W H‖² / ‖X‖².
    n_iter_ : int or None
        Number of iterations; None if a model file does not contain it.
    outcome_ : Outcome
        Why the fit ended.
    history_ : list of HistoryRow
        (iteration, seconds, relative_error, …) of each iteration; not in model files.
    seed_ : int
        The seed used.
    n_samples_ : int or None
        Number of rows; None if a model file does not contain it.

    Examples
    --------
    >>> import numpy as np
    >>> import partsong
    >>> X = np.random.default_rng(0).random((60, 8))
    >>> model = partsong.NMF(3, random_state=0)
    >>> W = model.fit_transform(X)
    >>> W.shape, model.components_.shape
    ((60, 3), (3, 8))
    """

    def __init__(
        self,
        n_components: int | str | None = None,
        *,
        solver: str | UpdateRule = "hals",
        init: str | None = "auto",
        beta_loss: str | float = "frobenius",
        tol: float = 1e-4,
        max_iter: int = 500,
        time_budget: float | None = None,
        alpha_W: float = 0.0,
        alpha_H: float | str = "same",
        l1_ratio: float = 0.0,
        sketch: str = "subsampling",
        sketch_ratio: float = 0.1,
        missing: str = "refuse",
        random_state: Any = None,
        verbose: int = 0,
        shuffle: bool = False,
        dtype: Any = None,
        n_threads: int | None = None,
    ) -> None:
        self.n_components = n_components
        self.solver = solver
        self.init = init
        self.beta_loss = beta_loss
        self.tol = tol
        self.max_iter = max_iter
        self.time_budget = time_budget
        self.alpha_W = alpha_W
        self.alpha_H = alpha_H
        self.l1_ratio = l1_ratio
        self.sketch = sketch
        self.sketch_ratio = sketch_ratio
        self.missing = missing
        self.random_state = random_state
        self.verbose = verbose
        self.shuffle = shuffle
        self.dtype = dtype
        self.n_threads = n_threads

    def fit(self, X: Any, y: Any = None, W: Any = None, H: Any = None, *, observer: FitObserver | None = None) -> NMF:
        """Fit the components of X. A `training.loop.FitObserver` is called in every iteration, and may resume a run."""
        self._fit(X, W, H, observer)
        return self

    def fit_transform(
        self, X: Any, y: Any = None, W: Any = None, H: Any = None, *, observer: FitObserver | None = None
    ) -> np.ndarray:
        """Fit the components and return W, as `transform` computes it."""
        return self._fit(X, W, H, observer).W

    def transform(self, X: Any) -> np.ndarray:
        """Return W for given rows: the non-negative least squares fit to the components, in their number type.

        Rows are solved independently; a row may round differently in another batch.
        """
        check_is_fitted(self)
        matrix = matrix_of(self, X, self.components_.dtype, reset=False)
        with runtime.limit_kernel_threads(threads_of(self.n_threads)):
            return self._solver().solve_rows(matrix, np.ascontiguousarray(self.components_.T))

    def inverse_transform(self, X: Any) -> np.ndarray:
        """Return W H for weights W (called X as in scikit-learn); for one row of weights (k), a row (m)."""
        check_is_fitted(self)
        return check_weights(X, len(self.components_)) @ self.components_

    def top_features(self, n: int = 10) -> list[list[str | int]]:
        """Return the n features with the largest values in each component: names if known, otherwise column numbers."""
        check_is_fitted(self)
        return top_features(self.components_, getattr(self, "feature_names_in_", None), whole_number("n", n))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model (H, names, settings, error; never W or rows) as safetensors with JSON metadata.

        A model that was loaded, and not refitted, keeps the settings of its file.
        """
        check_is_fitted(self)
        rows = {} if self.n_samples_ is None else {"n_samples": self.n_samples_}
        save_fitted(self, path, {**self.settings(), "dtype": str(self.components_.dtype), **rows})

    def settings(self) -> dict[str, Any]:
        """Return the settings of the fit as plain data for model files and checkpoints."""
        alpha_H = self.alpha_W if self.alpha_H == "same" else self.alpha_H
        solver: Any = self.solver
        name, parts = solver if isinstance(solver, str) else repr(solver), dict[str, Any]()
        if not isinstance(solver, str) and is_game(solver):
            name, parts = "game", solver.settings()
        return {
            "method": "centralized",
            "solver": name,
            **parts,
            "init": self.init or "auto",
            "tol": float(self.tol),
            "max_iter": int(self.max_iter),
            "alpha_w": float(self.alpha_W),
            "alpha_h": float(alpha_H),
            "l1_ratio": float(self.l1_ratio),
            **({"sketch": self.sketch, "sketch_ratio": self.sketch_ratio} if self.solver == "sanls" else {}),
            **({} if self.missing == "refuse" else {"missing": self.missing}),
        }

    def run_settings(self, fit: Fit) -> dict[str, Any]:
        """Return the settings that identify a run: `settings` and those determined by the data."""
        dtype, seed = str(fit.shards[0].matrix.dtype), whole_seed(self.random_state)
        return {**self.settings(), "n_components": fit.rank, "dtype": dtype.removeprefix("torch."), "seed": seed}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> NMF:
        """Return an unfitted estimator with the settings of a fit; invalid settings get their defaults."""
        estimator, names = cls(), list[str]()
        if settings.get("method") == "centralized":
            names = [*SETTINGS_IN_FILES]
        elif settings.get("method") == "game" and settings.get("missing") == "ignore":
            settings, names = {**settings, "solver": "game"}, ["solver", "missing"]
        for name in names:
            usual = getattr(estimator, name)
            setattr(estimator, name, settings.get(name, usual))
            try:
                estimator.check_settings()
            except ParameterError:
                setattr(estimator, name, usual)
        if estimator.solver == "game":
            from partsong.solvers.game import game_solver_from_settings

            estimator.set_params(solver=game_solver_from_settings(settings))
        if {"seed", "n_components", "dtype"} <= settings.keys():  # of a run, not of a model
            known = {name: settings[name] for name in ("n_components", "dtype")}
            estimator.set_params(random_state=settings["seed"], **known)
        estimator.alpha_W, estimator.alpha_H, estimator.l1_ratio = penalties_of(settings)
        return estimator

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def __sklearn_tags__(self) -> Any:
        return non_negative_tags(super().__sklearn_tags__(), allow_nan=self.missing == "ignore")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> NMF:
        """Load a fitted estimator from a model file of `NMF`, `partsong fit` or a federation, ready to transform.

        Models of one table also restore their settings. If a federation had different L1 shares for H and W, `l1_ratio`
        is that of W, the only one that `transform` uses. A solver that was passed as an object is replaced by the
        default; games are restored unless they have unnamed parts.
        """
        model = load_fitted(path)
        estimator = cls.from_settings(model.settings)
        estimator.__dict__.update(fitted_attributes(model))
        return estimator.set_params(n_components=len(model.components))

    def _fit(self, X: Any, W: Any, H: Any, observer: FitObserver | None) -> FitResult:
        began, observer = time.perf_counter(), FitObserver() if observer is None else observer
        stop, most, is_sketched = self.check_settings(), int(self.max_iter), self.solver == "sanls"
        matrix = matrix_of(self, X, precision_of(self.dtype), reset=True)
        rank, seed = rank_of(self._wanted_rank(H), matrix.shape), whole_seed(self.random_state)
        config = CentralizedConfig(
            rank,
            self._solver(),
            init="auto" if self.init is None or self.init == "custom" else self.init,
            seed=seed,
            max_iter=most,
            stop=stop,
            threads=threads_of(self.n_threads),
            sketch=self.sketch if is_sketched else None,
            sketch_ratio=float(self.sketch_ratio),
            game=self.solver if is_game(self.solver) else None,
            shuffle=bool(self.shuffle),
        )
        start, title = self._beginning(matrix, rank, W, H), f"NMF of {matrix.shape[0]} × {matrix.shape[1]}"
        with progress(self.verbose, 2 * most + 1 if is_sketched else most, self.time_budget, title) as bar:
            run, done = fit_centralized(matrix, config, start, self._build(), began, bar, observer)
        is_perfect = done.relative_error < NEGLIGIBLE["float32" in str(matrix.dtype)] and run.rounds > WINDOW
        if run.outcome is Outcome.MAX_ROUNDS and self.tol > 0 and not is_perfect:
            warnings.warn(
                f"Maximum number of iterations {most} reached. Increase it to improve convergence.",
                ConvergenceWarning,
                stacklevel=3,
            )
        self._keep(done, run, rank)
        self.n_samples_: int | None = matrix.shape[0]
        self.seed_ = seed
        observer.end(run, done)
        return done

    def _build(self) -> Build:
        """Return the builder of the fit; programs and engines are imported only for sketches and games."""
        if self.solver != "sanls" and not is_game(self.solver):
            return CentralizedFit
        from partsong.training.single_party import game_fit, sketched_fit

        return sketched_fit if self.solver == "sanls" else game_fit

    def _rows_for(self, X: Any, H: Any) -> tuple[np.ndarray, np.ndarray]:
        """W for rows and a given H, and that H."""
        self.check_settings()
        if H is None:
            raise ParameterError("update_H=False needs H. Pass H (k × m).")
        matrix = matrix_of(self, X, precision_of(self.dtype), reset=True)
        rank = rank_of(self._wanted_rank(H, is_custom=True), matrix.shape)
        given = check_factor("H", H, (rank, matrix.shape[1]), matrix.dtype, is_start=False).astype(
            matrix.dtype, copy=False
        )
        Ht = np.ascontiguousarray(given.T)
        with runtime.limit_kernel_threads(threads_of(self.n_threads)):
            return self._solver().solve_rows(matrix, Ht), given

    def _beginning(self, matrix: Matrix, rank: int, W: Any, H: Any) -> InitialFactors | None:
        if self.init == "custom":
            return check_init_factors(matrix, rank, W, H, is_cast=self.dtype is not None)
        if W is not None or H is not None:
            warnings.warn(
                f"When init!='custom', provided W or H are ignored; init is {self.init!r}. Pass init='custom' to start "
                "from them.",
                RuntimeWarning,
                stacklevel=4,
            )
        return None

    def _wanted_rank(self, H: Any, *, is_custom: bool = False) -> Any:
        """The requested rank or, if None, that of a given H."""
        if self.n_components is not None and not (isinstance(self.n_components, str) and self.n_components == "auto"):
            return self.n_components
        is_used = is_custom or self.init == "custom"
        return len(H) if is_used and hasattr(H, "__len__") and getattr(H, "ndim", 2) == 2 else None

    def _solver(self) -> SquaredError | ObservedRowSolver:
        return row_solver_of(self.solver, self.alpha_W, self.alpha_H, self.l1_ratio)

    def check_settings(self) -> StoppingRule:
        """Validate all parameters that need no data; return the stopping rule."""
        self._solver()
        require_sketch(self.sketch, self.sketch_ratio)
        require_squared_error(self.beta_loss, self.solver)
        require_missing(self.missing, self.solver)
        if not isinstance(self.shuffle, (bool, np.bool_)):
            raise ParameterError(f"shuffle must be True or False; got {self.shuffle!r}.", parameter="shuffle")
        if self.init is not None:
            one_of("init", self.init, INITS)
        if self.missing == "ignore" and self.init not in (None, "auto", "random", "custom"):
            raise ParameterError(f"init={self.init!r} needs all cells of X. Use init='random'.", parameter="init")
        whole_number("max_iter", self.max_iter)
        threads_of(self.n_threads)
        require_verbosity(self.verbose)
        stop = stop_of(self.tol, self.time_budget)
        is_slow = isinstance(self.solver, str) and self.solver in SLOW_SOLVERS
        return replace(stop, tol=SLOW_SHARE * stop.tol) if is_slow else stop

    def _keep(self, done: FitResult, run: Training, rank: int) -> None:
        self.__dict__.pop("_origin", None)  # it describes the fit of a loaded model, not this one
        self.components_ = done.H
        self.component_shares_ = done.shares
        self.n_components_ = rank
        rows, is_sketched = run.history, self.solver == "sanls"
        if is_sketched:  # an iteration is two exchanges, and few of them have an error
            rows = [row._replace(iteration=row.iteration // 2) for row in rows if not math.isnan(row.objective)]
        self.n_iter_ = len(run.history) // 2 if is_sketched else len(rows)
        self.outcome_ = run.outcome
        self.history_ = [row._replace(bytes_up=0, bytes_down=0) for row in rows]
        self.reconstruction_err_ = float(np.sqrt(done.squared_error))
        self.relative_error_ = done.relative_error
        self.explained_variance_ = 1.0 - done.relative_error**2


def non_negative_factorization(
    X: Any,
    W: Any = None,
    H: Any = None,
    n_components: int | str | None = "auto",
    *,
    init: str | None = None,
    update_H: bool = True,
    solver: str | UpdateRule = "hals",
    beta_loss: str | float = "frobenius",
    tol: float = 1e-4,
    max_iter: int = 500,
    alpha_W: float = 0.0,
    alpha_H: float | str = "same",
    l1_ratio: float = 0.0,
    random_state: Any = None,
    verbose: int = 0,
    shuffle: bool = False,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return W (n × k), H (k × m) and the number of iterations; drop-in for scikit-learn's function.

    It calls `NMF`, whose parameters these are. With `update_H=False`, H is fixed and W is the non-negative least
    squares fit to it, in one step; `tol`, `max_iter` and `init` are then ignored.

    Examples
    --------
    >>> import numpy as np
    >>> from partsong import non_negative_factorization
    >>> W, H, n_iter = non_negative_factorization(np.random.default_rng(0).random((20, 6)), n_components=2, tol=0.01)
    >>> W.shape, H.shape
    ((20, 2), (2, 6))
    """
    model = NMF(
        n_components, solver=solver, init=init, beta_loss=beta_loss, tol=tol, max_iter=max_iter, alpha_W=alpha_W,
        alpha_H=alpha_H, l1_ratio=l1_ratio, random_state=random_state, verbose=verbose, shuffle=shuffle,
    )  # fmt: skip
    if update_H:
        return model.fit_transform(X, W=W, H=H), model.components_, model.n_iter_
    if W is not None:
        warnings.warn("When update_H=False, the provided initial W is not used.", RuntimeWarning, stacklevel=2)
    return *model._rows_for(X, H), 1
