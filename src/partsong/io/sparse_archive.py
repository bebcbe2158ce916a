"""Compressed sparse matrices in .npz files, read a piece at a time: only the entries that are asked for are kept.

SciPy writes three one-dimensional arrays, each a member of the archive. One that is merely stored is read from where it
lies; one that is packed is unpacked in pieces, and what nobody wants is let go.
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
"""Entries, or bytes of a packed member, that are held beside the result."""

_LOCAL_HEADER = struct.Struct("<4s22xHH")


@dataclass(frozen=True, slots=True)
class ArchivedArray:
    """A one-dimensional array in an archive."""

    path: Path
    name: str
    header: Header

    def __len__(self) -> int:
        return self.header.shape[0]

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Entries start … stop − 1, in the byte order of this machine."""
        with self._values() as stream:
            _skip(stream, start * self.header.dtype.itemsize)
            return self._next(stream, stop - start)

    def pieces(self, start: int, stop: int) -> Iterator[npt.NDArray[Any]]:
        """The same in pieces of bounded size."""
        with self._values() as stream:
            _skip(stream, start * self.header.dtype.itemsize)
            for at in range(start, stop, PIECE):
                yield self._next(stream, min(PIECE, stop - at))

    @contextmanager
    def _values(self) -> Iterator[IO[bytes]]:
        """Bytes behind the array's header: of the file itself where the member is stored as it is."""
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
                raise FormatError(f"{self.path}, array {self.name!r}: ends too early. Copy or export the file again.")
            filled += got
        return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))


def _start_of(path: Path, stream: IO[bytes], member: zipfile.ZipInfo) -> int:
    """Where the bytes of a stored member begin; its own header may be longer than the list of contents says."""
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
    """A sparse matrix by its longer or shorter side (`major`: rows in CSR, columns in CSC), as the file holds it."""

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
            raise FormatError(f"{self.path}: indptr, indices and data do not belong together. Export the matrix again.")

    def block(self, major: Span, minor: Span) -> Any:
        """The block as CSR of `major` by `minor`, with both counted from 0."""
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
        """Of the entries in a span those between two minor indices, and where each major one begins among them."""
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
            raise FormatError(f"{self.path}: indices lie outside of the matrix. Export the matrix again.")


def _joined(pieces: list[npt.NDArray[Any]], strip: ArchivedArray) -> npt.NDArray[Any]:
    """One array; pieces are let go as they are copied."""
    whole = np.empty(sum(map(len, pieces)), strip.header.dtype.newbyteorder("="))
    at = len(whole)
    while pieces:
        piece = pieces.pop()
        whole[at - len(piece) : at] = piece
        at -= len(piece)
    return whole
