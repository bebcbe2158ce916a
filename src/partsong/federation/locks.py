"""One process at a time in a folder; who is killed leaves no lock behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from partsong.errors import FileError


@contextmanager
def locked(path: Path, *, waits: bool) -> Iterator[None]:
    """Hold a lock, or say that another process does; where the system has no such locks, nothing is held.

    It is given back by name, and not by closing the file: a child process may have the same file open.
    """
    try:
        fcntl: Any = import_module("fcntl")
    except ImportError:
        yield
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise FileError(f"{path.parent} is in use by another process. Wait for it, or end it first.") from error
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
