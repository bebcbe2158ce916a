"""`partsong.FederatedNMF`: federated NMF of several parties, simulated in one process."""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from partsong import methods
from partsong.aggregation.plaintext import PlainReduction
from partsong.core import runtime
from partsong.core.interfaces import Alignment, Array, Program, Round, Schedule
from partsong.core.parameters import real_number, whole_number
from partsong.core.runtime import graceful_interrupt
from partsong.engines.local import Parallel, Sequential
from partsong.errors import FormatError, InvisibleComponents, ParameterError, format_count
from partsong.estimators.parties import (
    method_options_of,
    named_parties,
    own_components,
    read_parties,
    require_method,
    require_privacy,
    usable_options,
    weights_by_party,
    weights_by_row,
)
from partsong.estimators.persistence import fitted_attributes, load_fitted, penalties_to_dict, save_fitted
from partsong.estimators.validation import (
    MISSING,
    check_weights,
    matrix_of,
    non_negative_tags,
    one_of,
    precision_of,
    rank_of,
    refuse_old_names,
    require_present_names,
    require_verbosity,
    solver_from_settings,
    stop_of,
    whole_seed,
)
from partsong.methods.moment import MomentProgram, bound_verdict, is_invention, verdict
from partsong.methods.privacy_request import (
    Privacy,
    PrivacyPlan,
    RowPrivacy,
    build_secure_sum,
    privacy_from_dict,
    privacy_to_dict,
)
from partsong.methods.registry import Problem
from partsong.privacy.exposure import party_exposures, worst_party
from partsong.privacy.spending import SIMULATION_ONLY, PrivacyTracker, parse_spent, remove_names
from partsong.secure_aggregation.protocol import SecureSum
from partsong.solvers.observed import ObservedRowSolver
from partsong.training.checkpoint import RunRecorder, fingerprint, stored_rows
from partsong.training.loop import (
    ON_PARTY_ERROR,
    RAISE,
    SKIP,
    Exclusion,
    ExclusionLog,
    Fit,
    FitObserver,
    HistoryRow,
    ResumePoint,
    StoppingRule,
    Training,
    Watch,
    exhaust,
    iterate_steps,
    progress,
    start_training,
)
from partsong.training.result import FitResult, top_features
from partsong.training.run_folder import MODEL, RunFolder, rank_files
from partsong.training.simulation import (
    FederatedFit,
    RoundReport,
    finish_with_warnings,
    iterate_rounds,
    party_components,
    simulate_rounds,
)

ROUNDS, PRIVATE_ROUNDS = 100, 10
"""Default rounds: for a Program, and with privacy, whose noise grows with the root of their number."""

MAY_CHANGE = frozenset({"rounds", "tol", "on_party_error"})
"""Settings that may change when a run is resumed; the noise of a private run was calibrated for its rounds."""

COMMON_OPTIONS = ("local_steps", "init_mode", "align")
"""Method options that are parameters of the estimator."""


@dataclass(slots=True)
class FitJob:
    """A running fit: the fit and its state, column names, exclusions, and each party's H_p."""

    fit: FederatedFit
    training: Training
    columns: Mapping[str, Any]
    exclusions: ExclusionLog
    observer: FitObserver = field(default_factory=FitObserver)
    own: dict[str, Array] = field(default_factory=dict)
    bar: Watch = lambda done, row: None

    def watch(self, done: Round, row: HistoryRow) -> None:
        """Record an exchange."""
        self.own = party_components(done.checkpoint)
        self.exclusions.note(done, row)
        self.observer.watch(done, row)
        self.bar(done, row)

    def run(self) -> None:
        """Run all rounds, from where the observer resumes."""
        with self.observer.begin(self.fit, self.exclusions.left_out) as resume_point:
            if resume_point is not None:
                began, interrupts = self.training.began, self.training.interrupts
                self.training = start_training(
                    self.fit, resume=resume_point, began=began, watch=self.watch, interrupts=interrupts
                )
                self.own = party_components(resume_point.checkpoint)
            exhaust(iterate_steps(self.fit, self.training, resume_point))

    def so_far(self) -> FitJob:
        """Return a snapshot that later rounds do not change."""
        training = replace(self.training, history=list(self.training.history))
        exclusions = replace(self.exclusions, missing={}, left_out=list(self.exclusions.left_out))
        return replace(self, training=training, exclusions=exclusions)


