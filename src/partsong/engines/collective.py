"""Collective calls over ranks: what a transport can do, and how ranks agree that all is well or why the run ends.

A rank is a process that holds one shard or several and runs the same loop as all others; rank 0 also plays the server.
Before anything large is sent, each rank shows a card of fixed size to all others. It says how much will follow, so that
it costs no exchange of its own, and whether this rank has failed or has left its loop. Where one has failed its message
follows, and all ranks raise it. A rank that fails while others work on for long does not wait: it ends the job.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from partsong import errors
from partsong.core.codec import Buffer, decode, encode
from partsong.core.interfaces import Array, Message
from partsong.errors import PartsongError, PartyError


class Communicator(Protocol):
    """What a network over ranks asks of a transport: five ways to move bytes and numbers, and one way to end it all.

    Ranks are 0 … size − 1. Every method but `abort` is collective: all ranks call it, in the same order. Bytes
    go as they are; nothing is ever pickled.
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


Result = TypeVar("Result")

PATIENCE = 5.0
"""Seconds for which a rank that has failed waits until the others can hear of it."""

RAISED = "(raised at"
"""How a note begins that says where an error is from: all ranks know of it."""

LONGEST = 4000
"""Characters of an error's message, and of each of its notes, that are sent."""


class Status(enum.IntEnum):
    """How a rank is."""

    WELL = 0
    LEFT = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class Card:
    """What a rank shows to all others before it sends anything: 49 bytes.

    `size`: bytes that follow. `faults`: own parties that are left out. `upload_bytes`, `form`: of an upload that it
    would add to a sum, and a checksum of the arrays (0: nothing to add). `norm`: of the model it holds, to notice ranks
    that drift apart. `first`: with which phase a sum begins, as rank 0 knows.
    """

    status: Status = Status.WELL
    size: int = 0
    faults: int = 0
    upload_bytes: int = 0
    form: int = 0
    norm: float = 0.0
    first: int = 0

    FORMAT: ClassVar[struct.Struct] = struct.Struct("<BQQQQdQ")

    def written(self) -> bytes:
        """As bytes."""
        counts = (self.size, self.faults, self.upload_bytes, self.form)
        return self.FORMAT.pack(self.status, *counts, self.norm, self.first)

    @classmethod
    def read(cls, card: bytes) -> Card:
        """From bytes."""
        status, *others = cls.FORMAT.unpack(card)
        return cls(Status(status), *others)


class Ended(Exception):
    """The run is over and every rank knows: with this error, or without one because a rank has left its loop."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def agree(communicator: Communicator, card: Card) -> list[Card]:
    """Everybody's cards, if all is well; else the run has ended."""
    shown = communicator.all_gather(card.written())
    assert shown is not None
    cards = [Card.read(one) for one in shown]
    states = {one.status for one in cards}
    if Status.FAILED in states:
        raise Ended(_first_failure(communicator, cards, b""))
    if Status.LEFT in states:
        raise Ended(None)
    return cards


def share(communicator: Communicator, text: str) -> list[str]:
    """Everybody's texts, in rank order."""
    own = text.encode()
    cards = agree(communicator, Card(size=len(own)))
    return [one.decode() for one in _side_by_side(communicator, own, [card.size for card in cards])]


def share_values(communicator: Communicator, own: Any) -> list[Any]:
    """Everybody's plain values (as JSON has them), in rank order; the end of a run elsewhere is an error."""
    with heard():
        return [json.loads(text) for text in share(communicator, json.dumps(own))]


def tell(communicator: Communicator, error: BaseException) -> None:
    """Take part in the next agreement as the one that failed; if the others do not come to it, end the job."""
    own = _described(error)
    error.add_note(f"{RAISED} rank {communicator.rank})")
    with suppress(Exception):  # a transport that is broken: the error itself matters more
        shown = communicator.all_gather(Card(Status.FAILED, len(own)).written(), PATIENCE)
        if shown is None:
            communicator.abort(f"Rank {communicator.rank} failed: {type(error).__name__}: {error}")
        else:
            _first_failure(communicator, [Card.read(one) for one in shown], own)


def leave(communicator: Communicator) -> None:
    """Take part in the next agreement as one that has left its loop, so that the others end theirs."""
    with suppress(Exception):  # of a transport that has ended before
        shown = communicator.all_gather(Card(Status.LEFT).written(), PATIENCE)
        cards = [Card.read(one) for one in shown or ()]
        if any(card.status is Status.FAILED for card in cards):
            _first_failure(communicator, cards, b"")


