"""Read blocks of compressed sparse matrices in .npz files; only the requested entries are kept.

SciPy writes three one-dimensional arrays, each as a member of the archive. An uncompressed member is read in place; a
compressed one is unpacked in pieces, and unneeded entries are discarded.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from partsong.errors import FormatError
from partsong.io.arrays import Header

Span = tuple[int, int]

PIECE = 1 << 18
"""Entries, or bytes of a compressed member, in memory at a time."""

_LOCAL_HEADER = struct.Struct("<4s22xHH")


@dataclass(frozen=True, slots=True)
class ArchivedArray:
    """A one-dimensional array in an .npz archive."""

    path: Path
    name: str
    header: Header

    def __len__(self) -> int:
        return self.header.shape[0]

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Read entries start … stop − 1, in native byte order."""
        with self._values() as stream:
            _skip(stream, start * self.header.dtype.itemsize)
            return self._next(stream, stop - start)

    def pieces(self, start: int, stop: int) -> Iterator[npt.NDArray[Any]]:
        """Yield the same in pieces of bounded size."""
        with self._values() as stream:
            _skip(stream, start * self.header.dtype.itemsize)
            for at in range(start, stop, PIECE):
                yield self._next(stream, min(PIECE, stop - at))

    @contextmanager
    def _values(self) -> Iterator[IO[bytes]]:
        """The bytes after the array's header: from the file itself if the member is uncompressed."""
        with zipfile.ZipFile(self.path) as archive:
            member = archive.getinfo(f"{self.name}.npy")
            if member.compress_type == zipfile.ZIP_STORED:
                with self.path.open("rb") as stream:
                    stream.seek(_start_of(self.path, stream, member) + self.header.offset)
                    yield stream
            else:
                with archive.open(member) as packed:
                    packed.read(self.header.offset)
                    yield packed

    def _next(self, stream: IO[bytes], count: int) -> npt.NDArray[Any]:
        values = np.empty(count, self.header.dtype)
        view, filled = values.view(np.uint8).data, 0
        while filled < len(view):
            got = stream.readinto(view[filled : filled + 8 * PIECE])  # type: ignore[attr-defined]
            if not got:
                raise FormatError(f"{self.path}, array {self.name!r}: is truncated. Copy or export the file again.")
            filled += got
        return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))


def _start_of(path: Path, stream: IO[bytes], member: zipfile.ZipInfo) -> int:
    """Offset of an uncompressed member; its local header may be longer than the archive directory says."""
    stream.seek(member.header_offset)
    mark, name, extra = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
    start = member.header_offset + _LOCAL_HEADER.size + name + extra
    if mark != b"PK\x03\x04" or start + member.file_size > path.stat().st_size:
        raise FormatError(f"{path}: the array {member.filename!r} is not where the archive says. Export it again.")
    return int(start)


def _skip(stream: IO[bytes], n_bytes: int) -> None:
    if isinstance(stream, zipfile.ZipExtFile):
        for start in range(0, n_bytes, PIECE):
            stream.read(min(PIECE, n_bytes - start))
    else:
        stream.seek(n_bytes, 1)


@dataclass(frozen=True, slots=True)
class ArchivedMatrix:
    """A CSR or CSC matrix in an archive; `major` is the compressed side: rows in CSR, columns in CSC."""

    path: Path
    n_major: int
    n_minor: int
    indptr: ArchivedArray
    indices: ArchivedArray
    data: ArchivedArray

    def __post_init__(self) -> None:
        whole = (strip.header.dtype.kind in "iu" for strip in (self.indptr, self.indices))
        lengths = (len(self.indptr), len(self.indices)) == (self.n_major + 1, len(self.data))
        if not lengths or not all(whole):
            raise FormatError(f"{self.path}: indptr, indices and data do not match. Export the matrix again.")

    def block(self, major: Span, minor: Span) -> Any:
        """Read a block as CSR of `major` by `minor`, with both counted from 0."""
        from scipy import sparse

        starts = self.indptr.read(major[0], major[1] + 1).astype(np.int64, copy=False)
        is_whole = starts[0] >= 0 and starts[-1] <= len(self.data) and int(self.indptr.read(0, 1)[0]) == 0
        if not is_whole or (np.diff(starts) < 0).any():
            raise FormatError(
                f"{self.path}: indptr does not ascend from 0 to the number of entries. Export the matrix again."
            )
        span = int(starts[0]), int(starts[-1])
        if minor == (0, self.n_minor):
            indices, data, ends = self.indices.read(*span), self.data.read(*span), starts - starts[0]
            self._require_in_range(indices)
        else:
            indices, data, ends = self._kept(span, starts, minor)
        small = np.int32 if max(self.n_minor, len(data)) < 2**31 else np.int64
        shape = (major[1] - major[0], minor[1] - minor[0])
        return sparse.csr_array((data, indices.astype(small, copy=False), ends.astype(small)), shape)

    def _kept(
        self, span: Span, starts: npt.NDArray[np.int64], minor: Span
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Entries of a span between two minor indices, and the start of each major index among them."""
        places, values = [], []
        ends, at = np.zeros(len(starts), np.int64), span[0]
        for indices, data in zip(self.indices.pieces(*span), self.data.pieces(*span), strict=True):
            self._require_in_range(indices)
            kept = np.flatnonzero((indices >= minor[0]) & (indices < minor[1]))
            if kept.size:
                majors = np.searchsorted(starts, kept + at, side="right")
                counts = np.bincount(majors - majors[0])
                ends[majors[0] : majors[0] + len(counts)] += counts
            places.append(indices[kept] - indices.dtype.type(minor[0]))
            values.append(data[kept])
            at += len(indices)
        return _joined(places, self.indices), _joined(values, self.data), np.cumsum(ends)

    def _require_in_range(self, indices: npt.NDArray[Any]) -> None:
        """Indices out of range would crash compiled code."""
        if indices.size and (indices.min() < 0 or indices.max() >= self.n_minor):
            raise FormatError(f"{self.path}: indices are outside the matrix. Export the matrix again.")


def _joined(pieces: list[npt.NDArray[Any]], strip: ArchivedArray) -> npt.NDArray[Any]:
    """Concatenate pieces; each is released once it is copied."""
    whole = np.empty(sum(map(len, pieces)), strip.header.dtype.newbyteorder("="))
    at = len(whole)
    while pieces:
        piece = pieces.pop()
        whole[at - len(piece) : at] = piece
        at -= len(piece)
    return whole
