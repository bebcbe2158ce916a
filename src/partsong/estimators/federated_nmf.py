"""`partsong.FederatedNMF`: parties' rows in, shared components out; simulated in one process."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from partsong.core.renamed import refuse_old_names
from partsong.core.runtime import graceful_interrupt
from partsong.engines.local import Parallel, Sequential
from partsong.errors import FormatError, ParameterError
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
    require_verbosity,
    solver_from_settings,
    stop_of,
    whole_seed,
)
from partsong.methods.privacy_request import Privacy, RowPrivacy, build_secure_sum, privacy_from_dict, privacy_to_dict
from partsong.methods.registry import Problem
from partsong.privacy.exposure import exposures_of, worst_party
from partsong.privacy.spending import SIMULATED, Spending, spent_from, without_names
from partsong.secure_aggregation.protocol import SecureSum
from partsong.solvers.observed import ObservedRows
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
from partsong.training.result import top_features
from partsong.training.run_folder import MODEL, RunFolder
from partsong.training.simulation import (
    FederatedFit,
    RoundReport,
    finish_with_warnings,
    iterate_rounds,
    party_components,
    simulate_rounds,
)

ROUNDS, PRIVATE_ROUNDS = 100, 10
"""Rounds by default, of a Program and with privacy; noise grows with the root of their number."""

MAY_CHANGE = frozenset({"rounds", "tol", "on_party_error"})
"""Settings that a resumed run may have otherwise; the noise of a private one was planned for its rounds."""

COMMON_OPTIONS = ("local_steps", "init_mode", "align")
"""Options of methods that are parameters of the estimator."""


@dataclass(slots=True)
class Job:
    """A fit under way: what is computed, how it stands, the columns, who is left out, and each party's H_p."""

    fit: FederatedFit
    training: Training
    columns: Mapping[str, Any]
    exclusions: ExclusionLog
    observer: FitObserver = field(default_factory=FitObserver)
    own: dict[str, Array] = field(default_factory=dict)
    bar: Watch = lambda done, row: None

    def watch(self, done: Round, row: HistoryRow) -> None:
        """Note one more exchange."""
        self.own = party_components(done.checkpoint)
        self.exclusions.note(done, row)
        self.observer.watch(done, row)
        self.bar(done, row)

    def run(self) -> None:
        """Take all rounds, from where the observer resumes them."""
        with self.observer.begin(self.fit, self.exclusions.left_out) as resume_point:
            if resume_point is not None:
                began, interrupts = self.training.began, self.training.interrupts
                self.training = start_training(
                    self.fit, resume=resume_point, began=began, watch=self.watch, interrupts=interrupts
                )
                self.own = party_components(resume_point.checkpoint)
            exhaust(iterate_steps(self.fit, self.training, resume_point))

    def so_far(self) -> Job:
        """The same as it stands, whatever comes."""
        training = replace(self.training, history=list(self.training.history))
        exclusions = replace(self.exclusions, missing={}, left_out=list(self.exclusions.left_out))
        return replace(self, training=training, exclusions=exclusions)


@dataclass(slots=True)
class KeptRun(FitObserver):
    """Keeps a run in a folder: its checkpoint is up to date whatever ends the rounds."""

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
        """Note a round; the checkpoint is written now and then."""
        assert self.recorder is not None
        self.recorder.watch(done, row)


