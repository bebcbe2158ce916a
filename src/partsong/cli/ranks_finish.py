"""From the last round to a model, with the rows of W where they are: `finished.complete` over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong import kernels
from partsong.cli.ranks_company import heard
from partsong.core import Array, Matrix, Message, Program
from partsong.engines.agreement import at_the_server, together
from partsong.engines.communicator import Communicator
from partsong.finished import Finished
from partsong.running import Run


@dataclass(frozen=True, slots=True)
class Closing:
    """The end of a fit at one rank: its rows, how they are solved for, and the way to the others.

    Sent: H from rank 0 (k × m), WᵀW (k × k) to be summed, the shares that rank 0 makes of it, and two numbers.
    """

    communicator: Communicator
    solver: Any
    matrix: Matrix

    def complete(self, program: Program, run: Run) -> Finished:
        """Put rank 0's best H on its scale and in order, solve for W exactly, and add up the errors."""
        H = self._of_rank_0(program.components(run.best))
        Ht = kernels.of(H).rows_of(H)
        if not (self.solver.penalty_W or self.solver.penalty_H):
            Ht = _unit_columns(Ht)
        Ht = _sorted(Ht, self._shares(self._solved(Ht, exactly=False), Ht))
        W = self._solved(Ht)
        shares = self._shares(W, Ht)
        if (np.diff(shares) > 0).any():  # close calls
            Ht = _sorted(Ht, shares)
            W = self._solved(Ht)
            shares = self._shares(W, Ht)
        own = together(self.communicator, lambda: self.matrix.squared_distance(W, self.matrix.native(Ht)))
        error, norm = self.communicator.sum(np.array([own, self.matrix.squared_norm]))
        H = np.ascontiguousarray(kernels.of(Ht).to_numpy(Ht).T)
        return Finished(H, {"all": W}, shares, float(np.maximum(0.0, error)), float(norm))

    def _solved(self, Ht: Array, exactly: bool = True) -> Array:
        return together(
            self.communicator,
            lambda: self.solver.solve_rows(self.matrix, self.matrix.native(Ht), exactly=exactly),
        )

    def _shares(self, W: Array, Ht: Array) -> np.ndarray:
        """share_j = Σ_l (WᵀW)_jl (HHᵀ)_jl / Σ over all ranks' rows; as rank 0 has it, so that orders agree."""
        own = kernels.of(W).to_numpy(kernels.of(W).gram(W)).astype(np.float64)
        gram = self._of_rank_0(self.communicator.sum(np.ascontiguousarray(own)))
        contribution = (gram * kernels.of(Ht).to_numpy(kernels.of(Ht).gram(Ht))).sum(axis=1)
        total = float(contribution.sum())
        return contribution / total if total > 0 else np.full(len(contribution), 1.0 / max(1, len(contribution)))

    def _of_rank_0(self, array: Array) -> Any:
        with heard():
            messages, _ = at_the_server(self.communicator, lambda: ({"": Message({"": array})}, None))
        return messages[""][""]


def _sorted(F: Array, shares: np.ndarray) -> Array:
    """Columns of F by falling share, in contiguous memory."""
    order = np.argsort(-shares, kind="stable")
    return kernels.of(F).like(np.take(kernels.of(F).to_numpy(F), order, axis=1), F)


def _unit_columns(Ht: Array) -> Array:
    on = kernels.of(Ht)
    values = on.to_numpy(Ht)
    sizes = np.sqrt(np.einsum("ij,ij->j", values, values, dtype=np.float64))
    return on.like(np.ascontiguousarray(values / np.where(sizes > 0, sizes, 1).astype(values.dtype)), Ht)
