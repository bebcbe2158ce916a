"""Encode messages and trees of states as bytes, and decode them. No pickle: only registered state classes are created.

    8 bytes: length of the header | header (JSON) | arrays as they are in memory, each at a multiple of 64 bytes

The header is `{"arrays": [[number type, shape, memory order, library], …], "value": node}`. The position of an array
follows from those before it. Plain JSON values and lists represent themselves in a node; everything else has a tag:

    {"float": "nan"}  {"array": 3}  {"scalar": 4}  {"tuple": […]}  {"set": […]}  {"mapping": [[key, value], …]}
    {"bytes": hex, or 3}  {"pieces": [bytes end to end, lengths]}  {"given": name}
    {"state": "averaging.party", "fields": {…}}  {"enum": "core.outcome", "member": "CONVERGED"}

Ranks exchange this format; journals, checkpoints and the files of a federation store it.
"""

from __future__ import annotations

import enum
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from partsong.core.states import FIELDS_AS_STORED, class_of, name_of
from partsong.errors import DataTypeError, FormatError

Array = Any  # a NumPy array or a torch tensor
Buffer = Any  # bytes, or a one-dimensional NumPy array of uint8
Node = Any  # JSON

ALIGNMENT = 64
SHORT = 64
"""Byte strings up to this length are stored in the header."""
MOST_DIMENSIONS = 32
NUMBERS = re.compile(r"[<>|][biufc][0-9]{1,2}")
TORCH_DEVICE = re.compile("torch [a-z]+")
TORCH_NUMBERS = frozenset({
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64",
    "complex128",
})  # fmt: skip


def encode(value: Any, given: Mapping[str, Any] | None = None) -> Buffer:
    """Return a tree as one buffer. Objects `given` by name are stored as references; pass them to `decode` again."""
    head, arrays = _encoded(value, given)
    buffer = np.empty(len(head) + sum(_rounded_up(data.size) for data in arrays), np.uint8)
    buffer[: len(head)] = np.frombuffer(head, np.uint8)
    place = len(head)
    for data in arrays:
        end, place = place + data.size, place + _rounded_up(data.size)
        buffer[end - data.size : end] = data
        buffer[end:place] = 0
    return buffer


def encode_parts(value: Any, given: Mapping[str, Any] | None = None) -> list[Buffer]:
    """Return the same bytes as a list of consecutive buffers, without copying the arrays."""
    head, arrays = _encoded(value, given)
    parts: list[Buffer] = [head]
    for data in arrays:
        parts += [data, bytes(_rounded_up(data.size) - data.size)]
    return parts


def _encoded(value: Any, given: Mapping[str, Any] | None) -> tuple[bytes, list[Any]]:
    """The header with its length, padded to where the arrays begin, and the bytes of each array."""
    encoder = _Encoder(dict(given or {}))
    node = encoder.node(value, ("value",))
    header = _to_json({"arrays": encoder.entries, "value": node}).encode()
    return (len(header).to_bytes(8, "little") + header).ljust(_rounded_up(8 + len(header)), b"\0"), encoder.data


def decode(
    data: Buffer,
    *,
    device: str = "",
    given: Mapping[str, Any] | None = None,
    only: Collection[str] | None = None,
    numpy_only: bool = False,
    copy: bool = False,
) -> Any:
    """Return the tree in a buffer; arrays are views of the buffer unless `copy`. Malformed input is a FormatError.

    Tensors go to `device` if given, else to the type of device that they came from. `only`: names of the states that
    may be created. `numpy_only`: tensors are refused.
    """
    buffer = np.frombuffer(bytearray(data), np.uint8) if isinstance(data, bytes) else data
    try:
        header, start = _header(buffer)
        decoder = _Decoder(dict(given or {}), only, _arrays(buffer, start, header["arrays"], device, numpy_only, copy))
        return decoder.value(header["value"])
    except (FormatError, MemoryError):
        raise
    except Exception as error:  # malicious bytes make parsers and constructors fail in any way
        reason = next(iter(str(error).splitlines()), "")[:200]
        raise _malformed(f"{type(error).__name__}: {reason}") from error


