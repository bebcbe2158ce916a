"""Collective operations over ranks: the transport's interface, and how errors and the end of a run reach all ranks.

A rank is a process that holds one or more shards and runs the same loop as all others. Rank 0 is also the server.
Before ranks send anything large, they exchange status cards of fixed size. A card says how many bytes follow, so it
costs no exchange of its own, and whether the rank has failed or left its loop. If a rank has failed, its error follows
and all ranks raise it. A rank that fails while others are busy for long does not wait: it aborts the job.
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
    """The interface of a transport over ranks: collective operations on bytes and arrays, and `abort`.

    Ranks are 0 … size − 1. Every method but `abort` is collective: all ranks call it, in the same order. Bytes are sent
    as they are; nothing is pickled.
    """

    @property
    def rank(self) -> int:
        """The rank of this process."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def device(self) -> str:
        """The device for received tensors; empty for the host."""

    def all_gather(self, card: bytes, timeout: float | None = None) -> list[bytes] | None:
        """Return the cards of all ranks, equally long, in rank order; None after `timeout` seconds."""

    def gather(self, parcel: Buffer, sizes: Sequence[int]) -> list[Buffer]:
        """Return the parcels of all ranks at rank 0, and nothing elsewhere; all ranks know the sizes."""

    def broadcast(self, parcel: Buffer | None, size: int) -> Buffer:
        """Return rank 0's parcel of this size at every rank."""

    def sum(self, array: Array) -> Array:
        """Return the sum over the ranks of equally shaped arrays, in the transport's order; `array` is unchanged."""

    def abort(self, message: str) -> None:
        """Show the message and end all ranks at once, if the transport can."""


Result = TypeVar("Result")

ERROR_TIMEOUT = 5.0
"""Seconds that a failed rank waits for the others to receive its error."""

RAISED_AT = "(raised at"
"""Start of the note that says where an error was raised; an error with it is known to all ranks."""

MAX_TEXT = 4000
"""Characters that are sent of an error's message and of each of its notes."""


class Status(enum.IntEnum):
    """The status of a rank."""

    OK = 0
    LEFT = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class StatusCard:
    """What a rank shows to all others before it sends anything: 49 bytes.

    `size`: the bytes that follow. `faults`: the number of own parties that are left out. `upload_bytes`: the size of an
    upload that it would add to a sum. `form`: a checksum of the upload's names, shapes and types (0: nothing to add).
    `norm`: the norm of its model, to detect ranks that drift apart. `first`: the first phase of the sum, set by rank 0.
    """

    status: Status = Status.OK
    size: int = 0
    faults: int = 0
    upload_bytes: int = 0
    form: int = 0
    norm: float = 0.0
    first: int = 0

    FORMAT: ClassVar[struct.Struct] = struct.Struct("<BQQQQdQ")

    def to_bytes(self) -> bytes:
        """Serialize."""
        counts = (self.size, self.faults, self.upload_bytes, self.form)
        return self.FORMAT.pack(self.status, *counts, self.norm, self.first)

    @classmethod
    def from_bytes(cls, card: bytes) -> StatusCard:
        """Parse."""
        status, *others = cls.FORMAT.unpack(card)
        return cls(Status(status), *others)


class RunEnded(Exception):
    """The run is over at every rank, with this error, or without one because a rank has left its loop."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def all_gather_status(communicator: Communicator, card: StatusCard) -> list[StatusCard]:
    """Exchange status cards; raise RunEnded if a rank has failed or left."""
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
    """Return the texts of all ranks, in rank order."""
    own = text.encode()
    cards = all_gather_status(communicator, StatusCard(size=len(own)))
    return [one.decode() for one in _all_gather_sized(communicator, own, [card.size for card in cards])]


def all_gather_values(communicator: Communicator, own: Any) -> list[Any]:
    """Return the values (plain JSON) of all ranks, in rank order; raise the error of a rank that ended the run."""
    with raising_remote_errors():
        return [json.loads(text) for text in all_gather_text(communicator, json.dumps(own))]


def broadcast_error(communicator: Communicator, error: BaseException) -> None:
    """Send an error to all ranks in the next status exchange; abort the job if the others do not reach it in time."""
    # Encoded without the note, which every other rank adds itself.
    own = _encode_error(error)
    error.add_note(f"{RAISED_AT} rank {communicator.rank})")
    # Because of this note, `broadcasting_errors` further out does not send the error again.
    with suppress(Exception):  # a transport that is broken: the error itself matters more
        shown = communicator.all_gather(StatusCard(Status.FAILED, len(own)).to_bytes(), ERROR_TIMEOUT)
        if shown is None:
            communicator.abort(f"Rank {communicator.rank} failed: {type(error).__name__}: {error}")
        else:
            _first_failure(communicator, [StatusCard.from_bytes(one) for one in shown], own)


def leave(communicator: Communicator) -> None:
    """Report in the next status exchange that this rank has left its loop, so that the others end theirs."""
    with suppress(Exception):  # of a transport that has ended before
        shown = communicator.all_gather(StatusCard(Status.LEFT).to_bytes(), ERROR_TIMEOUT)
        cards = [StatusCard.from_bytes(one) for one in shown or ()]
        if any(card.status is Status.FAILED for card in cards):
            _first_failure(communicator, cards, b"")


def run_on_all(communicator: Communicator, work: Callable[[], Result]) -> Result:
    """Return work() at this rank; if it fails at any rank, raise the first rank's error at all of them."""
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
    """Send an error raised in this block to all ranks: in the next status exchange, or by aborting the job."""
    try:
        yield
    except BaseException as error:
        if not _is_known_to_all(error):
            broadcast_error(communicator, error)
        raise


def _is_known_to_all(error: BaseException) -> bool:
    """Whether the error was sent to all ranks, or came from another one."""
    return any(str(note).startswith(RAISED_AT) for note in getattr(error, "__notes__", ()))


@contextmanager
def raising_remote_errors() -> Iterator[None]:
    """In this block, raise the error with which another rank ended the run."""
    try:
        yield
    except RunEnded as end:
        raise (end.error or _left_error()) from None


def _left_error() -> KeyboardInterrupt:
    """Return the error for a rank that left its loop, which ends the run at all ranks."""
    error = KeyboardInterrupt()
    error.add_note(f"{RAISED_AT} another rank)")
    return error


def run_on_rank_0(
    communicator: Communicator, work: Callable[[], tuple[Mapping[str, Message], Any]]
) -> tuple[Mapping[str, Message], Any]:
    """Run work() on rank 0 and return its result at every rank; raise RunEnded if it fails.

    Sent: a status card, then messages and note in one parcel, or the error.
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
    """Return the class name and the message of a partsong error."""
    return [_error_class_name(error), str(error)[:MAX_TEXT]]


def error_from_text(kind: str, message: str) -> PartsongError:
    """Rebuild a partsong error; an unknown class becomes a PartyError."""
    found = getattr(errors, kind, None)
    is_ours = isinstance(found, type) and issubclass(found, PartsongError)
    return (found if is_ours else PartyError)(message)  # type: ignore[misc]


def _first_failure(communicator: Communicator, cards: Sequence[StatusCard], own: bytes) -> BaseException:
    sizes = [card.size if card.status is Status.FAILED else 0 for card in cards]
    texts = _all_gather_sized(communicator, own, sizes)
    rank = next(rank for rank, size in enumerate(sizes) if size)
    return _decode_error(texts[rank], rank)


def _all_gather_sized(communicator: Communicator, own: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Gather texts of different sizes, padded to the longest."""
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
