"""Fixed-point encoding: real numbers as integers modulo 2⁶⁴, whose sums are exact.

x ↦ round(x·2^e) mod 2⁶⁴, with the largest e for which n·bound·2^e < 2⁶², so a sum of n such numbers fits into 63 bits
with its sign. Each addend is off by at most half a step, 2^−(e+1). A sum is off by n times that, plus the rounding of
the number type it is returned in. Integers are never converted to floating point.

The bound is public and does not depend on data. A party raises an error for a number beyond it and never clips. A sum
is therefore within ±n·bound, less than half of the range of 64 bits. If a party adds something else, each random number
is noticed with a probability of at least 1/2. Numbers chosen so that the sum stays within the range are not noticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from numbers import Real
from typing import Any

import numpy as np

from partsong.core.interfaces import Array, Message
from partsong.errors import DivergenceError, ParameterError, UploadError
from partsong.secure_aggregation.messages import ArrayInfo, Contents, describe_contents, library_of, vector_length

BITS = 62


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers from −bound to bound in steps of 2^−e, for sums of n of them."""

    bound: float
    parties: int

    def __post_init__(self) -> None:
        if not (isinstance(self.bound, Real) and 1e-100 <= self.bound <= 1e100):
            raise ParameterError(f"bound must be a number from 1e-100 to 1e100; got {self.bound!r}.", parameter="bound")
        if self.parties < 1:
            raise ParameterError(f"parties must be 1 or more; got {self.parties}.")

    @property
    def exponent(self) -> int:
        """e, the number of binary places."""
        return BITS - math.frexp(self.parties * self.bound)[1]

    @property
    def step(self) -> float:
        """2^−e."""
        return math.ldexp(1.0, -self.exponent)

    @property
    def error(self) -> float:
        """n·2^−(e+1), the largest error of a sum before it is rounded to the number type it is returned in."""
        return self.parties * self.step / 2

    def max_sum(self, addends: int) -> int:
        """Return the largest sum of this many encoded numbers, in steps; each may be rounded up by one step."""
        return addends * (round(math.ldexp(self.bound, self.exponent)) + 1)

    def encode(self, values: Any) -> Any:
        """Return round(x·2^e) mod 2⁶⁴ of float64 or integers within the bound."""
        # Two's complement: as uint64, negative numbers are the residues modulo 2⁶⁴. Shifts by 64 bits are undefined.
        if values.dtype.kind == "f" or self.exponent <= -64:
            return np.rint(np.ldexp(values, self.exponent)).astype(np.int64).view(np.uint64)
        return _shift(values, self.exponent).astype(np.int64).view(np.uint64)

    def decode(self, total: Any) -> Any:
        """Return a sum of at most n encoded numbers in float64."""
        return np.ldexp(total.view(np.int64).astype(np.float64), -self.exponent)

    def decode_integers(self, total: Any) -> Any:
        """Return a sum of at most n encoded numbers, rounded to the nearest integer, in int64."""
        return _shift(total.view(np.int64), -self.exponent)


