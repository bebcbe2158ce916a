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

    def all_gather(self, card: bytes, timeout: float | None = None) -> list[bytes] | None:
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

ERROR_TIMEOUT = 5.0
"""Seconds for which a rank that has failed waits until the others can hear of it."""

RAISED_AT = "(raised at"
"""How a note begins that says where an error is from: all ranks know of it."""

MAX_TEXT = 4000
"""Characters of an error's message, and of each of its notes, that are sent."""


class Status(enum.IntEnum):
    """How a rank is."""

    WELL = 0
    LEFT = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class StatusCard:
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

    def to_bytes(self) -> bytes:
        """As bytes."""
        counts = (self.size, self.faults, self.upload_bytes, self.form)
        return self.FORMAT.pack(self.status, *counts, self.norm, self.first)

    @classmethod
    def from_bytes(cls, card: bytes) -> StatusCard:
        """From bytes."""
        status, *others = cls.FORMAT.unpack(card)
        return cls(Status(status), *others)


class RunEnded(Exception):
    """The run is over and every rank knows: with this error, or without one because a rank has left its loop."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def all_gather_status(communicator: Communicator, card: StatusCard) -> list[StatusCard]:
    """Everybody's cards, if all is well; else the run has ended."""
    shown = communicator.all_gather(card.to_bytes())
    assert shown is not None
    cards = [StatusCard.from_bytes(one) for one in shown]
    states = {one.status for one in cards}
    if Status.FAILED in states:
        raise RunEnded(_first_failure(communicator, cards, b""))
    if Status.LEFT in states:
        raise RunEnded(None)
    return cards


def all_gather_text(communicator: Communicator, text: str) -> list[str]:
    """Everybody's texts, in rank order."""
    own = text.encode()
    cards = all_gather_status(communicator, StatusCard(size=len(own)))
    return [one.decode() for one in _all_gather_sized(communicator, own, [card.size for card in cards])]


def all_gather_values(communicator: Communicator, own: Any) -> list[Any]:
    """Everybody's plain values (as JSON has them), in rank order; the end of a run elsewhere is an error."""
    with raising_remote_errors():
        return [json.loads(text) for text in all_gather_text(communicator, json.dumps(own))]


def broadcast_error(communicator: Communicator, error: BaseException) -> None:
    """Take part in the next agreement as the one that failed; if the others do not come to it, end the job."""
    own = _encode_error(error)
    error.add_note(f"{RAISED_AT} rank {communicator.rank})")
    with suppress(Exception):  # a transport that is broken: the error itself matters more
        shown = communicator.all_gather(StatusCard(Status.FAILED, len(own)).to_bytes(), ERROR_TIMEOUT)
        if shown is None:
            communicator.abort(f"Rank {communicator.rank} failed: {type(error).__name__}: {error}")
        else:
            _first_failure(communicator, [StatusCard.from_bytes(one) for one in shown], own)


def leave(communicator: Communicator) -> None:
    """Take part in the next agreement as one that has left its loop, so that the others end theirs."""
    with suppress(Exception):  # of a transport that has ended before
        shown = communicator.all_gather(StatusCard(Status.LEFT).to_bytes(), ERROR_TIMEOUT)
        cards = [StatusCard.from_bytes(one) for one in shown or ()]
        if any(card.status is Status.FAILED for card in cards):
            _first_failure(communicator, cards, b"")


def run_on_all(communicator: Communicator, work: Callable[[], Result]) -> Result:
    """work() at this rank, or the error of the first rank where it failed: for files that are read before a run."""
    try:
        result = work()
    except BaseException as error:
        broadcast_error(communicator, error)
        raise
    try:
        all_gather_status(communicator, StatusCard())
    except RunEnded as end:
        raise (end.error or PartyError("Another rank has left.")) from None
    return result


@contextmanager
def broadcasting_errors(communicator: Communicator) -> Iterator[None]:
    """Within this block an error at one rank ends the block at all of them: in the next agreement, or by ending the job
    where others do not come to one.
    """
    try:
        yield
    except BaseException as error:
        if not _is_known_to_all(error):
            broadcast_error(communicator, error)
        raise


