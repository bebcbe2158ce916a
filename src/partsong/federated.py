"""`partsong.FederatedNMF`: parties' rows in, shared components out; simulated in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from partsong import recipes, threads
from partsong.core import Matrix, Program, Schedule, Shard
from partsong.data.check import require_factorizable
from partsong.data.matrix import as_matrix, float_type
from partsong.data.partition import party_names
from partsong.engines.parallel import Parallel
from partsong.engines.sequential import Sequential
from partsong.errors import FeatureError, ParameterError, PartsongError, ShapeError, first_few
from partsong.finished import Finished
from partsong.progress import progress
from partsong.running import HistoryRow, Run, Stop
from partsong.saving import save_fitted
from partsong.simulation import simulate
from partsong.streams import key
from partsong.validation import whole_seed

METHODS = ("exact", "fedavg")
STARTS = ("common", "independent")


class FederatedNMF(BaseEstimator):
    """X_p ≈ W_p H for parties p = 1 … c who keep their rows and weights to themselves.

    method="exact" sums WᵀW and WᵀX over parties: the pooled factorization, whatever the split. method="fedavg" lets
    every party iterate alone and averages H by position. A Program value may be given instead of a name.

    Parameters
    ----------
    n_components : int
        Rank k of the shared model.
    method : {"exact", "fedavg"} or Program
        How the parties work together.
    rounds : int
        The most exchanges.
    local_steps : int
        Sweeps ("exact") or iterations ("fedavg") at a party between exchanges.
    start : {"common", "independent"}
        "fedavg" only: one H for all and W fitted to it first, or an H of its own at every party.
    tol, time_budget, random_state, verbose, dtype :
        As in `NMF`. With tol=0 all rounds are run.
    n_jobs : int or None
        Parties that run at the same time; None is one per core. It does not change a bit of the result.

    Attributes
    ----------
    components_ : array (k, m)
        H; each row has Euclidean norm 1, sorted by explained share.
    history_ : list of rows
        (iteration, seconds, relative_error, bytes_up, bytes_down) per round; bytes_up over all parties, bytes_down
        for each. For "fedavg" the error is computed in simulation, with weights refitted at each party.
    relative_error_, explained_variance_, component_shares_, n_iter_, outcome_ :
        As in `NMF`, over all parties' rows.
    """

    def __init__(
        self,
        n_components: int = 10,
        *,
        method: str | Program = "exact",
        rounds: int = 100,
        local_steps: int = 3,
        start: str = "common",
        tol: float = 1e-4,
        time_budget: float | None = None,
        random_state: Any = None,
        verbose: int = 0,
        dtype: Any = None,
        n_jobs: int | None = None,
    ) -> None:
        self.n_components = n_components
        self.method = method
        self.rounds = rounds
        self.local_steps = local_steps
        self.start = start
        self.tol = tol
        self.time_budget = time_budget
        self.random_state = random_state
        self.verbose = verbose
        self.dtype = dtype
        self.n_jobs = n_jobs

    def fit(self, X: Sequence[Any], y: Any = None, *, names: Sequence[str] | None = None) -> FederatedNMF:
        """Learn shared components from a list with one matrix per party."""
        began = time.perf_counter()
        program, stop = self._program(), Stop(self.tol, self.time_budget)
        seed = whole_seed(self.random_state)
        shards = self._shards(X, names, seed)
        run, done = self._run(program, shards, seed, stop, began)
        self._keep(run, done, shards)
        self.seed_ = seed
        columns = next((list(part.columns) for part in X if hasattr(part, "columns")), None)
        if columns is not None:
            self.feature_names_in_ = np.array([str(name) for name in columns], dtype=object)
        return self

    def transform(self, X: Any) -> np.ndarray:
        """W for new rows at any party: the non-negative least squares fit to the shared components."""
        check_is_fitted(self)
        values = _at_party("the data to transform", X, self.dtype)
        if values.shape[1] != self.n_features_in_:
            raise ShapeError(
                f"X has {values.shape[1]} features, but FederatedNMF is expecting {self.n_features_in_} features "
                "as input."
            )
        with threads.kernels_on(threads.available()):
            H = values.native(self.components_)
            return recipes.plain(recipes.solver_rules()["hals"]).solve_rows(values, np.ascontiguousarray(H.T))

    def inverse_transform(self, W: Any) -> np.ndarray:
        """W H."""
        check_is_fitted(self)
        weights = np.asarray(W)
        if weights.ndim != 2 or weights.shape[1] != len(self.components_):
            raise ShapeError(f"Weights need {len(self.components_)} columns, one per component; got {weights.shape}.")
        return weights @ self.components_

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the shared model (H, names, settings, error; never W or rows); `NMF.load` reads it."""
        check_is_fitted(self)
        method = self.method if isinstance(self.method, str) else repr(self.method)
        told = {"method": method, "rounds": int(self.rounds), "local_steps": int(self.local_steps), "start": self.start}
        save_fitted(self, path, {**told, "tol": float(self.tol), "parties": len(self.parties_)})

    def _program(self) -> Any:
        for name, value in (
            ("n_components", self.n_components),
            ("rounds", self.rounds),
            ("local_steps", self.local_steps),
        ):
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise ParameterError(f"{name} must be a whole number of at least 1; got {value!r}.")
        if self.start not in STARTS:
            raise ParameterError(f"Unknown start {self.start!r}; choose one of {', '.join(STARTS)}.")
        if self.method == "exact":
            return recipes.shared_statistics(int(self.n_components), sweeps=int(self.local_steps))
        if self.method == "fedavg":
            steps, is_independent = int(self.local_steps), self.start == "independent"
            return recipes.fedavg(int(self.n_components), steps=steps, independent=is_independent)
        if isinstance(self.method, str):
            raise ParameterError(f"Unknown method {self.method!r}; choose one of {', '.join(METHODS)}, or a Program.")
        return self.method

    def _shards(self, matrices: Sequence[Any], names: Sequence[str] | None, seed: int) -> list[Shard]:
        if hasattr(matrices, "shape") or isinstance(matrices, str) or not isinstance(matrices, Sequence):
            raise ShapeError("fit takes a list with one matrix per party: fit([X_1, X_2, …]).")
        if len(matrices) == 0:
            raise ParameterError("A federation needs at least one party; the list is empty.")
        labels = list(names) if names is not None else party_names(len(matrices))
        if len(labels) != len(matrices):
            raise ParameterError(f"{len(labels)} names were given for {len(matrices)} parties.")
        _require_same_columns(labels, matrices)
        dtype = self.dtype if self.dtype is not None else _common_type(matrices)
        return [
            Shard(name, _at_party(f"party {name!r}", X, dtype), key(seed, "secret", name))
            for name, X in zip(labels, matrices, strict=True)
        ]

    def _run(self, program: Any, shards: list[Shard], seed: int, stop: Stop, began: float) -> tuple[Run, Finished]:
        engine = Sequential() if self.n_jobs == 1 else Parallel(self.n_jobs or 0)
        schedule = Schedule(int(self.rounds), seed)
        with progress(self.verbose, int(self.rounds), self.time_budget, f"{len(shards)} parties") as bar:
            return simulate(program, shards, schedule, stop=stop, engine=engine, began=began, watch=bar)

    def _keep(self, run: Run, done: Finished, shards: list[Shard]) -> None:
        self.components_ = done.H
        self.component_shares_ = done.shares
        self.n_features_in_ = done.H.shape[1]
        self.parties_ = [shard.name for shard in shards]
        self.n_iter_ = len(run.history)
        self.outcome_ = run.outcome
        self.history_: list[HistoryRow] = list(run.history)
        self.relative_error_ = done.relative_error
        self.explained_variance_ = 1.0 - done.relative_error**2