@dataclass(frozen=True, slots=True)
class Encoding:
    """One grid for each array of a message, by name, and one for the weight, the last number of the vector."""

    grid_of: Callable[[str], Grid]
    weight: Grid

    def encode(self, party: str, message: Message) -> Any:
        """Encode a message as one vector modulo 2⁶⁴; raise an error at the party if a number is beyond its bound."""
        try:
            contents = describe_contents(message)
        except UploadError as error:
            raise UploadError(f"Party {party!r}: {error} Nothing was sent.") from error
        vector = np.empty(vector_length(contents), np.uint64)
        for name, start, stop in self._slices(contents):
            values = _as_numbers(message[name])
            _require_within(party, f"the array {name!r}", values, self.grid_of(name).bound)
            vector[start:stop] = self.grid_of(name).encode(values.reshape(-1))
        weight = np.array([float(message.weight)])
        _require_within(party, "the weight", weight, self.weight.bound)
        vector[-1:] = self.weight.encode(weight)
        return vector

    def decode(self, total: Any, contents: Sequence[Contents]) -> Message:
        """Decode the sum of messages with these contents, in the number type that their sum would have.

        Raise UploadError if numbers within their bounds and non-negative weights cannot add up to it.
        """
        arrays, addends = {}, len(contents)
        for number, (name, start, stop) in enumerate(self._slices(contents[0])):
            grid, steps = self.grid_of(name), total[start:stop]
            _require_reachable(f"the array {name!r}", steps, -grid.max_sum(addends), grid.max_sum(addends))
            arrays[name] = _to_arrays(grid, steps, [one[number] for one in contents])
        _require_reachable("the weight", total[-1:], 0, self.weight.max_sum(addends))
        return Message(arrays, float(self.weight.decode(total[-1:])[0]))

    @staticmethod
    def _slices(contents: Contents) -> Iterator[tuple[str, int, int]]:
        place = 0
        for info in contents:
            yield info.name, place, place + info.count
            place += info.count


def _require_within(party: str, what: str, values: Any, bound: float) -> None:
    """Refuse numbers beyond a bound. The message shows no value: errors may travel further than data may."""
    if not np.isfinite(values).all():
        raise DivergenceError(
            f"Party {party!r}: {what} has NaN or infinite numbers, which cannot be detected once they are masked. "
            "Nothing was sent. Check its data and settings."
        )
    if values.size and not -bound <= values.min().item() <= values.max().item() <= bound:
        raise UploadError(
            f"Party {party!r}: {what} has numbers beyond its public bound, ±{bound:g}, so their sum could wrap around. "
            "Nothing was sent, and nothing is clipped. Scale the data of all parties, or agree on a larger bound, "
            "which makes sums less precise."
        )


def _require_reachable(what: str, total: Any, least: int, largest: int) -> None:
    steps = total.view(np.int64)
    if steps.size and not least <= int(steps.min()) <= int(steps.max()) <= largest:
        raise UploadError(
            f"{what} has numbers to which parties within their bounds cannot add up. A party has added what its "
            "program does not send. Masks hide which one, so nobody can be named. Nothing of the sum was used."
        )


def _shift(values: Any, places: int) -> Any:
    """Return round(x·2^places) of integers, with a single rounding, or none if places ≥ 0."""
    if places >= 0:
        return values.astype(np.int64) << np.int64(places)
    one, down = values.dtype.type(1), values.dtype.type(min(-places, 63))
    half = one << (down - one)
    # The rounding comes from the removed bits: adding one half before the shift could overflow.
    return (values >> down) + ((values & (half | (half - one))) >= half)


def _as_numbers(array: Array) -> Any:
    """Return a NumPy array: integers in 64 bits, everything else in float64."""
    if library_of(array) != "numpy":
        array = array.detach().cpu()
        array = (array.double() if array.is_floating_point() else array).numpy()
    numbers = np.asarray(array)
    kind = {"i": np.int64, "u": np.uint64}.get(numbers.dtype.kind, np.float64)
    return numbers.astype(kind, copy=False)


def _to_arrays(grid: Grid, total: Any, infos: Sequence[ArrayInfo]) -> Array:
    """Decode a total to the shape, number type, library and device of a sum of such arrays."""
    is_whole = all("int" in info.kind for info in infos)
    values = (grid.decode_integers(total) if is_whole else grid.decode(total)).reshape(infos[0].shape)
    library = infos[0].library
    if library == "numpy":
        kinds = (np.dtype("float32" if info.kind == "bfloat16" else info.kind) for info in infos)
        return values.astype(np.result_type(*kinds), copy=False)
    torch = import_module("torch")
    dtype = reduce(torch.promote_types, (getattr(torch, info.kind) for info in infos))
    return torch.from_numpy(values).to(dtype=dtype, device=library.removeprefix("torch "))
