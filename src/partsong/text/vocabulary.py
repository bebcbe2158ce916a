"""Which word is which column."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from partsong.errors import DataError, FeatureError, ParameterError, ShapeError
from partsong.text.documents import read_word_list
from partsong.text.words import Words


class Columns(Protocol):
    """Where a word goes: a column, or −1 for a word that has none."""

    @property
    def n_columns(self) -> int:
        """How many columns there are."""

    def column(self, word: str) -> int:
        """The column of a word."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Words in the order of their columns; `documents`: in how many of `n_documents` each is, where that is known."""

    words: tuple[str, ...] = field(repr=False)
    documents: Any = field(default=None, compare=False, repr=False)
    n_documents: int = 0
    _columns: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", tuple(self.words))
        object.__setattr__(self, "_columns", {word: column for column, word in enumerate(self.words)})
        if not self.words:
            raise DataError("A vocabulary without a word. Ask for fewer documents per word, or check the options.")
        if len(self._columns) < len(self.words):
            raise FeatureError(
                f"{len(self.words) - len(self._columns)} words are in the vocabulary more than once. Name each once."
            )
        if self.documents is not None:
            object.__setattr__(self, "documents", np.asarray(self.documents, dtype=np.int64))
            if self.documents.shape != (len(self.words),):
                raise ShapeError(
                    f"{self.documents.size} document frequencies for {len(self.words)} words: one for each is needed."
                )

    @property
    def n_columns(self) -> int:
        """How many words."""
        return len(self.words)

    def column(self, word: str) -> int:
        """The column of a word, or −1."""
        return self._columns.get(word, -1)

    def __contains__(self, word: object) -> bool:
        return word in self._columns

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Vocabulary, (self.words, self.documents, self.n_documents)

    @classmethod
    def of_documents(cls, documents: Iterable[str], words: Words | None = None) -> Vocabulary:
        """All words of own documents, sorted, with their document frequencies."""
        counted, n_documents = document_frequencies(documents, words or Words())
        if not counted:
            raise DataError(
                f"None of the {n_documents} documents has a word left: all are empty after splitting and stop words. "
                "Check the language, the pattern and the shortest length of words."
            )
        listed = sorted(counted)
        return cls(tuple(listed), np.array([counted[word] for word in listed]), n_documents)

    @classmethod
    def of_file(cls, path: str | os.PathLike[str], words: Words | None = None) -> Vocabulary:
        """A public list (UTF-8), one word per line, in the order of the file; with `words`, in the same normal form."""
        listed = [line.strip() for line in read_word_list(path)]
        if words is not None:
            listed = [word for line in listed for word in words.of(line)]
        return cls(tuple(dict.fromkeys(word for word in listed if word)))

    def pruned(self, min_documents: int = 1, max_share: float = 1.0, max_words: int | None = None) -> Vocabulary:
        """Words in at least so many documents and at most such a share of them; of these the most frequent ones."""
        if min_documents < 1 or not 0 < max_share <= 1 or (max_words is not None and max_words < 1):
            raise ParameterError(
                f"min_documents and max_words are at least 1, and max_share is above 0 and at most 1; got "
                f"{min_documents!r}, {max_words!r}, {max_share!r}."
            )
        if self.documents is None:
            raise ParameterError("These words have no document frequencies to prune by: they come from a public list.")
        kept = np.flatnonzero(
            (self.documents >= min_documents) & (self.documents <= max_share * max(1, self.n_documents))
        )
        if max_words is not None and len(kept) > max_words:
            order = sorted(kept.tolist(), key=lambda column: (-self.documents[column], self.words[column]))
            kept = np.sort(np.array(order[:max_words]))
        if not len(kept):
            raise DataError(
                f"None of {len(self.words)} words is in at least {min_documents} documents and in at most "
                f"{max_share:.0%} of {self.n_documents}: all documents would be empty. Prune less: "
                "a smaller min_documents, or a larger max_share."
            )
        return Vocabulary(tuple(self.words[column] for column in kept), self.documents[kept], self.n_documents)


@dataclass(frozen=True, slots=True)
class HashedVocabulary:
    """Columns by hash: nothing has to be agreed on but their number; words that meet in a column are added up.

    Without a key anybody can test which words a column may stand for; with one, the parties alone can. Columns have no
    words to show.
    """

    n_columns: int
    key: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.n_columns, bool) or not isinstance(self.n_columns, int) or self.n_columns < 1:
            raise ParameterError(f"n_columns must be a whole number of at least 1; got {self.n_columns!r}.")
        if not isinstance(self.key, bytes) or len(self.key) > 64:
            raise ParameterError("The key of a hashed vocabulary has at most 64 bytes, such as fresh_key() gives.")

    def column(self, word: str) -> int:
        """BLAKE2b(word) modulo the number of columns, with the key if there is one."""
        digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), key=self.key, digest_size=16, person=b"column")
        return int.from_bytes(digest.digest(), "little") % self.n_columns


def document_frequencies(documents: Iterable[str], words: Words) -> tuple[Counter[str], int]:
    """In how many documents each word occurs, and how many documents there are, empty ones as well."""
    counted: Counter[str] = Counter()
    n_documents = 0
    for text in documents:
        counted.update(set(words.of(text)))
        n_documents += 1
    return counted, n_documents


def require_one_vocabulary(vocabularies: Sequence[Vocabulary]) -> Vocabulary:
    """The vocabulary of all parties, if they have the same."""
    first = vocabularies[0]
    for number, other in enumerate(vocabularies):
        if other.words != first.words:
            raise FeatureError(
                f"Party {number} (counted from 0) has another vocabulary ({other.n_columns} words) than the first "
                f"({first.n_columns} words). Agree on one: a public file, hashing, or the rule of text.agreement."
            )
    return first
