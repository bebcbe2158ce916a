"""Aggregations that can be computed from a sum: sum, means, aligned means, disjoint blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from partsong import kernels
from partsong.core.interfaces import Array, Message, Reducible
from partsong.errors import PartyError


def add(a: Message, b: Message) -> Message:
    """Add two messages array by array; weights are added too."""
    sums = {
        name: (array + b[name])[...] for name, array in a.arrays.items()
    }  # keep 0-d arrays, which NumPy turns into numbers
    return Message(sums, a.weight + b.weight)


def sum_uploads(aggregation: Reducible, uploads: Sequence[Message]) -> Message:
    """lower(Σ lift(upload)), summed in the given order."""
    return aggregation.lower(reduce(add, map(aggregation.lift, uploads)))


class Summing:
    """lower(Σ lift(upload)); by default the plain sum."""

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
    """Σ_p n_p upload_p / Σ_p n_p, with the weight of each message (its number of rows)."""

    def lift(self, upload: Message) -> Message:
        """x ↦ (n·x, n)."""
        return Message({name: array * upload.weight for name, array in upload.arrays.items()}, upload.weight)

    def lower(self, total: Message) -> Message:
        """(Σ n·x, Σ n) ↦ the mean."""
        return Message({name: array / total.weight for name, array in total.arrays.items()}, total.weight)


@dataclass(frozen=True, slots=True)
class AlignedMean(Summing):
    """Row l: Σ_p w_p (P_p H_p)_l / Σ_p w_p (P_p 1)_l, from uploads that are already aligned; w_p = n_p if `weighted`.

    Rows that no party has are zero, with a count of zero.
    """

    weighted: bool = False

    def lift(self, upload: Message) -> Message:
        """(P H, P 1) ↦ w·(P H, P 1)."""
        weight = upload.weight if self.weighted else 1.0
        return Message({name: array * weight for name, array in upload.arrays.items()}, upload.weight)

    def lower(self, total: Message) -> Message:
        """Divide sums by counts, row by row."""
        counts = total["counts"]
        divisor = kernels.of(total["H"]).cast(np.where(counts > 0, counts, 1.0)[:, None], total["H"])
        return Message({"H": total["H"] / divisor, "counts": counts}, total.weight)


@dataclass(frozen=True, slots=True)
class DisjointBlocks(Summing):
    """Concatenation of column blocks of H, as a sum of arrays that are zero outside their own block.

    `arrived` (one number per block) counts how often each block was sent.
    """

    def lift(self, upload: Message) -> Message:
        """Place a block (k × w) among all columns (k × m); columns beyond the last are dropped."""
        block, blocks, width = (int(value) for value in upload["place"])
        H = upload["H"]
        if not (0 <= block < blocks and H.shape[1] == block_width(blocks, width)):
            raise PartyError(f"Block {block} of {blocks} with {H.shape[1]} columns does not fit {width} columns.")
        first, last = block_span(block, blocks, width)
        whole = kernels.of(H).empty((H.shape[0], width), H)
        whole[:, :first], whole[:, first:last], whole[:, last:] = 0, H[:, : last - first], 0
        arrived = np.zeros(blocks)
        arrived[block] = 1
        return Message({"H": whole, "arrived": arrived, "totals": upload["totals"]}, upload.weight)

    def __call__(self, uploads: Sequence[Message], model: Message = Message({})) -> Message:
        """Aggregate uploads in name order; all must be blocks of the model that was sent."""
        if "H" in model.arrays:
            dealt = (int(model["turn"][2]), int(model["H"].shape[1]))
            for upload in uploads:
                _, *place = (int(value) for value in upload["place"])
                if tuple(place) != dealt:
                    raise PartyError(
                        f"A party sent a block of {place[1]} columns in {place[0]} blocks, but the model has "
                        f"{dealt[1]} columns in {dealt[0]} blocks. Restart all parties from the same checkpoint."
                    )
        return sum_uploads(self, uploads)


def block_width(blocks: int, columns: int) -> int:
    """The width of blocks, ⌈columns / blocks⌉; the last ones may have fewer columns, or none."""
    return -(-columns // blocks)


def block_span(block: int, blocks: int, columns: int) -> tuple[int, int]:
    """First and last column of one block."""
    width = block_width(blocks, columns)
    return min(columns, block * width), min(columns, (block + 1) * width)


def extract_block(Ht: Array, block: int, blocks: int) -> Array:
    """The columns of H (k × w) of a block, padded with zeros."""
    first, last = block_span(block, blocks, len(Ht))
    out = kernels.of(Ht).empty((block_width(blocks, len(Ht)), Ht.shape[1]), Ht)
    out[: last - first], out[last - first :] = Ht[first:last], 0
    return out.T


def merge_blocks(H: Array, sent: Array, arrived: np.ndarray) -> Array:
    """H with the blocks that arrived replaced by those in `sent`."""
    if arrived.all():
        return sent
    whole = kernels.of(sent).cast(kernels.of(H).to_numpy(H), sent) + 0
    for block in np.flatnonzero(arrived):
        first, last = block_span(int(block), len(arrived), H.shape[1])
        whole[:, first:last] = sent[:, first:last]
    return whole