@dataclass(slots=True)
class RunFolderObserver(FitObserver):
    """Observer that keeps a run in a folder; its checkpoint is current, however the rounds end."""

    folder: RunFolder
    settings: Mapping[str, Any]
    columns: Mapping[str, Any]
    resume: bool
    record: bool
    may_change: frozenset[str]
    recorder: RunRecorder | None = None

    @contextmanager
    def begin(self, fit: Fit, left_out: list[Exclusion]) -> Iterator[ResumePoint | None]:
        """Open the folder."""
        names = self.columns.get("feature_names_in_")
        data = {shard.name: fingerprint(stored_rows(shard.matrix), names) for shard in fit.shards}
        asked: dict[str, Any] = {"resume": self.resume, "record": self.record, "may_change": self.may_change}
        self.recorder = self.folder.start(fit, self.settings, data, left_out=left_out, **asked)
        with self.recorder:
            yield self.recorder.resume_point

    def watch(self, done: Round, row: HistoryRow) -> None:
        """Record a round; the checkpoint is written periodically."""
        assert self.recorder is not None
        self.recorder.watch(done, row)


class FederatedNMF(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Federated non-negative matrix factorization X_p ≈ W_p H, simulated in one process.

    Parties p = 1 … c keep their rows X_p and weights W_p; only H is shared. `method="exact"` sums WᵀW and WᵀX over
    parties and gives the pooled factorization, whatever the split. `"fnmf"` starts with one long local phase, matches
    components (Dalleiger & Gionis, 2025), and continues like "exact". The reference of methods lists all methods, their
    options and what each one sends. `method` may also be a Program (`partsong.methods.build`, or your own).
    Asynchronous methods run on a virtual clock; compute time is proportional to a party's rows.

    This is a simulation: all parties run in this process, and their secrets are derived from `random_state`.

    Parameters
    ----------
    n_components : int, list of int or None, default=None
        Rank k of the shared model. None takes the rank of a Program, or min(n, m, 20) over all parties' rows. A list
        tries several ranks on one private release (RowPrivacy or PartyPrivacy of a moment), at no further cost:
        `components_` has the largest rank of which all directions are visible, `components_by_rank_` has all.
    method : str or Program, default="exact"
        The federated method; `partsong.methods.names()` lists the names.
    align : str, Alignment or None, default=None
        For methods that match components: "assignment", "partial-assignment", "sinkhorn", "partial-sinkhorn",
        "nearest", "softmax" or "identity". None takes the default of the method.
    rounds : int or None, default=None
        Maximum number of rounds. None is 100, or 10 with `privacy`, whose noise grows with the number of rounds. A
        round is one exchange, or several for some methods (see the reference of methods); for asynchronous methods it
        is as many arrivals as there are parties. One-shot methods have one round.
    local_steps : int or None, default=None
        Sweeps ("exact") or iterations (other methods) at a party between exchanges. None takes the default of the
        method. A time budget never interrupts an exchange.
    init_mode : {"shared", "local"} or None, default=None
        "shared": all parties start from one H and fit W to it first. "local": each party draws its own H. None takes
        the default of the method.
    tol : float, default=1e-4
        As in `NMF`. With 0, all rounds are run.
    time_budget : float or None, default=None
        As in `NMF`.
    random_state : int, RandomState, Generator or None, default=None
        As in `NMF`; also the source of all parties' secrets.
    verbose : int, default=0
        1 shows progress on standard error; with privacy, first what to expect of it.
    dtype : {"float32", "float64"} or None, default=None
        Number type of the computation. With None, one float64 party makes all parties compute in float64.
    n_jobs : int or None, default=None
        Number of parties that run concurrently; None or -1 is one per core. Results do not depend on it.
    on_party_error : {"raise", "skip"}, default="raise"
        What to do if a party's data are invalid, its work fails with a PartsongError, or its upload is refused.
        "skip" continues without the party and issues a `LeftOutWarning`. A party with invalid data (NaN, no rows,
        other columns than most) is dropped for the whole fit; otherwise it misses that round and is asked again.
    missing : {"refuse", "ignore"}, default="refuse"
        For method="game", or a Program with a game: "ignore" treats NaN in dense data, and entries that sparse data do
        not store, as unknown cells, which are not played. Errors then cover known cells, of which every party needs
        one. Values of `components_` in a column that no party knows are meaningless.
    privacy : PartyPrivacy, RowPrivacy or None, default=None
        Differential privacy (`partsong.methods.privacy_request`): of all data of a party, for methods that send H_p, or
        of every single row, for "exact"; see the reference of methods. All rounds are then run, regardless of `tol`,
        and the model is that of the last round, because errors do not leave a party.
    secure_aggregation : bool or SecureSum, default=False
        Parties add masks that cancel in the sum, so nobody sees a single upload. Needs at least three parties and the
        extra "privacy"; for methods that send sums or means by position. Pass a SecureSum to set its bounds.
    method_options : mapping or None, default=None
        Further options of the method, such as {"weighted": False} for "fedavg"; see the reference of methods.

    Attributes
    ----------
    components_ : ndarray of shape (k, m)
        H, sorted by explained share. Each row has Euclidean norm 1, or with penalties the scale that they determine.
    history_ : list of HistoryRow
        One row per exchange: (iteration, seconds, relative_error, bytes_up, bytes_down, drift, aligned_drift, …).
        bytes_up is over all parties, bytes_down per party. Except for "exact", errors are computed by the simulation,
        with weights refitted at each party; within rounds of several exchanges they are NaN. Drifts are
        Σ_p ‖H_p − H‖² / ‖H‖², by position and after alignment. `parties` is the number of participants. With privacy,
        `epsilon` is the budget spent so far.
    accounts_ : Accounts or None
        With privacy: what each party has released, including earlier runs passed in `privacy`.
    epsilon_spent_ : float
        With privacy: the largest ε that a party has spent, including earlier runs; otherwise infinity.
    privacy_report_ : dict or None
        With privacy: accounts and ε as plain data.
    exposure_ : Exposure
        Exposure level of the most exposed party: "bounded" (noise), "unknown" (only H was sent), "guess", "membership",
        "entries" or "rows" (docs/reference/exposure.md).
    exposures_ : dict of str to PartyExposure
        Exposure level of each party, with the numbers behind it.
    visible_directions_ : int or None
        With a private second moment: how many directions are visible above the noise.
    components_by_rank_ : dict of int to ndarray
        With a list of ranks: H (k × m) of each, from the same release; `at_rank(k)` is the model of one.
    forecast_ : Forecast or None
        With a private second moment: what public numbers say of it.
    simulated_ : tuple of str
        With privacy: quantities that only this simulation knows and that no party would release. None of them
        influences `components_` or files written by `save`.
    left_out_ : list of Exclusion
        (iteration, party, reason) for each party that was skipped; iterations are numbered as in `history_`.
    party_components_ : dict of str to ndarray of shape (k, m)
        Final H_p of each party, on the scale of `components_`. For "fnmf": those before the exact rounds. Equal to
        `components_` for parties without their own H_p.
    alignments_ : dict of str to ndarray of shape (k, k)
        P_p such that P_p · party_components_[p] is in the order of `components_`.
    relative_error_, explained_variance_ : float
        As in `NMF`, over all parties' rows.
    component_shares_ : ndarray of shape (k,)
        As in `NMF`, over all parties' rows.
    n_iter_ : int
        Number of rounds made.
    outcome_ : Outcome
        Why the fit ended.
    n_samples_ : int or None
        Number of rows of all parties.
    parties_ : list of str
        Names of the parties in the given order, without parties whose data were invalid.
    n_parties_ : int
        Number of parties.
    solver_ : RowSolver
        Solver that fits rows to the model, with the penalties of the program.

    Examples
    --------
    >>> import numpy as np
    >>> import partsong
    >>> X = np.random.default_rng(0).random((60, 8))
    >>> model = partsong.FederatedNMF(3, method="exact", rounds=20, random_state=0).fit([X[:25], X[25:]])
    >>> model.components_.shape
    (3, 8)
    >>> model.transform(X[:5]).shape
    (5, 3)
    """

    def set_params(self, **params: Any) -> FederatedNMF:
        """Set parameters, as in scikit-learn."""
        require_present_names(params, self._get_param_names())
        result: FederatedNMF = super().set_params(**params)
        return result

    @refuse_old_names
    def __init__(
        self,
        n_components: int | Sequence[int] | None = None,
        *,
        method: str | Program = "exact",
        align: str | Alignment | None = None,
        rounds: int | None = None,
        local_steps: int | None = None,
        init_mode: str | None = None,
        tol: float = 1e-4,
        time_budget: float | None = None,
        random_state: Any = None,
        verbose: int = 0,
        dtype: Any = None,
        n_jobs: int | None = None,
        on_party_error: str = RAISE,
        missing: str = "refuse",
        privacy: Privacy | None = None,
        secure_aggregation: Any = False,
        method_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.n_components = n_components
        self.method = method
        self.align = align
        self.rounds = rounds
        self.local_steps = local_steps
        self.init_mode = init_mode
        self.tol = tol
        self.time_budget = time_budget
        self.random_state = random_state
        self.verbose = verbose
        self.dtype = dtype
        self.n_jobs = n_jobs
        self.on_party_error = on_party_error
        self.missing = missing
        self.privacy = privacy
        self.secure_aggregation = secure_aggregation
        self.method_options = method_options

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        names: Any = None,
        parties: Any = None,
        run_folder: str | os.PathLike[str] | None = None,
        resume: bool = False,
        record: bool = False,
        observer: FitObserver | None = None,
    ) -> FederatedNMF:
        """Fit the shared components.

        Columns of data frames are put in the order of the first data frame; a column name missing at a party is an
        error. Arrays have no names and are used in their order. Tensors are computed with torch, if all parties have
        tensors on one device.

        Parameters
        ----------
        X : list of matrices, mapping of str to matrix, or matrix
            One matrix per party, or one matrix with `parties`.
        y : None
            Ignored; for scikit-learn.
        names : list of str or None, default=None
            Names of the parties, if X is a list.
        parties : array-like of shape (n,) or None, default=None
            The party of each row, if X is one matrix.
        run_folder : path or None, default=None
            Keep the run in this folder: settings, versions, a checkpoint every minute, history, bytes, result and
            model; `training.run_folder.RunFolder` reads it. The checkpoint holds private states of all parties.
        resume : bool, default=False
            Resume the run in `run_folder`. The result is bit for bit that of an uninterrupted run. Data and settings
            must be the same, except `rounds`, `tol` and `time_budget`.
        record : bool, default=False
            Also keep every message in `run_folder`, for attacks.
        observer : FitObserver or None, default=None
            Called in every round (`training.loop.FitObserver`), instead of `run_folder`.

        Returns
        -------
        FederatedNMF
            This estimator.
        """
        folder = None if run_folder is None else RunFolder(Path(run_folder))
        if folder is None and (resume or (record and observer is None)):
            raise ParameterError(
                "resume and record need run_folder. Pass the folder of the run.", parameter="run_folder"
            )
        if folder is not None and observer is not None:
            raise ParameterError("run_folder and observer both keep the run. Pass one of them.", parameter="run_folder")
        with graceful_interrupt() as interrupts:
            seed = folder.settings().get("seed") if folder is not None and resume else None
            job = self._prepare(X, names, parties, seed=seed, record=record)
            self._announce(job.fit)
            job.training.interrupts = interrupts
            if folder is not None:
                change = MAY_CHANGE if self.privacy is None else MAY_CHANGE - {"rounds"}
                observer = RunFolderObserver(folder, self.run_settings(job.fit), job.columns, resume, record, change)
            job.observer = FitObserver() if observer is None else observer
            with self._progress_then_finish(job):
                job.run()
            if folder is not None and isinstance(observer, RunFolderObserver):
                self._end_folder(folder, observer)
        return self

    def simulation(self, X: Any, names: Any = None) -> FederatedFit:
        """Return what `fit` would run (program, parties, schedule, reduction, engine) without computing."""
        return self._prepare(X, names, None).fit

    def iterate(self, X: Any, y: Any = None, *, names: Any = None, parties: Any = None) -> Iterator[RoundReport]:
        """Fit one round at a time; yield a report after each, with its history row, the current H, and the outcome.

            for report in model.iterate(parts):
                if np.linalg.norm(report.components - before) < enough:
                    break
            report.result().transform(rows)

        `report.result()` sets the fitted attributes as if the fit had ended with that round, from the best round so
        far, and returns the model; leaving the loop early counts as interrupted. After a complete loop, or an error
        within a round, the model is fitted. The first Ctrl-C within a round makes it the last round. Time that the
        caller spends between rounds, and before the first, counts neither in `history_` nor against `time_budget`.
        """
        job = self._prepare(X, names, parties)
        self._announce(job.fit)
        return self._reports(job, time.perf_counter())

    def fit_transform(self, X: Any, y: Any = None, *, names: Any = None, parties: Any = None) -> Any:
        """Fit the shared components and return W in the form of X: a list or mapping of W_p, or one W for one matrix.

        Weights are private: only a simulation has those of all parties. They equal the result of `transform`. A party
        that was skipped for invalid data has None, or NaN in its rows of one W.
        """
        matrices, labels = named_parties(X, names)
        labels, parties = (list(given) if isinstance(given, Iterator) else given for given in (labels, parties))
        self.fit(matrices, names=labels, parties=parties)
        if parties is not None:
            return weights_by_row(self.transform, matrices, parties, self.parties_)
        weights = weights_by_party(self.transform, matrices, labels, self.parties_)
        return dict(zip(X, weights, strict=True)) if isinstance(X, Mapping) else weights

    def transform(self, X: Any) -> np.ndarray:
        """Return W for new rows: the non-negative least squares fit to the shared components, in their number type.

        Named columns must be in the order of `feature_names_in_`. Rows are solved independently; a row may round
        differently in another batch. With missing="ignore", a row is fitted to its known cells; without any, w = 0.
        """
        check_is_fitted(self)
        matrix = matrix_of(self, X, self.components_.dtype, reset=False)
        with runtime.limit_kernel_threads(runtime.available_threads()):
            return self.solver_.solve_rows(matrix, np.ascontiguousarray(self.components_.T))

    def top_features(self, n: int = 10) -> list[list[str | int]]:
        """Return the n features with the largest values in each component: names if known, otherwise column numbers."""
        check_is_fitted(self)
        return top_features(self.components_, getattr(self, "feature_names_in_", None), whole_number("n", n))

    def inverse_transform(self, W: Any) -> np.ndarray:
        """Return W H."""
        check_is_fitted(self)
        return check_weights(W, len(self.components_)) @ self.components_

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the shared model (H, names, settings, error; never W or rows). `NMF.load` can read it, too.

        In its settings, `rounds` is the maximum and `iterations` the number made. A model that was loaded, and not
        refitted, keeps the settings of its file.
        """
        check_is_fitted(self)
        settings = {**self.settings(), "parties": self.n_parties_}
        if self.privacy_report_ is not None:
            settings |= {"privacy": privacy_to_dict(self.privacy), "privacy_spent": remove_names(self.privacy_report_)}
        elif self.n_samples_ is not None:
            settings |= {"n_samples": self.n_samples_}
        settings |= {"secure_aggregation": True} if self.secure_aggregation else {}
        save_fitted(self, path, {**settings, "dtype": str(self.components_.dtype), **penalties_to_dict(self.solver_)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FederatedNMF:
        """Load a fitted estimator from the model file of a federation, or of `partsong fit`, ready to transform.

        The file has no history, and no names and components of parties. An option that was passed as an unnamed object
        gets its default.
        """
        model = load_fitted(path)
        settings = model.settings
        if settings.get("method") not in methods.names():
            raise ParameterError(
                f"{path}: the method of this model is {str(settings.get('method'))[:40]!r}, which is not one of "
                f"{', '.join(methods.names())}. Use partsong.NMF.load(path), which reads any model."
            )
        try:
            estimator = cls.from_settings(settings).set_params(n_components=len(model.components))
            report, solver = parse_spent(settings.get("privacy_spent")), solver_from_settings(settings)
            estimator._set_fitted(
                fitted_attributes(model),
                accounts_=None,
                epsilon_spent_=(report or {}).get("epsilon_spent", math.inf),
                privacy_report_=report,
                simulated_=(),
                n_parties_=whole_number("parties", settings.get("parties", 1)),
                solver_=ObservedRowSolver(solver) if estimator.missing == "ignore" else solver,
            )
        except ParameterError as error:
            raise FormatError(
                f"{path}: the settings are not those of a federation: {error} Fit the model again."
            ) from error
        return estimator

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def __sklearn_tags__(self) -> Any:
        return non_negative_tags(super().__sklearn_tags__(), allow_nan=self.missing == "ignore")

    def check_settings(self) -> StoppingRule:
        """Validate all parameters that need no data; return the stopping rule."""
        options = self._options()
        require_method(self.method, options)
        if self.rounds is not None:
            whole_number("rounds", self.rounds)
        if isinstance(self.method, str):
            methods.method(self.method).build(Problem(2, rounds=self._rounds()), options)
        require_privacy(
            self.privacy, self.secure_aggregation, self.method, options=options, time_budget=self.time_budget
        )
        one_of("on_party_error", self.on_party_error, ON_PARTY_ERROR)
        plays = isinstance(getattr(self.method, "solver", None), ObservedRowSolver) or self.method == "game"
        if one_of("missing", self.missing, MISSING) == "ignore" and not plays:
            raise ParameterError(
                'missing="ignore" needs method="game" or a Program whose solver is ObservedRowSolver; '
                f'got method={self.method!r}. Use method="game", or impute missing cells.',
                parameter="missing",
            )
        is_moment = self.method == "moment" or (
            isinstance(self.privacy, RowPrivacy) and self.privacy.mechanism in ("auto", "moment", "centred")
        )
        if len(self._ranks) > 1 and (self.privacy is None or not is_moment):
            raise self._several_ranks_error()
        require_verbosity(self.verbose)
        if self.n_jobs not in (None, -1):
            whole_number("n_jobs", self.n_jobs, " (None or -1: one per core)")
        return stop_of(self.tol, self.time_budget)

    def _program(self, shape: tuple[int, int]) -> Program:
        if not isinstance(self.method, str):
            rank = rank_of(self.method.rank, shape)
            if self.n_components is not None and self.n_components != rank:
                raise ParameterError(
                    f"n_components={self.n_components!r}, but the rank of the program is {rank}. "
                    "Remove n_components, or use the same rank.",
                    parameter="n_components",
                )
            return self.method
        wanted = max(self._ranks) if self._ranks else self.n_components
        problem = Problem(rank_of(wanted, shape), rounds=self._rounds())
        return methods.method(self.method).build(problem, self._options())

    @property
    def _ranks(self) -> tuple[int, ...]:
        """The ranks of a list, in ascending order; empty for one rank."""
        if not isinstance(self.n_components, list | tuple | range | np.ndarray) or np.ndim(self.n_components) != 1:
            return ()
        if not len(self.n_components):
            raise ParameterError("n_components is an empty list. Pass at least one rank.", parameter="n_components")
        return tuple(sorted({whole_number("n_components", one) for one in self.n_components}))

    def _options(self) -> dict[str, Any]:
        """Options passed to the method, under its own names."""
        named = {"align": self.align, "local_steps": self.local_steps, "init_mode": self.init_mode}
        return method_options_of(self.method_options, **named)

    def _rounds(self) -> int:
        usual = methods.method(self.method).rounds if isinstance(self.method, str) else ROUNDS
        if usual == 1:
            return 1
        usual = usual if self.privacy is None else PRIVATE_ROUNDS
        return usual if self.rounds is None else int(self.rounds)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the fit, without privacy, as plain data for model files and checkpoints."""
        plain: dict[str, Any] = {"method": repr(self.method)}
        if isinstance(self.method, str):
            plain = {"method": self.method, **methods.method(self.method).settings(self._options(), COMMON_OPTIONS)}
        if isinstance(self.privacy, RowPrivacy):
            plain.pop("local_steps", None)  # noisy sums take one step
        plain |= {"rounds": self._rounds(), "tol": float(self.tol), "on_party_error": self.on_party_error}
        return plain if self.missing == "refuse" else {**plain, "missing": self.missing}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> FederatedNMF:
        """Return an unfitted estimator with the settings of a model file, run folder or checkpoint.

        An option that was passed as an unnamed object gets its default.
        """
        method = settings.get("method")
        if not isinstance(method, str) or method not in methods.names():
            raise ParameterError(
                f"{str(method)[:40]!r} is not a federated method. Use one of {', '.join(methods.names())}."
            )
        options = usable_options(method, settings.get("method_options"))
        takes = methods.method(method).parameters_with(options or {})
        asked = {name: settings[name] for name in ("rounds", "tol", "on_party_error") if name in settings}
        asked |= {name: settings[name] for name in COMMON_OPTIONS if name in takes and name in settings}
        if asked.get("align") not in methods.CHOICES["align"]:
            asked["align"] = None
        asked |= {"method_options": options, "missing": settings.get("missing") or "refuse"}
        asked["privacy"] = privacy_from_dict(settings.get("privacy"))
        if {"seed", "n_components", "dtype"} <= settings.keys():  # of a run, not of a model
            asked |= {"random_state": settings["seed"], **{name: settings[name] for name in ("n_components", "dtype")}}
        bound = settings.get("mask_bound")
        asked["secure_aggregation"] = (
            settings.get("secure_aggregation", False) if bound is None else SecureSum(real_number("mask_bound", bound))
        )
        estimator = cls(method=method, **asked)
        estimator.check_settings()
        return estimator

    def _protected(self, program: Program, n_parties: int, n_features: int) -> tuple[Program, PrivacyTracker | None]:
        """The program with the requested noise, and the privacy accounts if it has noise."""
        if self.privacy is not None:
            hides, several = bool(self.secure_aggregation), len(self._ranks) > 1
            program = self.privacy.program(program, self._rounds(), n_parties, hides, n_features, one_release=several)
        traits = program.traits
        if isinstance(program, MomentProgram):
            program.require_memory(n_features)
        if isinstance(program, MomentProgram) and traits.release is not None and program.later is None:
            program = replace(program, ranks=self._ranks)
        elif len(self._ranks) > 1:
            raise self._several_ranks_error()
        if traits.release is None:
            return program, None
        if self.privacy is None:
            return program, PrivacyTracker(traits)
        return program, PrivacyTracker(traits, self.privacy.delta, self.privacy.spent)

    def _several_ranks_error(self) -> ParameterError:
        return ParameterError(
            f"n_components={self.n_components!r}: several ranks can be tried on one private release of a second moment "
            'only. Pass one rank, or RowPrivacy(…, mechanism="moment").',
            parameter="n_components",
        )

    def privacy_plan(self, fit: FederatedFit) -> PrivacyPlan | None:
        """Return what a private fit will do, and what to expect of it, from public numbers alone; None without
        privacy.
        """
        if self.privacy is None:
            return None
        one_release, m = len(self._ranks) > 1 or self.method == "moment", fit.shards[0].matrix.shape[1]
        hides = bool(self.secure_aggregation)
        return self.privacy.plan(fit.program.rank, len(fit.shards), hides, m, one_release=one_release)

    def _announce(self, fit: FederatedFit) -> None:
        """Say what to expect before anything is spent; warn where that is less than the components asked for."""
        plan = self.privacy_plan(fit)
        if plan is None:
            return
        if plan.is_too_little(fit.program.rank):
            warnings.warn(str(plan.forecast), InvisibleComponents, stacklevel=3)
        elif self.verbose and str(plan):
            sys.stderr.write(f"{plan}\n")

    def _prepare(self, X: Any, names: Any, parties: Any, *, seed: int | None = None, record: bool = False) -> FitJob:
        """Validate everything before the first round; a resumed run keeps its seed."""
        began, stop = time.perf_counter(), self.check_settings()
        seed = whole_seed(self.random_state) if seed is None or self.random_state is not None else int(seed)
        has_gaps, skip_invalid = self.missing == "ignore", self.on_party_error == SKIP
        shards, columns, away = read_parties(
            X, names, parties, seed, precision_of(self.dtype), has_gaps=has_gaps, skip_invalid=skip_invalid
        )
        n, m = sum(shard.matrix.shape[0] for shard in shards), shards[0].matrix.shape[1]
        has_noise = self.privacy is not None or (
            not isinstance(self.method, str) and self.method.traits.release is not None
        )
        program = self._program((m if has_noise else n, m))  # with noise the number of rows is private
        program, spending = self._protected(program, len(shards), m)
        masks = (
            build_secure_sum(self.privacy, len(shards), in_shares=program.traits.min_in_sum > 1)
            if self.secure_aggregation is True
            else self.secure_aggregation or PlainReduction()
        )
        workers = 0 if self.n_jobs in (None, -1) else int(self.n_jobs)
        engine = Sequential(record=record) if self.n_jobs == 1 else Parallel(workers, record=record)
        rounds = self._rounds()
        schedule = Schedule(rounds, seed, on_party_error=self.on_party_error)
        fit = simulate_rounds(program, shards, rounds, schedule, stop, engine, masks, spending)
        job = FitJob(fit, start_training(fit, began=began), columns, ExclusionLog(away))
        job.training.watch = job.watch
        return job

    def _reports(self, job: FitJob, prepared: float) -> Iterator[RoundReport]:
        def result(so_far: FitJob) -> FederatedNMF:
            self._finish(so_far)
            return self

        fit, training, iteration = job.fit, job.training, 0
        with self._progress_then_finish(job):
            training.began += time.perf_counter() - prepared
            for step in iterate_rounds(fit, training):
                del step  # as large as the parties' states
                iteration += 1
                row, latest, so_far = training.history[-1], training.latest, partial(result, job.so_far())
                yield RoundReport(iteration, row, training.ended, so_far, fit.program, latest)
                del latest, so_far  # as large as the components of all parties

    @contextmanager
    def _progress_then_finish(self, job: FitJob) -> Iterator[None]:
        """Show progress; after the last round, or an error, set the model of the rounds made."""
        title = (
            f"{self.method if isinstance(self.method, str) else 'program'}, "
            f"{format_count(len(job.fit.shards), 'party', 'parties')}"
        )
        try:
            with progress(self.verbose, job.fit.last, self.time_budget, title) as job.bar:
                yield
        except GeneratorExit:  # the caller left the loop and can ask for a result
            raise
        except BaseException:
            if job.training.history:
                self._finish(job)
            raise
        self._finish(job)

    def run_settings(self, fit: FederatedFit) -> dict[str, Any]:
        """Return the settings that identify a run: `settings`, privacy, and those determined by the data."""
        return {
            **self.settings(),
            "parties": len(fit.shards),
            "n_components": list(self._ranks) or fit.program.rank,
            "secure_aggregation": bool(self.secure_aggregation),
            **({"mask_bound": self.secure_aggregation.bound} if isinstance(self.secure_aggregation, SecureSum) else {}),
            "privacy": None if self.privacy is None else privacy_to_dict(self.privacy),
            "dtype": str(fit.shards[0].matrix.dtype).removeprefix("torch."),
            "seed": fit.schedule.seed,
        }

    def _end_folder(self, folder: RunFolder, kept: RunFolderObserver) -> None:
        self.save(folder.path / MODEL)
        for rank, path in rank_files(folder.path / MODEL, self.components_by_rank_).items():
            self.at_rank(rank).save(path)
        result = {
            "outcome": str(self.outcome_),
            "iterations": self.n_iter_,
            "relative_error": self.relative_error_,
            "seed": self.seed_,
            "exposure": str(self.exposure_),
            "privacy": self.privacy_report_,
            "simulated": list(self.simulated_),
        }
        folder.end(self.history_, kept.recorder.sent if kept.recorder else (), result)

    def _finish(self, job: FitJob) -> None:
        """Set the fitted attributes from the best round so far."""
        fit, training = job.fit, job.training
        with graceful_interrupt():
            result = finish_with_warnings(fit, training)
        names, spending = [shard.name for shard in fit.shards], fit.spending
        released, by_rank = self._released(fit, training, result)
        own, alignments = own_components(result.H, job.own, names)
        exposures = party_exposures(fit.program, fit.shards, len(training.history))
        self._set_fitted(
            job.columns,
            components_=result.H,
            component_shares_=result.shares,
            n_components_=len(result.H),
            relative_error_=result.relative_error,
            explained_variance_=1.0 - result.relative_error**2,
            n_iter_=training.rounds,
            outcome_=training.outcome,
            history_=list(training.history),
            seed_=fit.schedule.seed,
            solver_=fit.solver,
            parties_=names,
            n_parties_=len(names),
            n_samples_=sum(shard.matrix.shape[0] for shard in fit.shards),
            party_components_=own,
            alignments_=alignments,
            left_out_=list(job.exclusions.left_out),
            exposures_=exposures,
            exposure_=worst_party(exposures.values()).level,
            accounts_=None if spending is None else spending.accounts,
            epsilon_spent_=math.inf if spending is None else spending.accounts.epsilon(spending.delta),
            privacy_report_=None if spending is None else {**spending.to_dict(), **released},
            visible_directions_=released.get("visible_directions"),
            components_by_rank_=by_rank,
            forecast_=None if (plan := self.privacy_plan(fit)) is None else plan.forecast,
            simulated_=SIMULATION_ONLY if spending is not None else (),
        )
        job.observer.end(training, result)

    def _released(
        self, fit: FederatedFit, training: Training, result: FitResult
    ) -> tuple[dict[str, Any], dict[int, np.ndarray]]:
        """What a noisy moment has shown, and H by rank; warns of components that the noise does not let see."""
        program, server = fit.program, training.best
        if not isinstance(program, MomentProgram) or fit.spending is None or server is None or server.spectrum is None:
            return {}, {}
        shown, rank = program.report(server), len(result.H)
        sentence = self._verdict(shown, rank)
        if is_invention(shown["visible_directions"], rank):
            warnings.warn(sentence, InvisibleComponents, stacklevel=4)
        by_rank = {one: program.components_at(server, one) for one in self._ranks}
        return {**shown, "verdict": sentence}, by_rank

    def _verdict(self, report: Mapping[str, Any], rank: int) -> str:
        """What a release says of a model of this rank, and of the row bound."""
        found = verdict(report["visible_directions"], rank)
        of_bound = bound_verdict(report, self.privacy.n_rows) if isinstance(self.privacy, RowPrivacy) else ""
        return f"{found} {of_bound}".rstrip()

    def at_rank(self, rank: int) -> FederatedNMF:
        """Return this model with another of the ranks that were asked for, from the same private release.

        Nothing more is spent. Attributes that need rows, such as `relative_error_`, are NaN.
        """
        check_is_fitted(self)
        others: Mapping[int, np.ndarray] = getattr(self, "components_by_rank_", {})
        if rank not in others:
            known = ", ".join(map(str, others)) or "none"
            raise ParameterError(
                f"rank must be one of the ranks of this fit ({known}); got {rank!r}. Fit with a list of ranks as "
                "n_components; a run folder has a model file for each of them.",
                parameter="rank",
            )
        if rank == len(self.components_):
            return self
        chosen, H = copy(self), others[rank].astype(self.components_.dtype)
        chosen.components_, chosen.n_components_ = H, rank
        chosen.component_shares_ = np.full(rank, math.nan)
        chosen.relative_error_ = chosen.explained_variance_ = math.nan
        chosen.party_components_ = dict.fromkeys(self.parties_, H)
        chosen.alignments_ = {name: np.eye(rank) for name in self.parties_}
        assert self.privacy_report_ is not None
        chosen.privacy_report_ = {**self.privacy_report_, "verdict": self._verdict(self.privacy_report_, rank)}
        return chosen

    def _set_fitted(self, columns: Mapping[str, Any], **attributes: Any) -> None:
        """Set all fitted attributes and remove those of an earlier fit."""
        for name in [name for name in vars(self) if name.endswith("_") or name == "_origin"]:
            delattr(self, name)
        for name, value in {**columns, **attributes}.items():
            setattr(self, name, value)


# scikit-learn's set_output makes one table of what `fit_transform` returns; here it is one for each party.
FederatedNMF.fit_transform = FederatedNMF.fit_transform.__wrapped__  # type: ignore[method-assign, attr-defined]