def together(communicator: Communicator, work: Callable[[], Result]) -> Result:
    """work() at this rank, or the error of the first rank where it failed: for files that are read before a run."""
    try:
        result = work()
    except BaseException as error:
        tell(communicator, error)
        raise
    try:
        agree(communicator, Card())
    except Ended as end:
        raise (end.error or PartyError("Another rank has left.")) from None
    return result


@contextmanager
def failing_together(communicator: Communicator) -> Iterator[None]:
    """Within this block an error at one rank ends the block at all of them: in the next agreement, or by ending the job
    where others do not come to one.
    """
    try:
        yield
    except BaseException as error:
        if not _is_known_to_all(error):
            tell(communicator, error)
        raise


def _is_known_to_all(error: BaseException) -> bool:
    """Whether it has been told, or was heard from another rank."""
    return any(str(note).startswith(RAISED) for note in getattr(error, "__notes__", ()))


@contextmanager
def heard() -> Iterator[None]:
    """Within this block the end of a run that another rank has told of is its error."""
    try:
        yield
    except Ended as end:
        raise (end.error or _left()) from None


def _left() -> KeyboardInterrupt:
    """Another rank has left its loop, and all end."""
    error = KeyboardInterrupt()
    error.add_note(f"{RAISED} another rank)")
    return error


def at_the_server(
    communicator: Communicator, work: Callable[[], tuple[Mapping[str, Message], Any]]
) -> tuple[Mapping[str, Message], Any]:
    """What rank 0 makes of work(), at every rank; where it fails, the run has ended.

    Sent: a card, then messages and note in one parcel, or the error.
    """
    if communicator.rank > 0:
        card = Card.read(bytes(communicator.broadcast(None, Card.FORMAT.size)))
        parcel = communicator.broadcast(None, card.size)
        if card.status is Status.FAILED:
            raise Ended(_restored(bytes(parcel), 0))
        messages, note = decode(parcel, device=communicator.device)
        return messages, note
    try:
        result = work()
        parcel = encode(tuple(result)) if communicator.size > 1 else b""
    except BaseException as error:
        own = _described(error)
        communicator.broadcast(Card(Status.FAILED, len(own)).written(), Card.FORMAT.size)
        communicator.broadcast(own, len(own))
        raise Ended(error) from error
    communicator.broadcast(Card(size=len(parcel)).written(), Card.FORMAT.size)
    communicator.broadcast(parcel, len(parcel))
    return result


def as_text(error: PartsongError) -> list[str]:
    """The class and the message of one of our errors."""
    return [_our_kind(error), str(error)[:LONGEST]]


def from_text(kind: str, message: str) -> PartsongError:
    """An error of ours again; kinds that nobody knows are errors of a party."""
    found = getattr(errors, kind, None)
    is_ours = isinstance(found, type) and issubclass(found, PartsongError)
    return (found if is_ours else PartyError)(message)  # type: ignore[misc]


def _first_failure(communicator: Communicator, cards: Sequence[Card], own: bytes) -> BaseException:
    sizes = [card.size if card.status is Status.FAILED else 0 for card in cards]
    texts = _side_by_side(communicator, own, sizes)
    rank = next(rank for rank, size in enumerate(sizes) if size)
    return _restored(texts[rank], rank)


def _side_by_side(communicator: Communicator, own: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Texts of several sizes, by cards as long as the longest."""
    shown = communicator.all_gather(own.ljust(max(sizes)))
    assert shown is not None
    return [text[:size] for text, size in zip(shown, sizes, strict=True)]


def _described(error: BaseException) -> bytes:
    notes = [note[:LONGEST] for note in getattr(error, "__notes__", [])]
    kind = _our_kind(error) if isinstance(error, PartsongError) else ""
    text = {"kind": kind, "type": type(error).__name__, "message": str(error)[:LONGEST], "notes": notes} | {
        "parameter": getattr(error, "parameter", None)
    }
    return json.dumps(text).encode()


def _restored(text: bytes, rank: int) -> PartsongError:
    told = json.loads(text)
    if told["kind"]:
        error = from_text(told["kind"], told["message"])
        error.parameter = told["parameter"]
    else:
        error = PartyError(f"Rank {rank} failed: {': '.join(filter(None, (told['type'], told['message'])))}")
    for note in (*told["notes"], f"{RAISED} rank {rank})"):
        error.add_note(note)
    return error


def _our_kind(error: PartsongError) -> str:
    return next(kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
