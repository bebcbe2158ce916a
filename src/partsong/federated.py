"""`partsong.FederatedNMF`: parties' rows in, shared components out; simulated in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin
from sklearn.utils.validation import check_is_fitted

from partsong import threads
from partsong.core import Alignment, Array, Program, Round, Schedule, Shard
from partsong.data.matrix import as_matrix
from partsong.engines.parallel import Parallel
from partsong.engines.sequential import Sequential
from partsong.errors import ParameterError
from partsong.finished import Finished, top_features
from partsong.given import given_weights
from partsong.methods import LOCAL_STEPS, METHODS, ONE_ROUND, STARTS, start_of
from partsong.parties import by_party, own_components, shards_of
from partsong.progress import progress
from partsong.running import HistoryRow, Run, Stop
from partsong.saving import penalties_told, save_fitted
from partsong.settings import (
    alignment_of,
    one_of,
    precision_of,
    program_of,
    rank_of,
    require_verbosity,
    stop_of,
    whole_number,
)
from partsong.simulation import party_components, simulate
from partsong.validation import validated, whole_seed

PROGRAM = (
    "rank", "solver", "aggregation", "start_party", "start_server", "local", "finish", "components", "metrics",
)  # fmt: skip


class FederatedNMF(ClassNamePrefixFeaturesOutMixin, BaseEstimator):
    """X_p ≈ W_p H for parties p = 1 … c who keep their rows and weights to themselves.

    method="exact" sums WᵀW and WᵀX over parties: the pooled factorization, whatever the split. All others let every
    party iterate alone and then agree on H: "fnmf" finds out which component is which (Dalleiger & Gionis, 2025),
    "fedavg" averages by position, "fedprox" as well while it pulls parties to the model, "ipalm-once" and "mur-once"
    average a single time. A Program value (`partsong.recipes` has more) may be given instead of a name.

    This is a simulation: all parties run in this process, and their secrets are derived from random_state.

    Parameters
    ----------
    n_components : int or None
        Rank k of the shared model; None takes that of a Program, or min(n, m, 20) over all parties' rows.
    method : {"exact", "fnmf", "fedavg", "fedprox", "ipalm-once", "mur-once"} or Program
        How the parties work together.
    align : {"assignment", "partial-assignment", "sinkhorn", "partial-sinkhorn", "nearest", "softmax", "identity"}
        "fnmf" only: how components are matched (None: assignment); an alignment of your own may be given as well.
    rounds : int
        The most exchanges.
    local_steps : int or None
        Sweeps ("exact") or iterations (all others) at a party between exchanges. None: 3 for "exact" and "fedavg", 10
        for "fedprox", 100 for "fnmf", 1000 for those that average once. A round is never broken off by a time budget.
    start : {"common", "independent"} or None
        One H for all and W fitted to it first, or an H of its own at every party. None: as the method does, independent
        for "fnmf" and those that average once. "exact" always has one for all.
    tol, time_budget, random_state, verbose, dtype :
        As in `NMF`. With tol=0 all rounds are run. Without dtype, one party in float64 makes all compute in float64.
    n_jobs : int or None
        Parties that run at the same time; None or -1 is one per core. It does not change a bit of the result.

    Attributes
    ----------
    components_ : array (k, m)
        H; sorted by explained share, and each row of Euclidean norm 1 (with penalties: on the scale they choose).
    history_ : list of rows
        (iteration, seconds, relative_error, bytes_up, bytes_down, drift, aligned_drift) per round; bytes_up over all
        parties, bytes_down for each. Unless the method is "exact", errors are computed in simulation, with weights
        refitted at each party. Drifts are Σ_p ‖H_p − H‖² / ‖H‖², by position and after alignment.
    party_components_ : dict of arrays (k, m)
        The H_p that parties ended with, on the scale of `components_`; that itself where they have none of their own.
    alignments_ : dict of arrays (k, k)
        P_p by which P_p · party_components_[p] lies in the order of `components_`.
    relative_error_, explained_variance_, component_shares_, n_iter_, outcome_ :
        As in `NMF`, over all parties' rows.
    solver_ : row solver
        How rows are fitted to the model, with the penalties of the program.
    """

    def __init__(
        self,
        n_components: int | None = None,
        *,
        method: str | Program = "exact",
        align: str | Alignment | None = None,
        rounds: int = 100,
        local_steps: int | None = None,
        start: str | None = None,
        tol: float = 1e-4,
        time_budget: float | None = None,
        random_state: Any = None,
        verbose: int = 0,
        dtype: Any = None,
        n_jobs: int | None = None,
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

    def fit(
        self, X: Any, y: Any = None, *, names: Sequence[str] | None = None, parties: Sequence[Any] | None = None
    ) -> FederatedNMF:
        """Learn shared components from a list with one matrix per party, or from one matrix and a label for each row.

        Columns of data frames are put in the order of the first party that names them; names that are missing at a
        party are an error. Arrays, which have no names, are taken as they are. Tensors are computed with torch, if all
        parties have tensors on one device.
        """
        began = time.perf_counter()
        stop, seed = self._check_settings(), whole_seed(self.random_state)
        if parties is not None:
            X, names = by_party(X, parties, names)
        shards = shards_of(self, X, names, seed, precision_of(self.dtype))
        rows, columns = sum(shard.matrix.shape[0] for shard in shards), shards[0].matrix.shape[1]
        program = self._program((rows, columns))
        run, done = self._run(program, shards, seed, stop, began)
        self._keep(run, done, shards)
        self.seed_ = seed
        self.solver_ = program.solver
        return self

    def transform(self, X: Any) -> np.ndarray:
        """W for new rows at any party: the non-negative least squares fit to the shared components, in their precision.

        Named columns must come in the order of `feature_names_in_`. Each row is solved alone; in other company its
        products may be rounded otherwise.
        """
        check_is_fitted(self)
        precision = self.components_.dtype
        matrix = as_matrix(validated(self, X, reset=False, dtype=precision), precision)
        with threads.kernels_on(threads.available()):
            return self.solver_.solve_rows(matrix, np.ascontiguousarray(self.components_.T))

    def top_features(self, n: int = 10) -> list[list[str | int]]:
        """The n features with the largest values in each component: names where known, else column numbers."""
        check_is_fitted(self)
        return top_features(self.components_, getattr(self, "feature_names_in_", None), whole_number("n", n))

    @property
    def _n_features_out(self) -> int:
        return int(self.components_.shape[0])

    def inverse_transform(self, W: Any) -> np.ndarray:
        """W H."""
        check_is_fitted(self)
        return given_weights(W, len(self.components_)) @ self.components_

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the shared model (H, names, settings, error; never W or rows); `NMF.load` reads it."""
        check_is_fitted(self)
        told: dict[str, Any] = {"method": repr(self.method)}
        if isinstance(self.method, str):
            told = {
                "method": self.method,
                "local_steps": self._steps(self.method),
                "start": start_of(self.method, self.start),
                **({"align": str(self.align or "assignment")} if self.method == "fnmf" else {}),
            }
        told |= {"rounds": self.n_iter_, "tol": float(self.tol), "parties": len(self.parties_)}
        save_fitted(self, path, {**told, "dtype": str(self.components_.dtype), **penalties_told(self.solver_)})

    def _check_settings(self) -> Stop:
        """All that can be refused before any data are looked at."""
        if isinstance(self.method, str):
            one_of("method", self.method, METHODS)
        elif isinstance(self.method, type) or not all(hasattr(self.method, name) for name in PROGRAM):
            raise ParameterError(f"method must be one of {', '.join(METHODS)}, or a Program; got {self.method!r}.")
        if self.start is not None:
            one_of("start", self.start, STARTS)
            if self.method == "exact" and self.start == "independent":
                raise ParameterError('method="exact" has one start for all parties: start must be None or "common".')
        self._require_settings_with_effect()
        whole_number("rounds", self.rounds)
        if self.local_steps is not None:
            whole_number("local_steps", self.local_steps, " (None: as the method does)")
        require_verbosity(self.verbose)
        if self.n_jobs not in (None, -1):
            whole_number("n_jobs", self.n_jobs, " (None or -1: one per core)")
        return stop_of(self.tol, self.time_budget)

    def _require_settings_with_effect(self) -> None:
        """A setting that would be ignored is a mistake."""
        if self.align is not None:
            alignment_of(self.align)
            if self.method != "fnmf":
                raise ParameterError(f'align is for method="fnmf" only; the method is {self.method!r}. Leave it out.')
        if not isinstance(self.method, str):
            ignored = [name for name in ("local_steps", "start") if getattr(self, name) is not None]
            if ignored:
                raise ParameterError(
                    f"{' and '.join(ignored)} are part of a Program: set them there, or leave them out."
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
            align=alignment_of("assignment" if self.align is None else self.align),
            independent=start_of(self.method, self.start) == "independent",
        )

    def _steps(self, method: str) -> int:
        return LOCAL_STEPS[method] if self.local_steps is None else int(self.local_steps)

    def _run(self, program: Program, shards: list[Shard], seed: int, stop: Stop, began: float) -> tuple[Run, Finished]:
        engine = Sequential() if self.n_jobs == 1 else Parallel(0 if self.n_jobs in (None, -1) else int(self.n_jobs))
        rounds = 1 if isinstance(self.method, str) and self.method in ONE_ROUND else int(self.rounds)
        schedule = Schedule(rounds, seed)
        own: dict[str, Array] = {}

        def watch(done: Round, row: HistoryRow) -> None:
            own.update(party_components(done.checkpoint))
            bar(done, row)

        with progress(self.verbose, rounds, self.time_budget, f"{len(shards)} parties") as bar:
            run, done = simulate(program, shards, schedule, stop=stop, engine=engine, began=began, watch=watch)
        self.party_components_, self.alignments_ = own_components(done.H, own, [shard.name for shard in shards])
        return run, done

    def _keep(self, run: Run, done: Finished, shards: list[Shard]) -> None:
        self.components_ = done.H
        self.component_shares_ = done.shares
        self.n_components_ = len(done.H)
        self.parties_ = [shard.name for shard in shards]
        self.n_iter_ = len(run.history)
        self.outcome_ = run.outcome
        self.history_: list[HistoryRow] = list(run.history)
        self.relative_error_ = done.relative_error
        self.explained_variance_ = 1.0 - done.relative_error**2
