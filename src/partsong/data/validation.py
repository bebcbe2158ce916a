"""Input validation: what is wrong with a matrix, where, and what to do, before anything is computed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from itertools import chain
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from partsong.data.conversion import array_errors, to_array
from partsong.data.scan import (
    SHOWN,
    Finding,
    Indices,
    MarkedCells,
    extremes,
    find_cells,
    first_indices,
    is_sparse,
    label_positions,
    name_errors,
    scan_zeros,
)
from partsong.errors import DataError, FeatureError, PartsongError, ShapeError, UnreadableError, first_few

_MIXED_KINDS = "OSUTMm"
_NUMBERS = (Real, Decimal, np.bool_, type(None))
Cells = npt.NDArray[np.object_]
_ERRORS: dict[str, type[PartsongError]] = {
    "container": UnreadableError,
    "not-2d": ShapeError,
    "no-rows": DataError,
    "no-columns": DataError,
    "non-numeric": UnreadableError,
    "complex": UnreadableError,
    "nan": DataError,
    "infinite": DataError,
    "negative": DataError,
    "scale": DataError,
    "too-small": DataError,
    "all-zero": DataError,
    "name-count": FeatureError,
    "duplicate-names": FeatureError,
    "missing-names": FeatureError,
    "name-type": FeatureError,
}
NOTHING_TO_LEARN = (
    "This party contributes nothing to sums, and only a random start to averages. "
    'Check its data, or leave it out: on_party_error="skip", or --on-party-error skip.'
)
_EMPTY_COLUMN = "They are harmless. Drop them to save time."
_CONSTANT = "They do not distinguish samples. Drop them, unless they are an intended offset."
TITLES = re.compile(r"unnamed: ?\d+|.+[ _.-]id|(row|sample)[ _.-]?(id|index|number|names?)")
"""Column titles that mark whole numbers as identifiers; pandas writes the first one for an unnamed index."""
WORDS = frozenset({"id", "idx", "index", "sample", "row", "#"})
"""Titles that may also be words counted in texts; here the numbers must be unique as well."""
FEWEST_ROWS = 10  # shorter columns may count up by chance
FEWEST_TO_DIFFER = 4  # for the first column, where an index usually is, and for titles of identifiers


def cell_errors(X: Any, feature_names: Sequence[str] | None = None) -> Iterator[Finding]:
    """Yield a finding on complex columns, or on cells that are not numbers; None counts as a missing number.

    Columns with a numeric type are not scanned.
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
    shown = [
        f"row {row}, column {label_positions(column, feature_names)[0]}: {_short(cells[row, place])}"
        for row, place, column in zip(rows[:SHOWN], at[:SHOWN], columns[:SHOWN, None], strict=True)
    ]
    reason = _complaint(cells[rows[0], at[0]]) or "numbers are stored as text"
    more = f" (and {rows.size - SHOWN} more)" if rows.size > SHOWN else ""
    message = f"{rows.size} cell(s) are not numbers: {'; '.join(shown)}{more}; counted from 0; {reason}."
    remedy = "Remove text columns, encode categories as numbers, fill gaps, and convert with X.astype(float)."
    return Finding(
        "non-numeric",
        "error",
        message,
        remedy,
        first_indices(np.unique(rows)),
        first_indices(np.unique(columns)),
        rows.size,
    )


def _kinds(X: Any) -> list[str]:
    """The NumPy kind character of each column."""
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
    """Mark cells that cannot be converted to a number; if there are none, numbers stored as text."""
    strange = np.array([not isinstance(cell, _NUMBERS) for cell in cells.flat], dtype=bool).reshape(cells.shape)
    hopeless = strange.copy()
    hopeless[strange] = [_complaint(cell) != "" for cell in cells[strange]]
    return hopeless if hopeless.any() else strange


def _complaint(cell: Any) -> str:
    """Python's message why a cell cannot be converted to a number; empty if it can."""
    try:
        float(cell)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def _short(cell: Any) -> str:
    text = repr(cell)
    return text if len(text) <= 40 else f"{text[:39]}…"


