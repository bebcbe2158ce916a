"""From the last round to a model: scale, order, weights, error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from partsong import kernels
from partsong.core.interfaces import Array, Program, RowSolver, Shard
from partsong.core.runtime import held
from partsong.training.stopping import Run

Result = TypeVar("Result")

ROUNDING = 1e-15
"""A share of ‖X‖ that is nothing."""


class Gathering(Protocol):
    """Who completes a model together, each with shards of its own, and how what one has becomes what all have."""

    def jointly(self, work: Callable[[], Result]) -> Result:
        """work() here, which fails for everybody where it fails for one."""

    def total(self, array: np.ndarray) -> np.ndarray:
        """Σ over all, the same bits everywhere."""


@dataclass(frozen=True, slots=True)
class Alone:
    """All shards are here."""

    def jointly(self, work: Callable[[], Result]) -> Result:
        """work()."""
        return work()

    def total(self, array: np.ndarray) -> np.ndarray:
        """As it is."""
        return array


@dataclass(frozen=True, slots=True)
class Finished:
    """H (k × m) on its stated scale and in order, W per party, explained shares, and the error over all rows."""

    H: np.ndarray
    weights: dict[str, Array]
    shares: np.ndarray
    squared_error: float
    squared_norm: float

    @property
    def W(self) -> Array:
        """The weights of the only party."""
        (weights,) = self.weights.values()
        return weights

    @property
    def relative_error(self) -> float:
        """‖X − W H‖ / ‖X‖; zero for a matrix of zeros."""
        return float(np.sqrt(self.squared_error / self.squared_norm)) if self.squared_norm > 0 else 0.0


class OnDemand:
    """What a fit leaves behind, worked out when it is first asked for: an estimator between two rounds of its fit.

    `fitted` are the names of these attributes.
    """

    fitted: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name in self.fitted and "_unfinished" in self.__dict__:
            self._settle()
            return self.__dict__[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __sklearn_is_fitted__(self) -> bool:
        return any(name in self.__dict__ for name in (*self.fitted, "_unfinished"))

    def __getstate__(self) -> Any:
        """Copies and pickles hold the fitted model, not the data that it has yet to be worked out from."""
        self._settle()
        return super().__getstate__()

    def _forget(self) -> None:
        for name in (*self.fitted, "_unfinished"):
            self.__dict__.pop(name, None)

    def _leave(self, work: Callable[[], None]) -> None:
        """Another model, not yet worked out; `work` sets all that is in `fitted`."""
        self._forget()
        self._unfinished = work

    def _settle(self) -> None:
        """Work it out now, if need be; where a second Ctrl-C breaks that off, it can be asked for again."""
        if "_unfinished" in self.__dict__:
            with held():
                self._unfinished()
            self.__dict__.pop("_unfinished", None)


def complete(
    solver: RowSolver,
    shards: Sequence[Shard],
    Ht: Array,
    rescale: bool,
    among: Gathering = Alone(),
    keeps_order: bool = False,
) -> Finished:
    """Put H on its scale, solve for every W as `transform` does, and sort by explained share.

    Without penalties rows of H get Euclidean norm 1. W is solved for the sorted H, so that transforming the same
    rows later gives the same numbers; only sums over parties (k × k, and two numbers) are needed, which are those of
    everybody `among` whom the shards are. Where components depend on each other W is not unique, and the order is that
    of a nearby solution. One that `keeps_order` is not sorted: with differential privacy an order by shares, which are
    known from all rows, would tell of them.
    """

    def solved(Ht: Array, exactly: bool = True) -> tuple[dict[str, Array], np.ndarray, np.ndarray]:
        weights = among.jointly(lambda: _solve(solver, shards, Ht, exactly))
        gram = among.total(_gram(weights, Ht))
        return weights, _shares(gram, Ht), gram

    if rescale:
        Ht = _unit_columns(Ht)
    if not keeps_order:
        _, shares, gram = solved(Ht, exactly=False)
        if not rescale:
            norm = among.total(np.array([sum(shard.matrix.squared_norm for shard in shards)]))
            Ht = _without_rounding(Ht, gram, float(norm[0]))
        Ht = _sorted(Ht, shares)
    weights, shares, _ = solved(Ht)
    if not keeps_order and (np.diff(shares) > 0).any():  # close calls
        Ht = _sorted(Ht, shares)
        weights, shares, _ = solved(Ht)
    error, norm = among.total(among.jointly(lambda: _squares(shards, weights, Ht)))
    H = np.ascontiguousarray(kernels.of(Ht).to_numpy(Ht).T)
    return Finished(H, weights, shares, float(np.maximum(0.0, error)), float(norm))


def finish(
    program: Program, solver: RowSolver, shards: Sequence[Shard], run: Run, start_H: Array, keeps_order: bool = False
) -> Finished:
    """`complete` from the best round of a run, or from the start where not even one round was finished."""
    H = start_H if run.best is None else program.components(run.best)
    return complete(solver, shards, kernels.of(H).rows_of(H), scale_is_free(solver), keeps_order=keeps_order)


def scale_is_free(solver: RowSolver) -> bool:
    """Whether W H alone matters: not under penalties, nor for a solver without any, whose weights are shares."""
    return not any(getattr(solver, penalty, True) for penalty in ("penalty_W", "penalty_H"))


def _solve(solver: RowSolver, shards: Sequence[Shard], Ht: Array, exactly: bool) -> dict[str, Array]:
    return {s.name: solver.solve_rows(s.matrix, s.matrix.native(Ht), exactly=exactly) for s in shards}


def _sorted(F: Array, shares: np.ndarray) -> Array:
    """Columns of F by falling share, in contiguous memory."""
    order = np.argsort(-shares, kind="stable")
    return kernels.of(F).like(np.take(kernels.of(F).to_numpy(F), order, axis=1), F)


def _without_rounding(Ht: Array, gram: np.ndarray, norm: float) -> Array:
    """Hᵀ with components set to zero that contribute less than rounding: penalties shrink them for ever, never to 0."""
    values = kernels.of(Ht).to_numpy(Ht)
    sizes = np.einsum("ij,ij->j", values, values, dtype=np.float64) * gram.diagonal()
    return kernels.of(Ht).like(values * (sizes > ROUNDING**2 * norm), Ht)


def _unit_columns(Ht: Array) -> Array:
    on = kernels.of(Ht)
    values = on.to_numpy(Ht)
    sizes = np.sqrt(np.einsum("ij,ij->j", values, values, dtype=np.float64))
    return on.like(np.ascontiguousarray(values / np.where(sizes > 0, sizes, 1).astype(values.dtype)), Ht)


def _gram(weights: dict[str, Array], Ht: Array) -> np.ndarray:
    """Σ_p W_pᵀW_p (k × k) in float64; zero where there are no rows."""
    gram = np.zeros((Ht.shape[1], Ht.shape[1]))
    for W in weights.values():
        gram += kernels.of(W).to_numpy(kernels.of(W).gram(W))
    return gram


def _shares(gram: np.ndarray, Ht: Array) -> np.ndarray:
    """share_j = Σ_l (WᵀW)_jl (HHᵀ)_jl / Σ: what component j contributes to ‖W H‖²."""
    contribution = (gram * kernels.of(Ht).to_numpy(kernels.of(Ht).gram(Ht))).sum(axis=1)
    total = float(contribution.sum())
    return contribution / total if total > 0 else np.full(len(contribution), 1.0 / max(1, len(contribution)))


def _squares(shards: Sequence[Shard], weights: dict[str, Array], Ht: Array) -> np.ndarray:
    """‖X − W H‖² and ‖X‖² over the rows that are here."""
    error = sum(shard.matrix.squared_distance(weights[shard.name], shard.matrix.native(Ht)) for shard in shards)
    norm = sum(shard.matrix.squared_norm for shard in shards)
    return np.array([error, norm], np.float64)


def top_features(H: np.ndarray, names: Sequence[str] | None, n: int) -> list[list[str | int]]:
    """The n features with the largest values in each row of H: names where known, else column numbers."""
    order = np.argsort(-H, axis=1, kind="stable")[:, :n]
    return [[int(j) if names is None else str(names[j]) for j in row] for row in order]
