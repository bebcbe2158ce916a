"""What an engine over ranks asks of a transport: five ways to move bytes and numbers, and one way to end it all.

A rank is a process that holds one shard or several and runs the same loop as all others; rank 0 also plays the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from partsong.core import Array

Buffer = Any  # bytes, or a one-dimensional NumPy array of uint8


class Communicator(Protocol):
    """Ranks 0 … size − 1. Every method but `abort` is collective: all ranks call it, in the same order.

    Bytes go as they are; nothing is ever pickled.
    """

    @property
    def rank(self) -> int:
        """Which one this is."""

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def device(self) -> str:
        """Where tensors that arrive belong; empty for the host."""

    def all_gather(self, card: bytes, patience: float | None = None) -> list[bytes] | None:
        """The cards of all ranks, equally long, in rank order; None if they are not there after `patience` seconds."""

    def gather(self, parcel: Buffer, sizes: Sequence[int]) -> list[Buffer]:
        """At rank 0 the parcels of all ranks, whose sizes everybody knows; elsewhere nothing."""

    def broadcast(self, parcel: Buffer | None, size: int) -> Buffer:
        """Rank 0's parcel of that size, at every rank."""

    def sum(self, array: Array) -> Array:
        """Σ over the ranks of arrays that are alike, in an order that the transport chooses; `array` stays as it is."""

    def abort(self, message: str) -> None:
        """End the other ranks as well, in whatever they are doing, if the transport can; the message is shown."""
