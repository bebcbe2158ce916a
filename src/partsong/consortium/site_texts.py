"""Texts of a site on its own disk, as `partsong topics` reads them; what is read stays in the process."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from partsong.text.documents import read_documents

READING = ("text_column", "encoding")
USUAL_COLUMN, USUAL_ENCODING = "text", "utf-8"
ENDINGS = (".jsonl", ".txt")
TABLES = ("matrix.mtx", "matrix.mtx.gz")


def are_texts(data: Path) -> bool:
    """Whether that is what a file or folder of this kind holds in any case; a .csv can hold either."""
    if not data.is_dir():
        return Path(data.name.lower().removesuffix(".gz")).suffix in ENDINGS
    held = {entry.name for entry in data.iterdir()}
    return not held & set(TABLES) and any(name.lower().removesuffix(".gz").endswith(".txt") for name in held)


def texts_at(data: Path, reading: dict[str, Any]) -> tuple[str, ...]:
    """The texts; read once in a process, as long as the files stay as they are."""
    column, encoding = reading.get("text_column", USUAL_COLUMN), reading.get("encoding", USUAL_ENCODING)
    return _read(data, str(column), str(encoding), _stamp(data))


def _stamp(data: Path) -> tuple[tuple[str, int, int], ...]:
    files = sorted(data.iterdir()) if data.is_dir() else [data]
    found = [(file.name, file.stat()) for file in files if file.is_file()]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in found)


@lru_cache(maxsize=1)
def _read(data: Path, column: str, encoding: str, stamp: tuple[tuple[str, int, int], ...]) -> tuple[str, ...]:
    return tuple(read_documents(data, column=column, encoding=encoding))
