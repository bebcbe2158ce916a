"""What callers pass, as a matrix and the names of its columns: what can be read, and what to do about the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from scipy import sparse

from partsong.core.interfaces import Matrix
from partsong.data.dense import DenseMatrix
from partsong.data.scan import SHOWN, Finding, is_sparse
from partsong.data.sparse import SparseMatrix
from partsong.errors import CompositionError, DataTypeError, FeatureError, ShapeError, UnreadableError, first_few

_MISSING = ("None", "nan", "NaT", "<NA>")
_NUMERIC_KINDS = "biuf"
_AS_ARRAY = "Pass a 2-D NumPy array or a SciPy sparse matrix; rows are samples, all of one length."
EXACT_IN_FLOAT32 = ("float16", "bool", "int8", "uint8", "int16", "uint16")


def is_tensor(X: Any) -> bool:
    """Whether X is a torch tensor; asked without importing torch."""
    return type(X).__module__.partition(".")[0] == "torch"


def array_of(X: Any) -> Any:
    """X as an ndarray (nothing is read or copied where that can be helped), or as CSR or CSC."""
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
    """A dense torch tensor as a NumPy array, shared where it lies in this machine's memory; bfloat16 as float32."""
    import torch

    if X.layout is not torch.strided:
        raise UnreadableError(
            f"A sparse torch tensor ({str(X.layout).removeprefix('torch.')}) is not taken. Make it a SciPy matrix: "
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
            f"MaskedArray cannot be read as a matrix: it hides {hidden} masked value(s), which would be used "
            "as if they were data. Fill them (X.filled(0)), or drop their rows (numpy.ma.compress_rows(X))."
        )
    return np.asarray(X.data)


def form_errors(X: Any) -> Iterator[Finding]:
    """What keeps an array or sparse matrix from being one of numbers; `validation.cell_errors` looks at its cells."""
    shape = tuple(X.shape)
    if X.dtype.kind not in _NUMERIC_KINDS:
        text = f"The values are not numbers: the type of the matrix is {X.dtype}."
        remedy = "Take text columns out, encode categories as numbers, and convert with X.astype(float)."
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
        yield Finding("no-rows", "error", text, "Check the filter or the file that the rows came from.")
    elif shape[1] == 0:
        text = f"Found array with 0 feature(s) (shape={shape}) while a minimum of 1 is required."
        yield Finding("no-columns", "error", text, "Check which columns were selected.")


def as_matrix(X: Any, dtype: Any = None) -> Matrix:
    """The rows of X behind products, without copying where that can be helped.

    NumPy arrays (any order; memory maps stay on disk), SciPy sparse matrices, and torch tensors are taken. float32
    and float64 are kept; types that float32 holds exactly become float32, all others float64, unless `dtype` says
    otherwise. Values are not checked here: `data.validation.require_factorizable` does that.
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


def values_of(matrix: Matrix) -> Any:
    """An array, or a CSR array where the data are sparse; of complete rows in memory alone."""
    if isinstance(matrix, DenseMatrix):
        return matrix.X
    if isinstance(matrix, SparseMatrix):
        return matrix.by_row
    X: Any = getattr(matrix, "X", None)
    if type(matrix).__name__ != "TensorMatrix" or X is None:
        raise CompositionError(
            "This is for complete rows, dense or sparse, that can be looked at one by one, and was given a "
            f"{type(matrix).__name__}. Pass an array, a SciPy sparse matrix or a torch tensor."
        )
    X = X.detach().cpu()
    if str(X.layout) == "torch.strided":
        return X.numpy()
    parts = (X.values(), X.col_indices(), X.crow_indices())
    return sparse.csr_array(tuple(part.cpu().numpy() for part in parts), tuple(X.shape))


def column_labels(X: Any) -> list[Any] | None:
    """What a data frame calls its columns; None for anything else."""
    if hasattr(X, "iloc") and hasattr(X, "columns"):
        return list(X.columns)
    return list(X.__dataframe__().column_names()) if hasattr(X, "__dataframe__") else None


def column_names(X: Any) -> tuple[str, ...] | None:
    """The names of a data frame's columns, checked; labels without any text among them (numbers) are not names.

    Labels must differ in either case.
    """
    labels = column_labels(X) or []
    has_names = any(isinstance(label, str) for label in labels)
    for finding in name_errors(labels, len(labels)):
        if has_names or finding.kind == "duplicate-names":
            raise FeatureError(f"{finding.message} {finding.remedy}")
    return tuple(labels) if has_names else None


def repeated(names: Sequence[str]) -> list[str]:
    """Names that occur more than once, in the order of their first occurrence."""
    return [name for name, count in Counter(names).items() if count > 1]


def require_names(feature_names: Sequence[str], source: str) -> None:
    """Raise FeatureError for names that are empty, used twice, or no text."""
    for finding in name_errors(feature_names, len(feature_names)):
        raise FeatureError(f"{source}: {finding.message} {finding.remedy}")


def name_errors(names: Sequence[str], n_columns: int) -> Iterator[Finding]:
    """Findings about a wrong number of names, names used twice, empty names, and names that are no text."""
    if len(names) != n_columns:
        message = f"{len(names)} feature names for {n_columns} columns."
        yield Finding("name-count", "error", message, "Give one name per column, or none.", count=len(names))
    empty = [position for position, name in enumerate(names) if _is_missing(name)]
    twice = [name for name in repeated(names) if not _is_missing(name)]
    if twice:
        at = {name: [place for place, other in enumerate(names) if other == name] for name in twice[:SHOWN]}
        told = [f"{name!r} ({first_few(places[:SHOWN], len(places), 'column')})" for name, places in at.items()]
        message = f"Feature names must differ; used more than once: {first_few(told, len(twice), 'name')}."
        remedy = "Columns are counted from 0. Rename the columns, or merge those that mean the same."
        columns = tuple(sorted(place for places in at.values() for place in places)[:SHOWN])
        yield Finding("duplicate-names", "error", message, remedy, columns=columns, count=len(twice))
    if empty:
        message = f"Columns without a name: {first_few(empty[:SHOWN], len(empty), 'column')}, counted from 0."
        remedy = "Name them, or remove them."
        yield Finding("missing-names", "error", message, remedy, columns=tuple(empty[:SHOWN]), count=len(empty))
    others = [place for place, name in enumerate(names) if not isinstance(name, str) and place not in set(empty)]
    if others:
        told = [f"{place} ({names[place]!r})" for place in others[:SHOWN]]
        message = f"Feature names must be text; they are not in {first_few(told, len(others), 'column')}."
        remedy = "Make all of them text: X.columns = X.columns.astype(str)."
        yield Finding("name-type", "error", message, remedy, columns=tuple(others[:SHOWN]), count=len(others))


def _is_missing(name: Any) -> bool:
    return not name.strip() if isinstance(name, str) else str(name) in _MISSING
