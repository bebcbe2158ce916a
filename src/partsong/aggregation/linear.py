"""Aggregations that are sums in disguise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from partsong import kernels
from partsong.core.interfaces import Array, Message, Reducible
from partsong.errors import PartyError


def add(a: Message, b: Message) -> Message:
    """The sum of two messages, array by array; weights add up too."""
    sums = {name: (array + b[name])[...] for name, array in a.arrays.items()}  # of 0-d arrays NumPy makes a number
    return Message(sums, a.weight + b.weight)


def sum_uploads(aggregation: Reducible, uploads: Sequence[Message]) -> Message:
    """lower(Σ lift(upload)), summed in the order given."""
    return aggregation.lower(reduce(add, map(aggregation.lift, uploads)))


class Summing:
    """lower(Σ lift(upload)); by itself the plain sum."""

    __slots__ = ()

    def lift(self, upload: Message) -> Message:
        return upload

    def lower(self, total: Message) -> Message:
        return total

    def __call__(self, uploads: Sequence[Message], model: Message = Message({})) -> Message:
        return sum_uploads(self, uploads)


@dataclass(frozen=True, slots=True)
class Sum(Summing):
    """Σ_p upload_p."""


@dataclass(frozen=True, slots=True)
class Mean(Summing):
    """(1/N) Σ_p upload_p over the parties that took part."""

    def lift(self, upload: Message) -> Message:
        """x ↦ (x, 1)."""
        return Message(upload.arrays, 1.0)

    def lower(self, total: Message) -> Message:
        """(Σx, N) ↦ Σx / N."""
        return Message({name: array / total.weight for name, array in total.arrays.items()}, total.weight)


@dataclass(frozen=True, slots=True)
class WeightedMean(Summing):
    """Σ_p n_p upload_p / Σ_p n_p, with the weight each message carries (its number of rows)."""

    def lift(self, upload: Message) -> Message:
        """x ↦ (n·x, n)."""
        return Message({name: array * upload.weight for name, array in upload.arrays.items()}, upload.weight)

    def lower(self, total: Message) -> Message:
        """(Σ n·x, Σ n) ↦ the mean."""
        return Message({name: array / total.weight for name, array in total.arrays.items()}, total.weight)


@dataclass(frozen=True, slots=True)
class AlignedMean(Summing):
    """Row l: Σ_p w_p (P_p H_p)_l / Σ_p w_p (P_p 1)_l, from uploads that are aligned already; w_p = n_p if `weighted`.

    Rows that nobody has come out as zeros, with a count of zero.
    """

    weighted: bool = False

    def lift(self, upload: Message) -> Message:
        """(P H, P 1) ↦ w·(P H, P 1)."""
        weight = upload.weight if self.weighted else 1.0
        return Message({name: array * weight for name, array in upload.arrays.items()}, upload.weight)

    def lower(self, total: Message) -> Message:
        """Sums to means, row by row."""
        counts = total["counts"]
        divisor = kernels.of(total["H"]).cast(np.where(counts > 0, counts, 1.0)[:, None], total["H"])
        return Message({"H": total["H"] / divisor, "counts": counts}, total.weight)


@dataclass(frozen=True, slots=True)
class DisjointBlocks(Summing):
    """Blocks of columns of H put side by side: a sum of arrays that are zero outside their own block.

    `arrived` (one number for each block) counts how often a block was sent.
    """

    def lift(self, upload: Message) -> Message:
        """A block (k × w) in its place among all columns (k × m); what would lie beyond them is left out."""
        block, blocks, width = (int(value) for value in upload["place"])
        H = upload["H"]
        if not (0 <= block < blocks and H.shape[1] == block_width(blocks, width)):
            raise PartyError(f"Block {block} of {blocks}, with {H.shape[1]} columns, has no place among {width}.")
        first, last = block_span(block, blocks, width)
        whole = kernels.of(H).empty((H.shape[0], width), H)
        whole[:, :first], whole[:, first:last], whole[:, last:] = 0, H[:, : last - first], 0
        arrived = np.zeros(blocks)
        arrived[block] = 1
        return Message({"H": whole, "arrived": arrived, "totals": upload["totals"]}, upload.weight)

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
        return sum_uploads(self, uploads)


def block_width(blocks: int, columns: int) -> int:
    """The width of blocks, ⌈columns / blocks⌉; the last ones may have fewer columns, or none."""
    return -(-columns // blocks)


def block_span(block: int, blocks: int, columns: int) -> tuple[int, int]:
    """The columns of one of so many blocks."""
    width = block_width(blocks, columns)
    return min(columns, block * width), min(columns, (block + 1) * width)


def extract_block(Ht: Array, block: int, blocks: int) -> Array:
    """The columns of H (k × w) of a block, with zeros where there are no more of them."""
    first, last = block_span(block, blocks, len(Ht))
    out = kernels.of(Ht).empty((block_width(blocks, len(Ht)), Ht.shape[1]), Ht)
    out[: last - first], out[last - first :] = Ht[first:last], 0
    return out.T


def merge_blocks(H: Array, sent: Array, arrived: np.ndarray) -> Array:
    """What was sent where it was sent, and what was there before elsewhere."""
    if arrived.all():
        return sent
    whole = kernels.of(sent).cast(kernels.of(H).to_numpy(H), sent) + 0
    for block in np.flatnonzero(arrived):
        first, last = block_span(int(block), len(arrived), H.shape[1])
        whole[:, first:last] = sent[:, first:last]
    return whole
