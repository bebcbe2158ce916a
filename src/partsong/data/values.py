"""The numbers of a matrix on the host, for whoever has to look at single rows."""

from __future__ import annotations

from typing import Any

from scipy import sparse

from partsong.core import Matrix
from partsong.data.dense import DenseMatrix
from partsong.data.sparse import SparseMatrix
from partsong.errors import CompositionError


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
