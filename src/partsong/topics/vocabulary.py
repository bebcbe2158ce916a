"""Vocabularies, word counts and tf-idf weights of documents."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from scipy import sparse

from partsong.core.interfaces import Matrix
from partsong.core.parameters import whole_number
from partsong.core.states import state
from partsong.data.conversion import as_matrix
from partsong.errors import (
    DataError,
    DataTypeError,
    FeatureError,
    ParameterError,
    PartsongError,
    ShapeError,
    format_count,
    with_message,
)
from partsong.estimators.parties import party_names
from partsong.evaluation.topic_quality import WINDOW, windows
from partsong.topics.documents import as_documents, read_word_list
from partsong.topics.tokenizer import Words

TFIDF, COUNTS = WEIGHTINGS = ("tfidf", "counts")


class Columns(Protocol):
    """A map from words to columns; −1 for words without a column."""

    @property
    def n_columns(self) -> int:
        """The number of columns."""

    def column(self, word: str) -> int:
        """The column of a word."""


@state("words.vocabulary")
@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Words in the order of their columns; `documents`: the document frequency of each in `n_documents`, if known."""

    words: tuple[str, ...] = field(repr=False)
    documents: Any = field(default=None, compare=False, repr=False)
    n_documents: int = 0
    _columns: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", tuple(self.words))
        object.__setattr__(self, "_columns", {word: column for column, word in enumerate(self.words)})
        if not self.words:
            raise DataError("The vocabulary is empty. Lower min_documents, or check the word options.")
        if len(self._columns) < len(self.words):
            raise FeatureError(
                f"{len(self.words) - len(self._columns)} words are in the vocabulary more than once. Remove duplicates."
            )
        if self.documents is not None:
            object.__setattr__(self, "documents", np.asarray(self.documents, dtype=np.int64))
            if self.documents.shape != (len(self.words),):
                raise ShapeError(
                    f"{self.documents.size} document frequencies for {len(self.words)} words. Pass one per word."
                )

    @property
    def n_columns(self) -> int:
        return len(self.words)

    def column(self, word: str) -> int:
        return self._columns.get(word, -1)

    def __contains__(self, word: object) -> bool:
        return word in self._columns

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Vocabulary, (self.words, self.documents, self.n_documents)

    @classmethod
    def of_documents(cls, documents: Iterable[str], words: Words | None = None) -> Vocabulary:
        """Create a vocabulary of all words of documents, sorted, with document frequencies."""
        counted, n_documents = document_frequencies(documents, words or Words())
        if not counted:
            raise DataError(
                f"Every document (of {n_documents}) is empty after splitting and removing stop words. Check language, "
                "pattern and shortest."
            )
        listed = sorted(counted)
        return cls(tuple(listed), np.array([counted[word] for word in listed]), n_documents)

    @classmethod
    def of_file(cls, path: str | os.PathLike[str], words: Words | None = None) -> Vocabulary:
        """Read a public list (UTF-8), one word per line, in file order; normalized with `words` if given."""
        listed = [line.strip() for line in read_word_list(path)]
        if words is not None:
            listed = [word for line in listed for word in words.of(line)]
        return cls(tuple(dict.fromkeys(word for word in listed if word)))

    def pruned(self, min_documents: int = 1, max_df: float = 1.0, max_words: int | None = None) -> Vocabulary:
        """Keep words in at least `min_documents` and at most a share `max_df` of documents; then the most frequent."""
        if min_documents < 1 or not 0 < max_df <= 1 or (max_words is not None and max_words < 1):
            raise ParameterError(
                f"min_documents and max_words must be at least 1, and max_df above 0 and at most 1; got "
                f"{min_documents!r}, {max_words!r}, {max_df!r}.",
                parameter="min_documents",
            )
        if self.documents is None:
            raise ParameterError("These words have no document frequencies to prune by. Use Vocabulary.of_documents.")
        kept = np.flatnonzero((self.documents >= min_documents) & (self.documents <= max_df * max(1, self.n_documents)))
        if max_words is not None and len(kept) > max_words:
            order = sorted(kept.tolist(), key=lambda column: (-self.documents[column], self.words[column]))
            kept = np.sort(np.array(order[:max_words]))
        if not len(kept):
            raise DataError(
                f"None of {len(self.words)} words is in at least {min_documents} documents and in at most "
                f"{max_df:.0%} of {self.n_documents}. Use a smaller min_documents or a larger max_df.",
                parameter="min_documents",
            )
        return Vocabulary(tuple(self.words[column] for column in kept), self.documents[kept], self.n_documents)


