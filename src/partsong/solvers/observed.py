"""NMF with missing cells: exact least squares for W given H (or H given W) over the known cells of each row."""

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
"""Cost of solving a row, in multiples of k²: sweeps, a few factorizations, checks."""


@dataclass(frozen=True, slots=True)
class ObservedRowSolver:
    """w_i = argmin over w ≥ 0 of ½ Σ_j (x_ij − w·h_j)² + c_i (l1 ‖w‖₁ + ½ l2 ‖w‖²) over the c_i known cells j of row i.

    If all cells are known, this is the problem that `complete` solves; `complete` also handles all other matrix types.
    The penalties of `complete` apply, with c_i in place of the number of columns (as in Zhou et al., 2008), so that a
    row with few ratings is not shrunk more than a row with many. Without l2, a row with fewer known cells than
    components has many solutions; one of them is returned.
    """

    complete: SquaredError = field(default_factory=SquaredError)

    @property
    def penalty_W(self) -> Penalty:
        """The penalty on W."""
        return self.complete.penalty_W

    @property
    def penalty_H(self) -> Penalty:
        """The penalty on H."""
        return self.complete.penalty_H

    def solve_rows(self, matrix: Matrix, Ht: Array, *, exactly: bool = True) -> Array:
        """Return W (n × k) for Hᵀ (m × k), in the dtype of Hᵀ; a row without a known cell gets zeros."""
        if not isinstance(matrix, ObservedMatrix):
            return self.complete.solve_rows(matrix, Ht, exactly=exactly)
        return _solve_observed_rows(matrix, Ht, self.complete.penalty_W, exactly)

    def solve_columns(self, matrix: ObservedMatrix, W: Array, *, exactly: bool = True) -> Array:
        """Return Hᵀ (m × k) for W (n × k): the same on the transpose, with the penalty on H."""
        return _solve_observed_rows(matrix.transposed(), W, self.complete.penalty_H, exactly)


def _solve_observed_rows(matrix: ObservedMatrix, Ht: np.ndarray, penalty: Penalty, exactly: bool) -> np.ndarray:
    """Solve each row exactly from its own normal equations in float64, in parallel threads."""
    if Ht.ndim != 2 or Ht.shape[0] != matrix.shape[1]:
        raise ShapeError(
            f"The fixed factor must have one row for each of the {matrix.shape[1]} columns of the data; "
            f"got shape {tuple(Ht.shape)}. Pass Hᵀ (m × k) to solve for rows and W (n × k) to solve for columns."
        )
    rank, side = Ht.shape[1], matrix.by_row
    out = np.empty((matrix.shape[0], rank), Ht.dtype)
    fixed = np.ascontiguousarray(Ht, np.float64)
    entries = side.indptr, side.indices, side.data, fixed, (float(penalty.l1), float(penalty.l2)), exactly
    pieces = matrix.pieces(0.5 * rank * rank, ROW_COST * rank * rank)
    runtime.map_ranges(pieces, lambda a, b: compiled.respond(*entries, a, b, out))
    return out
