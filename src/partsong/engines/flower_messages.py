"""Bytes in messages of Flower, and back.

    message.content["about"]: number of bytes and SHA-256; "whole": the bytes, where they are few
                   ["arrays"]: "0", "1", …, pieces of the bytes, where they are many

Flower cuts an array into objects of 5 MB that travel once where they are equal, so that a model for all sites is sent
to the server's store once. Every object costs Flower four calls on its way, and an array is four objects: so few bytes
go without.
"""

from __future__ import annotations

import hashlib
from typing import Any

from partsong.errors import FormatError, MissingExtra

QUESTION = "query.partsong"
PIECE_BYTES = 1 << 26
SMALL_BYTES = 1 << 18
MOST_BYTES = 1 << 31


def question(data: bytes, node: int, patience: float) -> Any:
    """A message to a node."""
    return _flwr().Message(_content(data), node, QUESTION, ttl=patience)


def answer_to(message: Any, data: bytes) -> Any:
    """A message back."""
    return _flwr().Message(_content(data), reply_to=message)


def content_of(message: Any, most: int = MOST_BYTES) -> bytes:
    """The bytes in a message; FormatError where they are not whole, or too many."""
    try:
        about = message.content["about"]
        size, digest = int(about["bytes"]), str(about["sha256"])
        pieces = [bytes(about["whole"])] if "whole" in about else _pieces(message.content["arrays"])
    except Exception as error:
        raise FormatError("a message of Flower does not hold what it should") from error
    if size > most or sum(map(len, pieces)) != size:
        raise FormatError("a message of Flower is cut short, or longer than is taken")
    data = b"".join(pieces)
    if hashlib.sha256(data).hexdigest() != digest:
        raise FormatError("a message of Flower was changed on its way")
    return data


def _pieces(arrays: Any) -> list[bytes]:
    return [arrays[str(number)].data for number in range(len(arrays))]


def _content(data: bytes) -> Any:
    flwr = _flwr()
    about: dict[str, Any] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if len(data) <= SMALL_BYTES:
        return flwr.RecordDict({"about": flwr.ConfigRecord({**about, "whole": data})})
    starts = range(0, max(len(data), 1), PIECE_BYTES)
    pieces = {str(number): data[start : start + PIECE_BYTES] for number, start in enumerate(starts)}
    arrays = {
        name: flwr.Array(dtype="uint8", shape=(len(piece),), stype="partsong.bytes", data=piece)
        for name, piece in pieces.items()
    }
    return flwr.RecordDict({"arrays": flwr.ArrayRecord(arrays), "about": flwr.ConfigRecord(about)})


def _flwr() -> Any:
    try:
        from flwr import app
    except ImportError as error:
        raise MissingExtra("This needs Flower. Install it with: pip install 'partsong[flower]'") from error
    return app