class FederatedNMF(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """X_p ≈ W_p H for parties p = 1 … c who keep their rows and weights to themselves.

    method="exact" sums WᵀW and WᵀX over parties: the pooled factorization, whatever the split. "fnmf" begins with one
    long local phase, after which components are matched (Dalleiger & Gionis, 2025), and goes on like "exact". All
    methods, their options and what each sends are in the reference of methods. A Program value
    (`partsong.methods.build`, or one of your own) may be given instead of a name. Asynchronous methods run over a
    virtual clock, on which a party's work lasts in proportion to its rows.

    This is a simulation: all parties run in this process, and their secrets are derived from random_state.

    Parameters
    ----------
    n_components : int or None
        Rank k of the shared model; None takes that of a Program, or min(n, m, 20) over all parties' rows.
    method : name or Program
        How the parties work together; `partsong.methods.names()` has all names.
    align : name or Alignment
        For methods that match components: how, "assignment", "partial-assignment", "sinkhorn", "partial-sinkhorn",
        "nearest", "softmax" or "identity". None: as the method does.
    rounds : int or None
        The most rounds; None is 100, and 10 with `privacy`, whose noise grows with their number. A round is one
        exchange, several where the reference of methods says so, and as many arrivals as there are parties where a
        method is asynchronous. Methods that exchange once have one.
    local_steps : int or None
        Sweeps ("exact") or iterations (all others) at a party between exchanges. None: as the method does. An exchange
        is never broken off by a time budget.
    init_mode : {"shared", "local"} or None
        One H for all and W fitted to it first, or an H of its own at every party. None: as the method does.
    tol, time_budget, random_state, verbose, dtype :
        As in `NMF`. With tol=0 all rounds are run. Without dtype, one party in float64 makes all compute in float64.
    n_jobs : int or None
        Parties that run at the same time; None or -1 is one per core. It does not change a bit of the result.
    on_party_error : {"raise", "skip"}
        What a party leads to whose data cannot be used, whose work ends in an error of ours, or whose upload is
        refused: an error, or a fit without it and a `LeftOutWarning` that says why. One with bad data (NaN, no rows,
        other columns than most) is then not there at all; any other is left out of that round and asked again.
    missing : {"refuse", "ignore"}
        "game", or a Program that plays, only: with "ignore", NaN in dense data and whatever sparse data do not store
        are unknown cells, which nobody plays. Errors are then over known cells, of which every party needs one, and
        what `components_` says of a column that no party knows means nothing.
    privacy : None, PartyPrivacy or RowPrivacy
        Differential privacy (`partsong.methods.privacy_request`): of all data of a party, where each sends its own H;
        or of every single row, for "exact" (the reference of methods says which have which).
        All rounds are then run, whatever tol, and the model is that of the last: errors do not leave a party.
    secure_aggregation : bool or SecureSum
        Whether parties add masks that cancel in the sum, so that nobody sees a single upload (at least three parties;
        extra "privacy"); for methods that send sums or means by position. A SecureSum has bounds of your own.
    method_options : mapping of names to values, or None
        Further options of the method, such as {"weighted": False} of "fedavg"; names and values are in the
        reference of methods.

    Attributes
    ----------
    components_ : array (k, m)
        H; sorted by explained share, and each row of Euclidean norm 1 (with penalties: on the scale they choose).
    history_ : list of rows
        (iteration, seconds, relative_error, bytes_up, bytes_down, drift, aligned_drift, …) per exchange; bytes_up over
        all parties, bytes_down for each. Unless the method is "exact", errors are computed in simulation, with weights
        refitted at each party; within rounds of several exchanges they are NaN. Drifts are Σ_p ‖H_p − H‖² / ‖H‖², by
        position and after alignment. `parties` is how many took part. With privacy `epsilon` is what was spent by then.
    accounts_, epsilon_spent_, privacy_report_ :
        With privacy: what each party has released, the ε that this has cost the one that has spent most, together with
        earlier runs that `privacy` names, and both in plain values. Without: None, infinity and None.
    exposure_, exposures_ : Exposure, dict of PartyExposure
        What may be computed from all that was sent, for the party that it is worst for, and for each with its numbers:
        "bounded" (noise), "unknown" (only H was sent), "guess", "membership", "entries" or "rows"
        (docs/reference/exposure.md).
    simulated_ : tuple of names
        With privacy: what this object knows because all parties run in one process, and what no party would have
        released. None of it is in `components_`, or in files that `save` writes.
    left_out_ : list of (iteration, party, reason)
        Who was left out of which round, and why; rounds are numbered as in `history_`.
    party_components_ : dict of arrays (k, m)
        The H_p that parties ended with, on the scale of `components_`; of "fnmf" those that they had found themselves
        before the exact rounds; `components_` itself where they have none of their own.
    alignments_ : dict of arrays (k, k)
        P_p by which P_p · party_components_[p] lies in the order of `components_`.
    relative_error_, explained_variance_, component_shares_, n_iter_, outcome_, n_samples_ :
        As in `NMF`, over all parties' rows; `n_iter_` counts the rounds made, of the `rounds` allowed.
    parties_, n_parties_ :
        Their names, in the order given, and their number; those without usable data are not among them.
    solver_ : row solver
        How rows are fitted to the model, with the penalties of the program.
    """

    @refuse_old_names
    def __init__(
        self,
        n_components: int | None = None,
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
        """Learn shared components from a list with one matrix per party (`names` may name them), a mapping of names to
        matrices, or one matrix and `parties`, a label for each of its rows.

        Columns of data frames are put in the order of the first party that names them; names that are missing at a
        party are an error. Arrays, which have no names, are taken as they are. Tensors are computed with torch, if all
        parties have tensors on one device.

        With a `run_folder` the run is kept there (`training.run_folder.RunFolder` reads it): settings, versions, a
        checkpoint every minute, history, bytes, result and model; with `record` every message as well, for attacks.
        `resume=True` goes on with the run that the folder holds, to the bits of one that was never interrupted; data
        and settings must be the same, but for `rounds`, `tol` and `time_budget`. The checkpoint holds private states:
        it is for the one machine that simulates all parties. An `observer` (`training.loop.FitObserver`) sees every
        round instead, and may keep the run elsewhere.
        """
        folder = None if run_folder is None else RunFolder(Path(run_folder))
        if folder is None and (resume or (record and observer is None)):
            raise ParameterError("resume and record need run_folder, where the run is kept.", parameter="run_folder")
        if folder is not None and observer is not None:
            raise ParameterError(
                "A run is kept in run_folder or by an observer. Pass one of them.", parameter="run_folder"
            )
        with graceful_interrupt() as interrupts:
            seed = folder.settings().get("seed") if folder is not None and resume else None
            job = self._prepare(X, names, parties, seed=seed, record=record)
            job.training.interrupts = interrupts
            if folder is not None:
                change = MAY_CHANGE if self.privacy is None else MAY_CHANGE - {"rounds"}
                observer = KeptRun(folder, self.run_settings(job.fit), job.columns, resume, record, change)
            job.observer = FitObserver() if observer is None else observer
            with self._keeping_rounds(job):
                job.run()
            if folder is not None and isinstance(observer, KeptRun):
                self._end_folder(folder, observer)
        return self

    def simulation(self, X: Any, names: Any = None) -> FederatedFit:
        """What `fit` would run: program, parties, schedule, reduction and engine. Nothing is computed."""
        return self._prepare(X, names, None).fit

    def iterate(self, X: Any, y: Any = None, *, names: Any = None, parties: Any = None) -> Iterator[RoundReport]:
        """`fit`, one round at a time: a report after each, with its history row, H as it stands, and the outcome if it
        was the last.

            for report in model.iterate(parts):
                if np.linalg.norm(report.components - before) < enough:
                    break
            report.result().transform(rows)

        `report.result()` fits the model as if the fit had ended with that round, at its best round so far, and returns
        it; leaving early counts as interrupted. A loop that runs to its end leaves the model fitted, and so does an
        error within a round. The first Ctrl-C within a round makes it the last. What the caller does between rounds,
        and before the first, counts neither in `history_` nor against `time_budget`.
        """
        job = self._prepare(X, names, parties)
        return self._reports(job, time.perf_counter())

    def fit_transform(self, X: Any, y: Any = None, *, names: Any = None, parties: Any = None) -> Any:
        """Learn the shared components and return W as the data came: a list or mapping of every party's W_p, or one W
        in the order of the rows of one matrix with labels.

        Weights are private: only a simulation has those of all parties. They are what `transform` gives. Of a party
        whose data cannot be used and that was left out there are none: None, or NaN in the rows of one W.
        """
        matrices, labels = named_parties(X, names)
        labels, parties = (list(given) if isinstance(given, Iterator) else given for given in (labels, parties))
        self.fit(matrices, names=labels, parties=parties)
        if parties is not None:
            return weights_by_row(self.transform, matrices, parties, self.parties_)
        weights = weights_by_party(self.transform, matrices, labels, self.parties_)
        return dict(zip(X, weights, strict=True)) if isinstance(X, Mapping) else weights

    def transform(self, X: Any) -> np.ndarray:
        """W for new rows at any party: the non-negative least squares fit to the shared components, in their precision.

        Named columns must come in the order of `feature_names_in_`. Each row is solved alone; in other company its
        products may be rounded otherwise. With missing="ignore" it is fitted to its known cells; without any, w = 0.
        """
        check_is_fitted(self)
        matrix = matrix_of(self, X, self.components_.dtype, reset=False)
        with runtime.limit_kernel_threads(runtime.available_threads()):
            return self.solver_.solve_rows(matrix, np.ascontiguousarray(self.components_.T))

    def top_features(self, n: int = 10) -> list[list[str | int]]:
        """The n features with the largest values in each component: names where known, else column numbers."""
        check_is_fitted(self)
        return top_features(self.components_, getattr(self, "feature_names_in_", None), whole_number("n", n))

    def inverse_transform(self, W: Any) -> np.ndarray:
        """W H."""
        check_is_fitted(self)
        return check_weights(W, len(self.components_)) @ self.components_

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the shared model (H, names, settings, error; never W or rows); `NMF.load` reads it as well.

        Of its settings `rounds` is the number allowed and `iterations` the number made. A model that was loaded, and
        not fitted again, is written with all that its file said of its fit.
        """
        check_is_fitted(self)
        told = {**self.settings(), "parties": self.n_parties_}
        if self.privacy_report_ is not None:
            told |= {"privacy": privacy_to_dict(self.privacy), "privacy_spent": without_names(self.privacy_report_)}
        elif self.n_samples_ is not None:
            told |= {"n_samples": self.n_samples_}
        told |= {"secure_aggregation": True} if self.secure_aggregation else {}
        save_fitted(self, path, {**told, "dtype": str(self.components_.dtype), **penalties_to_dict(self.solver_)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FederatedNMF:
        """A fitted estimator from the model file of a federation, ready to transform; also from the command line's.

        What is not in the file is not there: history, names and components of single parties. An option that was given
        as a value without a name comes back as the method has it by default.
        """
        model = load_fitted(path)
        settings = model.settings
        if settings.get("method") not in methods.names():
            raise ParameterError(
                f"{path}: this model was not learned by one of the methods {', '.join(methods.names())}, but by "
                f"{str(settings.get('method'))[:40]!r}. partsong.NMF.load(path) transforms rows with any model."
            )
        try:
            estimator = cls.from_settings(settings).set_params(n_components=len(model.components))
            report, solver = spent_from(settings.get("privacy_spent")), solver_from_settings(settings)
            estimator._set_fitted(
                fitted_attributes(model),
                accounts_=None,
                epsilon_spent_=(report or {}).get("epsilon_spent", math.inf),
                privacy_report_=report,
                simulated_=(),
                n_parties_=whole_number("parties", settings.get("parties", 1)),
                solver_=ObservedRows(solver) if estimator.missing == "ignore" else solver,
            )
        except ParameterError as error:
            raise FormatError(f"{path}: its settings are not those of a federation: {error} Fit again.") from error
        return estimator

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def __sklearn_tags__(self) -> Any:
        return non_negative_tags(super().__sklearn_tags__(), allow_nan=self.missing == "ignore")

    def check_settings(self) -> StoppingRule:
        """Refuse all that can be refused without data; return when to stop."""
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
        plays = isinstance(getattr(self.method, "solver", None), ObservedRows) or self.method == "game"
        if one_of("missing", self.missing, MISSING) == "ignore" and not plays:
            raise ParameterError(
                'missing="ignore" is for method="game" and for Programs whose solver is ObservedRows, in which unknown '
                f"cells are not played; the method is {self.method!r}. Take a game, or fill the gaps.",
                parameter="missing",
            )
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
                    "Leave n_components out, or make both the same.",
                    parameter="n_components",
                )
            return self.method
        problem = Problem(rank_of(self.n_components, shape), rounds=self._rounds())
        return methods.method(self.method).build(problem, self._options())

    def _options(self) -> dict[str, Any]:
        """What the method was given, under its own names."""
        named = {"align": self.align, "local_steps": self.local_steps, "init_mode": self.init_mode}
        return method_options_of(self.method_options, **named)

    def _rounds(self) -> int:
        usual = methods.method(self.method).rounds if isinstance(self.method, str) else ROUNDS
        if usual == 1:
            return 1
        usual = usual if self.privacy is None else PRIVATE_ROUNDS
        return usual if self.rounds is None else int(self.rounds)

    def settings(self) -> dict[str, Any]:
        """The settings of the fit as plain data, without privacy: what model files and checkpoints say."""
        told: dict[str, Any] = {"method": repr(self.method)}
        if isinstance(self.method, str):
            told = {"method": self.method, **methods.method(self.method).settings(self._options(), COMMON_OPTIONS)}
        if isinstance(self.privacy, RowPrivacy):
            told.pop("local_steps", None)  # noisy sums are of one step
        told |= {"rounds": self._rounds(), "tol": float(self.tol), "on_party_error": self.on_party_error}
        return told if self.missing == "refuse" else {**told, "missing": self.missing}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> FederatedNMF:
        """An unfitted estimator from the settings of a model file, a run folder or a checkpoint.

        An option that was given as a value without a name is as the method has it by default.
        """
        method = settings.get("method")
        if not isinstance(method, str) or method not in methods.names():
            raise ParameterError(f"No method between parties is called {str(method)[:40]!r}.")
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

    def _protected(self, program: Program, n_parties: int) -> tuple[Program, Spending | None]:
        """The program with the noise that was asked for, and the accounts of a program that has noise."""
        if self.privacy is not None:
            program = self.privacy.program(program, self._rounds(), n_parties, bool(self.secure_aggregation))
        traits = program.traits
        if traits.release is None:
            return program, None
        if self.privacy is None:
            return program, Spending(traits.release, most=traits.max_releases)
        return program, Spending(traits.release, self.privacy.delta, self.privacy.spent, traits.max_releases)

    def _prepare(self, X: Any, names: Any, parties: Any, *, seed: int | None = None, record: bool = False) -> Job:
        """All that can be refused is refused here, before the first round; a resumed run has its own seed."""
        began, stop = time.perf_counter(), self.check_settings()
        seed = whole_seed(self.random_state) if seed is None or self.random_state is not None else int(seed)
        has_gaps, leave_out = self.missing == "ignore", self.on_party_error == SKIP
        shards, columns, away = read_parties(
            X, names, parties, seed, precision_of(self.dtype), has_gaps=has_gaps, leave_out=leave_out
        )
        n, m = sum(shard.matrix.shape[0] for shard in shards), shards[0].matrix.shape[1]
        has_noise = self.privacy is not None or (
            not isinstance(self.method, str) and self.method.traits.release is not None
        )
        program = self._program((m if has_noise else n, m))  # with noise the number of rows is not to be told
        program, spending = self._protected(program, len(shards))
        masks = (
            build_secure_sum(self.privacy, len(shards))
            if self.secure_aggregation is True
            else self.secure_aggregation or PlainReduction()
        )
        workers = 0 if self.n_jobs in (None, -1) else int(self.n_jobs)
        engine = Sequential(record=record) if self.n_jobs == 1 else Parallel(workers, record=record)
        rounds = self._rounds()
        schedule = Schedule(rounds, seed, on_party_error=self.on_party_error)
        fit = simulate_rounds(program, shards, rounds, schedule, stop, engine, masks, spending)
        job = Job(fit, start_training(fit, began=began), columns, ExclusionLog(away))
        job.training.watch = job.watch
        return job

    def _reports(self, job: Job, prepared: float) -> Iterator[RoundReport]:
        def result(so_far: Job) -> FederatedNMF:
            self._finish(so_far)
            return self

        fit, training, iteration = job.fit, job.training, 0
        with self._keeping_rounds(job):
            training.began += time.perf_counter() - prepared
            for step in iterate_rounds(fit, training):
                del step  # as large as the parties' states
                iteration += 1
                row, latest, so_far = training.history[-1], training.latest, partial(result, job.so_far())
                yield RoundReport(iteration, row, training.ended, so_far, fit.program, latest)
                del latest, so_far  # as large as the components of all parties

    @contextmanager
    def _keeping_rounds(self, job: Job) -> Iterator[None]:
        """Show progress; where the rounds end, or an error ends them, keep the model of those that were made."""
        title = f"{self.method if isinstance(self.method, str) else 'program'}, {len(job.fit.shards)} parties"
        try:
            with progress(self.verbose, job.fit.last, self.time_budget, title) as job.bar:
                yield
        except GeneratorExit:  # the caller has left the loop, and asks for a result if it wants one
            raise
        except BaseException:
            if job.training.history:
                self._finish(job)
            raise
        self._finish(job)

    def run_settings(self, fit: FederatedFit) -> dict[str, Any]:
        """What tells a run from others: `settings`, privacy, and what the data decide."""
        return {
            **self.settings(),
            "parties": len(fit.shards),
            "n_components": fit.program.rank,
            "secure_aggregation": bool(self.secure_aggregation),
            **({"mask_bound": self.secure_aggregation.bound} if isinstance(self.secure_aggregation, SecureSum) else {}),
            "privacy": None if self.privacy is None else privacy_to_dict(self.privacy),
            "dtype": str(fit.shards[0].matrix.dtype).removeprefix("torch."),
            "seed": fit.schedule.seed,
        }

    def _end_folder(self, folder: RunFolder, kept: KeptRun) -> None:
        self.save(folder.path / MODEL)
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

    def _finish(self, job: Job) -> None:
        """Fit the estimator to the best round so far."""
        fit, training = job.fit, job.training
        with graceful_interrupt():
            result = finish_with_warnings(fit, training)
        names, spending = [shard.name for shard in fit.shards], fit.spending
        own, alignments = own_components(result.H, job.own, names)
        exposures = exposures_of(fit.program, fit.shards, len(training.history))
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
            privacy_report_=None if spending is None else spending.told(),
            simulated_=SIMULATED if spending is not None else (),
        )
        job.observer.end(training, result)

    def _set_fitted(self, columns: Mapping[str, Any], **attributes: Any) -> None:
        """Set all fitted attributes; nothing is left of an earlier fit."""
        for name in [name for name in vars(self) if name.endswith("_") or name == "_origin"]:
            delattr(self, name)
        for name, value in {**columns, **attributes}.items():
            setattr(self, name, value)


# scikit-learn's set_output makes one table of what `fit_transform` returns; here it is one for each party.
FederatedNMF.fit_transform = FederatedNMF.fit_transform.__wrapped__  # type: ignore[method-assign, attr-defined]