@dataclass(slots=True)
class _Encoder:
    """Turn values into nodes and collect their arrays; an array that occurs twice is stored once."""

    given: Mapping[str, Any]
    entries: list[list[Any]] = field(default_factory=list)
    data: list[Buffer] = field(default_factory=list)
    seen: dict[int, tuple[int, Any]] = field(default_factory=dict)  # holds the array, so that its id is not reused

    def node(self, value: Any, where: tuple[Any, ...]) -> Node:
        """The node for a value; `where` is the path to it, for messages."""
        kind = type(value)
        if kind is np.ndarray:
            return {"array": self.array(value, value, where)}
        if value is None or kind is str or kind is int or kind is bool:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        for name, known in self.given.items():
            if value is known:
                return {"given": name}
        own_name = name_of(kind)
        return self.container(value, where) if own_name is None else self.named(own_name, value, where)

    def named(self, name: str, value: Any, where: tuple[Any, ...]) -> Node:
        """The node for a value of a registered class."""
        if isinstance(value, enum.Enum):
            return {"enum": name, "member": FIELDS_AS_STORED.get(name, {}).get(value.name, value.name)}
        names, as_stored = (one.name for one in fields(value) if one.init), FIELDS_AS_STORED.get(name, {})
        content = {as_stored.get(one, one): self.node(getattr(value, one), (where, ".", one)) for one in names}
        return {"state": name, "fields": content}

    def container(self, value: Any, where: tuple[Any, ...]) -> Node:
        """The node for a container, and for arrays and scalars of rarer types."""
        kind = type(value)
        if kind is list:
            return self.nodes(value, where)
        if kind is tuple:
            if value and all(type(item) is bytes for item in value):
                joined, lengths = np.frombuffer(b"".join(value), np.uint8), np.array([len(item) for item in value])
                return {"pieces": [self.array(part, part, where) for part in (joined, lengths)]}
            return {"tuple": self.nodes(value, where)}
        if isinstance(value, Mapping):
            return {
                "mapping": [[self.key(key, where), self.node(item, (where, "[", key))] for key, item in value.items()]
            }
        if kind is bytes:
            is_short = len(value) <= SHORT
            return {"bytes": value.hex() if is_short else self.array(np.frombuffer(value, np.uint8), value, where)}
        if kind is frozenset:
            return {"set": self.nodes(sorted(value), where)}
        if isinstance(value, np.generic):
            return {"scalar": self.array(np.asarray(value), value, where)}
        if kind is np.memmap or is_tensor(value):
            return {"array": self.array(value, value, where)}
        raise DataTypeError(
            f"{_path(where)} is a {kind.__name__}, which cannot be stored or sent. Use arrays, numbers, text, "
            'None, tuples, lists, mappings, and frozen dataclasses decorated with @state("my-method.party").'
        )

    def nodes(self, values: Collection[Any], where: tuple[Any, ...]) -> list[Node]:
        """The nodes of several values."""
        return [self.node(item, (where, "[", at)) for at, item in enumerate(values)]

    def key(self, key: Any, where: tuple[Any, ...]) -> Node:
        """The node for a key: text, a whole number, or a tuple of these."""
        if _is_key(key):
            return self.node(key, where)
        raise DataTypeError(
            f"{_path(where)} has a key of type {type(key).__name__}. Use text, whole numbers or tuples of them."
        )

    def array(self, array: Array, original: Any, where: tuple[Any, ...]) -> int:
        """The index of an array among those collected."""
        if id(original) not in self.seen:
            entry, data = _laid_out(array, where)
            self.seen[id(original)] = len(self.entries), original
            self.entries.append(entry)
            self.data.append(data)
        return self.seen[id(original)][0]


def _laid_out(array: Array, where: tuple[Any, ...]) -> tuple[list[Any], Buffer]:
    """The header entry of an array, and its bytes in one dimension."""
    order, is_torch = memory_order(array), is_tensor(array)
    kind = number_type(array.dtype) if is_torch else array.dtype.str
    if not (kind in TORCH_NUMBERS if is_torch else _width(kind)):
        raise DataTypeError(
            f"{_path(where)} holds {array.dtype}, which cannot be stored or sent. Use arrays of numbers."
        )
    if is_torch:
        stored = array.permute(*range(array.ndim - 1, -1, -1)) if order == "F" else array
        flat = stored.detach().cpu().contiguous().reshape(-1)
        return [kind, list(array.shape), order, f"torch {array.device.type}"], flat.view(_torch().uint8).numpy()
    flat = np.ascontiguousarray(array.T if order == "F" else array).reshape(-1)
    return [kind, list(array.shape), order, "numpy"], flat.view(np.uint8)


def memory_order(array: Array) -> str:
    """The memory order to store: "F" for a transposed view of an array in C order, else "C"."""
    if array.ndim < 2 or _is_in_order(array):
        return "C"
    turned = array.permute(*range(array.ndim - 1, -1, -1)) if is_tensor(array) else array.T
    return "F" if _is_in_order(turned) else "C"


