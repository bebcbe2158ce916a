"""Locks on folders: one process at a time, and none is left behind by a process that was killed.

The system's own locks, and not the filelock package, whose promises are too weak here. It does not know which process
holds a lock, and `partsong federation stop` sends that process a signal: a number in a file may belong to another
process by now. To look whether a lock is held it has to be taken, which makes a process that starts meanwhile give up.
And on a file system without locks it takes a file that is there for one, which a killed process leaves behind.

`held` is a record lock, of which the system tells the process, and which no child inherits. `locked` is for a moment's
work on one file, and keeps threads apart as well. On NFS both need a server with locks; on Windows nothing is locked.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, util
from pathlib import Path
from typing import Any

from partsong.errors import FileError

fcntl: Any = import_module("fcntl") if util.find_spec("fcntl") else None
IS_LINUX = sys.platform == "linux"
FORM = "hhqqi4x" if IS_LINUX else "qqihh"
"""A lock as the system tells of it: kind, origin, start, length, process; or start, length, process, kind, origin."""

_own: dict[tuple[int, int], int] = {}
"""Files that this process has locked, and its number. It must not open them again: a record lock ends as soon as its
process closes the file, by whatever descriptor."""
_one_at_a_time = threading.Lock()


@contextmanager
def held(path: Path, otherwise: str) -> Iterator[None]:
    """Hold a lock; FileError with the text `otherwise` where somebody else does."""
    with _one_at_a_time:
        holder = _look(path)
        descriptor = _taken(path, "lockf") if holder is None else None
        if descriptor is None:
            holder = holder or holder_of(path)
            raise FileError(f"{otherwise} (process {holder})." if holder else f"{otherwise}.")
        own = _identity(path)
        _own[own] = os.getpid()
    try:
        yield
    finally:
        with _one_at_a_time:
            _own.pop(own, None)
            os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether somebody holds a lock; nothing is taken or written in order to look."""
    return _look(path) is not None


def holder_of(path: Path) -> int | None:
    """The process that holds a lock; None where nobody does, or one that has no number here."""
    return _look(path) or None


@contextmanager
def locked(path: Path, *, waits: bool) -> Iterator[None]:
    """Hold a lock; FileError where somebody else does and this does not wait.

    It is given back by name, and not by closing the file: a child process may have the same file open.
    """
    descriptor = _taken(path, "flock", waits=waits)
    if descriptor is None:
        raise FileError(f"{path.parent} is in use by another process. Wait for it, or end it first.")
    try:
        yield
    finally:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _look(path: Path) -> int | None:
    """The number of the process; 0 where it has none here (in another container, on another machine); None: nobody."""
    own = _identity(path)
    if own is None or fcntl is None:
        return None
    if _own.get(own) == os.getpid():
        return os.getpid()
    asked = (fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0) if IS_LINUX else (0, 0, 0, fcntl.F_WRLCK, os.SEEK_SET)
    try:
        with path.open("rb") as file:
            found = struct.unpack(FORM, fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(FORM, *asked)))
    except OSError as error:
        raise _without_locks(path, error) from error
    kind, process = (found[0], found[4]) if IS_LINUX else (found[3], found[2])
    return None if kind == fcntl.F_UNLCK else max(0, process)


def _taken(path: Path, call: str, *, waits: bool = False) -> int | None:
    """The file, open and locked by this call of the system; None where somebody else holds the lock."""
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if fcntl is not None:
            getattr(fcntl, call)(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return None
        raise _without_locks(path, error) from error
    return descriptor


def _identity(path: Path) -> Any:
    """The file, whatever it is called; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _without_locks(path: Path, error: OSError) -> FileError:
    return FileError(
        f"{path} cannot be opened and locked: {error.strerror or error}. Use a folder of yours, on a disk with locks."
    )
