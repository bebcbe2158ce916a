"""Texts to rows that topics are learned from, the same way at the fit and ever after."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import sparse

from partsong.core import Matrix
from partsong.data.matrix import as_matrix
from partsong.data.partition import party_names
from partsong.errors import DataTypeError, ParameterError, PartsongError
from partsong.evaluate.cooccurrence import WINDOW, windows
from partsong.text.counts import Counted, count, tf_idf
from partsong.text.documents import as_documents
from partsong.text.vocabulary import HashedVocabulary, Vocabulary
from partsong.text.words import Words

TFIDF, COUNTS = WEIGHTINGS = ("tfidf", "counts")


class UnknownWordsWarning(UserWarning):
    """No document of a party has a word of the vocabulary: the party takes part, with rows of zeros."""


@dataclass(frozen=True, slots=True)
class Weighing:
    """What a text is to a model: which words it has, which columns they are, and what they weigh.

    `documents` are the document frequencies of all parties' texts, for tf-idf with rows of norm 1; without them a word
    weighs as often as it occurs. It knows no text, and is all that a model file says of texts.
    """

    words: Words
    vocabulary: Vocabulary | HashedVocabulary
    documents: Any = field(default=None, repr=False)
    n_documents: int = 0

    @property
    def weighting(self) -> str:
        """Its name."""
        return COUNTS if self.documents is None else TFIDF

    @property
    def names(self) -> list[str]:
        """What to show for each column: its word, or its number where words are hashed."""
        if isinstance(self.vocabulary, Vocabulary):
            return list(self.vocabulary.words)
        return [f"#{column}" for column in range(self.vocabulary.n_columns)]

    def counted(self, texts: Iterable[str]) -> Counted:
        """How often each word is in each text."""
        return count(texts, self.words, self.vocabulary)

    def weighed(self, counted: Counted) -> Counted:
        """The same by weight."""
        return counted if self.documents is None else tf_idf(counted, self.documents, self.n_documents)

    def windows(self, texts: Iterable[str], size: int = WINDOW) -> Any:
        """Windows over texts as rows of 0 and 1 (CSR)."""
        listed = [self.words.of(text) for text in texts]
        known = {word: self.vocabulary.column(word) for word in {word for text in listed for word in text}}
        rows = windows(listed, {word: column for word, column in known.items() if column >= 0}, size)
        return sparse.csr_array((rows.data, rows.indices, rows.indptr), (rows.shape[0], self.vocabulary.n_columns))


def words_of(words: Words | None, language: str, stop_words: Iterable[str]) -> Words:
    """The options of words by a value, or by the two that are changed most."""
    if words is None:
        if isinstance(stop_words, str | Iterator) or not isinstance(stop_words, Iterable):
            raise DataTypeError(
                "stop_words is a collection of words that can be read again; from a file: stop_words_of('words.txt')."
            )
        return Words(language, tuple(stop_words))
    if not isinstance(words, Words):
        raise DataTypeError(f"words must be partsong.text.words.Words(…) or None, not {type(words).__name__}.")
    return words


def texts_by_party(texts: Any) -> dict[str, list[str]]:
    """Documents by the name of their party, from a list with one list of texts per party, or a mapping of names."""
    if isinstance(texts, str | bytes) or not isinstance(texts, Mapping | Sequence):
        raise DataTypeError(
            "Texts of parties are a list with one list of texts for each, [texts_1, texts_2, …], or a mapping of names "
            f"to such lists, not {type(texts).__name__}. Texts that are all in one place are for TopicModel."
        )
    if not len(texts):
        raise ParameterError("A federation needs at least one party; none was given.")
    if not isinstance(texts, Mapping):
        return {name: _documents(name, own) for name, own in zip(party_names(len(texts)), texts, strict=True)}
    wrong = [name for name in texts if not (isinstance(name, int) or (isinstance(name, str) and name.strip()))]
    if wrong:
        raise ParameterError("Names of parties must be text or whole numbers; a key of this mapping is neither.")
    if len({str(name) for name in texts}) < len(texts):
        raise ParameterError("Names of parties must differ as text; two keys of this mapping read the same.")
    return {str(name): _documents(str(name), own) for name, own in texts.items()}


def matrix_of(rows: Any, dtype: Any = None) -> Matrix:
    """Rows behind products."""
    return as_matrix(sparse.csr_array(rows), dtype)


def frequencies_of(counted: Counted) -> tuple[np.ndarray, int]:
    """In how many documents each column is above zero, and how many there are."""
    return np.bincount(counted.rows.indices, minlength=counted.rows.shape[1]).astype(np.int64), counted.rows.shape[0]


def _documents(name: str, texts: Any) -> list[str]:
    try:
        return as_documents(texts)
    except PartsongError as error:
        raise type(error)(f"Party {name!r}: {error}") from None
