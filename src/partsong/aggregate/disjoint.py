"""Blocks of columns, each of which one party alone has played, put side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partsong import kernels
from partsong.aggregate.linear import total_of
from partsong.core import Array, Message
from partsong.errors import PartyError


@dataclass(frozen=True, slots=True)
class DisjointBlocks:
    """Blocks of columns of H put side by side: a sum of arrays that are zero outside their own block.

    `arrived` (one number for each block) counts how often a block was sent, `curvatures` are those of who sent it.
    """

    def lift(self, upload: Message) -> Message:
        """A block (k × w) in its place among all columns (k × m); what would lie beyond them is left out."""
        block, blocks, width = (int(value) for value in upload["place"])
        H, totals = upload["H"], upload["totals"]
        if not (0 <= block < blocks and H.shape[1] == breadth(blocks, width)):
            raise PartyError(f"Block {block} of {blocks}, with {H.shape[1]} columns, has no place among {width}.")
        first, last = span_of(block, blocks, width)
        whole = kernels.of(H).empty((H.shape[0], width), H)
        whole[:, :first], whole[:, first:last], whole[:, last:] = 0, H[:, : last - first], 0
        arrived, curvatures = np.zeros(blocks), np.zeros(blocks)
        arrived[block], curvatures[block] = 1, totals[-1]
        arrays = {"H": whole, "arrived": arrived, "totals": totals[:-1], "curvatures": curvatures}
        return Message(arrays, upload.weight)

    def lower(self, total: Message) -> Message:
        """As it is."""
        return total

    def __call__(self, uploads: Sequence[Message], model: Message = Message({})) -> Message:
        """Of uploads in name order; all of them must be blocks of the model they were sent."""
        if "H" in model.arrays:
            dealt = (int(model["turn"][2]), int(model["H"].shape[1]))
            for upload in uploads:
                _, *place = (int(value) for value in upload["place"])
                if tuple(place) != dealt:
                    raise PartyError(
                        f"A party has sent one of {place[0]} blocks of {place[1]} columns, but {dealt[1]} columns were "
                        f"dealt out in {dealt[0]} blocks. All parties go on from the same start: begin again with it."
                    )
        return total_of(self, uploads)


def breadth(blocks: int, columns: int) -> int:
    """The width of blocks, ⌈columns / blocks⌉; the last ones may have fewer columns, or none."""
    return -(-columns // blocks)


def span_of(block: int, blocks: int, columns: int) -> tuple[int, int]:
    """The columns of one of so many blocks."""
    width = breadth(blocks, columns)
    return min(columns, block * width), min(columns, (block + 1) * width)


def cut_out(Ht: Array, block: int, blocks: int) -> Array:
    """The columns of H (k × w) of a block, with zeros where there are no more of them."""
    first, last = span_of(block, blocks, len(Ht))
    out = kernels.of(Ht).empty((breadth(blocks, len(Ht)), Ht.shape[1]), Ht)
    out[: last - first], out[last - first :] = Ht[first:last], 0
    return out.T


def joined(H: Array, sent: Array, arrived: np.ndarray) -> Array:
    """What was sent where it was sent, and what was there before elsewhere."""
    if arrived.all():
        return sent
    whole = kernels.of(sent).like(kernels.of(H).to_numpy(H), sent) + 0
    for block in np.flatnonzero(arrived):
        first, last = span_of(int(block), len(arrived), H.shape[1])
        whole[:, first:last] = sent[:, first:last]
    return whole