@dataclass(frozen=True, slots=True)
class HashedVocabulary:
    """Columns by hash: parties agree only on their number; words with the same column are added.

    Without a key, anyone can test which words a column may represent; with a key, only the parties can. Columns have no
    words to display.
    """

    n_columns: int
    key: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        whole_number("n_columns", self.n_columns)
        if not isinstance(self.key, bytes) or len(self.key) > 64:
            raise ParameterError("The key of a hashed vocabulary must have at most 64 bytes. Use fresh_key().")

    def column(self, word: str) -> int:
        """BLAKE2b(word) modulo the number of columns, with the key if there is one."""
        digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), key=self.key, digest_size=16, person=b"column")
        return int.from_bytes(digest.digest(), "little") % self.n_columns


def document_frequencies(documents: Iterable[str], words: Words) -> tuple[Counter[str], int]:
    """Return the document frequency of each word, and the number of documents including empty ones."""
    counted: Counter[str] = Counter()
    n_documents = 0
    for text in documents:
        counted.update(set(words.of(text)))
        n_documents += 1
    return counted, n_documents


@dataclass(frozen=True, slots=True)
class DocumentRows:
    """Rows (n × m, CSR, float32), one per document; `is_empty` marks documents without any known word."""

    rows: Any
    is_empty: Any

    @property
    def n_empty(self) -> int:
        """The number of empty documents; they are kept as rows of zeros."""
        return int(self.is_empty.sum())

    def require_words(self, whose: str = "The collection") -> DocumentRows:
        """Return self; refuse a collection in which every document is empty."""
        if self.n_empty == len(self.is_empty):
            raise DataError(
                f"{whose}: every document (of {len(self.is_empty)}) is empty; none has a word of the vocabulary "
                f"({format_count(self.rows.shape[1], 'column')}). Check the language, the word options and the "
                "vocabulary."
            )
        return self


def count_words(documents: Iterable[str], words: Words, vocabulary: Columns) -> DocumentRows:
    """Count the words of the vocabulary in each document; documents without any become rows of zeros."""
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
    return DocumentRows(rows, np.diff(rows.indptr) == 0)


def inverse_frequencies(documents: Any, n_documents: int) -> Any:
    """Return log((1 + n) / (1 + df)) + 1 for each column, smoothed as in scikit-learn."""
    frequencies = np.asarray(documents, dtype=np.float64)
    if frequencies.size and not 0 <= frequencies.min() <= frequencies.max() <= n_documents:
        raise ParameterError(f"Document frequencies must be from 0 to the number of documents, {n_documents}.")
    return np.log((1.0 + n_documents) / (1.0 + frequencies)) + 1.0


def tf_idf(
    counted: DocumentRows, documents: Any, n_documents: int, *, is_sublinear: bool = False, norm: str = "l2"
) -> DocumentRows:
    """Return counts (or 1 + log counts) times inverse document frequencies, with rows of unit norm ("l2") or "none".

    Frequencies are those of all parties together, so that a word has the same weight at every party.
    """
    if norm not in ("l2", "none"):
        raise ParameterError(f'norm must be "l2" or "none"; got {norm!r}.', parameter="norm")
    weights = inverse_frequencies(documents, n_documents)
    rows = counted.rows
    if weights.shape != (rows.shape[1],):
        raise ShapeError(f"{weights.size} document frequencies for {rows.shape[1]} columns. Pass one per column.")
    values = rows.data.astype(np.float64)
    values = (1.0 + np.log(values) if is_sublinear else values) * weights[rows.indices]
    if norm == "l2":
        squares = np.bincount(np.repeat(np.arange(rows.shape[0]), np.diff(rows.indptr)), values**2, rows.shape[0])
        values /= np.repeat(np.sqrt(squares), np.diff(rows.indptr))
    weighted = sparse.csr_matrix((values.astype(rows.dtype), rows.indices, rows.indptr), shape=rows.shape)
    return replace(counted, rows=weighted)


