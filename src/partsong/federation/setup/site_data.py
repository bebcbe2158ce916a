"""The table or the texts of a site, read from its own disk once in a process, as long as the files stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partsong.io.opening import Wanted
from partsong.io.read import read_wanted
from partsong.topics.documents import read_documents

if TYPE_CHECKING:
    from partsong.data.table import Table

USUAL_COLUMN = "text"
ENDINGS = (".jsonl", ".txt")
TABLES = ("matrix.mtx", "matrix.mtx.gz")

Stamp = tuple[tuple[str, int, int], ...]


def table_at(data: Path, reading: Mapping[str, Any]) -> Table:
    """The rows."""
    found: Table = _read(data, tuple(reading.items()), _stamp(data))
    return found


def texts_at(data: Path, reading: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts."""
    found: tuple[str, ...] = _read(data, tuple(reading.items()), _stamp(data))
    return found


def are_texts(data: Path) -> bool:
    """Whether a file or folder of this kind always holds texts; a .csv can hold either."""
    if not data.is_dir():
        return Path(data.name.lower().removesuffix(".gz")).suffix in ENDINGS
    held = {entry.name for entry in data.iterdir()}
    return not held & set(TABLES) and any(name.lower().removesuffix(".gz").endswith(".txt") for name in held)


def _stamp(data: Path) -> Stamp:
    files = sorted(data.iterdir()) if data.is_dir() else [data]
    found = [(file.name, file.stat()) for file in files if file.is_file()]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in found)


@lru_cache(maxsize=1)
def _read(data: Path, reading: tuple[tuple[str, Any], ...], stamp: Stamp) -> Any:
    options = dict(reading)
    if "text_column" not in options:
        return read_wanted(data, Wanted(**options))
    return tuple(read_documents(data, column=options["text_column"], encoding=options.get("encoding", "utf-8")))