def inspect(
    X: Any, feature_names: Sequence[str] | None = None, sample_names: Sequence[str] | None = None
) -> tuple[Finding, ...]:
    """Return all findings about X before a fit, errors first.

    Memory maps are read in blocks of about 8 MB; of sparse matrices only stored values are read.
    """
    errors = tuple(_errors(X, feature_names, sample_names))
    unreadable = {"container", "not-2d", "no-rows", "no-columns", "non-numeric", "complex"}
    if unreadable.intersection(finding.kind for finding in errors):
        return errors
    return errors + tuple(_notes(to_array(X), feature_names, sample_names))


def require_factorizable(
    X: Any, feature_names: Sequence[str] | None = None, dtype: Any = None, *, party: str = ""
) -> None:
    """Raise the error of the first problem that prevents a factorization of X; two passes over valid data.

    `dtype` is the precision of the fit if it differs from that of X. For a `party`, all-zero data are refused, and the
    message names the party.
    """
    for finding in _errors(X, feature_names, None, dtype, party):
        raise error_from(finding)


def require_transformable(X: Any, feature_names: Sequence[str] | None = None, dtype: Any = None) -> None:
    """The same for rows to transform: they may be arbitrarily small, because nothing is squared."""
    for finding in _errors(X, feature_names, None, dtype):
        if finding.kind != "too-small":
            raise error_from(finding)


def error_from(finding: Finding) -> PartsongError:
    """Return the exception of a finding."""
    return _ERRORS[finding.kind](f"{finding.message} {finding.remedy}".rstrip())


def _errors(
    X: Any, feature_names: Sequence[str] | None, sample_names: Sequence[str] | None, dtype: Any = None, party: str = ""
) -> Iterator[Finding]:
    try:
        matrix = to_array(X)
    except UnreadableError as error:
        yield Finding("container", "error", str(error), "")
        return
    form = next(chain(cell_errors(matrix, feature_names), array_errors(matrix)), None)
    if form is not None:
        yield form
        return
    precision = np.dtype(matrix.dtype if dtype is None else dtype)
    yield from _value_errors(matrix, feature_names, sample_names, precision, party)
    if feature_names is not None:
        yield from name_errors(feature_names, matrix.shape[1])


def _value_errors(
    X: Any, feature_names: Sequence[str] | None, sample_names: Sequence[str] | None, dtype: np.dtype[Any], party: str
) -> Iterator[Finding]:
    low, high = extremes(X)
    if party and low == high == 0:
        yield Finding("all-zero", "error", "Every value is zero.", NOTHING_TO_LEARN)
        return
    if low >= 0 and high < np.inf:
        yield from _scale_error(high, dtype)
        return
    for kind, what, remedy, is_marked in _FAULTS:
        found = find_cells(X, is_marked)
        if found.count:
            message = f"{what}: {found.count} cell(s), in {_where(found, feature_names, sample_names, party)}."
            yield Finding(
                kind, "error", message, remedy, first_indices(found.rows), first_indices(found.columns), found.count
            )


def _scale_error(high: float, dtype: np.dtype[Any]) -> Iterator[Finding]:
    """Sums of squares must neither overflow nor underflow in the precision of the fit."""
    reach = 1e15 if dtype == np.float32 else 1e140
    if high > reach or 0 < high < 1 / reach:
        message = f"The largest value is {high:.3g}: squares of such values leave the range of {dtype}."
        remedy = "Rescale the data, for example by the largest value" + (
            ", or use dtype float64." if dtype == np.float32 else "."
        )
        yield Finding("scale" if high > reach else "too-small", "error", message, remedy)