def _is_known_to_all(error: BaseException) -> bool:
    """Whether it has been told, or was heard from another rank."""
    return any(str(note).startswith(RAISED_AT) for note in getattr(error, "__notes__", ()))


@contextmanager
def raising_remote_errors() -> Iterator[None]:
    """Within this block the end of a run that another rank has told of is its error."""
    try:
        yield
    except RunEnded as end:
        raise (end.error or _left_error()) from None


def _left_error() -> KeyboardInterrupt:
    """Another rank has left its loop, and all end."""
    error = KeyboardInterrupt()
    error.add_note(f"{RAISED_AT} another rank)")
    return error


def run_on_rank_0(
    communicator: Communicator, work: Callable[[], tuple[Mapping[str, Message], Any]]
) -> tuple[Mapping[str, Message], Any]:
    """What rank 0 makes of work(), at every rank; where it fails, the run has ended.

    Sent: a card, then messages and note in one parcel, or the error.
    """
    if communicator.rank > 0:
        card = StatusCard.from_bytes(bytes(communicator.broadcast(None, StatusCard.FORMAT.size)))
        parcel = communicator.broadcast(None, card.size)
        if card.status is Status.FAILED:
            raise RunEnded(_decode_error(bytes(parcel), 0))
        messages, note = decode(parcel, device=communicator.device)
        return messages, note
    try:
        result = work()
        parcel = encode(tuple(result)) if communicator.size > 1 else b""
    except BaseException as error:
        own = _encode_error(error)
        communicator.broadcast(StatusCard(Status.FAILED, len(own)).to_bytes(), StatusCard.FORMAT.size)
        communicator.broadcast(own, len(own))
        raise RunEnded(error) from error
    communicator.broadcast(StatusCard(size=len(parcel)).to_bytes(), StatusCard.FORMAT.size)
    communicator.broadcast(parcel, len(parcel))
    return result


def error_to_text(error: PartsongError) -> list[str]:
    """The class and the message of one of our errors."""
    return [_error_class_name(error), str(error)[:MAX_TEXT]]


def error_from_text(kind: str, message: str) -> PartsongError:
    """An error of ours again; kinds that nobody knows are errors of a party."""
    found = getattr(errors, kind, None)
    is_ours = isinstance(found, type) and issubclass(found, PartsongError)
    return (found if is_ours else PartyError)(message)  # type: ignore[misc]


def _first_failure(communicator: Communicator, cards: Sequence[StatusCard], own: bytes) -> BaseException:
    sizes = [card.size if card.status is Status.FAILED else 0 for card in cards]
    texts = _all_gather_sized(communicator, own, sizes)
    rank = next(rank for rank, size in enumerate(sizes) if size)
    return _decode_error(texts[rank], rank)


def _all_gather_sized(communicator: Communicator, own: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Texts of several sizes, by cards as long as the longest."""
    shown = communicator.all_gather(own.ljust(max(sizes)))
    assert shown is not None
    return [text[:size] for text, size in zip(shown, sizes, strict=True)]


def _encode_error(error: BaseException) -> bytes:
    notes = [note[:MAX_TEXT] for note in getattr(error, "__notes__", [])]
    kind = _error_class_name(error) if isinstance(error, PartsongError) else ""
    text = {"kind": kind, "type": type(error).__name__, "message": str(error)[:MAX_TEXT], "notes": notes} | {
        "parameter": getattr(error, "parameter", None)
    }
    return json.dumps(text).encode()


def _decode_error(text: bytes, rank: int) -> PartsongError:
    found = json.loads(text)
    if found["kind"]:
        error = error_from_text(found["kind"], found["message"])
        error.parameter = found["parameter"]
    else:
        error = PartyError(f"Rank {rank} failed: {': '.join(filter(None, (found['type'], found['message'])))}")
    for note in (*found["notes"], f"{RAISED_AT} rank {rank})"):
        error.add_note(note)
    return error


def _error_class_name(error: PartsongError) -> str:
    return next(kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
