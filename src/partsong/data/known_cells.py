"""Which cells of a matrix are known, from any container that can tell."""

from __future__ import annotations

from typing import Any

import numpy as np

from partsong.data.cells import cell_errors
from partsong.data.check import error_of
from partsong.data.finding import few
from partsong.data.form import array_of, form_errors
from partsong.data.scan import BLOCK_BYTES, is_sparse
from partsong.errors import DataError, DataTypeError, first_few


def known_cells(X: Any) -> Any:
    """The cells that a sparse matrix stores, or that are not NaN in a dense array, as CSR with ascending columns.

    Each has one value, in the type it came in; half precision becomes float32. Values are not looked at otherwise.
    """
    by_row = _stored_cells(X) if is_sparse(X) else _cells_that_are_numbers(X)
    _require_no_twins(by_row)
    return by_row


def _stored_cells(X: Any) -> Any:
    """A sparse matrix in CSR form with ascending columns; what it stores twice stays twice."""
    from scipy.sparse import coo_array, csr_array

    _require_form(X)
    if X.format == "dia":
        raise DataTypeError(
            "A diagonal matrix (dia) stores zeros in cells that nobody filled in, so it does not tell which are known. "
            "Pass coordinates (coo) or rows (csr) with an entry for each known cell."
        )
    if X.format not in ("csr", "csc"):
        cells = X.tocoo(copy=False)
        X = coo_array((cells.data, (cells.row, cells.col)), shape=X.shape)
        X.has_canonical_format = True  # so that cells stored twice are not added up on the way, but found
    given = X.tocsr()
    by_row = csr_array((given.data, given.indices, given.indptr), shape=X.shape)
    if not by_row.has_sorted_indices:
        by_row = by_row.copy()
        by_row.sort_indices()
    if by_row.dtype.kind == "f" and np.isnan(by_row.data).any():
        raise DataError(
            f"NaN is stored in {int(np.isnan(by_row.data).sum())} cell(s), which are then neither known nor unknown. "
            "Leave unknown cells out of a sparse matrix, or pass a dense array with NaN in them."
        )
    return by_row


def _cells_that_are_numbers(X: Any) -> Any:
    """A dense array without its NaN, in CSR form; looked at in blocks of rows."""
    from scipy.sparse import csr_array

    hidden = np.ma.getmaskarray(X) if isinstance(X, np.ma.MaskedArray) else None
    array = np.asarray(X.data) if isinstance(X, np.ma.MaskedArray) else array_of(X)
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
    for finding in (*cell_errors(X), *form_errors(X)):
        raise error_of(finding)


def _require_no_twins(by_row: Any) -> None:
    """Refuse cells with two values, which a sum would make a third of."""
    equal = np.flatnonzero(by_row.indices[1:] == by_row.indices[:-1])
    first, second = (np.searchsorted(by_row.indptr, at, side="right") for at in (equal, equal + 1))
    twins = equal[first == second]
    if twins.size:
        rows = np.unique(first[first == second] - 1)
        raise DataError(
            f"{twins.size} cell(s) are stored more than once, in {first_few(few(rows), rows.size, 'row')}; counted "
            "from 0. Keep one value for each (the latest, or their mean): adding them up would invent values."
        )
