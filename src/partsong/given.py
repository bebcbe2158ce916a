"""Factors that a caller gives: a start to fit from, weights to turn back into rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from partsong import kernels
from partsong.core import Matrix
from partsong.data.cells import cell_errors
from partsong.data.finding import SHOWN
from partsong.data.form import array_of
from partsong.errors import ParameterError, ShapeError, UnreadableError, first_few
from partsong.local.start import Beginning

_SIDES = {"H": "row per component and one column per feature", "W": "row per sample and one column per component"}


def given_beginning(matrix: Matrix, rank: int, W: Any, H: Any) -> Beginning:
    """The factors of init='custom', checked."""
    if H is None:
        raise ParameterError("init='custom' needs H (and optionally W): fit(X, W=…, H=…).")
    n, m = matrix.shape
    columns = _factor("H", H, (rank, m))
    rows = None if W is None else _factor("W", W, (n, rank))
    start = matrix.native(np.ascontiguousarray(columns.T))
    return Beginning(kernels.of(start).rows_of(start.T), None if rows is None else matrix.native(rows.copy(order="C")))


def _factor(name: str, factor: Any, shape: tuple[int, int]) -> np.ndarray:
    values = numeric(name, factor)
    if values.shape != shape:
        raise ShapeError(f"{name} must have shape {shape}; got {values.shape}. Give one {_SIDES[name]}.")
    _require_none(name, values, ~np.isfinite(values), "finite", "Replace them, for example by small positive numbers.")
    _require_none(name, values, values < 0, "non-negative", f"Clip them: {name}.clip(0).")
    return values


def _require_none(name: str, values: np.ndarray, wrong: np.ndarray, wanted: str, way_out: str) -> None:
    """Refuse values by their positions, counted from 0."""
    if wrong.any():
        places = [tuple(map(int, place)) for place in np.argwhere(wrong)]
        told = [f"({', '.join(map(str, place))}): {values[place]}" for place in places[:SHOWN]]
        raise ParameterError(
            f"{name} must be {wanted}, and is not at {first_few(told, len(places), 'position')}. {way_out}"
        )


def given_weights(W: Any, rank: int) -> np.ndarray:
    """Weights (n × k) for `inverse_transform`."""
    weights = numeric("W", W)
    if weights.ndim != 2 or weights.shape[1] != rank:
        raise ShapeError(
            f"inverse_transform takes weights with {rank} columns, one per component; "
            f"got an array of shape {weights.shape}."
        )
    _require_none("W", weights, ~np.isfinite(weights), "finite", "Leave out, or fill, the rows with gaps.")
    return weights


def numeric(name: str, values: Any) -> np.ndarray:
    """A dense array of numbers."""
    held = array_of(values.toarray() if hasattr(values, "tocsr") else values)
    for finding in cell_errors(held):
        raise UnreadableError(f"{name}: {finding.message} {finding.remedy}")
    if held.dtype.kind not in "biuf":
        raise UnreadableError(
            f"{name} must hold numbers; its type is {held.dtype}. Convert it with {name}.astype(float)."
        )
    return np.asarray(held)
