"""From any container to an array: what is a matrix, and what to do about what is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from partsong.data.finding import Finding
from partsong.data.scan import is_sparse
from partsong.errors import UnreadableError

_NUMERIC_KINDS = "biuf"
_AS_ARRAY = "Pass a 2-D NumPy array or a SciPy sparse matrix; rows are samples, all of one length."


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
    """What keeps an array or sparse matrix from being a matrix of numbers; `cells.cell_errors` looks at its cells."""
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
