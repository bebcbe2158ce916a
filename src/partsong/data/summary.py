"""Summary statistics of a table, and the rows with invalid values; block by block, without a dense copy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from partsong.data.scan import BLOCK_BYTES, find_cells, is_sparse, repeated, scan_zeros
from partsong.data.table import Table

Marks = tuple[tuple[str, Any], ...]

_MARKS: Marks = (
    ("nan", np.isnan),
    ("infinite", np.isinf),
    ("negative", lambda values: (values < 0) & (values > -np.inf)),
)


def summary_of(table: Table) -> dict[str, Any]:
    """Return shape, sparsity, type, memory, range and names; range and mean are over finite values."""
    X = table.X
    n_cells = int(X.shape[0]) * int(X.shape[1])
    low, high, total, n_finite, n_nonzero = _statistics(X)
    if is_sparse(X):
        stored, memory = int(X.nnz), int(X.data.nbytes + X.indices.nbytes + X.indptr.nbytes)
        if stored < n_cells:
            low, high, n_finite = min(low, 0.0), max(high, 0.0), n_finite + n_cells - stored
    else:
        stored, memory = n_cells, int(X.nbytes)
    return {
        "source": table.source,
        "shape": [int(side) for side in X.shape],
        "stored_entries": stored,
        "sparsity": 1.0 - n_nonzero / n_cells if n_cells else 0.0,
        "format": "sparse" if is_sparse(X) else "on disk" if isinstance(X, np.memmap) else "dense",
        "dtype": str(X.dtype),
        "memory_bytes": memory,
        "min": low if n_finite else None,
        "max": high if n_finite else None,
        "mean": total / n_finite if n_finite else None,
        "feature_names": table.feature_names is not None,
        "sample_names": table.sample_names is not None,
        "labels": table.labels is not None,
        "duplicate_feature_names": len(repeated(table.feature_names or ())),
        "duplicate_sample_names": len(repeated(table.sample_names or ())),
    }


def offending_rows(table: Table) -> Iterator[tuple[Any, ...]]:
    """Yield row, sample, severity, problem, number of cells, first column and its name; counted from 0."""
    X = table.X
    if X.dtype.kind not in "biuf" or 0 in X.shape:
        return
    for kind, is_marked in _MARKS if X.dtype.kind == "f" else _MARKS[2:]:
        for row in find_cells(X, is_marked).rows.tolist():
            columns = _marked_columns(X, row, is_marked)
            yield _line(table, row, "error", kind, len(columns), int(columns[0]))
    for row in scan_zeros(X).zero_rows.tolist():
        yield _line(table, row, "note", "zero-row", int(X.shape[1]), 0)


def _line(table: Table, row: int, severity: str, kind: str, n_cells: int, column: int) -> tuple[Any, ...]:
    sample = "" if table.sample_names is None else table.sample_names[row]
    feature = "" if table.feature_names is None else table.feature_names[column]
    return row, sample, severity, kind, n_cells, column, feature


def _marked_columns(X: Any, row: int, is_marked: Any) -> Any:
    if not is_sparse(X):
        return np.flatnonzero(is_marked(np.asarray(X[row])))
    part = slice(X.indptr[row], X.indptr[row + 1])
    return np.sort(X.indices[part][is_marked(X.data[part])])


def _statistics(X: Any) -> tuple[float, float, float, int, int]:
    """Smallest, largest and sum of the finite stored values, their number, and the number of nonzeros."""
    low, high, total, n_finite, n_nonzero = math.inf, -math.inf, 0.0, 0, 0
    if X.dtype.kind not in "biuf":
        return low, high, total, n_finite, n_nonzero
    for block in _blocks(X.data if is_sparse(X) else X):
        n_nonzero += int(np.count_nonzero(block))
        finite = block if block.dtype.kind != "f" else block[np.isfinite(block)]
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            total += float(finite.sum(dtype=np.float64))
            n_finite += int(finite.size)
    return low, high, total, n_finite, n_nonzero


def _blocks(values: Any) -> Iterator[Any]:
    row_bytes = max(1, values.nbytes // max(1, len(values)))
    step = max(1, BLOCK_BYTES // row_bytes)
    for start in range(0, len(values), step):
        yield values[start : start + step]
