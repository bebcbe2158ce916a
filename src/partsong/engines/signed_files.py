"""Files that are whole when their name appears, each signed for its place: "PARTSONG" | Ed25519 signature | bytes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path

from partsong.errors import FileError, FormatError

MAGIC = b"PARTSONG"
SIGNATURE_BYTES = 64
MOST_BYTES = 1 << 31

Sign = Callable[[bytes], bytes]
Verify = Callable[[bytes, bytes], bool]
"""Signature and text -> whether the holder of the key has signed it."""


def drop(path: Path, data: bytes) -> None:
    """Write a file so that it is whole when its name appears."""
    draft = path.with_name(f".{secrets.token_hex(8)}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror or error}. Check folder and disk.") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def sweep(folder: Path, pattern: re.Pattern[str], keep: str) -> None:
    """Take away what was left by a server that was killed: whoever asks is the only one who does."""
    for path in folder.iterdir() if folder.is_dir() else ():
        found = pattern.fullmatch(path.name)
        if found is not None and found[1] != keep:
            with contextlib.suppress(OSError):
                path.unlink()


def signed(sign: Sign, direction: str, party: str, key: str, content: bytes) -> bytes:
    """A file's bytes, for one direction, party, request and content."""
    return MAGIC + sign(_statement(direction, party, key, content)) + content


def opened(path: Path, verify: Verify, where: tuple[str, str, str], most: int) -> bytes:
    """The content, if it was signed for this place by the one who is known for it."""
    try:
        if path.is_symlink() or path.stat().st_size > most:
            raise FormatError(
                f"{path.name} is a link, or longer than the {most} bytes that are taken; it was not read."
            )
        data = path.read_bytes()
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


def _statement(direction: str, party: str, key: str, content: bytes) -> bytes:
    parts = (b"partsong file drop", direction.encode(), party.encode(), key.encode(), hashlib.sha256(content).digest())
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
