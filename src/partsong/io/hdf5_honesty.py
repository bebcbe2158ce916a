"""Checks of an HDF5 file before its library reads it: damage on which that library hangs, and sizes beyond reason.

They do not make HDF5 safe: its library is compiled code, and a file that was damaged or made for it can still crash the
process (fuzzing with flipped bytes found such a file). An .h5ad from a stranger is best converted elsewhere first.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any

from partsong.errors import FormatError
from partsong.io.opening import GZIP_RATIO

DEEPEST = 4  # obs / column / categories / values
_HEAP_START = b"GCOL\x01\x00\x00\x00"
_HEAP_HEADER = _OBJECT_HEADER = 16
_SAVE_AGAIN = "The file is damaged; copy it again, or save it again with write_h5ad."


def require_sound_heaps(path: Path) -> None:
    """Walk the heaps that hold text: one whose chain of objects misses its end makes the HDF5 library loop for ever."""
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(_HEAP_START)
        while start >= 0:
            end = start + _number(data, start + 8, 8)
            if end > len(data) or not _chain_ends_at(data, start + _HEAP_HEADER, end):
                raise FormatError(f"{path}: the heap of text at byte position {start} is inconsistent. {_SAVE_AGAIN}")
            start = data.find(_HEAP_START, max(end, start + 1))


def _chain_ends_at(data: mmap.mmap, at: int, end: int) -> bool:
    """Objects follow each other up to the end; number 0 is free space and takes all that is left."""
    while at + _OBJECT_HEADER <= end:
        number, size = _number(data, at, 2), _number(data, at + 8, 8)
        if number == 0:
            return at + size == end
        at += _OBJECT_HEADER + -(-size // 8) * 8
    return at <= end


def _number(data: mmap.mmap, at: int, n_bytes: int) -> int:
    return int.from_bytes(data[at : at + n_bytes], "little")


def require_honest(path: Path, h5py: Any, parent: Any, name: str, depth: int = 0) -> None:
    """Refuse links to elsewhere, and data that claim more bytes than the file could unpack to."""
    if depth > DEEPEST or not isinstance(parent.get(name, getlink=True), h5py.HardLink):
        raise FormatError(f"{path}: {name!r} is missing, leads out of the file, or runs in circles. {_SAVE_AGAIN}")
    part = parent[name]
    if isinstance(part, h5py.Group):
        for inner in part:
            require_honest(path, h5py, part, inner, depth + 1)
    elif isinstance(part, h5py.Dataset):
        largest = max(part.size or 0, math.prod(part.chunks or ())) * part.dtype.itemsize
        if part.external or part.is_virtual or largest > GZIP_RATIO * path.stat().st_size:
            raise FormatError(
                f"{path}: {part.name} claims {largest} bytes, more than the file can hold, or keeps them elsewhere. "
                f"{_SAVE_AGAIN}"
            )
