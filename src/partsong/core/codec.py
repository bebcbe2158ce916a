"""Serialize messages and states: buffers for engines, tagged JSON trees for files. No pickle.

Trees of states to JSON and back: what is not an array becomes a tagged node, arrays are set aside by number.

{"array": "3", "order": "C"}   {"scalar": "4"}   {"float": "nan"}   {"tuple": [...]}   {"mapping": [[key, value], ...]}
{"enum": "Outcome", "member": "CONVERGED"}   {"record": "State", "fields": {...}}
"""

from __future__ import annotations

import enum
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from partsong.core.interfaces import Array, Message, State, type_name
from partsong.errors import CompositionError, DataTypeError, FormatError, ParameterError

Buffer = Any  # bytes, or a one-dimensional NumPy array of uint8

# ---- parcels ----------------------------------------------------------------------------------------------------
#
# Messages as bytes: a JSON header, then the arrays as they lie in memory.
#
#     8 bytes: length of the header | header | arrays, each from a multiple of 64 bytes on
#
# The header tells label, weight and, for each array, its name, number type, shape, memory order and place. Reading
# cannot run code: types are looked up by name among those of numbers. Tensors arrive as tensors.

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


# ---- state parcels ----------------------------------------------------------------------------------------------
#
# A state on its way to another rank: what is not an array becomes JSON, arrays go as they are in a Message.
#
#     {"array": "3"}   {"scalar": "4"}   {"tuple": [...]}   {"mapping": [[key, value], ...]}   {"record": [class,
# fields]}
#
# Reading makes objects of dataclasses that this process has imported already, and of nothing else.


def told_state(state: State) -> tuple[Message, Any]:
    """Its arrays, and a note of the rest."""
    arrays: dict[str, Array] = {}
    note = _told(state, arrays)
    return Message(arrays), note


def state_of(message: Message, note: Any) -> State:
    """The state again."""
    if not isinstance(note, dict):
        return note
    ((tag, content),) = note.items()
    if tag == "array":
        return message[content]
    if tag == "scalar":
        return message[content][0]
    if tag == "tuple":
        return tuple(state_of(message, item) for item in content)
    if tag == "mapping":
        return {key: state_of(message, item) for key, item in content}
    module, name, inner = content
    return _class(module, name)(**{key: state_of(message, item) for key, item in inner.items()})


