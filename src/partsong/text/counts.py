"""Documents to sparse rows: counts of words, and tf-idf."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import sparse

from partsong.errors import DataError, ParameterError, ShapeError
from partsong.text.vocabulary import Columns
from partsong.text.words import Words


@dataclass(frozen=True, slots=True)
class Counted:
    """Rows (n × m, CSR, float32), one per document; `is_empty`: without any word that has a column."""

    rows: Any
    is_empty: Any

    @property
    def n_empty(self) -> int:
        """How many documents are empty; they are kept, as rows of zeros."""
        return int(self.is_empty.sum())

    def require_words(self, whose: str = "The collection") -> Counted:
        """Itself, unless every document is empty."""
        if self.n_empty == len(self.is_empty):
            raise DataError(
                f"{whose}: all {len(self.is_empty)} documents are empty, none has a word of the vocabulary "
                f"({self.rows.shape[1]} columns). Check language, options and column, or the rule of the vocabulary."
            )
        return self


def count(documents: Iterable[str], words: Words, vocabulary: Columns) -> Counted:
    """How often each word of the vocabulary is in each document; documents without any stay, as rows of zeros."""
    known: dict[str, int] = {}
    columns: list[int] = []
    ends = [0]
    for text in documents:
        for word in words.of(text):
            column = known.get(word)
            if column is None:
                column = known[word] = vocabulary.column(word)
            if column >= 0:
                columns.append(column)
        ends.append(len(columns))
    shape = (len(ends) - 1, vocabulary.n_columns)
    values = np.ones(len(columns), dtype=np.float32)
    rows = sparse.csr_matrix((values, np.array(columns, dtype=np.int32), np.array(ends)), shape=shape)
    rows.sum_duplicates()
    return Counted(rows, np.diff(rows.indptr) == 0)


def inverse_frequencies(documents: Any, n_documents: int) -> Any:
    """log((1 + n) / (1 + df)) + 1 for each column, as scikit-learn smooths it."""
    frequencies = np.asarray(documents, dtype=np.float64)
    if frequencies.size and not 0 <= frequencies.min() <= frequencies.max() <= n_documents:
        raise ParameterError(f"Document frequencies lie between 0 and the number of documents, {n_documents}.")
    return np.log((1.0 + n_documents) / (1.0 + frequencies)) + 1.0


def tf_idf(
    counted: Counted, documents: Any, n_documents: int, *, is_sublinear: bool = False, norm: str = "l2"
) -> Counted:
    """Counts (or 1 + log of them) times inverse document frequencies; rows of unit norm ("l2"), or as they are.

    Frequencies are those of all parties together, so that a word weighs the same everywhere.
    """
    if norm not in ("l2", "none"):
        raise ParameterError(f'norm must be "l2" or "none"; got {norm!r}.')
    weights = inverse_frequencies(documents, n_documents)
    rows = counted.rows
    if weights.shape != (rows.shape[1],):
        raise ShapeError(f"{weights.size} document frequencies for {rows.shape[1]} columns: one for each is needed.")
    values = rows.data.astype(np.float64)
    values = (1.0 + np.log(values) if is_sublinear else values) * weights[rows.indices]
    if norm == "l2":
        squares = np.bincount(np.repeat(np.arange(rows.shape[0]), np.diff(rows.indptr)), values**2, rows.shape[0])
        values /= np.repeat(np.sqrt(squares), np.diff(rows.indptr))
    weighted = sparse.csr_matrix((values.astype(rows.dtype), rows.indices, rows.indptr), shape=rows.shape)
    return replace(counted, rows=weighted)
