"""Locks on folders: one process at a time, and none is left behind by a process that was killed.

`held` and `is_held` use the system's record locks, and not the filelock package, for three promises that it does not
make: one can look whether somebody holds a lock without taking it or writing anything; the system knows which process
that is, so that no number is written down that another process could have by now; and a child does not inherit the
lock, so that it ends with the process that took it, however that ends. `locked` is for a moment's work on one file.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from partsong.errors import FileError

TAKEN = (errno.EACCES, errno.EAGAIN)
LINUX, OTHERS = "hhqqi4x", "qqihh"
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
        descriptor = _locked(path) if holder is None else None
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


def _look(path: Path) -> int | None:
    """The number of the process; 0 where it has none here (in another container, on another machine); None: nobody."""
    own = _identity(path)
    if own is None:
        return None
    if _own.get(own) == os.getpid():
        return os.getpid()
    fcntl = _fcntl()
    if fcntl is None:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return _asked(fcntl, descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _without_locks(path, error) from error


def _asked(fcntl: Any, descriptor: int) -> int | None:
    is_linux = sys.platform == "linux"
    fields = (fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0) if is_linux else (0, 0, 0, fcntl.F_WRLCK, os.SEEK_SET)
    form = LINUX if is_linux else OTHERS
    found = struct.unpack(form, fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack(form, *fields)))
    kind, process = (found[0], found[4]) if is_linux else (found[3], found[2])
    return None if kind == fcntl.F_UNLCK else max(0, process)


def _locked(path: Path) -> int | None:
    """The file, open and locked; None where another process was faster."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise _without_locks(path, error) from error
    try:
        if (fcntl := _fcntl()) is not None:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in TAKEN:
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


def _fcntl() -> Any:
    """None on Windows: nothing is locked there."""
    try:
        return import_module("fcntl")
    except ImportError:
        return None


def _without_locks(path: Path, error: OSError) -> FileError:
    return FileError(
        f"{path} cannot be opened and locked: {error.strerror or error}. Use a folder of yours, on a disk with locks."
    )


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
