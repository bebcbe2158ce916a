"""One door for every form of data."""

from __future__ import annotations

from typing import Any

import numpy as np

from partsong.core import Matrix
from partsong.data.dense import DenseMatrix
from partsong.data.form import is_tensor
from partsong.errors import DataTypeError, ShapeError

EXACT_IN_FLOAT32 = ("float16", "bool", "int8", "uint8", "int16", "uint16")


def as_matrix(X: Any, dtype: Any = None) -> Matrix:
    """The rows of X behind products, without copying where that can be helped.

    NumPy arrays (any order; memory maps stay on disk), SciPy sparse matrices, and torch tensors are taken. float32
    and float64 are kept; types that float32 holds exactly become float32, all others float64, unless `dtype` says
    otherwise. Values are not checked here: `data.check.require_factorizable` does that.
    """
    if is_tensor(X):
        return _from_torch(X, dtype)
    if hasattr(X, "tocsr"):
        return _from_sparse(X, dtype)
    array = X if isinstance(X, np.ndarray) else np.asarray(X)
    _require_two_dimensions(array)
    kind = float_type(array.dtype, dtype)
    on_disk = isinstance(array, np.memmap) or isinstance(getattr(array, "base", None), np.memmap)
    if not on_disk:
        array = array.astype(kind, copy=False)
        if not (array.flags.c_contiguous or array.flags.f_contiguous):
            array = np.ascontiguousarray(array)
    return DenseMatrix(array, kind)


def float_type(dtype: Any, wanted: Any = None) -> np.dtype:
    """The floating-point type that data of a NumPy or torch `dtype` are computed in."""
    given = _numpy_type(dtype)
    if given.kind not in "biuf":
        raise DataTypeError(f"Data of type {given} cannot be factorized. Convert it to numbers first.")
    if wanted is not None:
        chosen = np.dtype(wanted)
        if chosen not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise DataTypeError(f"dtype must be float32 or float64; got {chosen}.")
        return chosen
    if given == np.float32 or given.name in EXACT_IN_FLOAT32:
        return np.dtype(np.float32)
    return np.dtype(np.float64)


def _numpy_type(dtype: Any) -> np.dtype:
    """The NumPy type of a NumPy or torch type; bfloat16 is held by float32."""
    name = str(dtype).removeprefix("torch.") if type(dtype).__module__.partition(".")[0] == "torch" else dtype
    try:
        return np.dtype("float32" if name == "bfloat16" else name)
    except TypeError as error:
        raise DataTypeError(f"Data of type {dtype} cannot be factorized. Convert it to numbers first.") from error


def _require_two_dimensions(X: Any) -> None:
    if X.ndim != 2:
        raise ShapeError(f"Data must be a table with rows and columns (2 dimensions); this has {X.ndim}.")


def _from_sparse(X: Any, dtype: Any) -> Matrix:
    from partsong.data.sparse import SparseMatrix

    _require_two_dimensions(X)
    kind = float_type(X.dtype, dtype)
    by_row = X.tocsr().astype(kind, copy=False)
    if not by_row.has_canonical_format:
        by_row = by_row.copy()
        by_row.sum_duplicates()
    if X.format == "csc" and X.has_canonical_format:
        return SparseMatrix(by_row, X.astype(kind, copy=False).T)
    return SparseMatrix.of_rows(by_row)


def _from_torch(X: Any, dtype: Any) -> Matrix:
    import torch

    from partsong.data.tensor import TensorMatrix

    _require_two_dimensions(X)
    return TensorMatrix(X.detach().to(getattr(torch, float_type(X.dtype, dtype).name)))
