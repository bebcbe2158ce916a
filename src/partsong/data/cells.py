"""Cells that are not numbers, in arrays of objects, arrays of text, and data frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from partsong.data.finding import SHOWN, Finding, few, labelled
from partsong.data.scan import is_sparse

_MIXED_KINDS = "OSUTMm"
_NUMBERS = (Real, Decimal, np.bool_, type(None))

Cells = npt.NDArray[np.object_]


def cell_errors(X: Any, feature_names: Sequence[str] | None = None) -> Iterator[Finding]:
    """A finding on complex columns, or on single cells that are not numbers; None counts as a gap among numbers.

    Columns that hold nothing but numbers by their type are not looked at.
    """
    kinds = _kinds(X)
    if "c" in kinds:
        text = "Complex data not supported: some or all of the values are complex."
        yield Finding("complex", "error", text, "Pass real parts (X.real) or magnitudes (abs(X)).")
        return
    doubtful = np.array([place for place, kind in enumerate(kinds) if kind in _MIXED_KINDS], dtype=np.intp)
    if not doubtful.size:
        return
    cells = _objects(X, doubtful)
    rows, at = np.nonzero(_are_foreign(cells))
    if rows.size:
        yield _finding(cells, rows, at, doubtful, feature_names)


def _finding(
    cells: Cells,
    rows: npt.NDArray[np.intp],
    at: npt.NDArray[np.intp],
    doubtful: npt.NDArray[np.intp],
    feature_names: Sequence[str] | None,
) -> Finding:
    columns = doubtful[at]
    told = [
        f"row {row}, column {labelled(column, feature_names)[0]}: {_short(cells[row, place])}"
        for row, place, column in zip(rows[:SHOWN], at[:SHOWN], columns[:SHOWN, None], strict=True)
    ]
    reason = _complaint(cells[rows[0], at[0]]) or "numbers written as text are text"
    more = f" (and {rows.size - SHOWN} more)" if rows.size > SHOWN else ""
    message = f"{rows.size} cell(s) are not numbers: {'; '.join(told)}{more}; counted from 0; {reason}."
    remedy = "Take text columns out, encode categories as numbers, fill gaps, and convert with X.astype(float)."
    return Finding("non-numeric", "error", message, remedy, few(np.unique(rows)), few(np.unique(columns)), rows.size)


def _kinds(X: Any) -> list[str]:
    """The kind of each column, as NumPy abbreviates it."""
    if hasattr(X, "iloc") and hasattr(X, "dtypes"):
        types = X.dtypes
        return [str(getattr(dtype, "kind", "O")) for dtype in (types if hasattr(types, "__iter__") else [types])]
    if is_sparse(X) or not isinstance(X, np.ndarray) or X.ndim != 2:
        return ["c"] if getattr(getattr(X, "dtype", None), "kind", "") == "c" else []
    return [X.dtype.kind] * X.shape[1] if X.dtype.kind in _MIXED_KINDS + "c" else []


def _objects(X: Any, columns: npt.NDArray[np.intp]) -> Cells:
    if isinstance(X, np.ndarray):
        return X.astype(object)
    chosen = X.iloc[:, columns] if X.ndim == 2 else X.to_frame()
    return np.asarray(chosen.to_numpy(dtype=object))


def _are_foreign(cells: Cells) -> npt.NDArray[np.bool_]:
    """Whether a cell is no number: those that cannot be made one where there are any, else numbers written as text."""
    strange = np.array([not isinstance(cell, _NUMBERS) for cell in cells.flat], dtype=bool).reshape(cells.shape)
    hopeless = strange.copy()
    hopeless[strange] = [_complaint(cell) != "" for cell in cells[strange]]
    return hopeless if hopeless.any() else strange


def _complaint(cell: Any) -> str:
    """Why a cell cannot be made a number, in Python's words; empty where it can."""
    try:
        float(cell)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def _short(cell: Any) -> str:
    text = repr(cell)
    return text if len(text) <= 40 else f"{text[:39]}…"