def array_types(arrays: Mapping[str, Array]) -> Iterator[tuple[str, str, str, tuple[int, ...], str]]:
    """Name, library, number type, shape and memory order of each array, by name."""
    for name, array in sorted(arrays.items()):
        library = "torch" if is_tensor(array) else "numpy"
        yield name, library, number_type(array.dtype), tuple(array.shape), memory_order(array)


def number_type(dtype: Any) -> str:
    """The name of a number type, the same for arrays and tensors."""
    return str(dtype).removeprefix("torch.")


def is_tensor(value: Any) -> bool:
    """Whether this is a torch tensor; torch need not be installed."""
    return not isinstance(value, np.ndarray) and type(value).__module__.partition(".")[0] == "torch"


def _is_in_order(array: Array) -> bool:
    return bool(array.is_contiguous() if is_tensor(array) else array.flags.c_contiguous)


def _header(buffer: Buffer) -> tuple[dict[str, Any], int]:
    """The header, and the offset of the first array."""
    length = int.from_bytes(buffer[:8].tobytes(), "little") if len(buffer) >= 8 else -1
    if not 0 <= length <= len(buffer) - 8:
        raise _malformed("it is truncated")
    header = _from_json(buffer[8 : 8 + length].tobytes().decode())
    if not isinstance(header, dict) or set(header) != {"arrays", "value"}:
        raise _malformed("its header has other keys")
    return header, _rounded_up(8 + length)


def _arrays(buffer: Buffer, start: int, entries: Any, device: str, numpy_only: bool, copy: bool) -> list[Array]:
    """The arrays that a header lists; their sizes are checked against the buffer before any array is created."""
    places = []
    for entry in entries:
        size = _size(entry, numpy_only)
        places.append(slice(start, start + size))
        start += _rounded_up(size)
    if start != len(buffer):
        raise _malformed(f"its arrays need {start} bytes, but it has {len(buffer)}")
    return [_array(buffer[at], entry, device, copy) for at, entry in zip(places, entries, strict=True)]


def _size(entry: Any, numpy_only: bool) -> int:
    """The number of bytes of an array; a malformed entry is refused."""
    kind, shape, order, library = entry
    is_numpy = library == "numpy"
    is_known = _width(kind) > 0 if is_numpy else kind in TORCH_NUMBERS and TORCH_DEVICE.fullmatch(library)
    if not is_known or order not in ("C", "F"):
        raise _malformed(f"an array has the unknown number type {str(kind)[:20]!r} ({str(library)[:20]})")
    if numpy_only and not is_numpy:
        raise _malformed("it holds a tensor, but only NumPy arrays are accepted here")
    if len(shape) > MOST_DIMENSIONS or not all(type(size) is int and size >= 0 for size in shape):
        raise _malformed(f"an array has the shape {str(shape)[:60]}")
    width = _width(kind) if is_numpy else int(getattr(_torch(), kind).itemsize)
    return math.prod(shape) * width


@lru_cache(maxsize=64)
def _width(kind: str) -> int:
    """The bytes of a number type in NumPy's notation, such as "<f8"; 0 if it is not one."""
    return np.dtype(kind).itemsize if NUMBERS.fullmatch(kind) else 0


def _array(data: Buffer, entry: list[Any], device: str, copy: bool) -> Array:
    kind, shape, order, library = entry
    stored = shape[::-1] if order == "F" else shape
    if copy:
        data = np.array(data)
    if library == "numpy":
        array = data.view(np.dtype(kind)).reshape(stored)
        return array.T if order == "F" else array
    torch, home = _torch(), library.removeprefix("torch ")
    tensor = torch.from_numpy(data).view(getattr(torch, kind)).reshape(stored)
    tensor = tensor if home == "cpu" else tensor.to(device or home)
    return tensor.permute(*range(tensor.ndim - 1, -1, -1)) if order == "F" else tensor


