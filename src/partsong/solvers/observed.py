"""Best responses to known cells: W for given H, each row from the columns it has met."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from partsong.core import runtime
from partsong.core.interfaces import Array, Matrix
from partsong.data.observed import ObservedMatrix
from partsong.errors import ShapeError
from partsong.kernels import observed as compiled
from partsong.solvers.normal_equations import Penalty
from partsong.solvers.squared_error import SquaredError

ROW_COST = 16
"""What solving a row costs, in multiples of k²: sweeps, a few factorizations, checks."""


@dataclass(frozen=True, slots=True)
class ObservedRowSolver:
    """w_i = argmin over w ≥ 0 of ½ Σ_j (x_ij − w·h_j)² + c_i (l1 ‖w‖₁ + ½ l2 ‖w‖²) over the c_i known cells j of row i.

    Where all cells are known this is what `complete` solves, and matrices of any other kind are left to it. Penalties
    are those of `complete`; they count known cells as they count columns there (as in Zhou et al., 2008), so that a row
    with few ratings is not shrunk more than one with many. Without l2 a row with fewer known cells than components has
    many solutions, and gets one of them.
    """

    complete: SquaredError = field(default_factory=SquaredError)

    @property
    def penalty_W(self) -> Penalty:
        """On W."""
        return self.complete.penalty_W

    @property
    def penalty_H(self) -> Penalty:
        """On H."""
        return self.complete.penalty_H

    def solve_rows(self, matrix: Matrix, Ht: Array, *, exactly: bool = True) -> Array:
        """W (n × k) for Hᵀ (m × k), in the type of Hᵀ; a row without a known cell gets zeros."""
        if not isinstance(matrix, ObservedMatrix):
            return self.complete.solve_rows(matrix, Ht, exactly=exactly)
        return _solve_observed_rows(matrix, Ht, self.complete.penalty_W, exactly)

    def solve_columns(self, matrix: ObservedMatrix, W: Array, *, exactly: bool = True) -> Array:
        """Hᵀ (m × k) for W (n × k): the same on the transpose, with the penalty on H."""
        return _solve_observed_rows(matrix.transposed(), W, self.complete.penalty_H, exactly)


def _solve_observed_rows(matrix: ObservedMatrix, Ht: np.ndarray, penalty: Penalty, exactly: bool) -> np.ndarray:
    """One exact solve per row, from its own normal equations in float64; threads share out the rows."""
    if Ht.ndim != 2 or Ht.shape[0] != matrix.shape[1]:
        raise ShapeError(
            f"The fixed factor must have a row for each of the {matrix.shape[1]} columns of the data; "
            f"its shape is {tuple(Ht.shape)}. Pass Hᵀ (m × k) for rows and W (n × k) for columns."
        )
    rank, side = Ht.shape[1], matrix.by_row
    out = np.empty((matrix.shape[0], rank), Ht.dtype)
    fixed = np.ascontiguousarray(Ht, np.float64)
    entries = side.indptr, side.indices, side.data, fixed, (float(penalty.l1), float(penalty.l2)), exactly
    pieces = matrix.pieces(0.5 * rank * rank, ROW_COST * rank * rank)
    runtime.map_ranges(pieces, lambda a, b: compiled.respond(*entries, a, b, out))
    return out
