"""A batch of documents whose arrays have a size of their own, whatever is in them."""

from __future__ import annotations

from dataclasses import dataclass

from partsong.core.interfaces import Array


@dataclass(frozen=True, slots=True)
class Frame:
    """Words, counts, the document that each belongs to, and 2b places where documents start.

    What a recorded step reads in place of a `Bag`: entries beyond those of the batch have a count of zero. They make up
    b documents more, so that none of them is long, and their words are all sorts: a GPU sums documents and words at
    the same time, and each of them one by one.
    """

    words: Array
    counts: Array
    owners: Array
    starts: Array

    def __len__(self) -> int:
        return len(self.starts) // 2
