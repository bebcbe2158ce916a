"""Rows with unknown cells: ratings, measurements with gaps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from partsong.core import runtime
from partsong.core.interfaces import Sums
from partsong.core.runtime import cached_property
from partsong.data.conversion import array_errors, float_type, to_array
from partsong.data.csr import GATHER_COST, CsrRows
from partsong.data.scan import BLOCK_BYTES, first_indices, is_sparse
from partsong.data.validation import cell_errors, error_from, require_transformable
from partsong.errors import CompositionError, DataError, DataTypeError, first_few
from partsong.kernels import observed as compiled


@dataclass(frozen=True, eq=False)
class ObservedMatrix(CsrRows):
    """The known cells of X (n × m), by row and by column; all other cells are unknown, not zero.

    Both are CSR arrays with ascending columns, `by_column` of the transpose; stored zeros are known zeros. Norms,
    means, distances and blocks are over known cells. Products with X would need unknown cells, so there are none.
    """

    @staticmethod
    def of_rows(by_row: Any) -> ObservedMatrix:
        """Create a matrix from known cells in CSR form with ascending columns."""
        return ObservedMatrix(by_row, by_row.T.tocsr())

    def transposed(self) -> ObservedMatrix:
        return ObservedMatrix(self.by_column, self.by_row)

    @property
    def empty_rows(self) -> np.ndarray:
        """Indices of rows without a known cell, for which w = 0."""
        return np.flatnonzero(np.diff(self.by_row.indptr) == 0)

    @property
    def empty_columns(self) -> np.ndarray:
        """Indices of columns without a known cell, which no fit can predict."""
        return np.flatnonzero(np.diff(self.by_column.indptr) == 0)

    @cached_property
    def squared_norm(self) -> float:
        return float(np.einsum("i,i->", self.by_row.data, self.by_row.data, dtype=np.float64))

    @cached_property
    def mean(self) -> float:
        """The mean of the known cells; 0 if there are none."""
        return float(self.by_row.data.sum(dtype=np.float64)) / max(1, self.stored)

    def gram_is_cheap(self, k: int) -> bool:
        return True

    def visit(
        self, Ht: np.ndarray, A: np.ndarray, step: Callable[[slice, np.ndarray], Sums]
    ) -> tuple[np.ndarray, Sums]:
        _refuse("X Hᵀ and XᵀW")

    def walk(self, Ht: np.ndarray, step: Callable[[slice, np.ndarray], Sums]) -> Sums:
        _refuse("X Hᵀ")

    def times(self, B: np.ndarray) -> np.ndarray:
        _refuse("X B")

    def transposed_times(self, A: np.ndarray) -> np.ndarray:
        _refuse("Xᵀ A")

    def rows(self, indices: np.ndarray) -> ObservedMatrix:
        return ObservedMatrix.of_rows(self.by_row[indices])

    def squared_distance(self, W: np.ndarray, Ht: np.ndarray) -> float:
        """Σ (x_ij − w_i·h_j)² over known cells, cell by cell in float64."""
        side = self.by_row
        entries = side.indptr, side.indices, side.data, W, Ht
        add = compiled.squared_distance
        return float(sum(runtime.map_ranges(self.pieces(Ht.shape[1]), lambda a, b: add(*entries, a, b))))

    def residuals(self, W: np.ndarray, Ht: np.ndarray) -> np.ndarray:
        """x_ij − w_i·h_j of each known cell in float64, in the order of `by_row.data`."""
        side, out = self.by_row, np.empty(self.stored)
        entries = side.indptr, side.indices, side.data, W, Ht
        fill = compiled.residuals
        runtime.map_ranges(self.pieces(Ht.shape[1]), lambda a, b: fill(*entries, a, b, out))
        return out

    def pieces(self, per_entry: float, per_row: float = 0.0) -> list[tuple[int, int]]:
        """Ranges of rows of equal cost, one per thread; costs are in multiply-adds."""
        rows = self.shape[0]
        effort = self.by_row.indptr * (per_entry * GATHER_COST) + np.arange(rows + 1) * per_row
        return runtime.split_range(rows, 2.0 * float(effort[-1]), effort)


def observed(X: Any, precision: Any = None) -> ObservedMatrix:
    """Return the known cells of X: stored cells of a sparse matrix (zeros included), or non-NaN cells of a dense array.

    Masked cells of a masked array are unknown too. Number types are those of `as_matrix`, unless `precision` is given.
    Infinite and negative values, stored NaN and duplicate cells are refused. Rows and columns without a known cell are
    accepted; see `empty_rows` and `empty_columns`.
    """
    by_row = X.by_row if isinstance(X, ObservedMatrix) else known_cells(X)
    kind = float_type(by_row.dtype, precision)
    if isinstance(X, ObservedMatrix) and kind == X.dtype:
        return X
    require_transformable(by_row, dtype=kind)
    return ObservedMatrix.of_rows(by_row.astype(kind, copy=False))


def _refuse(product: str) -> NoReturn:
    raise CompositionError(
        f"{product} would need the unknown cells of this matrix. Use a game method, which plays only known cells, and "
        "solvers.observed.ObservedRowSolver for new rows; or fill the gaps and pass an array."
    )


def known_cells(X: Any) -> Any:
    """Return stored cells of a sparse matrix, or non-NaN cells of a dense array, as CSR with ascending columns.

    Each cell has one value of the original type; half precision becomes float32. Values are not checked further.
    """
    by_row = _stored_cells(X) if is_sparse(X) else _cells_that_are_numbers(X)
    _require_no_twins(by_row)
    return by_row


def _stored_cells(X: Any) -> Any:
    """A sparse matrix in CSR form with ascending columns; duplicate cells are kept."""
    from scipy.sparse import coo_array, csr_array

    _require_form(X)
    if X.format == "dia":
        raise DataTypeError(
            "A diagonal matrix (dia) also stores zeros for unknown cells, so the known ones cannot be identified. Pass "
            "coordinates (coo) or rows (csr) with an entry for each known cell."
        )
    if X.format not in ("csr", "csc"):
        cells = X.tocoo(copy=False)
        X = coo_array((cells.data, (cells.row, cells.col)), shape=X.shape)
        X.has_canonical_format = True  # keeps duplicates, so that they can be found
    given = X.tocsr()
    by_row = csr_array((given.data, given.indices, given.indptr), shape=X.shape)
    if not by_row.has_sorted_indices:
        by_row = by_row.copy()
        by_row.sort_indices()
    if by_row.dtype.kind == "f" and np.isnan(by_row.data).any():
        raise DataError(
            f"NaN is stored in {int(np.isnan(by_row.data).sum())} cell(s). Leave unknown cells out of a sparse matrix, "
            "or pass a dense array with NaN."
        )
    return by_row


def _cells_that_are_numbers(X: Any) -> Any:
    """The non-NaN cells of a dense array in CSR form, read in blocks of rows."""
    from scipy.sparse import csr_array

    hidden = np.ma.getmaskarray(X) if isinstance(X, np.ma.MaskedArray) else None
    array = np.asarray(X.data) if isinstance(X, np.ma.MaskedArray) else to_array(X)
    _require_form(array)
    n, m = array.shape
    counts, columns, values = [], [], []
    height = max(1, BLOCK_BYTES // (8 * m))
    for start in range(0, n, height):
        block = array[start : start + height]
        is_known = ~np.isnan(block)
        if hidden is not None:
            is_known &= ~hidden[start : start + height]
        counts.append(is_known.sum(axis=1))
        columns.append(np.nonzero(is_known)[1].astype(np.int32 if array.size < 2**31 else np.int64))
        values.append(np.asarray(block[is_known]))
    starts = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
    data = np.concatenate(values)
    data = data.astype(np.float32, copy=False) if data.dtype == np.float16 else data
    return csr_array((data, np.concatenate(columns), starts), shape=(n, m))


def _require_form(X: Any) -> None:
    for finding in (*cell_errors(X), *array_errors(X)):
        raise error_from(finding)


def _require_no_twins(by_row: Any) -> None:
    """Refuse duplicate cells, which SciPy would sum."""
    equal = np.flatnonzero(by_row.indices[1:] == by_row.indices[:-1])
    first, second = (np.searchsorted(by_row.indptr, at, side="right") for at in (equal, equal + 1))
    twins = equal[first == second]
    if twins.size:
        rows = np.unique(first[first == second] - 1)
        raise DataError(
            f"{twins.size} cell(s) are stored more than once, in {first_few(first_indices(rows), rows.size, 'row')}; "
            "counted from 0. Keep one value for each cell, for example the latest or the mean."
        )
