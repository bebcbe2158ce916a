"""Write files atomically: text, JSON and arbitrary contents; check that folders and files are writable."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from partsong.errors import FileError
from partsong.io.opening import resolve_path


@contextmanager
def atomic_write(path: str | os.PathLike[str], *, private: bool = False) -> Iterator[Path]:
    """Yield an empty temporary file next to `path`; it replaces `path` when the block ends without an error.

    The contents are flushed to disk before the rename. A `private` file is readable by its owner only; otherwise an
    existing file keeps its permissions. Links are followed.
    """
    # os.replace would replace a link itself, not the file that it points to.
    target = Path(os.path.realpath(resolve_path(path)))
    draft = target.with_name(f".{secrets.token_hex(8)}.{target.name}")
    if target.exists() and not os.access(target, os.W_OK):
        raise FileError(f"{path} is write-protected. Choose another name, or remove the protection.")
    try:
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if private else 0o666))
        yield draft
        # Before the rename: after a power failure, the new name must not have empty contents.
        _flush_to_disk(draft, os.O_RDWR)
        # os.replace gives the file the permissions of the draft.
        if target.exists() and not private:
            shutil.copymode(target, draft)
        os.replace(draft, target)
        with contextlib.suppress(OSError):  # not every system can flush a folder
            _flush_to_disk(target.parent, os.O_RDONLY)
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(
            f"{path} cannot be written: {error.strerror or error}. Check that the folder exists and is writable, and "
            "that the disk is not full. An existing file was not changed."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _flush_to_disk(path: Path, mode: int) -> None:
    descriptor = os.open(path, mode)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def as_json(value: Any) -> Any:
    """Convert a value to JSON types: None for NaN and infinity, Python numbers for NumPy's, text for paths."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(as_json(content), indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write a text file atomically; a `private` file is readable by its owner only."""
    write_bytes(path, text.encode("utf-8"), private=private)


def write_bytes(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file atomically; a `private` file is readable by its owner only."""
    with atomic_write(path, private=private) as draft:
        draft.write_bytes(content)


def require_writable_folder(option: str, folder: Path) -> None:
    """Refuse a folder that does not exist or is not writable; tested by creating a file."""
    if not folder.is_dir():
        raise FileError(f"{option}: there is no folder {folder}. Create it, or choose another one.")
    probe = folder / f".{secrets.token_hex(8)}.partsong"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except OSError as error:
        raise FileError(
            f"{option}: the folder {folder} is not writable ({error.strerror}). Choose another one."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def require_writable_file(option: str, place: Path) -> None:
    """Refuse a file that could not be written, before anything is computed."""
    if place.is_dir():
        raise FileError(f"{option} {place}: this is a folder. Pass a file in it.")
    if place.exists() and not os.access(place, os.W_OK):
        raise FileError(
            f"{option} {place}: the file is write-protected. Choose another name, or remove the protection."
        )
    require_writable_folder(option, place.parent)


FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""Spreadsheets execute text that starts with these (OWASP, CSV injection)."""


def first_formula(names: Iterable[str]) -> str | None:
    """Return the first name that a spreadsheet would take for a formula; numbers such as -3 or +1e5 are not."""
    return next((name for name in names if name.startswith(FORMULA_STARTS) and not _is_number(name)), None)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def quoting_for(texts: Iterable[str]) -> Literal[0, 2]:
    """Return the least quoting that preserves these texts; Python's writer does not quote a bare CR."""
    return csv.QUOTE_NONNUMERIC if any("\r" in text for text in texts) else csv.QUOTE_MINIMAL
