"""Distance of a factorization from a Nash equilibrium of the NMF game, by exact best responses.

Row player i owns w_i, column player j owns h_j, and each has the utility −½ Σ e² over the cells that it plays, with
e_ij = x_ij − w_i·h_j (Singh, 2021, eq. 4, without its transpose). Each player's problem is convex, so that equilibria
are just the stationary points of NMF.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong import kernels
from partsong.core import runtime
from partsong.core.interfaces import Array, Matrix
from partsong.data.conversion import as_matrix, is_tensor
from partsong.data.dense import DenseMatrix
from partsong.data.observed import ObservedMatrix
from partsong.data.scan import is_sparse
from partsong.data.validation import require_transformable
from partsong.errors import DataError, ShapeError
from partsong.kernels import observed as compiled
from partsong.solvers.normal_equations import NormalEquations
from partsong.solvers.observed import ObservedRowSolver
from partsong.solvers.update_rules import BlockPivoting


@dataclass(frozen=True, slots=True, eq=False)
class Equilibrium:
    """What each player could still gain by its best response while all others stay, and ½‖X‖² to measure it by.

    `row_gains` (n) and `column_gains` (m) are not negative, and all zero at a Nash equilibrium.
    """

    row_gains: np.ndarray
    column_gains: np.ndarray
    energy: float

    @property
    def epsilon(self) -> float:
        """The largest gain: this is an ε-equilibrium."""
        return float(max(self.row_gains.max(), self.column_gains.max()))

    @property
    def relative_epsilon(self) -> float:
        """The largest gain as a share of ½‖X‖²; 0 where X is zero."""
        return self.epsilon / self.energy if self.energy > 0 else 0.0

    def holds(self, epsilon: float, *, relative: bool = False) -> bool:
        """Whether no player can gain more than epsilon, in units of ½‖X‖² if `relative`."""
        return (self.relative_epsilon if relative else self.epsilon) <= epsilon


def equilibrium(X: Any, W: Array, H: Array) -> Equilibrium:
    """The gains of all players at W (n × k), H (k × m); X is an array, a sparse matrix or any Matrix.

    Best responses are exact. A Matrix in float32 takes factors in float32, and gains then are to 1e-6·½‖X‖².
    """
    matrix, W, Ht = _profile(X, W, H)
    if isinstance(matrix, ObservedMatrix):
        rows, columns = _gains_where_known(matrix, W, Ht), _gains_where_known(matrix.transposed(), Ht, W)
    else:
        rows, columns = _gains(W, Ht, matrix.times(Ht)), _gains(Ht, W, matrix.transposed_times(W))
    return Equilibrium(rows, columns, 0.5 * float(matrix.squared_norm))


def _profile(X: Any, W: Array, H: Array) -> tuple[Matrix, Array, Array]:
    """The data and both factors, W (n × k) and Hᵀ (m × k), in its number type and place."""
    matrix = _matrix(X)
    W, H = (values if is_tensor(values) else np.asarray(values) for values in (W, H))
    n, m = matrix.shape
    if W.ndim != 2 or H.ndim != 2 or (W.shape[0], W.shape[1], H.shape[1]) != (n, H.shape[0], m):
        raise ShapeError(
            f"W H must have the shape of X, {n} × {m}; W is {tuple(W.shape)} and H {tuple(H.shape)}. "
            "Pass W (n × k) and H (k × m)."
        )
    for name, values in (("W", W), ("H", H)):
        if not bool(((values >= 0) & (values < np.inf)).all()):
            raise DataError(f"{name} has negative, infinite or NaN entries. Pass finite factors, zero or more.")
    Ht = kernels.of(H).rows_of(H)
    if isinstance(matrix, ObservedMatrix):
        return matrix, np.ascontiguousarray(_numbers(W)), _numbers(Ht)
    return matrix, matrix.native(W), matrix.native(Ht)


def _matrix(X: Any) -> Matrix:
    """A Matrix as it is; arrays and sparse matrices behind products in float64, into which dense tiles are converted
    one by one.
    """
    if hasattr(X, "squared_distance"):
        return X
    require_transformable(X)
    given = as_matrix(X, np.float64 if is_sparse(X) else None)
    return DenseMatrix(given.X, np.dtype(np.float64)) if isinstance(given, DenseMatrix) else given


def _gains(F: Array, fixed: Array, cross: Array) -> np.ndarray:
    """f(F) − min f of each row, f(v) = ½ v gram v − v·cross, as ½ (F − best)·((F + best) gram − 2 cross)."""
    gram, rule = kernels.of(fixed).gram(fixed), BlockPivoting()
    best, _ = rule.step(F, NormalEquations(gram, cross), rule.init(F))
    now, then, gram = _numbers(F), _numbers(best), _numbers(gram)
    slopes = (now + then) @ gram - 2 * _numbers(cross)
    return np.maximum(0.0, 0.5 * np.einsum("ij,ij->i", now - then, slopes))


def _gains_where_known(matrix: ObservedMatrix, F: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """The same over the known cells of each row."""
    best = ObservedRowSolver().solve_rows(matrix, fixed.astype(np.float64, copy=False))
    side, out = matrix.by_row, np.empty(matrix.shape[0])
    entries = side.indptr, side.indices, side.data, fixed, F, best
    pieces = matrix.pieces(2 * fixed.shape[1])
    runtime.map_ranges(pieces, lambda a, b: compiled.gains(*entries, a, b, out))
    return np.maximum(0.0, out)


def _numbers(values: Array) -> np.ndarray:
    return np.asarray(kernels.of(values).to_numpy(values), np.float64)
