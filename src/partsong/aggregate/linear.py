"""Aggregations that are sums in disguise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from partsong import kernels
from partsong.core import Message, Reducible


def add(a: Message, b: Message) -> Message:
    """The sum of two messages, array by array; weights add up too."""
    return Message({name: array + b[name] for name, array in a.arrays.items()}, a.weight + b.weight)


def total_of(aggregation: Reducible, uploads: Sequence[Message]) -> Message:
    """lower(Σ lift(upload)), summed in the order given."""
    return aggregation.lower(reduce(add, map(aggregation.lift, uploads)))


@dataclass(frozen=True, slots=True)
class Sum:
    """Σ_p upload_p."""

    def lift(self, upload: Message) -> Message:
        """As it is."""
        return upload

    def lower(self, total: Message) -> Message:
        """As it is."""
        return total

    def __call__(self, uploads: Sequence[Message], model: Message = Message({})) -> Message:
        """Of uploads in name order."""
        return total_of(self, uploads)


@dataclass(frozen=True, slots=True)
class Mean:
    """(1/N) Σ_p upload_p over the parties that took part."""

    def lift(self, upload: Message) -> Message:
        """x ↦ (x, 1)."""
        return Message(upload.arrays, 1.0)

    def lower(self, total: Message) -> Message:
        """(Σx, N) ↦ Σx / N."""
        return Message({name: array / total.weight for name, array in total.arrays.items()}, total.weight)

    def __call__(self, uploads: Sequence[Message], model: Message = Message({})) -> Message:
        """Of uploads in name order."""
        return total_of(self, uploads)


@dataclass(frozen=True, slots=True)
class WeightedMean:
    """Σ_p n_p upload_p / Σ_p n_p, with the weight each message carries (its number of rows)."""

    def lift(self, upload: Message) -> Message:
        """x ↦ (n·x, n)."""
        return Message({name: array * upload.weight for name, array in upload.arrays.items()}, upload.weight)

    def lower(self, total: Message) -> Message:
        """(Σ n·x, Σ n) ↦ the mean."""
        return Message({name: array / total.weight for name, array in total.arrays.items()}, total.weight)

    def __call__(self, uploads: Sequence[Message], model: Message = Message({})) -> Message:
        """Of uploads in name order."""
        return total_of(self, uploads)


@dataclass(frozen=True, slots=True)
class AlignedMean:
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
        divisor = kernels.of(total["H"]).like(np.where(counts > 0, counts, 1.0)[:, None], total["H"])
        return Message({"H": total["H"] / divisor, "counts": counts}, total.weight)

    def __call__(self, uploads: Sequence[Message], model: Message = Message({})) -> Message:
        """Of uploads in name order."""
        return total_of(self, uploads)
