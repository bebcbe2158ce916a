"""What is wrong with a matrix, where, and what to do about it; asked before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from partsong.data.cells import cell_errors
from partsong.data.finding import Finding, few, labelled
from partsong.data.form import array_of, form_errors
from partsong.data.names import name_errors
from partsong.data.scan import Indices, Places, blanks, extremes, places
from partsong.errors import DataError, FeatureError, PartsongError, ShapeError, UnreadableError, first_few

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
    "Nothing can be learned from such a party: it adds nothing to sums, and to averages no more than a start that it "
    'drew at random. Check its data, or leave it out (faulty="leave out" does so by itself).'
)


def inspect(
    X: Any, feature_names: Sequence[str] | None = None, sample_names: Sequence[str] | None = None
) -> tuple[Finding, ...]:
    """Everything that can be said about X before a fit, errors first.

    Memory maps are read in blocks of about 8 MB; sparse matrices are looked at through their stored values.
    """
    errors = tuple(_errors(X, feature_names, sample_names))
    unreadable = {"container", "not-2d", "no-rows", "no-columns", "non-numeric", "complex"}
    if unreadable.intersection(finding.kind for finding in errors):
        return errors
    return errors + tuple(_notes(array_of(X), feature_names, sample_names))


def require_factorizable(
    X: Any, feature_names: Sequence[str] | None = None, dtype: Any = None, *, party: str = ""
) -> None:
    """Raise the typed error for the first thing that keeps X from being factorized; two reductions if all is well.

    `dtype` is the precision that the fit will use where it is not that of X. Of a `party` zeros alone are
    refused, and rows are told to be its own.
    """
    for finding in _errors(X, feature_names, None, dtype, party):
        raise error_of(finding)


def require_transformable(X: Any, feature_names: Sequence[str] | None = None, dtype: Any = None) -> None:
    """The same for rows that a model gets to see: they may be as small as they like, since nothing is squared."""
    for finding in _errors(X, feature_names, None, dtype):
        if finding.kind != "too-small":
            raise error_of(finding)


def error_of(finding: Finding) -> PartsongError:
    """The typed error that says what a finding says."""
    return _ERRORS[finding.kind](f"{finding.message} {finding.remedy}".rstrip())


def _errors(
    X: Any,
    feature_names: Sequence[str] | None,
    sample_names: Sequence[str] | None,
    dtype: Any = None,
    party: str = "",
) -> Iterator[Finding]:
    try:
        matrix = array_of(X)
    except UnreadableError as error:
        yield Finding("container", "error", str(error), "")
        return
    form = next(chain(cell_errors(matrix, feature_names), form_errors(matrix)), None)
    if form is not None:
        yield form
        return
    precision = np.dtype(matrix.dtype if dtype is None else dtype)
    yield from _value_errors(matrix, feature_names, sample_names, precision, party)
    if feature_names is not None:
        yield from name_errors(feature_names, matrix.shape[1])


def _value_errors(
    X: Any,
    feature_names: Sequence[str] | None,
    sample_names: Sequence[str] | None,
    dtype: np.dtype[Any],
    party: str,
) -> Iterator[Finding]:
    low, high = extremes(X)
    if party and low == high == 0:
        yield Finding("all-zero", "error", "Every value is zero.", NOTHING_TO_LEARN)
        return
    if low >= 0 and high < np.inf:
        yield from _scale_error(high, dtype)
        return
    for kind, what, remedy, is_marked in _FAULTS:
        found = places(X, is_marked)
        if found.count:
            message = f"{what}: {found.count} cell(s), in {_where(found, feature_names, sample_names, party)}."
            yield Finding(kind, "error", message, remedy, few(found.rows), few(found.columns), found.count)


def _scale_error(high: float, dtype: np.dtype[Any]) -> Iterator[Finding]:
    """Sums of squares must neither overflow nor vanish in the precision of the fit."""
    reach = 1e15 if dtype == np.float32 else 1e140
    if high > reach or 0 < high < 1 / reach:
        message = f"The largest value is {high:.3g}: squares of such values leave the range of {dtype}."
        remedy = "Rescale the data (divide by the largest value, say)" + (
            ", or compute in float64 (dtype='float64')." if dtype == np.float32 else "."
        )
        yield Finding("scale" if high > reach else "too-small", "error", message, remedy)


def _is_negative(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    return np.asarray((values < 0) & (values > -np.inf))


_FAULTS: tuple[tuple[str, str, str, Callable[[Any], Any]], ...] = (
    ("nan", "NaN in data", "Fill the gaps (with 0 or a column's median, say) or drop these rows.", np.isnan),
    ("infinite", "Infinite values (inf) in data", "Look for a division by zero or an overflow before.", np.isinf),
    ("negative", "Negative values in data", "Shift, clip or drop them: parts only add up.", _is_negative),
)


def _where(found: Places, feature_names: Sequence[str] | None, sample_names: Sequence[str] | None, party: str) -> str:
    rows = first_few(labelled(found.rows, sample_names), found.rows.size, "row")
    columns = first_few(labelled(found.columns, feature_names), found.columns.size, "column")
    return f"{rows}{f' of party {party!r}' if party else ''}; {columns}; counted from 0"


def _notes(X: Any, feature_names: Sequence[str] | None, sample_names: Sequence[str] | None) -> Iterator[Finding]:
    found = blanks(X)
    if found.zero_rows.size == X.shape[0]:
        yield Finding("all-zero", "note", "Every value is zero.", "Check the file: a fit of nothing is nothing.")
        return
    if found.zero_rows.size:
        text = first_few(labelled(found.zero_rows, sample_names), found.zero_rows.size, "row")
        message, remedy = (
            f"All zero: {text}, counted from 0.",
            "Harmless: their weights are 0. Drop them if unexpected.",
        )
        yield Finding("zero-rows", "note", message, remedy, rows=few(found.zero_rows), count=found.zero_rows.size)
    yield from _column_note("zero-columns", "All zero", _EMPTY_COLUMN, found.zero_columns, feature_names)
    yield from _column_note(
        "constant-columns", "One value in all rows", _CONSTANT, found.constant_columns, feature_names
    )


_EMPTY_COLUMN = "Harmless: they carry nothing. Drop them to save time."
_CONSTANT = "They tell no sample from another. Drop them, unless an offset is meant."


def _column_note(
    kind: str, what: str, remedy: str, columns: Indices, feature_names: Sequence[str] | None
) -> Iterator[Finding]:
    if columns.size:
        text = first_few(labelled(columns, feature_names), columns.size, "column")
        message = f"{what}: {text}, counted from 0."
        yield Finding(kind, "note", message, remedy, columns=few(columns), count=columns.size)
