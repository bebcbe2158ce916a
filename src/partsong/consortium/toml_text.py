"""Small TOML files that we write ourselves, whole or not at all; they are read by `federation.keys.read_toml`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partsong.io.atomic import replacing


def toml_of(table: Mapping[str, Any]) -> str:
    """Texts, numbers, truth values, lists of these, and tables of them; None is left out."""
    plain = {name: value for name, value in table.items() if value is not None and not isinstance(value, Mapping)}
    lines = [f"{_key(name)} = {_value(value)}" for name, value in plain.items()]
    for name, inner in table.items():
        if isinstance(inner, Mapping):
            lines += ["", f"[{_key(name)}]", *(f"{_key(key)} = {_value(value)}" for key, value in inner.items())]
    return "\n".join(lines) + "\n"


def write(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """A file, whole or not at all; one that is `private` is for its owner alone."""
    with replacing(path, private=private) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


def _key(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False)
