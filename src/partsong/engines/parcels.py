"""Messages as bytes: a JSON header, then the arrays as they lie in memory.

    8 bytes: length of the header | header | arrays, each from a multiple of 64 bytes on

The header tells label, weight and, for each array, its name, number type, shape, memory order and place. Reading cannot
run code: types are looked up by name among those of numbers. Tensors arrive as tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from partsong.core import Array, Message, type_name
from partsong.engines.communicator import Buffer
from partsong.errors import CompositionError, FormatError

ALIGNMENT = 64


def packed(messages: Mapping[str, Message], note: Any = None) -> Buffer:
    """Labelled messages, and a note of numbers, names and lists, in one buffer."""
    entries, pieces, place = [], [], 0
    for label, message in messages.items():
        arrays = []
        for name, array in message.arrays.items():
            form, data = _laid_out(name, array)
            arrays.append([name, *form, place])
            pieces.append((place, data))
            place += _rounded_up(data.nbytes)
        entries.append([label, float(message.weight), arrays])
    header = json.dumps({"messages": entries, "note": note}).encode()
    begin = _rounded_up(8 + len(header))
    buffer = np.empty(begin + place, np.uint8)
    buffer[:8] = np.frombuffer(len(header).to_bytes(8, "little"), np.uint8)
    buffer[8 : 8 + len(header)] = np.frombuffer(header, np.uint8)
    for start, data in pieces:
        buffer[begin + start : begin + start + data.nbytes] = data
    return buffer


def unpacked(parcel: Buffer, device: str = "") -> tuple[dict[str, Message], Any]:
    """The messages and the note; arrays are views of the parcel. Tensors go to `device`, if one is named."""
    buffer = np.frombuffer(bytearray(parcel), np.uint8) if isinstance(parcel, bytes) else parcel
    length = int.from_bytes(buffer[:8].tobytes(), "little")
    content = json.loads(buffer[8 : 8 + length].tobytes())
    data = buffer[_rounded_up(8 + length) :]
    messages = {
        label: Message({name: _read(data, form, device) for name, *form in arrays}, weight)
        for label, weight, arrays in content["messages"]
    }
    return messages, content["note"]


def forms(message: Message) -> Iterator[tuple[str, str, str, tuple[int, ...], str]]:
    """Name, library, number type, shape and memory order of each array, by name."""
    for name, array in sorted(message.arrays.items()):
        library = "torch" if _is_tensor(array) else "numpy"
        yield name, library, type_name(array.dtype), tuple(array.shape), memory_order(array)


def memory_order(array: Array) -> str:
    """Which bytes go as they are: "F" for a transposed view of an array in C order, else "C"."""
    if array.ndim < 2 or _is_in_order(array):
        return "C"
    turned = array.permute(*range(array.ndim - 1, -1, -1)) if _is_tensor(array) else array.T
    return "F" if _is_in_order(turned) else "C"


def _laid_out(name: str, array: Array) -> tuple[list[Any], Any]:
    """How an array is described, and its bytes in one dimension."""
    if not _is_tensor(array):
        array = np.asarray(array)
        if array.dtype.kind not in "biufc":
            raise CompositionError(f"{name!r} holds {array.dtype}; send arrays of numbers.")
    order = memory_order(array)
    if _is_tensor(array):
        turned = array.permute(*range(array.ndim - 1, -1, -1)) if order == "F" else array
        flat = turned.detach().cpu().contiguous().reshape(-1)
        data = flat.view(import_module("torch").uint8).numpy()
        return [type_name(array.dtype), list(array.shape), order, f"torch {array.device.type}"], data
    data = np.ascontiguousarray(array.T if order == "F" else array).reshape(-1).view(np.uint8)
    return [array.dtype.str, list(array.shape), order, "numpy"], data


def _read(data: Any, form: list[Any], device: str) -> Array:
    kind, shape, order, library, place = form
    stored = shape[::-1] if order == "F" else shape
    if library == "numpy":
        dtype = np.dtype(kind)
        if dtype.kind not in "biufc":
            raise FormatError(f"A parcel holds {kind}, which is no type of numbers.")
        array = data[place : place + math.prod(shape) * dtype.itemsize].view(dtype).reshape(stored)
        return array.T if order == "F" else array
    torch = import_module("torch")
    dtype = getattr(torch, kind)
    piece = data[place : place + math.prod(shape) * dtype.itemsize]
    tensor = torch.from_numpy(piece).view(dtype).reshape(stored)
    home = library.removeprefix("torch ")
    tensor = tensor if home == "cpu" else tensor.to(device or home)
    return tensor.permute(*range(tensor.ndim - 1, -1, -1)) if order == "F" else tensor


def _is_tensor(array: Array) -> bool:
    return type(array).__module__.partition(".")[0] == "torch"


def _is_in_order(array: Array) -> bool:
    return bool(array.is_contiguous() if _is_tensor(array) else array.flags.c_contiguous)


def _rounded_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
