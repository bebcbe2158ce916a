"""The estimators' door: scikit-learn's conventions outside, typed errors inside."""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np
from sklearn.utils.validation import check_array, validate_data

from partsong.data.cells import cell_errors
from partsong.data.check import error_of, require_factorizable, require_transformable
from partsong.data.finding import SHOWN
from partsong.data.form import array_of, form_errors
from partsong.data.names import column_labels, column_names
from partsong.data.observed import ObservedMatrix, observed
from partsong.data.table import Table
from partsong.errors import (
    DataError,
    DataTypeError,
    FeatureError,
    ParameterError,
    ShapeError,
    UnreadableError,
    first_few,
)
from partsong.streams import fresh_seed


def validated(estimator: Any, X: Any, *, reset: bool, dtype: Any = None) -> Any:
    """X as an array or sparse matrix that can be factorized (`reset`) or transformed.

    Names and width are remembered or compared; `dtype` is the precision to compute in where it is not that of X.
    """
    rows = numbers_of(X)
    agree_on_columns(estimator, X, reset=reset)
    require = require_factorizable if reset else require_transformable
    require(rows, column_names(X), dtype)
    return rows


def validated_cells(estimator: Any, X: Any, *, reset: bool, dtype: Any = None) -> ObservedMatrix:
    """The known cells of X; columns of which nothing is known are told of in a fit."""
    rows = numbers_with_gaps(X)
    agree_on_columns(estimator, X, reset=reset)
    cells = observed(rows, dtype)
    if not cells.stored and reset:
        raise DataError("No cell of X is known. Give at least one number; NaN and what is not stored are unknown.")
    if reset and len(cells.empty_columns):
        so = "it is" if len(cells.empty_columns) == 1 else "they are"
        warn_of_unknown(cells.empty_columns, f"{so} zero in every component", stacklevel=6)
    return cells


def warn_of_unknown(columns: np.ndarray, consequence: str, *, stacklevel: int) -> None:
    """Warn of columns without a known cell, and of what follows from that."""
    shown = first_few(columns[:SHOWN].tolist(), len(columns), "column")
    warnings.warn(f"Nothing is known of {shown} (counted from 0): {consequence}.", UserWarning, stacklevel=stacklevel)


def numbers_with_gaps(X: Any) -> Any:
    """`numbers_of`, with NaN also where a masked array hides something."""
    return numbers_of(_with_gaps(X) if isinstance(X, np.ma.MaskedArray) else X)


def _with_gaps(X: Any) -> np.ndarray:
    """NaN where a masked array hides something."""
    kind = X.dtype if X.dtype.kind not in "biu" else np.dtype(np.float64)
    filled: np.ndarray = X.astype(kind, copy=False).filled(np.nan)
    return filled


def numbers_of(X: Any) -> Any:
    """Whatever holds a matrix of numbers as an array, a memory map, CSR or CSC; the values are not looked at."""
    if isinstance(X, Table):
        raise DataTypeError("This is a Table; its numbers are in .X and its names beside them: fit(table.X).")
    if isinstance(X, str | os.PathLike):
        raise UnreadableError(f"{X!r} is text, not a matrix. Read a file first: partsong.read(path).X.")
    names = column_names(X)
    held = X if column_labels(X) is not None else array_of(X)
    for finding in cell_errors(held, names):
        raise error_of(finding)
    try:
        rows = check_array(
            held,
            accept_sparse=("csr", "csc"),
            dtype="numeric",
            ensure_2d=False,
            allow_nd=True,
            ensure_all_finite=False,
            ensure_min_samples=0,
            ensure_min_features=0,
        )
    except (TypeError, ValueError) as error:
        raise UnreadableError(f"{error} Convert the data to a NumPy array of numbers first.") from error
    for finding in form_errors(rows):
        raise error_of(finding)
    return held if isinstance(held, np.memmap) else rows  # scikit-learn makes a map a plain view; maps give pages back


def agree_on_columns(estimator: Any, X: Any, *, reset: bool) -> None:
    """Remember the names and the number of columns of X (`reset`), or compare them with those of the fit."""
    try:
        validate_data(estimator, X, reset=reset, skip_check_array=True)
    except ValueError as error:
        if "feature names" not in str(error).lower():
            raise ShapeError(str(error) if reset else f"{error} {_way_to_width(estimator)}") from error
        raise FeatureError(f"{error}\n{_way_to_names(estimator, X)}") from error


def _way_to_width(estimator: Any) -> str:
    """What to do about another number of columns, where names cannot tell which of them are meant."""
    names = getattr(estimator, "feature_names_in_", None)
    if names is None:
        return (
            "Bring X to the columns of the fit, in the same order: leave out those that are new, and add those that "
            "are missing (zeros, if they were not measured)."
        )
    return (
        f"The fit had the {first_few(map(repr, names[:SHOWN]), len(names), 'column')}: bring X to these, in this "
        "order; of a data frame with names it is told which are missing and which are new."
    )


def _way_to_names(estimator: Any, X: Any) -> str:
    """What to do about names that are not those of the fit, or not in their order."""
    known, here = set(getattr(estimator, "feature_names_in_", ())), set(column_labels(X) or ())
    order = "X[list(model.feature_names_in_)]"
    if known - here:
        return f"Add the missing columns (zeros, if they were not measured), then take {order}."
    if here - known:
        return f"Leave out the columns that the fit did not have: {order}."
    return f"Put the columns in the order of the fit: {order}. An array without names is taken as it is."


def whole_seed(random_state: Any) -> int:
    """An integer seed from what scikit-learn calls random_state."""
    if random_state is None:
        return fresh_seed()
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31 - 1))
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**63 - 1))
    if isinstance(random_state, int | np.integer) and not isinstance(random_state, bool) and random_state >= 0:
        return int(random_state)
    raise ParameterError(f"random_state must be None, a whole number ≥ 0, or a NumPy generator; got {random_state!r}.")


class NonNegativeTransformer:
    """What scikit-learn asks of a transformer: rows without negative numbers, dense or sparse, to one number for each
    component, in the type they came in.
    """

    components_: np.ndarray

    @property
    def _n_features_out(self) -> int:
        return int(self.components_.shape[0])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.input_tags.positive_only = True
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags
