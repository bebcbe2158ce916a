"""A state on its way to another rank: what is not an array becomes JSON, arrays go as they are in a Message.

    {"array": "3"}   {"scalar": "4"}   {"tuple": [...]}   {"mapping": [[key, value], ...]}   {"record": [class, fields]}

Reading makes objects of dataclasses that this process has imported already, and of nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from partsong.core import Array, Message, State
from partsong.errors import CompositionError, FormatError


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