def _told(value: Any, arrays: dict[str, Array]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    number = str(len(arrays))
    if isinstance(value, np.generic):
        arrays[number] = np.array([value])
        return {"scalar": number}
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        arrays[number] = value
        return {"array": number}
    if type(value) is tuple:
        return {"tuple": [_told(item, arrays) for item in value]}
    if isinstance(value, Mapping):
        return {"mapping": [[key, _told(item, arrays)] for key, item in value.items()]}
    kind = type(value)
    if is_dataclass(value) and kind.__qualname__ == kind.__name__:
        inner = {one.name: _told(getattr(value, one.name), arrays) for one in fields(value) if one.init}
        return {"record": [kind.__module__, kind.__name__, inner]}
    raise CompositionError(
        f"A server's state holds {kind.__qualname__}, which cannot be sent to other ranks. Use dataclasses of a "
        "module's top level, tuples, mappings, arrays, numbers, text or None."
    )


def _class(module: str, name: str) -> Any:
    found = getattr(sys.modules.get(module), name, None)
    if not (isinstance(found, type) and is_dataclass(found)):
        raise FormatError(f"A state is of the class {module}.{name}, which this rank does not know.")
    return found


# ---- state tree -------------------------------------------------------------------------------------------------

Node = Any  # JSON
Tensors = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Encoder:
    """Turns values into nodes and gathers their arrays; an array that occurs twice is stored once."""

    tensors: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    _seen: dict[int, tuple[str, Any]] = field(default_factory=dict)  # the value is kept, so that its id stays its own

    def encode(self, value: Any, where: str) -> Node:
        """The node for a value; `where` is its place in the tree, for messages."""
        if isinstance(value, enum.Enum):
            return {"enum": type(value).__name__, "member": value.name}
        if isinstance(value, np.generic):
            return {"scalar": self._set_aside(np.asarray(value), value)}
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if type(value) is np.ndarray or type(value) is np.memmap:
            is_fortran = value.flags.f_contiguous and not value.flags.c_contiguous
            return {
                "array": self._set_aside(value.T if is_fortran else value, value),
                "order": "F" if is_fortran else "C",
            }
        return self._encode_container(value, where)

    def _encode_container(self, value: Any, where: str) -> Node:
        if type(value) is tuple:
            return {"tuple": [self.encode(item, f"{where}[{at}]") for at, item in enumerate(value)]}
        if isinstance(value, Mapping):
            return {
                "mapping": [[_key(key, where), self.encode(item, f"{where}[{key!r}]")] for key, item in value.items()]
            }
        if is_dataclass(value) and not isinstance(value, type):
            stored = (entry.name for entry in fields(value) if entry.init)
            content = {name: self.encode(getattr(value, name), f"{where}.{name}") for name in stored}
            return {"record": type(value).__name__, "fields": content}
        raise DataTypeError(
            f"{where} is a {type(value).__name__}, which a checkpoint cannot hold. "
            "Use frozen dataclasses, tuples, mappings, NumPy arrays, enums, numbers, text or None."
        )

    def _set_aside(self, array: npt.NDArray[Any], original: Any) -> str:
        if id(original) not in self._seen:
            number = str(len(self.tensors))
            self.tensors[number] = array
            self._seen[id(original)] = (number, original)
        return self._seen[id(original)][0]


@dataclass(frozen=True, slots=True)
class Decoder:
    """Turns nodes into values; makes objects of the classes it knows, and of no others."""

    known: Mapping[str, type]

    @staticmethod
    def knowing(classes: Sequence[type]) -> Decoder:
        """A decoder for these classes, which are told apart by name alone."""
        known: dict[str, type] = {}
        for cls in classes:
            if known.setdefault(cls.__name__, cls) is not cls:
                raise ParameterError(
                    f"Two state types are called {cls.__name__}; a checkpoint cannot tell them apart. Rename one."
                )
        return Decoder(known)

    def decode(self, node: Node, tensors: Tensors) -> Any:
        """The value of a node."""
        if node is None or type(node) in (bool, int, float, str):
            return node
        if not isinstance(node, dict):
            raise FormatError(f"A node of the tree is a bare {type(node).__name__}. Start the run anew.")
        for tags, decode in _DECODERS.items():
            if node.keys() == tags:
                return decode(self, node, tensors)
        raise FormatError(f"A node of the tree has the unknown tags {sorted(node)[:5]}. Start the run anew.")

    def _float(self, node: Node, tensors: Tensors) -> float:
        if node["float"] not in ("nan", "inf", "-inf"):
            raise FormatError("A node of the tree claims to be a number and is not. Start the run anew.")
        return float(node["float"])

    def _array(self, node: Node, tensors: Tensors) -> npt.NDArray[Any]:
        array = tensors[node["array"]]
        return array.T if node["order"] == "F" else array

    def _scalar(self, node: Node, tensors: Tensors) -> Any:
        return tensors[node["scalar"]].reshape(())[()]

    def _tuple(self, node: Node, tensors: Tensors) -> tuple[Any, ...]:
        return tuple(self.decode(item, tensors) for item in node["tuple"])

    def _mapping(self, node: Node, tensors: Tensors) -> dict[str | int, Any]:
        return {_key(key, "a mapping"): self.decode(item, tensors) for key, item in node["mapping"]}

    def _enum(self, node: Node, tensors: Tensors) -> enum.Enum:
        cls = self._class(node["enum"])
        if not issubclass(cls, enum.Enum):
            raise FormatError(f"{cls.__name__} is not an enumeration. Start the run anew.")
        return cls[node["member"]]

    def _record(self, node: Node, tensors: Tensors) -> Any:
        cls = self._class(node["record"])
        if not is_dataclass(cls) or not isinstance(node["fields"], dict):
            raise FormatError(f"{cls.__name__} is not a record with fields. Start the run anew.")
        stored, declared = set(node["fields"]), {entry.name for entry in fields(cls) if entry.init}
        needed = {
            entry.name for entry in fields(cls) if entry.init and entry.default is entry.default_factory is MISSING
        }
        if not needed <= stored <= declared:  # fields that are new since then have their defaults
            raise FormatError(
                f"{cls.__name__} was stored with the fields {sorted(stored)}, but has {sorted(declared)} here. "
                "The checkpoint is from another version of partsong: use that one, or start the run anew."
            )
        return cls(**{name: self.decode(item, tensors) for name, item in node["fields"].items()})

    def _class(self, name: Any) -> type:
        if not isinstance(name, str) or name not in self.known:
            raise FormatError(
                f"The states are of the class {str(name)[:60]!r}, which does not belong to this method "
                f"(expected: {', '.join(sorted(self.known))}). Resume with the method that wrote the checkpoint."
            )
        return self.known[name]


_DECODERS: dict[frozenset[str], Callable[[Decoder, Node, Tensors], Any]] = {
    frozenset({"float"}): Decoder._float,
    frozenset({"array", "order"}): Decoder._array,
    frozenset({"scalar"}): Decoder._scalar,
    frozenset({"tuple"}): Decoder._tuple,
    frozenset({"mapping"}): Decoder._mapping,
    frozenset({"enum", "member"}): Decoder._enum,
    frozenset({"record", "fields"}): Decoder._record,
}


def _key(key: Any, where: str) -> str | int:
    if type(key) not in (str, int):
        raise DataTypeError(f"{where} has a key of type {type(key).__name__}. Use text or whole numbers as keys.")
    return key
