"""The estimators' door: scikit-learn's conventions outside, typed errors inside."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils.validation import validate_data

from partsong.data.check import require_factorizable
from partsong.data.table import Table
from partsong.errors import DataTypeError, FeatureError, ParameterError, PartsongError, ShapeError
from partsong.streams import fresh_seed


def validated(estimator: Any, X: Any, *, reset: bool) -> Any:
    """X as an array or sparse matrix that can be factorized; names and width are remembered or compared."""
    if isinstance(X, Table):
        raise DataTypeError("This is a Table; its numbers are in .X and its names beside them: fit(table.X).")
    if type(X).__module__.partition(".")[0] == "torch":
        X = X.detach().cpu().numpy()
    try:
        checked = validate_data(
            estimator,
            X,
            reset=reset,
            accept_sparse=("csr", "csc"),
            dtype="numeric",
            ensure_all_finite=False,
            ensure_min_samples=1,
            ensure_min_features=1,
        )
    except PartsongError:
        raise
    except ValueError as error:
        raise _typed(str(error)) from error
    except TypeError as error:
        raise DataTypeError(str(error)) from error
    checked = _kept_on_disk(X, checked)
    require_factorizable(checked, dtype=getattr(estimator, "dtype", None))
    return checked


def _kept_on_disk(given: Any, checked: Any) -> Any:
    """scikit-learn hands a memory map back as a plain view; the map itself can give pages back."""
    return given if isinstance(given, np.memmap) else checked


def _typed(message: str) -> PartsongError:
    if "feature names" in message.lower():
        return FeatureError(message + "\nPut the columns in the order of the fit, or pass an array without names.")
    if "could not convert" in message or "dtype" in message or "string" in message.lower():
        return DataTypeError(message) if "complex" in message.lower() else ShapeOrType(message)
    return ShapeError(message)


class ShapeOrType(DataTypeError, ValueError):
    """Cells that are not numbers: a wrong type to partsong, a ValueError to scikit-learn."""


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
