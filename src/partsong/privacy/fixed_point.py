"""Real numbers as whole numbers modulo 2⁶⁴, in which sums are exact.

x ↦ round(x·2^e) mod 2⁶⁴, with the largest e for which n·bound·2^e ≤ 2⁶², so that a sum of n such numbers never leaves
the 63 bits of its sign and size. Each addend is off by at most half a step, 2^−(e+1); a sum by n times that, and by the
rounding of the number type it is returned in. The bound is public and comes from no data. A number beyond it is an
error at its party, and is never clipped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Any

import numpy as np

from partsong.core import Array, Message, type_name
from partsong.errors import DivergenceError, ParameterError, UploadError

BITS = 62

KINDS = {"bfloat16", *(f"float{width}" for width in (16, 32, 64))}
KINDS |= {f"{sign}int{width}" for sign in ("", "u") for width in (8, 16, 32, 64)}
"""Number types that a sum can be returned in."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers from −bound to bound in steps of 2^−e, of which n are added up."""

    bound: float
    parties: int

    def __post_init__(self) -> None:
        if not 1e-100 <= self.bound <= 1e100:
            raise ParameterError(f"A bound must be a number from 1e-100 to 1e100; got {self.bound}.")
        if self.parties < 1:
            raise ParameterError(f"A sum has at least one addend; got {self.parties}.")

    @property
    def exponent(self) -> int:
        """The number e: places behind the binary point."""
        return BITS - math.frexp(self.parties * self.bound)[1]

    @property
    def step(self) -> float:
        """2^−e."""
        return math.ldexp(1.0, -self.exponent)

    @property
    def error(self) -> float:
        """n·2^−(e+1): how far a sum can be off, before it is rounded to the number type that it is returned in."""
        return self.parties * self.step / 2

    def encoded(self, values: Any) -> Any:
        """round(x·2^e) mod 2⁶⁴, of float64 within the bound."""
        return np.rint(np.ldexp(values, self.exponent)).astype(np.int64).view(np.uint64)

    def decoded(self, total: Any) -> Any:
        """A sum of at most n encoded numbers, in float64."""
        return np.ldexp(total.view(np.int64).astype(np.float64), -self.exponent)


@dataclass(frozen=True, slots=True)
class Piece:
    """An array of a message without its numbers; `kind` is its number type, `library` is numpy, or torch and where."""

    name: str
    shape: tuple[int, ...]
    kind: str
    library: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS or any(size < 0 for size in self.shape):
            raise UploadError(f"The array {self.name!r} holds {self.kind}; only real numbers can be masked.")

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


Contents = tuple[Piece, ...]


def contents_of(message: Message) -> Contents:
    """What is in a message, by name."""
    return tuple(
        Piece(name, tuple(map(int, array.shape)), type_name(array.dtype), _library(array))
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
    except TypeError as error:
        raise ValueError(str(error)) from error
    return tuple(Piece(*entry) for entry in listed)


def are_alike(one: Contents, other: Contents) -> bool:
    """Whether they can be added: names and shapes; number types may differ."""
    return [(piece.name, piece.shape) for piece in one] == [(piece.name, piece.shape) for piece in other]


def size_of(contents: Contents) -> int:
    """The length of the vector: all numbers, and the weight."""
    return sum(piece.count for piece in contents) + 1


@dataclass(frozen=True, slots=True)
class Encoding:
    """A grid for each array of a message by its name, and one for the weight, the last number of the vector."""

    grid_of: Callable[[str], Grid]
    weight: Grid

    def encoded(self, party: str, message: Message) -> Any:
        """All numbers of a message in one vector modulo 2⁶⁴; refused at the party where one is not within its bound."""
        contents = contents_of(message)
        vector = np.empty(size_of(contents), np.uint64)
        for name, start, stop in self._places(contents):
            values = _as_numbers(message[name])
            _require_within(party, f"the array {name!r}", values, self.grid_of(name).bound)
            vector[start:stop] = self.grid_of(name).encoded(values.reshape(-1))
        weight = np.array([float(message.weight)])
        _require_within(party, "the weight", weight, self.weight.bound)
        vector[-1:] = self.weight.encoded(weight)
        return vector

    def decoded(self, total: Any, contents: Sequence[Contents]) -> Message:
        """The sum of messages with these contents, in the number type that their sum would have."""
        arrays = {}
        for number, (name, start, stop) in enumerate(self._places(contents[0])):
            pieces = [one[number] for one in contents]
            values = self.grid_of(name).decoded(total[start:stop]).reshape(pieces[0].shape)
            arrays[name] = _like(values, pieces)
        return Message(arrays, float(self.weight.decoded(total[-1:])[0]))

    @staticmethod
    def _places(contents: Contents) -> Iterator[tuple[str, int, int]]:
        place = 0
        for piece in contents:
            yield piece.name, place, place + piece.count
            place += piece.count


def _require_within(party: str, what: str, values: Any, bound: float) -> None:
    """No value is told: the error may travel further than the data may."""
    if not np.isfinite(values).all():
        raise DivergenceError(
            f"Party {party!r} would mask NaN or infinite numbers in {what}, which nobody could find in the sum. "
            "Nothing was sent. Check its data and settings."
        )
    if values.size and max(-float(values.min()), float(values.max())) > bound:
        raise UploadError(
            f"Party {party!r}: {what} has numbers beyond its public bound, ±{bound:g}, and a sum of them could not be "
            "told from another one. Nothing was sent, and nothing is clipped. Scale the data of all parties, or "
            "agree on a larger bound, which makes the steps of the sum larger."
        )


def _as_numbers(array: Array) -> Any:
    numbers = np.asarray(array) if _library(array) == "numpy" else array.detach().cpu().double().numpy()
    return numbers.astype(np.float64, copy=False)


def _library(array: Array) -> str:
    if type(array).__module__.partition(".")[0] != "torch":
        return "numpy"
    return f"torch {array.device.type}"


def _like(values: Any, pieces: Sequence[Piece]) -> Array:
    """Values in the number type, library and place of a sum of such arrays."""
    library = pieces[0].library
    if library == "numpy":
        kind = np.result_type(*(np.dtype(piece.kind) for piece in pieces))
        return (np.rint(values) if kind.kind in "iu" else values).astype(kind, copy=False)
    torch = import_module("torch")
    dtype = reduce(torch.promote_types, (getattr(torch, piece.kind) for piece in pieces))
    return torch.from_numpy(values).to(dtype=dtype, device=library.removeprefix("torch "))
