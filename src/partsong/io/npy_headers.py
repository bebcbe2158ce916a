"""What the arrays of .npy and .npz files say of themselves, before any value is read and whether or not it is true."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from partsong.errors import FormatError
from partsong.io.opening import GZIP_RATIO

FEATURE_KEYS = ("feature_names", "genes", "features")
SAMPLE_KEYS = ("sample_names", "samples")
RESAVE = "Save it again with np.save or np.savez from plain number or text arrays (X.astype(float), names.astype(str))."


@dataclass(frozen=True, slots=True)
class Header:
    """What an array says of itself before its values are read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int

    @property
    def n_bytes(self) -> int:
        """Of header and values together."""
        return self.offset + self.dtype.itemsize * math.prod(self.shape)


def header_of(stream: IO[bytes]) -> Header:
    """From the beginning of an array; the stream is left where its values begin."""
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"version {version} of the .npy format is not one that plain numbers need")
    shape, _, dtype = readers[version](stream)
    if min(shape, default=0) < 0:
        raise ValueError(f"the shape {shape} is negative")
    return Header(shape, dtype, stream.tell())


def member_headers(path: Path, archive: zipfile.ZipFile) -> Iterator[tuple[str, Header]]:
    """The header of each array, held against the size of its member, and that against what can be unpacked at all."""
    for member in archive.infolist():
        if not member.filename.endswith(".npy"):
            continue
        where = f"{path}, array {member.filename.removesuffix('.npy')!r}"
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise FormatError(f"{where}: packed in a way that np.savez does not use. {RESAVE}")
        ratio = 1 if member.compress_type == zipfile.ZIP_STORED else GZIP_RATIO
        if member.file_size > ratio * min(member.compress_size, path.stat().st_size) + ratio:
            raise FormatError(f"{where}: claims {member.file_size} bytes, more than its place can hold. {RESAVE}")
        with archive.open(member) as stream:
            header = header_of(stream)
        if not header.dtype.hasobject:
            require_honest(where, header, member.file_size)
        yield member.filename.removesuffix(".npy"), header


def require_honest(where: str, header: Header, held: int) -> None:
    """Refuse an array that is not as long as it says."""
    if not header.dtype.hasobject and header.n_bytes != held:
        raise FormatError(
            f"{where}: its header claims {header.n_bytes} bytes (shape {header.shape}, {header.dtype}), "
            f"but it holds {held}. It is cut short or damaged. {RESAVE}"
        )


def require_numbers(where: str, dtype: np.dtype[Any]) -> None:
    """Refuse objects and text where numbers belong."""
    if dtype.hasobject:
        raise FormatError(f"{where}: holds Python objects, which are never loaded: they can run code. {RESAVE}")
    if dtype.kind not in "biufc":
        raise FormatError(f"{where}: holds {dtype}, not numbers. {RESAVE}")


def names_in(
    path: Path, headers: Mapping[str, Header], arrays: Any, keys: tuple[str, ...], length: int
) -> tuple[str, ...] | None:
    """The first array of one of these keys that has this length, as text; None if there is none."""
    for key in keys:
        if key in headers and headers[key].shape == (length,):
            if headers[key].dtype.kind not in "USiu":
                raise FormatError(f"{path}, array {key!r}: names are {headers[key].dtype}, not text. {RESAVE}")
            return tuple(
                name.decode("utf-8") if isinstance(name, bytes) else str(name) for name in arrays[key].tolist()
            )
    return None
