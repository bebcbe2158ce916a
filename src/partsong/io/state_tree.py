"""Trees of states to JSON and back: what is not an array becomes a tagged node, arrays are set aside by number.

{"array": "3", "order": "C"}   {"scalar": "4"}   {"float": "nan"}   {"tuple": [...]}   {"mapping": [[key, value], ...]}
{"enum": "Outcome", "member": "CONVERGED"}   {"record": "State", "fields": {...}}
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from partsong.errors import DataTypeError, FormatError, ParameterError

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
        if stored != declared:
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
