"""What a party brings to an agreement: its words and in how many of its documents each occurs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import compress, repeat
from typing import Any, cast

import numpy as np

from partsong.core import Matrix, Shard
from partsong.errors import CompositionError
from partsong.streams import fresh_seed
from partsong.text.documents import as_documents
from partsong.text.keys import require_key
from partsong.text.vocabulary import document_frequencies
from partsong.text.words import Words


@dataclass(frozen=True, slots=True)
class HeldWords:
    """Words with the number of own documents that have them; private, and so is the key that the parties share.

    `options` are those of the words, which all parties have to have in common.
    """

    words: tuple[str, ...] = field(repr=False)
    documents: Any = field(repr=False)
    n_documents: int
    key: bytes = field(repr=False)
    options: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        """As many rows as documents, and no columns yet."""
        return self.n_documents, 0

    @property
    def dtype(self) -> Any:
        """Counts are whole; a layout asks for some type."""
        return np.dtype(np.float64)

    @classmethod
    def of(cls, documents: Iterable[Any], words: Words, key: bytes) -> HeldWords:
        """The words of documents, which may all be empty."""
        counted, n_documents = document_frequencies(as_documents(documents), words)
        listed = tuple(sorted(counted))
        frequencies = np.array([counted[word] for word in listed], dtype=np.int64)
        return cls(listed, frequencies, n_documents, require_key(key), words.to_json())

    def candidates(self, min_documents: int, longest: int) -> tuple[tuple[bytes, ...], int]:
        """The words that may be proposed, as bytes: in enough documents, and of at most `longest` bytes of UTF-8.

        Also how many of those in enough documents are longer.
        """
        chosen = compress(self.words, (np.asarray(self.documents) >= min_documents).tolist())
        texts = [word.encode("utf-8", "surrogatepass") for word in chosen]
        short = [text for text in texts if len(text) <= longest]
        return tuple([text for text in short if b"\0" not in text]), len(texts) - len(short)

    def frequencies_in(self, columns: Mapping[str, int]) -> Any:
        """In how many of its documents the word of each column occurs."""
        found = np.zeros(len(columns), dtype=np.int64)
        at = np.fromiter(map(columns.get, self.words, repeat(-1)), np.int64, len(self.words))
        found[at[at >= 0]] = np.asarray(self.documents)[at >= 0]
        return found


def word_shards(
    documents: Mapping[str, Iterable[Any]], words: Words, key: bytes, secrets: Mapping[str, int] | None = None
) -> list[Shard]:
    """Parties by name, where all of them are in one process; elsewhere each makes its own."""
    return [
        Shard(
            name,
            cast(Matrix, HeldWords.of(texts, words, key)),
            fresh_seed() if secrets is None else secrets[name],
        )
        for name, texts in documents.items()
    ]


def held_by(shard: Shard) -> HeldWords:
    """A party's words."""
    held: Any = shard.matrix
    if not isinstance(held, HeldWords):
        raise CompositionError(
            f"An agreement on words is between parties that hold words, and {shard.name!r} holds "
            f"{type(held).__name__}. Make its shard with word_shards."
        )
    return held
