"""Locks on files that end with the process that holds them, however it ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from partsong.errors import FileError


@contextmanager
def held(path: Path, otherwise: str) -> Iterator[None]:
    """Hold a lock; FileError with the text `otherwise` where somebody else does. The holder's number is in the file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not _taken(descriptor):
            raise FileError(f"{otherwise} (process {_holder(path)}).")
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        os.close(descriptor)


def holder_of(path: Path) -> int | None:
    """The process that holds a lock; None where nobody does."""
    if not path.exists():
        return None
    descriptor = os.open(path, os.O_RDWR)
    try:
        return None if _taken(descriptor) else _holder(path)
    finally:
        os.close(descriptor)


def _holder(path: Path) -> int | None:
    text = path.read_text()
    return int(text) if text.isdigit() else None


def _taken(descriptor: int) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows: nothing is locked there
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