@dataclass(frozen=True, slots=True)
class _Decoder:
    """Turn nodes into values."""

    given: Mapping[str, Any]
    only: Collection[str] | None
    arrays: list[Any]
    copied: dict[int, bytes] = field(default_factory=dict)

    def value(self, node: Node) -> Any:
        """The value of a node."""
        if node is None or type(node) in (bool, int, float, str):
            return node
        if type(node) is list:
            return [self.value(item) for item in node]
        if len(node) == 1:
            ((tag, content),) = node.items()
            read = _READERS.get(tag)
            if read is not None:
                return read(self, content)
        elif node.keys() == {"state", "fields"}:
            return self.record(node["state"], node["fields"])
        elif node.keys() == {"enum", "member"}:
            cls = self.named(node["enum"], enum.Enum)
            in_code = {stored: now for now, stored in FIELDS_AS_STORED.get(node["enum"], {}).items()}
            return cls[in_code.get(node["member"], node["member"])]
        raise _malformed(f"a node has the unknown tags {sorted(node)[:5]}")

    def read_float(self, text: Any) -> float:
        """A float that JSON cannot represent."""
        if text not in ("nan", "inf", "-inf"):
            raise _malformed("a number is invalid")
        return float(text)

    def read_array(self, number: Any) -> Array:
        """The array with this index."""
        if type(number) is not int or not 0 <= number < len(self.arrays):
            raise _malformed(f"there is no array {str(number)[:20]!r}")
        return self.arrays[number]

    def items(self, nodes: Any) -> Iterator[Any]:
        """The values of a list of nodes."""
        if type(nodes) is not list:
            raise _malformed("a list of values is not a list")
        return (self.value(item) for item in nodes)

    def read_mapping(self, pairs: Any) -> dict[Any, Any]:
        """Values by key."""
        found = {self.read_key(key): self.value(item) for key, item in pairs}
        if len(found) != len(pairs):
            raise _malformed("a mapping has a duplicate key")
        return found

    def read_key(self, node: Node) -> Any:
        """Text, a whole number, or a tuple of these."""
        key = self.value(node)
        if _is_key(key):
            return key
        raise _malformed(f"a mapping has a key of type {type(key).__name__}")

    def read_bytes(self, text: Any) -> bytes:
        """Bytes: in hexadecimal digits, or an array."""
        return bytes.fromhex(text) if isinstance(text, str) else self._copied(text)

    def _copied(self, number: Any) -> bytes:
        """The bytes of an array, copied once for all references."""
        array = self.read_array(number)
        if number not in self.copied:
            self.copied[number] = array.tobytes()
        return self.copied[number]

    def read_pieces(self, numbers: Any) -> tuple[bytes, ...]:
        """A tuple of byte strings."""
        place, lengths = numbers[0], self.read_array(numbers[1])
        whole, ends = self._copied(place), np.cumsum(lengths).tolist()
        if lengths.min() < 0 or ends[-1] != len(whole):
            raise _malformed("lengths of byte strings do not match")
        return tuple(whole[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True))

    def record(self, name: Any, content: Any) -> Any:
        """A state with its fields; fields added since it was written get their defaults."""
        cls = self.named(name, object)
        if not is_dataclass(cls) or type(content) is not dict:
            raise _malformed(f"{name!r} is not a state with fields")
        make: Any = cls
        as_stored = FIELDS_AS_STORED.get(name, {})
        declared = {as_stored.get(one.name, one.name): one for one in fields(cls) if one.init}
        needed = {stored for stored, one in declared.items() if one.default is one.default_factory is MISSING}
        if not needed <= content.keys() <= declared.keys():
            raise FormatError(
                f"The state {name!r} was written with the fields {sorted(content)}, but this version of partsong has "
                f"{sorted(declared)}. Use the version that wrote it, or start a new run."
            )
        return make(**{declared[stored].name: self.value(item) for stored, item in content.items()})

    def named(self, name: Any, kind: type) -> Any:
        """The class with a name, if it may be created here."""
        if not isinstance(name, str) or (self.only is not None and name not in self.only):
            raise _malformed(f"the state {str(name)[:60]!r} is not allowed here")
        cls = class_of(name)
        if not issubclass(cls, kind):
            raise _malformed(f"{name!r} is a state of another kind")
        return cls


_READERS: Mapping[str, Callable[[_Decoder, Any], Any]] = {
    "float": _Decoder.read_float,
    "array": _Decoder.read_array,
    "scalar": lambda decoder, number: decoder.read_array(number).reshape(())[()],
    "tuple": lambda decoder, nodes: tuple(decoder.items(nodes)),
    "set": lambda decoder, nodes: frozenset(decoder.items(nodes)),
    "mapping": _Decoder.read_mapping,
    "bytes": _Decoder.read_bytes,
    "pieces": _Decoder.read_pieces,
    "given": lambda decoder, name: decoder.given[name],
}


def _malformed(what: str) -> FormatError:
    return FormatError(
        f"Encoded data cannot be read: {what}. It is damaged or from another version of partsong. Restore it from a "
        "backup or start a new run."
    )


def _is_key(key: Any) -> bool:
    return type(key) in (str, int) or (type(key) is tuple and all(type(part) in (str, int) for part in key))


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_to_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_from_json = json.JSONDecoder(parse_constant=_refuse).decode


def _path(where: tuple[Any, ...]) -> str:
    if len(where) == 1:
        return str(where[0])
    inner, kind, name = where
    return _path(inner) + (f".{name}" if kind == "." else f"[{name!r}]")


def _rounded_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _torch() -> Any:
    return import_module("torch")
