"""A batch of documents whose arrays have a size of their own, whatever is in them."""

from __future__ import annotations

from dataclasses import dataclass

from partsong.core import Array


@dataclass(frozen=True, slots=True)
class Frame:
    """Words, counts, the document that each belongs to, and where each of the b documents starts.

    What a recorded step reads in place of a `Bag`: entries beyond those of the batch have a count of zero.
    """

    words: Array
    counts: Array
    owners: Array
    starts: Array

    def __len__(self) -> int:
        return len(self.starts)
