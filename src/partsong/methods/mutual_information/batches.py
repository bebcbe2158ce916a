"""Documents as bags of words, a batch at a time: sparse rows in an order of one's own, never made dense."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType

import numpy as np

from partsong.core.interfaces import Array, Matrix
from partsong.core.runtime import cached_property
from partsong.data.conversion import is_tensor
from partsong.data.sparse import SparseMatrix
from partsong.errors import DataTypeError
from partsong.methods.mutual_information import numpy_backend as on_numpy


def operations(array: Array) -> ModuleType:
    """What can be done with this kind of array: `on_numpy` or `on_torch`."""
    if isinstance(array, np.ndarray):
        return on_numpy
    from partsong.methods.mutual_information import torch_backend as on_torch

    return on_torch


@dataclass(frozen=True, eq=False)
class Documents:
    """Rows in CSR form: starts (n + 1, always on the host), words and counts in the type and place of the data."""

    starts: np.ndarray
    words: Array
    counts: Array

    def __len__(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def offsets(self) -> Array:
        """Where each document starts, beside its words."""
        return operations(self.words).places(self.starts[:-1], self.words)

    @cached_property
    def owners(self) -> Array:
        """The document that each entry belongs to, beside its words."""
        owner = np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.starts))
        return operations(self.words).places(owner, self.words)

    def reordered(self, order: np.ndarray) -> Documents:
        """Document i is order[i] of these."""
        lengths = np.diff(self.starts)[order]
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        entries = np.repeat(self.starts[:-1][order] - starts[:-1], lengths) + np.arange(starts[-1])
        chosen = operations(self.words).places(entries, self.words)
        return Documents(starts, self.words[chosen], self.counts[chosen])

    def batches(self, size: int) -> Iterator[Batch]:
        """⌈n/size⌉ bags of nearly equal size, in order: a small rest would take steps of its own size."""
        return (Batch(self, first, last) for first, last in pairwise(batch_bounds(len(self), size)))


@dataclass(frozen=True, slots=True)
class Batch:
    """Documents first…last: a batch."""

    documents: Documents
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def starts(self) -> np.ndarray:
        """Of all documents."""
        return self.documents.starts

    @property
    def words(self) -> Array:
        """Of all documents."""
        return self.documents.words

    @property
    def counts(self) -> Array:
        """Of all documents."""
        return self.documents.counts


def batch_bounds(n: int, size: int) -> list[int]:
    """Where ⌈n/size⌉ batches of nearly equal size begin, and the end of the last."""
    number = -(-n // size)
    return [n * i // number for i in range(number + 1)] if n else []


def to_documents(matrix: Matrix) -> Documents:
    """The rows of a matrix; those of dense data are written down anew, without their zeros."""
    if isinstance(matrix, SparseMatrix):
        side = matrix.by_row
        return Documents(side.indptr.astype(np.int64), side.indices, side.data)
    X = getattr(matrix, "X", None)
    if isinstance(X, np.ndarray):
        from scipy.sparse import csr_array

        side = csr_array(X.astype(matrix.dtype, copy=False))
        return Documents(side.indptr.astype(np.int64), side.indices, side.data)
    if X is not None and is_tensor(X):
        return _of_tensor(X)
    raise DataTypeError(
        f"Documents cannot be taken from a {type(matrix).__name__}: a batch needs single rows. "
        "Pass a SciPy sparse matrix, an array, or a torch tensor."
    )


def _of_tensor(X: Array) -> Documents:
    import torch

    if X.layout is torch.strided:
        rows, words = X.nonzero(as_tuple=True)
        lengths = torch.bincount(rows, minlength=X.shape[0]).cpu().numpy()
        return Documents(np.concatenate([[0], np.cumsum(lengths)]), words, X[rows, words])
    return Documents(X.crow_indices().cpu().numpy().astype(np.int64), X.col_indices().long(), X.values())
