"""What is in a message but for its numbers: what parties tell each other before they mask anything."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from partsong.core import Array, Message, type_name
from partsong.errors import UploadError

LIBRARIES = ("numpy", *(f"torch {place}" for place in ("cpu", "cuda", "mps", "xpu")))
"""Where a sum can be returned."""

KINDS = {"bfloat16", *(f"float{width}" for width in (16, 32, 64))}
KINDS |= {f"{sign}int{width}" for sign in ("", "u") for width in (8, 16, 32, 64)}
"""Number types that a sum can be returned in."""


@dataclass(frozen=True, slots=True)
class Piece:
    """An array of a message without its numbers; `kind` is its number type, `library` is numpy, or torch and where."""

    name: str
    shape: tuple[int, ...]
    kind: str
    library: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.library not in LIBRARIES or any(size < 0 for size in self.shape):
            raise UploadError(
                f"The array {self.name!r} holds {self.kind} ({self.library}); only real numbers can be masked."
            )

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


Contents = tuple[Piece, ...]


def contents_of(message: Message) -> Contents:
    """What is in a message, by name."""
    return tuple(
        Piece(name, tuple(map(int, array.shape)), _kind(array), library_of(array))
        for name, array in sorted(message.arrays.items())
    )


def told(contents: Contents) -> bytes:
    """As text that can be sent."""
    return json.dumps([[piece.name, piece.shape, piece.kind, piece.library] for piece in contents]).encode()


def understood(text: bytes) -> Contents:
    """From text; ValueError where it is none of ours."""
    try:
        listed = [
            (str(name), tuple(map(int, shape)), str(kind), str(place)) for name, shape, kind, place in json.loads(text)
        ]
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return tuple(Piece(*entry) for entry in listed)


def form_of(contents: Contents) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Names and shapes."""
    return tuple((piece.name, piece.shape) for piece in contents)


def are_alike(one: Contents, other: Contents) -> bool:
    """Whether they can be added: names and shapes; number types may differ."""
    return form_of(one) == form_of(other)


def size_of(contents: Contents) -> int:
    """The length of the vector: all numbers, and the weight."""
    return sum(piece.count for piece in contents) + 1


def _kind(array: Array) -> str:
    """The name of the number type, in whatever order its bytes are."""
    return str(getattr(array.dtype, "name", type_name(array.dtype)))


def library_of(array: Array) -> str:
    """NumPy, or torch and the kind of device."""
    if type(array).__module__.partition(".")[0] != "torch":
        return "numpy"
    return f"torch {array.device.type}"
