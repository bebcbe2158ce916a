"""`partsong.FederatedNMF`: parties' rows in, shared components out; simulated in one process."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from partsong.aggregation.plaintext import InTheOpen
from partsong.core import runtime
from partsong.core.interfaces import Alignment, Array, Matrix, Program, Reduction, Round, Schedule, traits_of
from partsong.core.parameters import whole_number
from partsong.core.runtime import held
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel, Sequential
from partsong.errors import FormatError, ParameterError
from partsong.estimators.parameters import (
    MISSING,
    alignment_of,
    given_weights,
    one_of,
    precision_of,
    program_of,
    rank_of,
    require_method,
    require_privacy,
    require_verbosity,
    solver_told,
    stop_of,
)
from partsong.estimators.persistence import fill_from_file, forget_origin, penalties_told, save_fitted
from partsong.estimators.validation import (
    NonNegativeTransformer,
    WeightsByParty,
    by_party,
    named_parties,
    own_components,
    shards_of,
    sound_parties,
    validated,
    validated_cells,
    whole_seed,
)
from partsong.methods.privacy_request import Privacy, RowPrivacy, masks_for, privacy_from, privacy_told
from partsong.methods.registry import (
    ALIGNED,
    ALIGNMENTS,
    LOCAL_STEPS,
    METHODS,
    MOST_ROUNDS,
    ONE_ROUND,
    PRIVATE_ROUNDS,
    alignment_for,
    start_of,
)
from partsong.privacy.accounting import Accounts
from partsong.privacy.exposure import exposures_of, worst_party
from partsong.privacy.ledger import SIMULATED, USUAL_DELTA, Spending, spent_from, without_names
from partsong.solvers.observed import ObservedRows
from partsong.training.loop import FAULTY, LEAVE_OUT, STOP, Attendance, LeftOut, Pursuit, Task, progress
from partsong.training.result import Finished, OnDemand, top_features
from partsong.training.simulation import (
    RoundReport,
    conclude_aloud,
    holding_interrupts,
    party_components,
    reports_of,
    simulation_by_name,
)
from partsong.training.stopping import HistoryRow, Run, Stop

# ---- federated settings -----------------------------------------------------------------------------------------
#
# What `FederatedNMF` may be asked for, and the program, masks and accounts that this means.


class FederatedSettings:
    """Settings of `FederatedNMF` by the names of its parameters."""

    n_components: int | None
    method: Any
    align: Any
    rounds: int | None
    local_steps: int | None
    start: str | None
    tol: float
    time_budget: float | None
    verbose: int
    n_jobs: int | None
    faulty: str
    missing: str
    privacy: Privacy | None
    masked: Any

    def _check_settings(self) -> Stop:
        """All that can be refused before any data are looked at."""
        require_method(self.method, align=self.align, start=self.start, local_steps=self.local_steps)
        if self.rounds is not None:
            whole_number("rounds", self.rounds)
        steps, budget = self.local_steps, self.time_budget
        require_privacy(self.privacy, self.masked, self.method, steps=steps, time_budget=budget)
        one_of("faulty", self.faulty, FAULTY)
        self._require_missing()
        require_verbosity(self.verbose)
        if self.n_jobs not in (None, -1):
            whole_number("n_jobs", self.n_jobs, " (None or -1: one per core)")
        return stop_of(self.tol, self.time_budget)

    def _require_missing(self) -> None:
        """Cells that are not known can be left out by games only."""
        plays = isinstance(getattr(self.method, "solver", None), ObservedRows) or self.method == "game"
        if one_of("missing", self.missing, MISSING) == "ignore" and not plays:
            raise ParameterError(
                'missing="ignore" is for method="game" and for Programs whose solver is ObservedRows, in which unknown '
                f"cells are not played; the method is {self.method!r}. Take a game, or fill the gaps."
            )

    def _program(self, shape: tuple[int, int]) -> Program:
        if not isinstance(self.method, str):
            rank = rank_of(self.method.rank, shape)
            if self.n_components is not None and self.n_components != rank:
                raise ParameterError(
                    f"n_components={self.n_components!r}, but the rank of the program is {rank}. "
                    "Leave n_components out, or make both the same."
                )
            return self.method
        return program_of(
            self.method,
            rank_of(self.n_components, shape),
            steps=self._steps(self.method),
            align=alignment_of(alignment_for(self.method, self.align)),
            start=start_of(self.method, self.start),
        )

    def _steps(self, method: str) -> int:
        return LOCAL_STEPS[method] if self.local_steps is None else int(self.local_steps)

    def _rounds(self) -> int:
        if isinstance(self.method, str) and self.method in ONE_ROUND:
            return 1
        usual = MOST_ROUNDS if self.privacy is None else PRIVATE_ROUNDS
        return usual if self.rounds is None else int(self.rounds)

    def _is_private(self) -> bool:
        """Whether what was released had noise, by the method or by `privacy`."""
        return self.privacy is not None or traits_of(self.method).release is not None

    def _protected(self, program: Program, n_parties: int) -> tuple[Program, Spending | None]:
        """The program with the noise that was asked for, and the accounts of a program that has noise."""
        delta, before = USUAL_DELTA, Accounts()
        if self.privacy is not None:
            program = self.privacy.program(program, self._rounds(), n_parties, bool(self.masked))
            delta, before = self.privacy.delta, self.privacy.spent
        traits = traits_of(program)
        if traits.release is None:
            return program, None
        return program, Spending(traits.release, delta, before, traits.max_releases)

    def _reduction(self, n_parties: int) -> Reduction:
        """Sums in the open, or masked."""
        masks: Reduction = masks_for(self.privacy, n_parties) if self.masked is True else self.masked or InTheOpen()
        return masks

    def _account(self, spending: Spending | None) -> None:
        """What the run has cost in privacy; what a simulation knows beside it is marked."""
        self.accounts_ = None if spending is None else spending.accounts
        self.epsilon_spent_ = math.inf if spending is None else spending.accounts.epsilon(spending.delta)
        self.privacy_report_: dict[str, Any] | None = None if spending is None else spending.told()
        self.simulated_ = SIMULATED if spending is not None else ()


# ---- federated --------------------------------------------------------------------------------------------------


class FederatedNMF(
    FederatedSettings,
    WeightsByParty,
    OnDemand,
    NonNegativeTransformer,
    ClassNamePrefixFeaturesOutMixin,
    TransformerMixin,
    BaseEstimator,
):
    """X_p ≈ W_p H for parties p = 1 … c who keep their rows and weights to themselves.

    method="exact" sums WᵀW and WᵀX over parties: the pooled factorization, whatever the split. All others let every
    party iterate alone and then agree on H: "fnmf-alone" finds out which component is which (Dalleiger & Gionis, 2025),
    "fedavg" averages by position, "fedprox" as well while it pulls parties to the model, "ipalm-once" and "mur-once"
    average a single time. "fnmf" begins like "fnmf-alone", and goes on like "exact" after one round. The secure methods
    of Qian et al. (2020) hold their steps back: "syn-sd" averages by position, "syn-ssd-u", "-v" and "-uv" sketch the
    steps of W, H or both and let W fit the mean of all H in every step, "asyn-sd" and "asyn-ssd-v" let nobody wait for
    others (here over a virtual clock, on which a party's work lasts in proportion to its rows). In a "game" rows of W
    stay with their party and play cells with columns of H, which travel (Singh, 2021). A Program value
    (`partsong.methods.recipes` has more) may be given instead of a name; it is run synchronously, whatever it is.

    This is a simulation: all parties run in this process, and their secrets are derived from random_state.

    Parameters
    ----------
    n_components : int or None
        Rank k of the shared model; None takes that of a Program, or min(n, m, 20) over all parties' rows.
    method : {"exact", "fnmf", "fnmf-alone", "fedavg", "fedprox", "ipalm-once", "mur-once", "syn-sd", "syn-ssd-u", \
"syn-ssd-v", "syn-ssd-uv", "asyn-sd", "asyn-ssd-v", "game"} or Program
        How the parties work together.
    align : {"assignment", "partial-assignment", "sinkhorn", "partial-sinkhorn", "nearest", "softmax", "identity"}
        "fnmf", "fnmf-alone": how components are matched; an alignment of your own may be given, too. None is
        "assignment" for "fnmf" and "sinkhorn" for "fnmf-alone".
    rounds : int or None
        The most rounds; None is 100, and 10 with `privacy`, whose noise grows with their number. A round is one
        exchange; local_steps + 1 of them for "syn-ssd-…", and as many arrivals as there are parties for "asyn-…".
    local_steps : int or None
        Sweeps ("exact") or iterations (all others) at a party between exchanges. None: 3 for "exact" and "fedavg", 10
        for "fedprox", "syn-…" and "asyn-…", 100 for "fnmf" and "fnmf-alone", 1000 for those that average once. An
        exchange is never broken off by a time budget.
    start : {"common", "independent"} or None
        One H for all and W fitted to it first, or an H of its own at every party. None: as the method does, independent
        for "fnmf", "fnmf-alone" and those that average once. "exact", "syn-…" and "asyn-…" always have one for all.
    tol, time_budget, random_state, verbose, dtype :
        As in `NMF`. With tol=0 all rounds are run. Without dtype, one party in float64 makes all compute in float64.
    n_jobs : int or None
        Parties that run at the same time; None or -1 is one per core. It does not change a bit of the result.
    faulty : {"stop", "leave out"}
        What a party leads to whose data cannot be used, whose work ends in an error of ours, or whose upload is
        refused: an error, or a fit without it and a `LeftOutWarning` that says why. One with bad data (NaN, no rows,
        other columns than most) is then not there at all; any other is left out of that round and asked again.
    missing : {"refuse", "ignore"}
        "game", or a Program that plays, only: with "ignore", NaN in dense data and whatever sparse data do not store
        are unknown cells, which nobody plays. Errors are then over known cells, of which every party needs one, and
        what `components_` says of a column that no party knows means nothing.
    privacy : None, PartyPrivacy or RowPrivacy
        Differential privacy (`partsong.methods.privacy_request`): of all data of a party, where each sends its own H
        ("fnmf-alone", "fedavg", "fedprox", "ipalm-once", "mur-once", "syn-sd"); or of every single row, for "exact".
        All rounds are then run, whatever tol, and the model is that of the last: errors do not leave a party.
    masked : bool or MaskedSum
        Whether parties add masks that cancel in the sum, so that nobody sees a single upload (at least three parties;
        extra "privacy"); for methods that send sums or means by position. A MaskedSum has bounds of your own.

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
    exposure_ : Exposure, exposures_ : dict of PartyExposure
        What may be computed from all that was sent, for the party that it is worst for, and for each with its numbers:
        "bounded" (noise), "unknown" (only H was sent), "guess", "membership", "entries" or "rows" (docs/privacy.md).
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

    fitted = (
        "components_", "component_shares_", "n_components_", "parties_", "n_parties_", "n_samples_", "n_iter_",
        "party_components_", "alignments_", "outcome_", "history_", "left_out_", "relative_error_",
        "explained_variance_", "seed_", "solver_", "exposure_", "exposures_", "accounts_", "epsilon_spent_",
        "privacy_report_", "simulated_",
    )  # fmt: skip

    def __init__(
        self,
        n_components: int | None = None,
        *,
        method: str | Program = "exact",
        align: str | Alignment | None = None,
        rounds: int | None = None,
        local_steps: int | None = None,
        start: str | None = None,
        tol: float = 1e-4,
        time_budget: float | None = None,
        random_state: Any = None,
        verbose: int = 0,
        dtype: Any = None,
        n_jobs: int | None = None,
        faulty: str = STOP,
        missing: str = "refuse",
        privacy: Privacy | None = None,
        masked: Any = False,
    ) -> None:
        self.n_components = n_components
        self.method = method
        self.align = align
        self.rounds = rounds
        self.local_steps = local_steps
        self.start = start
        self.tol = tol
        self.time_budget = time_budget
        self.random_state = random_state
        self.verbose = verbose
        self.dtype = dtype
        self.n_jobs = n_jobs
        self.faulty = faulty
        self.missing = missing
        self.privacy = privacy
        self.masked = masked

    def fit(self, X: Any, y: Any = None, *, names: Any = None, parties: Any = None) -> FederatedNMF:
        """Learn shared components from a list with one matrix per party (`names` may name them), a mapping of names to
        matrices, or one matrix and `parties`, a label for each of its rows.

        Columns of data frames are put in the order of the first party that names them; names that are missing at a
        party are an error. Arrays, which have no names, are taken as they are. Tensors are computed with torch, if all
        parties have tensors on one device.
        """
        with held() as interrupts:
            pursuit, attendance = self._prepare(X, names, parties)
            pursuit.follower.interrupts = interrupts
            for _ in self._reports(pursuit, attendance):
                pass
        return self

    def iterate(self, X: Any, y: Any = None, *, names: Any = None, parties: Any = None) -> Iterator[RoundReport]:
        """`fit`, one round at a time: a report after each, with its history row, H as it stands, and the outcome if it
        was the last.

            for report in model.iterate(parts):
                if np.linalg.norm(rows - model.inverse_transform(model.transform(rows))) < enough:
                    break

        Between rounds, and however the loop is left, the model is fitted as if the fit had ended there: at the best
        round so far, with what that takes computed when it is asked for. Leaving early counts as interrupted. The first
        Ctrl-C within a round makes it the last. What the caller does between rounds, and before the first, counts
        neither in `history_` nor against `time_budget`, which are about the time of the fit itself.
        """
        pursuit, attendance = self._prepare(X, names, parties)
        return holding_interrupts(pursuit, self._reports(pursuit, attendance), time.perf_counter())

    def transform(self, X: Any) -> np.ndarray:
        """W for new rows at any party: the non-negative least squares fit to the shared components, in their precision.

        Named columns must come in the order of `feature_names_in_`. Each row is solved alone; in other company its
        products may be rounded otherwise. With missing="ignore" it is fitted to its known cells; without any, w = 0.
        """
        check_is_fitted(self)
        precision = self.components_.dtype
        matrix: Matrix
        if self.missing == "ignore":
            matrix = validated_cells(self, X, reset=False, dtype=precision)
        else:
            matrix = as_matrix(validated(self, X, reset=False, dtype=precision), precision)
        with runtime.kernels_on(runtime.available()):
            return self.solver_.solve_rows(matrix, np.ascontiguousarray(self.components_.T))

    def top_features(self, n: int = 10) -> list[list[str | int]]:
        """The n features with the largest values in each component: names where known, else column numbers."""
        check_is_fitted(self)
        return top_features(self.components_, getattr(self, "feature_names_in_", None), whole_number("n", n))

    def inverse_transform(self, W: Any) -> np.ndarray:
        """W H."""
        check_is_fitted(self)
        return given_weights(W, len(self.components_)) @ self.components_

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the shared model (H, names, settings, error; never W or rows); `NMF.load` reads it as well.

        Of its settings `rounds` is the number allowed and `iterations` the number made. A model that was loaded, and
        not fitted again, is written with all that its file said of its fit.
        """
        check_is_fitted(self)
        told: dict[str, Any] = {"method": repr(self.method)}
        if isinstance(self.method, str):
            told = {
                "method": self.method,
                "local_steps": self._steps(self.method),
                "start": start_of(self.method, self.start),
                **({"align": str(alignment_for(self.method, self.align))} if self.method in ALIGNED else {}),
            }
        told |= {
            "rounds": self._rounds(),
            "tol": float(self.tol),
            "faulty": self.faulty,
            "parties": self.n_parties_,
        }
        told |= {} if self.missing == "refuse" else {"missing": self.missing}
        if self.privacy_report_ is not None:
            told |= {"privacy": privacy_told(self.privacy), "privacy_spent": without_names(self.privacy_report_)}
        elif self.n_samples_ is not None:
            told |= {"n_samples": self.n_samples_}
        told |= {"masked": True} if self.masked else {}
        if isinstance(self.privacy, RowPrivacy):
            del told["local_steps"]
        save_fitted(self, path, {**told, "dtype": str(self.components_.dtype), **penalties_told(self.solver_)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FederatedNMF:
        """A fitted estimator from the model file of a federation, ready to transform; also from the command line's.

        What is not in the file is not there: history, names and components of single parties.
        """
        estimator = cls()
        settings = fill_from_file(estimator, path)
        method = settings.get("method")
        if method not in METHODS:
            raise ParameterError(
                f"{path}: this model was not learned by one of the methods {', '.join(METHODS)}, but by "
                f"{str(method)[:40]!r}. partsong.NMF.load(path) transforms rows with any model."
            )
        told = ("rounds", "local_steps", "start", "tol", "faulty")
        asked = {name: settings[name] for name in told if name in settings}
        asked["align"] = settings.get("align") if method in ALIGNED and settings.get("align") in ALIGNMENTS else None
        asked["missing"] = settings.get("missing") or "refuse"
        try:
            asked |= {"privacy": privacy_from(settings.get("privacy")), "masked": settings.get("masked", False)}
            estimator.privacy_report_ = spent_from(settings.get("privacy_spent"))
            estimator.epsilon_spent_ = (estimator.privacy_report_ or {}).get("epsilon_spent", math.inf)
            estimator.accounts_, estimator.simulated_ = None, ()
            estimator.set_params(n_components=estimator.n_components_, method=method, **asked)._check_settings()
            estimator.n_parties_ = whole_number("parties", settings.get("parties", 1))
            plain = solver_told(settings)
            estimator.solver_ = ObservedRows(plain) if estimator.missing == "ignore" else plain
        except ParameterError as error:
            raise FormatError(f"{path}: its settings are not those of a federation: {error} Fit again.") from error
        return estimator

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.missing == "ignore"
        return tags

    def _prepare(self, X: Any, names: Any, parties: Any) -> tuple[Pursuit, Attendance]:
        """All that can be refused is refused here, before the first round."""
        began = time.perf_counter()
        stop, seed = self._check_settings(), whole_seed(self.random_state)
        matrices, labels = named_parties(X, names) if parties is None else by_party(X, parties, names)
        precision, away, has_gaps = precision_of(self.dtype), dict[str, str](), self.missing == "ignore"
        if self.faulty == LEAVE_OUT:
            matrices, labels, away = sound_parties(matrices, labels, precision, has_gaps=has_gaps)
        shards = shards_of(self, matrices, labels, seed, precision, has_gaps=has_gaps)
        rows, columns = sum(shard.matrix.shape[0] for shard in shards), shards[0].matrix.shape[1]
        program = self._program((columns if self._is_private() else rows, columns))
        engine = Sequential() if self.n_jobs == 1 else Parallel(0 if self.n_jobs in (None, -1) else int(self.n_jobs))
        rounds, reduction = self._rounds(), self._reduction(len(shards))
        program, spending = self._protected(program, len(shards))
        schedule = Schedule(rounds, seed, faulty=self.faulty)
        task = simulation_by_name(self.method, program, shards, rounds, schedule, stop, engine, reduction, spending)
        return Pursuit.of(task, began=began), Attendance(away)

    def _reports(self, pursuit: Pursuit, attendance: Attendance) -> Iterator[RoundReport]:
        task = pursuit.task
        own: dict[str, Array] = {}
        self._forget()
        forget_origin(self)

        def watch(done: Round, row: HistoryRow) -> None:
            own.clear()
            own.update(party_components(done.checkpoint))
            attendance.note(done, row)
            bar(done, row)

        def conclude() -> None:
            run = pursuit.course.run()
            self._keep(task, run, conclude_aloud(task, run), own)
            self._account(task.spending)
            self.left_out_: list[LeftOut] = list(attendance.left_out)

        title = f"{self.method if isinstance(self.method, str) else 'program'}, {len(task.shards)} parties"
        with progress(self.verbose, task.schedule.rounds, self.time_budget, title) as bar:
            pursuit.follower.watch = watch
            for report in reports_of(pursuit):
                self._leave(conclude)
                yield report
        self._leave(conclude)
        self._settle()

    def _keep(self, task: Task, run: Run, done: Finished, own: dict[str, Array]) -> None:
        self.components_ = done.H
        self.component_shares_ = done.shares
        self.n_components_ = len(done.H)
        self.parties_ = [shard.name for shard in task.shards]
        self.n_parties_ = len(self.parties_)
        self.n_samples_: int | None = sum(shard.matrix.shape[0] for shard in task.shards)
        self.party_components_, self.alignments_ = own_components(done.H, own, self.parties_)
        self.n_iter_ = run.rounds
        self.outcome_ = run.outcome
        self.history_: list[HistoryRow] = list(run.history)
        self.relative_error_ = done.relative_error
        self.explained_variance_ = 1.0 - done.relative_error**2
        self.seed_ = task.schedule.seed
        self.solver_ = task.program.solver
        self.exposures_ = exposures_of(task.program, task.shards, len(run.history))
        self.exposure_ = worst_party(self.exposures_.values()).level
