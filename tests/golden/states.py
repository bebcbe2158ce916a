"""One value of every kind of state, encoded in a golden file, and the names of their fields.

    python tests/golden/states.py                     add states and fields that are new
    python tests/golden/states.py --write NAME …      states that no release has had yet, and that have changed

Names and fields are in files that users have: after a release they stay. A field may be added, with a default.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import json
import pkgutil
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import partsong
from partsong.core.codec import decode, encode
from partsong.core.states import FIELDS_AS_STORED, MODULES, class_of, name_of
from partsong.errors import PartsongError

HERE = Path(__file__).resolve().parent
FIELDS, ENCODED = HERE / "states.json", HERE / "states.bin"

ARRAY = np.arange(6.0).reshape(2, 3).T
VALUES = {int: 3, float: 0.5, bool: True, str: "text", bytes: b"bytes", type(None): None}
"""What a field holds, by its type; one of any other type holds an array."""
OWN_VALUES = {
    "secure.array": {"kind": "float64", "library": "numpy", "shape": (3, 2)},
    "privacy.release": {"kind": "gaussian", "noise_multiplier": 2.0, "unit": "row", "relation": "replace"},
    "words.vocabulary": {"words": ("a", "b"), "documents": np.array([1, 2])},
    "core.message": {"arrays": {"H": ARRAY, "n": np.float32([1, 2])}, "weight": 2.5},
}
"""Fields that are checked when a state is made."""


def all_names() -> dict[str, str]:
    """The states that the package defines, by walking it, with their modules."""
    found = {}
    for info in pkgutil.walk_packages(partsong.__path__, "partsong."):
        try:
            module = importlib.import_module(info.name)
        except (ImportError, PartsongError):
            if "flower" in info.name or info.name.endswith("__main__"):
                continue
            raise
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == info.name and name_of(value) is not None:
                found[name_of(value)] = info.name.removeprefix("partsong.")
    return found


def fields_of(name: str) -> list[str]:
    """The fields of a state as they are stored, or the members of an enumeration."""
    cls = class_of(name)
    if issubclass(cls, enum.Enum):
        return [FIELDS_AS_STORED.get(name, {}).get(member.name, member.name) for member in cls]
    as_stored = FIELDS_AS_STORED.get(name, {})
    return [as_stored.get(field.name, field.name) for field in dataclasses.fields(cls) if field.init]


def sample(name: str) -> Any:
    """A state with something in every field."""
    cls = class_of(name)
    if issubclass(cls, enum.Enum):
        return next(iter(cls))
    own, kinds = OWN_VALUES.get(name, {}), typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    return cls(**{one: own[one] if one in own else _value(kinds[one]) for one in names})


def _value(kind: Any) -> Any:
    outer, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind in VALUES:
        return VALUES[kind]
    if outer is Mapping:
        return {_value(inner[0]): _value(inner[1])}
    if outer in (tuple, frozenset):
        return outer(_value(one) for one in inner if one is not Ellipsis)
    if outer in (types.UnionType, typing.Union):
        return _value(inner[0])
    own_name = name_of(kind) if isinstance(kind, type) else None
    return ARRAY if own_name is None else sample(own_name)


def load() -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Names with their fields, and an encoded value of each."""
    return json.loads(FIELDS.read_text()), decode(ENCODED.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description="Write golden states.")
    parser.add_argument("--write", nargs="+", default=[], metavar="NAME", help="states that have changed")
    changed = set(parser.parse_args().write)
    known, values = load() if FIELDS.exists() else ({}, {})
    names = sorted(MODULES)
    for name in names:
        stored = [] if name in changed else known.get(name, [])
        known[name] = [*stored, *(one for one in fields_of(name) if one not in stored)]
        if name in changed or name not in values:
            values[name] = encode(sample(name))
    lines = (f"{json.dumps(name)}: {json.dumps(known[name])}" for name in names)
    FIELDS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    ENCODED.write_bytes(encode({name: values[name] for name in names}).tobytes())


if __name__ == "__main__":
    main()
