"""State files: checkpoints, journals, and the states of a federation's sites and server.

    8 bytes: "partsong" | 24 bytes: kind of file and format version | 32 bytes: SHA-256 | tree

The tree is encoded by `core.codec`. The checksum covers the whole file. State files contain private states such as W,
so only their owner can read them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from partsong.core.codec import decode, encode_parts
from partsong.errors import FormatError, PartsongError
from partsong.io.opening import parse_errors, resolve_path
from partsong.io.write import atomic_write

MAGIC = b"partsong"
VERSION = 2
"""Version 0.1.0 wrote format 1: safetensors with classes by their bare names."""
HEADER = 64


def write_state(
    path: str | os.PathLike[str], value: Any, kind: str = "states", given: Mapping[str, Any] | None = None
) -> None:
    """Write a tree of states atomically, readable by its owner only; objects `given` by name are not stored."""
    parts = encode_parts(value, given)
    mark = f"{kind} {VERSION}".encode().ljust(24, b"\0")
    digest = hashlib.sha256(mark)
    for part in parts:
        digest.update(part)
    with atomic_write(path, private=True) as draft, draft.open("wb") as file:
        file.write(MAGIC + mark + digest.digest())
        for part in parts:
            file.write(part)


def read_state(path: str | os.PathLike[str], kind: str = "states", given: Mapping[str, Any] | None = None) -> Any:
    """Read a file of this kind that `write_state` wrote; anything else is a FormatError."""
    place = resolve_path(path)
    with parse_errors(place, f"a file of {kind}"):
        with place.open("rb") as file:
            head = file.read(HEADER)
        _require(place, head, kind)
        data = np.memmap(place, np.uint8, "r")
        digest = hashlib.sha256(head[8:32])
        digest.update(data[HEADER:].data)
        if digest.digest() != head[32:]:
            raise FormatError(
                f"{place}: its contents do not match its checksum, so it was damaged or edited. Restore it from a "
                "backup."
            )
        try:
            return decode(data[HEADER:], given=given, copy=True)
        except PartsongError as error:
            raise FormatError(f"{place}: {error}") from error


def _require(place: Path, head: bytes, kind: str) -> None:
    """Refuse files of another kind or version."""
    if len(head) < HEADER or head[:8] != MAGIC:
        if b'"__metadata__":{"partsong"' in head:
            raise FormatError(
                f"{place}: partsong 0.1.0 wrote this file of {kind}, or it is a model file. This release cannot resume "
                "runs of 0.1.0: finish the run with that version, or start a new run."
            )
        raise FormatError(f"{place}: not a file of {kind} that partsong wrote, or truncated. Restore it from a backup.")
    purpose, _, version = head[8:32].rstrip(b"\0").decode("ascii", "replace").rpartition(" ")
    if purpose != kind:
        raise FormatError(f"{place}: this is a file of {purpose!r}. Pass a file of {kind!r}.")
    if version != str(VERSION):
        raise FormatError(
            f"{place}: written in format version {version}, but this release reads version {VERSION}. Use the version "
            "of partsong that wrote it, or start a new run."
        )