class UnknownWordsWarning(UserWarning):
    """No document of a party has a word of the vocabulary; the party takes part with rows of zeros."""


@dataclass(frozen=True, slots=True)
class TextVectorizer:
    """Converts texts to rows: word options, vocabulary and weighting.

    `documents` are the document frequencies over all parties, for tf-idf with rows of norm 1; without them rows are
    word counts. It contains no text; a model file stores nothing else about texts.
    """

    words: Words
    vocabulary: Vocabulary | HashedVocabulary
    documents: Any = field(default=None, repr=False)
    n_documents: int = 0

    @property
    def weighting(self) -> str:
        """The name of the weighting."""
        return COUNTS if self.documents is None else TFIDF

    @property
    def names(self) -> list[str]:
        """The label of each column: its word, or its number if words are hashed."""
        if isinstance(self.vocabulary, Vocabulary):
            return list(self.vocabulary.words)
        return [f"#{column}" for column in range(self.vocabulary.n_columns)]

    def counted(self, texts: Iterable[str]) -> DocumentRows:
        """Count the words of each text."""
        return count_words(texts, self.words, self.vocabulary)

    def weighed(self, counted: DocumentRows) -> DocumentRows:
        """Weight counted rows."""
        return counted if self.documents is None else tf_idf(counted, self.documents, self.n_documents)

    def windows(self, texts: Iterable[str], size: int = WINDOW) -> Any:
        """Return sliding windows over texts as rows of 0 and 1 (CSR)."""
        listed = [self.words.of(text) for text in texts]
        known = {word: self.vocabulary.column(word) for word in {word for text in listed for word in text}}
        rows = windows(listed, {word: column for word, column in known.items() if column >= 0}, size)
        return sparse.csr_array((rows.data, rows.indices, rows.indptr), (rows.shape[0], self.vocabulary.n_columns))


def word_options(words: Words | None, language: str, stop_words: Iterable[str]) -> Words:
    """Return word options from a Words value, or from language and stop words."""
    if words is None:
        if isinstance(stop_words, str | Iterator) or not isinstance(stop_words, Iterable):
            raise DataTypeError(
                "stop_words must be a collection of words. From a file, use stop_words_of('words.txt').",
                parameter="stop_words",
            )
        return Words(language, tuple(stop_words))
    if not isinstance(words, Words):
        raise DataTypeError(
            f"words must be partsong.topics.tokenizer.Words(…) or None, not {type(words).__name__}.", parameter="words"
        )
    return words


def texts_by_party(texts: Any) -> dict[str, list[str]]:
    """Return documents by party, from a list with one list of texts per party, or a mapping of names."""
    if isinstance(texts, str | bytes) or not isinstance(texts, Mapping | Sequence):
        raise DataTypeError(
            "Texts must be a list with one list of texts per party, [texts_1, texts_2, …], or a mapping of names to "
            f"such lists, not {type(texts).__name__}. For texts in one place use TopicModel."
        )
    if not len(texts):
        raise ParameterError("A federation needs at least one party; got none.")
    if not isinstance(texts, Mapping):
        return {name: _documents(name, own) for name, own in zip(party_names(len(texts)), texts, strict=True)}
    wrong = [name for name in texts if not (isinstance(name, int) or (isinstance(name, str) and name.strip()))]
    if wrong:
        raise ParameterError("Party names must be text or whole numbers. Convert the keys of the mapping.")
    if len({str(name) for name in texts}) < len(texts):
        raise ParameterError("Party names must differ as text; two keys of the mapping are equal as text. Rename one.")
    return {str(name): _documents(str(name), own) for name, own in texts.items()}


def rows_as_matrix(rows: Any, dtype: Any = None) -> Matrix:
    """Return rows as a Matrix."""
    return as_matrix(sparse.csr_array(rows), dtype)


def frequencies_of(counted: DocumentRows) -> tuple[np.ndarray, int]:
    """Return the document frequency of each column, and the number of documents."""
    return np.bincount(counted.rows.indices, minlength=counted.rows.shape[1]).astype(np.int64), counted.rows.shape[0]


def _documents(name: str, texts: Any) -> list[str]:
    try:
        return as_documents(texts)
    except PartsongError as error:
        raise with_message(error, f"Party {name!r}: {error}") from None