def _is_negative(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    return np.asarray((values < 0) & (values > -np.inf))


_FAULTS: tuple[tuple[str, str, str, Callable[[Any], Any]], ...] = (
    ("nan", "NaN in data", "Fill the gaps, for example with 0 or the column median, or drop these rows.", np.isnan),
    (
        "infinite",
        "Infinite values (inf) in data",
        "Look for a division by zero or an overflow in earlier steps.",
        np.isinf,
    ),
    ("negative", "Negative values in data passed to NMF", "Shift, clip or drop them.", _is_negative),
)


def _where(
    found: MarkedCells, feature_names: Sequence[str] | None, sample_names: Sequence[str] | None, party: str
) -> str:
    rows = first_few(label_positions(found.rows, sample_names), found.rows.size, "row")
    columns = first_few(label_positions(found.columns, feature_names), found.columns.size, "column")
    return f"{rows}{f' of party {party!r}' if party else ''}; {columns}; counted from 0"


def _notes(X: Any, feature_names: Sequence[str] | None, sample_names: Sequence[str] | None) -> Iterator[Finding]:
    found = scan_zeros(X)
    if found.zero_rows.size == X.shape[0]:
        yield Finding("all-zero", "note", "Every value is zero.", "Check the file.")
        return
    if found.zero_rows.size:
        text = first_few(label_positions(found.zero_rows, sample_names), found.zero_rows.size, "row")
        message, remedy = (
            f"All zero: {text}, counted from 0.",
            "They are harmless: their weights are 0. Drop them if unexpected.",
        )
        yield Finding(
            "zero-rows", "note", message, remedy, rows=first_indices(found.zero_rows), count=found.zero_rows.size
        )
    yield from _column_note("zero-columns", "All zero", _EMPTY_COLUMN, found.zero_columns, feature_names)
    yield from _column_note(
        "constant-columns", "One value in all rows", _CONSTANT, found.constant_columns, feature_names
    )


def _column_note(
    kind: str, what: str, remedy: str, columns: Indices, feature_names: Sequence[str] | None
) -> Iterator[Finding]:
    if columns.size:
        text = first_few(label_positions(columns, feature_names), columns.size, "column")
        message = f"{what}: {text}, counted from 0."
        yield Finding(kind, "note", message, remedy, columns=first_indices(columns), count=columns.size)


def identifier_columns(X: Any, feature_names: Sequence[str] | None = None) -> Indices:
    """Return columns of whole numbers with the title of an identifier, and columns with x_i = x_0 + i."""
    n_rows, n_columns = X.shape
    if X.dtype.kind not in "iuf" or n_rows < 2 or n_columns < 2:
        return np.zeros(0, dtype=np.intp)
    titled = [at for at, name in enumerate(feature_names or ()) if _is_titled(X, at, str(name).strip().casefold())]
    return np.union1d(np.array(titled, dtype=np.intp), _counting(X))


def identifier_findings(X: Any, feature_names: Sequence[str] | None = None) -> tuple[Finding, ...]:
    """Return a note on such columns and how to leave them out, if there are any."""
    found = identifier_columns(X, feature_names)
    if not found.size:
        return ()
    shown = first_few(label_positions(found, feature_names), found.size, "column")
    message = f"These look like row identifiers, not measurements: {shown}, counted from 0."
    name = "…" if feature_names is None else feature_names[int(found[0])]
    remedy = (
        f"A fit would use it as a feature. Pass {name!r} as the label to leave it out. In a text file, you can also "
        "put it first with the title 'sample', so that it names the rows."
    )
    return (
        Finding("identifier-columns", "note", message, remedy, columns=first_indices(found), count=int(found.size)),
    )


def _is_titled(X: Any, at: int, title: str) -> bool:
    if TITLES.fullmatch(title):
        return _are_whole(_column(X, at))
    if title not in WORDS or X.shape[0] < FEWEST_TO_DIFFER:
        return False
    values = _column(X, at)
    return _are_whole(values) and len(np.unique(values)) == len(values)


def _counting(X: Any) -> Indices:
    """Columns with x_i = x_0 + i for all i; the first rows exclude nearly all columns, and only the rest is read."""
    n_rows = X.shape[0]
    top = _dense(X[: min(n_rows, FEWEST_ROWS)])
    steps = (np.diff(top, axis=0) == 1).all(axis=0)
    if n_rows < FEWEST_ROWS:
        steps[1:] = False
    if n_rows < FEWEST_TO_DIFFER:
        steps[0] = False
    return np.array([at for at in np.flatnonzero(steps).tolist() if _counts_up(_column(X, at))], dtype=np.intp)


def _counts_up(values: npt.NDArray[Any]) -> bool:
    return bool((values == values[0] + np.arange(len(values))).all())


def _are_whole(values: npt.NDArray[Any]) -> bool:
    return bool((np.isfinite(values) & (values == np.floor(values))).all())


def _column(X: Any, at: int) -> npt.NDArray[np.float64]:
    return _dense(X[:, [at]]).ravel()


def _dense(block: Any) -> npt.NDArray[np.float64]:
    return np.asarray(block.toarray() if is_sparse(block) else block, dtype=np.float64)