def _at_party(who: str, X: Any, dtype: Any) -> Matrix:
    """A party's matrix, checked; an error says whose it is."""
    try:
        values = X.to_numpy() if hasattr(X, "to_numpy") else X
        if not hasattr(values, "tocsr") and not hasattr(values, "device"):
            values = np.asanyarray(values)
        require_factorizable(values, dtype=dtype)
        return as_matrix(values, dtype)
    except PartsongError as error:
        raise type(error)(f"In {who}: {error}") from error


def _common_type(matrices: Sequence[Any]) -> Any:
    kinds = {float_type(getattr(X, "dtype", np.asarray(X).dtype)) for X in matrices if not hasattr(X, "device")}
    return None if not kinds else max(kinds, key=lambda kind: kind.itemsize)


def _require_same_columns(names: Sequence[str], matrices: Sequence[Any]) -> None:
    """Named columns must agree in name and order."""
    lists = {name: list(X.columns) for name, X in zip(names, matrices, strict=True) if hasattr(X, "columns")}
    if not lists:
        return
    first, expected = next(iter(lists.items()))
    for name, columns in lists.items():
        if columns == expected:
            continue
        missing = [str(c) for c in expected if c not in set(columns)]
        extra = [str(c) for c in columns if c not in set(expected)]
        if not missing and not extra:
            raise FeatureError(f"Party {name!r} holds the columns of {first!r} in another order. Reorder them.")
        said = [f"lacks {first_few(missing[:5], len(missing), 'column')}"] if missing else []
        said += [f"has {first_few(extra[:5], len(extra), 'other column')}"] if extra else []
        raise FeatureError(
            f"Party {name!r} {' and '.join(said)}, compared with {first!r}. Agree on one list of columns."
        )
