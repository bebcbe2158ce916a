"""Convert arrays, sparse matrices, tensors and data frames to a Matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import sparse

from partsong import kernels
from partsong.core.interfaces import Array, Matrix
from partsong.data.dense import DenseMatrix
from partsong.data.scan import Finding, is_sparse
from partsong.data.sparse import SparseMatrix
from partsong.errors import CompositionError, DataTypeError, ShapeError, UnreadableError

_NUMERIC_KINDS = "biuf"
_AS_ARRAY = "Pass a 2-D NumPy array or a SciPy sparse matrix; rows are samples of equal length."
EXACT_IN_FLOAT32 = ("float16", "bool", "int8", "uint8", "int16", "uint16")


def is_tensor(X: Any) -> bool:
    """Whether X is a torch tensor; does not import torch."""
    return type(X).__module__.partition(".")[0] == "torch"


def to_array(X: Any) -> Any:
    """Return X as an ndarray (without reading or copying if possible), or as CSR or CSC."""
    if is_sparse(X):
        return X if X.format in ("csr", "csc") else X.tocsr()
    if is_tensor(X):
        return host_array(X)
    if isinstance(X, np.ma.MaskedArray):
        return _unmasked(X)
    if isinstance(X, np.memmap):
        return X
    try:
        return np.asarray(X)
    except (TypeError, ValueError) as error:
        raise UnreadableError(f"{type(X).__name__} cannot be read as a matrix: {error} {_AS_ARRAY}") from error


def host_array(X: Any) -> np.ndarray:
    """Return a dense torch tensor as a NumPy array, without a copy if it is in host memory; bfloat16 as float32."""
    import torch

    if X.layout is not torch.strided:
        raise UnreadableError(
            f"Sparse torch tensors ({str(X.layout).removeprefix('torch.')}) are not supported. Convert it to SciPy: "
            "S = X.to_sparse_csr(); scipy.sparse.csr_array((S.values(), S.col_indices(), S.crow_indices()), S.shape)."
        )
    try:
        return np.asarray((X.float() if X.dtype == torch.bfloat16 else X).detach().cpu().resolve_conj().numpy())
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnreadableError(f"This torch tensor cannot be read: {error}. {_AS_ARRAY}") from error


def _unmasked(X: np.ma.MaskedArray[Any, Any]) -> np.ndarray:
    hidden = int(np.ma.getmaskarray(X).sum())
    if hidden:
        raise UnreadableError(
            f"MaskedArray cannot be read as a matrix: it has {hidden} masked value(s). Fill them (X.filled(0)), or "
            "drop their rows (numpy.ma.compress_rows(X))."
        )
    return np.asarray(X.data)


def array_errors(X: Any) -> Iterator[Finding]:
    """Findings on the shape and type of an array or sparse matrix; see `validation.cell_errors` for single cells."""
    shape = tuple(X.shape)
    if X.dtype.kind not in _NUMERIC_KINDS:
        text = f"The values are not numbers: the matrix has type {X.dtype}."
        remedy = "Remove text columns, encode categories as numbers, and convert with X.astype(float)."
        yield Finding("non-numeric", "error", text, remedy)
    elif len(shape) != 2:
        yield Finding(
            "not-2d",
            "error",
            f"Expected a 2-D matrix (samples x features), got {len(shape)} dimension(s), shape {shape}.",
            "Reshape your data: X.reshape(-1, 1) for one feature, X.reshape(1, -1) for one sample, "
            "X.reshape(len(X), -1) for images.",
        )
    elif shape[0] == 0:
        text = f"Found array with 0 sample(s) (shape={shape}) while a minimum of 1 is required."
        yield Finding("no-rows", "error", text, "Check the filter or the file behind the rows.")
    elif shape[1] == 0:
        text = f"Found array with 0 feature(s) (shape={shape}) while a minimum of 1 is required."
        yield Finding("no-columns", "error", text, "Check which columns were selected.")


def as_matrix(X: Any, dtype: Any = None) -> Matrix:
    """Return X as a Matrix, without copying if possible.

    Accepts NumPy arrays (any order; memory maps stay on disk), SciPy sparse matrices and torch tensors. float32 and
    float64 are kept; types that float32 represents exactly become float32, all others float64, unless `dtype` is given.
    Values are not checked here; see `data.validation.require_factorizable`.
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
    """Return the floating-point type for computations on data of a NumPy or torch `dtype`."""
    given = _numpy_type(dtype)
    if given.kind not in "biuf":
        raise DataTypeError(f"Data of type {given} cannot be factorized. Convert it to numbers first.")
    if wanted is not None:
        chosen = np.dtype(wanted)
        if chosen not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise DataTypeError(f"dtype must be float32 or float64; got {chosen}.", parameter="dtype")
        return chosen
    if given == np.float32 or given.name in EXACT_IN_FLOAT32:
        return np.dtype(np.float32)
    return np.dtype(np.float64)


def _numpy_type(dtype: Any) -> np.dtype:
    """The NumPy type of a NumPy or torch type; bfloat16 becomes float32."""
    name = str(dtype).removeprefix("torch.") if type(dtype).__module__.partition(".")[0] == "torch" else dtype
    try:
        return np.dtype("float32" if name == "bfloat16" else name)
    except TypeError as error:
        raise DataTypeError(f"Data of type {dtype} cannot be factorized. Convert it to numbers first.") from error


def _require_two_dimensions(X: Any) -> None:
    if X.ndim != 2:
        raise ShapeError(f"Data must have 2 dimensions (samples x features); got {X.ndim}. Reshape the data.")


def _from_sparse(X: Any, dtype: Any) -> Matrix:

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


def transposed_factor(matrix: Matrix, H: Array) -> Array:
    """Return Hᵀ (m × k) of a factor H (k × m), in the number type and on the device of a matrix."""
    native = matrix.native(H)
    return kernels.of(native).rows_of(native)


def to_values(matrix: Matrix) -> Any:
    """Return the values of complete rows as an array, or as a CSR array if they are sparse."""
    if isinstance(matrix, DenseMatrix):
        return matrix.X
    if isinstance(matrix, SparseMatrix):
        return matrix.by_row
    X: Any = getattr(matrix, "X", None)
    if type(matrix).__name__ != "TensorMatrix" or X is None:
        raise CompositionError(
            f"This needs complete rows, dense or sparse; got a {type(matrix).__name__}. Pass an array, a SciPy sparse "
            "matrix or a torch tensor."
        )
    X = X.detach().cpu()
    if str(X.layout) == "torch.strided":
        return X.numpy()
    parts = (X.values(), X.col_indices(), X.crow_indices())
    return sparse.csr_array(tuple(part.cpu().numpy() for part in parts), tuple(X.shape))
