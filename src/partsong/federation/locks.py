"""Locks on folders: one process at a time, released when a process is killed.

These are the operating system's locks, not the filelock package, which is too weak here. filelock does not know which
process holds a lock, and `partsong federation stop` signals that process; a number in a file may belong to another
process by now. Testing a lock means taking it, which makes a process that starts meanwhile give up. On a file system
without locks it relies on a lock file, which a killed process leaves behind.

`held` is a record lock: the system reports its process, and children do not inherit it. `locked` is for a short
operation on one file, and also excludes other threads. On NFS both need a server with locks; on Windows nothing is
locked.
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
"""Layout of struct flock: type, whence, start, length, pid on Linux; else start, length, pid, type, whence."""

_own: dict[tuple[int, int], int] = {}
"""Files that this process has locked, and its process number. It must not open them again: a record lock ends as soon
as its process closes any descriptor of the file."""
_one_at_a_time = threading.Lock()


@contextmanager
def held(path: Path, otherwise: str) -> Iterator[None]:
    """Hold a lock; FileError with the text `otherwise` if another process holds it."""
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
    """Return whether a process holds the lock, without taking it."""
    return _look(path) is not None


def holder_of(path: Path) -> int | None:
    """Return the process that holds a lock; None if there is none, or if it has no number on this machine."""
    return _look(path) or None


@contextmanager
def locked(path: Path, *, waits: bool) -> Iterator[None]:
    """Hold a lock; if another process holds it, wait or raise FileError.

    It is released explicitly, not by closing the file: a child process may have the same file open.
    """
    descriptor = _taken(path, "flock", waits=waits)
    if descriptor is None:
        raise FileError(f"{path.parent} is in use by another process. Wait for that process or stop it.")
    try:
        yield
    finally:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _look(path: Path) -> int | None:
    """Return the process that holds the lock; 0 if it has no number here (other container or machine); None if free."""
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
    """Open and lock the file by this system call; None if another process holds the lock."""
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
    """Identify a file by device and inode; None if it does not exist."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _without_locks(path: Path, error: OSError) -> FileError:
    return FileError(
        f"{path} cannot be opened and locked: {error.strerror or error}. Use a folder of your own "
        "on a file system with locks."
    )
