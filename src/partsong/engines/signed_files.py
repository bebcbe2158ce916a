"""Files that are whole when their name appears, each signed for its place: "PARTSONG" | Ed25519 signature | bytes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from partsong.errors import FileError, FormatError

MAGIC = b"PARTSONG"
SIGNATURE_BYTES = 64
MOST_BYTES = 1 << 31
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
MISPLACED = {errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EACCES, errno.EPERM}
"""Errors of a place that somebody else can have made; all others are of the disk."""

Sign = Callable[[bytes], bytes]
Verify = Callable[[bytes, bytes], bool]
"""Signature and text -> whether the holder of the key has signed it."""


def drop(path: Path, data: bytes) -> None:
    """Write a file so that it is whole when its name appears; FormatError where its folder is a link, or none that can
    be written to: it may be somebody else who has made it.
    """
    draft = f".{secrets.token_hex(8)}.draft"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            with open(os.open(draft, NEW, 0o666, dir_fd=folder), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(draft, dir_fd=folder)
            os.close(folder)
    except OSError as error:
        told = f"{path} cannot be written: {error.strerror or error}."
        if error.errno in MISPLACED:
            raise FormatError(f"{told} Make its folder one that both sides can write to, and no link.") from error
        raise FileError(f"{told} Check folder and disk.") from error


def sweep(folder: Path, pattern: re.Pattern[str], keep: tuple[str, ...]) -> None:
    """Take away what was left by a server that was killed; files whose IDs begin in one of these ways stay."""
    with contextlib.suppress(OSError):
        for path in () if folder.is_symlink() else list(folder.iterdir()):
            found = pattern.fullmatch(path.name)
            if found is not None and not found[1].startswith(keep):
                take_away(path)


def take_away(path: Path) -> None:
    """Remove a file, a link or an empty folder, if that can be done."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            path.rmdir()
        else:
            path.unlink()


def signed(sign: Sign, direction: str, party: str, key: str, content: bytes) -> bytes:
    """A file's bytes, for one direction, party, request and content."""
    return MAGIC + sign(_statement(direction, party, key, content)) + content


def opened(path: Path, verify: Verify, where: tuple[str, str, str], most: int) -> bytes:
    """The content, if it was signed for this place by the one who is known for it."""
    try:
        data = _read(path, most)
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{path.name} cannot be read: {error.strerror or error}.") from error
    start = len(MAGIC) + SIGNATURE_BYTES
    signature, content = data[len(MAGIC) : start], data[start:]
    if data[: len(MAGIC)] != MAGIC or not verify(signature, _statement(*where, content)):
        raise FormatError(
            f"{path.name} has not the signature that is known for its place: cut short, changed, from somebody else, "
            "or repeated from another request. It was not used."
        )
    return content


def _read(path: Path, most: int) -> bytes:
    """A file's bytes; whatever else has its name (a link, a pipe, a folder) is not read, and not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            raise FormatError(
                f"{path.name} is no file, or longer than the {most} bytes that are taken; it was not read."
            )
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(descriptor)


def _statement(direction: str, party: str, key: str, content: bytes) -> bytes:
    parts = (b"partsong file drop", direction.encode(), party.encode(), key.encode(), hashlib.sha256(content).digest())
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
