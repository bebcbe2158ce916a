"""A batch of documents padded to a fixed array size, for CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

from partsong.core.interfaces import Array


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Words, counts, the document of each entry, and the starts of 2b documents.

    A recorded step reads this in place of a `Batch`. Padding entries have a count of zero. They are spread over b extra
    documents and over many words, because a GPU adds the entries of one document, or of one word, one after another.
    """

    words: Array
    counts: Array
    owners: Array
    starts: Array

    def __len__(self) -> int:
        return len(self.starts) // 2
