"""Mini-batches of documents as sparse rows, in any order, without dense copies."""

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
    """Return the operations for this kind of array: `numpy_backend` or `torch_backend`."""
    if isinstance(array, np.ndarray):
        return on_numpy
    from partsong.methods.mutual_information import torch_backend as on_torch

    return on_torch


@dataclass(frozen=True, eq=False)
class Documents:
    """Rows in CSR form: starts (n + 1, always on the host), words and counts with the type and device of the data."""

    starts: np.ndarray
    words: Array
    counts: Array

    def __len__(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def offsets(self) -> Array:
        """The start of each document, on the device of its words."""
        return operations(self.words).places(self.starts[:-1], self.words)

    @cached_property
    def owners(self) -> Array:
        """The document of each entry, on the device of its words."""
        owner = np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.starts))
        return operations(self.words).places(owner, self.words)

    def reordered(self, order: np.ndarray) -> Documents:
        """Return documents in this order: document i is order[i]."""
        lengths = np.diff(self.starts)[order]
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        entries = np.repeat(self.starts[:-1][order] - starts[:-1], lengths) + np.arange(starts[-1])
        chosen = operations(self.words).places(entries, self.words)
        return Documents(starts, self.words[chosen], self.counts[chosen])

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield ⌈n/size⌉ batches of nearly equal size, in order; a small last batch would take larger steps."""
        return (Batch(self, first, last) for first, last in pairwise(batch_bounds(len(self), size)))


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch: documents first … last − 1."""

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
    """Return the starts of ⌈n/size⌉ batches of nearly equal size, and the end of the last."""
    number = -(-n // size)
    return [n * i // number for i in range(number + 1)] if n else []


def to_documents(matrix: Matrix) -> Documents:
    """Return the rows of a matrix; dense data are converted to sparse rows."""
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
