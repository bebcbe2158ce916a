"""parts.json, the list of a folder of parts: read with suspicion, since it may come from a stranger or an editor."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partsong.errors import FormatError

LISTING = "parts.json"
FORMAT = "partsong-parts"
VERSION = 1
_WAY_OUT = "Correct the list, or split the data again."


@dataclass(frozen=True, slots=True)
class Part:
    """One party's entry in parts.json; a list written by hand may leave `sha256` out."""

    name: str
    file: str
    rows: int
    sha256: str | None = None


def listed(folder: Path) -> list[Part]:
    """The parties of a folder, or what is wrong with the list of them."""
    path = folder / LISTING
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path} cannot be read as JSON ({error}). Split the data again.") from error
    told = content if isinstance(content, dict) else {}
    if told.get("format") != FORMAT or told.get("version") != VERSION:
        raise FormatError(f"{path}: this is not version {VERSION} of a {FORMAT} file. Split the data again.")
    entries = told.get("parties")
    if not isinstance(entries, list) or not entries:
        raise FormatError(f"{path}: lists no parties. {_WAY_OUT}")
    parts = [_part(f"{path}, party {number}", entry) for number, entry in enumerate(entries, start=1)]
    for what, values in (("name", [part.name for part in parts]), ("file", [part.file for part in parts])):
        _require_different(path, what, values)
    return parts


def _part(where: str, entry: Any) -> Part:
    """One entry, each field checked by itself."""
    if not isinstance(entry, dict):
        raise FormatError(f"{where}: is {_shown(entry)}, not an object with name, file and rows. {_WAY_OUT}")
    for field in ("name", "file", "rows"):
        if field not in entry:
            raise FormatError(f"{where}: has no {field!r}. {_WAY_OUT}")
    name, file = (_text(where, field, entry[field]) for field in ("name", "file"))
    rows, sha256 = entry["rows"], entry.get("sha256")
    if type(rows) is not int or rows < 1:
        raise FormatError(f"{where}: rows is {_shown(rows)}, but must be a whole number of at least 1. {_WAY_OUT}")
    if Path(file).name != file or file.startswith("."):
        raise FormatError(f"{where}: {file!r} is not the plain name of a file beside the list. {_WAY_OUT}")
    if sha256 is not None and not (isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256)):
        raise FormatError(f"{where}: the sha256 of {file!r} is not 64 hexadecimal digits. {_WAY_OUT}")
    return Part(name, file, rows, sha256)


def _text(where: str, field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise FormatError(f"{where}: its {field} is {_shown(value)}, but must be text, in quotes. {_WAY_OUT}")
    return value


def _require_different(path: Path, what: str, values: Sequence[str]) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise FormatError(f"{path}: two parties have the same {what}, {value!r}. {_WAY_OUT}")
        seen.add(value)


def _shown(value: Any) -> str:
    return json.dumps(value)[:40]
