"""Dense rows piece by piece: tiles of whole rows, and blocks of rows that are too wide for that.

Arrays may be mapped from files larger than memory: pages that have been read are given back.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

TILE_BYTES = 2 << 20
MAPPED_TILE_BYTES = 4 << 20
LOW = 64
"""Fewer rows than these make a tile too low for its products to run at speed."""
BLOCK_HEIGHT = 256
MOST_SUMMED = 1024
"""Rows whose products are at most summed in the type of the data."""


def even_ranges(start: int, stop: int, longest: int) -> list[tuple[int, int]]:
    """start…stop in as few ranges as can be, none longer than `longest`, all of about the same length."""
    count = -(-(stop - start) // longest)
    cuts = [start + (stop - start) * i // max(1, count) for i in range(count + 1)]
    return list(pairwise(cuts))


@dataclass(frozen=True, slots=True)
class Tiles:
    """An array in pieces that fit the cache, in a number type of choice.

    Pages of a mapped file are given back once a piece is done.
    """

    X: np.ndarray
    dtype: np.dtype

    @property
    def are_low(self) -> bool:
        """Whether only few rows fit a tile; what is in memory already may exceed it somewhat."""
        return LOW * self._row_bytes > self._bytes * (1 if self._is_mapped else 4)

    @property
    def block_width(self) -> int:
        """Columns of a block of the usual height."""
        return max(1, self._bytes // self.dtype.itemsize // BLOCK_HEIGHT)

    @property
    def narrow_width(self) -> int:
        """Columns of a block as high as can be: pages of a file are not read for a few numbers each."""
        return self.block_width if self._is_mapped else max(1, self.block_width * BLOCK_HEIGHT // MOST_SUMMED)

    def of_rows(self, start: int, stop: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Tiles of whole rows: a start, a stop, and the rows between them."""
        mapped = mapping(self.X)
        height = max(1 if self.are_low else LOW, self._bytes // self._row_bytes)
        is_by_row = self.X.flags.c_contiguous
        for a, b in even_ranges(start, stop, height):
            yield a, b, np.asarray(self.X[a:b], self.dtype)
            if mapped is not None:
                give_back(mapped, self.X, *((a, b) if is_by_row else (0, self.X.shape[1])))

    def blocks(
        self, rows: tuple[int, int], columns: tuple[int, int]
    ) -> Iterator[tuple[int, int, int, int, np.ndarray]]:
        """Rows a…b of columns c…d; all the columns where enough rows of them fit a block."""
        mapped = mapping(self.X)
        width = max(1, min(columns[1] - columns[0], self.block_width))
        height = min(MOST_SUMMED, max(1, self._bytes // self.dtype.itemsize // width))
        for a in range(*rows, height):
            b = min(a + height, rows[1])
            for c in range(*columns, width):
                d = min(c + width, columns[1])
                yield a, b, c, d, np.asarray(self.X[a:b, c:d], self.dtype)
                if mapped is not None:
                    give_back_block(mapped, self.X, (a, b), (c, d))

    @property
    def _is_mapped(self) -> bool:
        return mapping(self.X) is not None

    @property
    def _bytes(self) -> int:
        return MAPPED_TILE_BYTES if self._is_mapped else TILE_BYTES

    @property
    def _row_bytes(self) -> int:
        return max(1, self.X.shape[1] * self.dtype.itemsize)


def mapping(X: np.ndarray) -> mmap.mmap | None:
    """The file mapping behind an np.memmap in one piece, if its pages are those of the file.

    A copy-on-write map (mode "c") holds changes that exist nowhere else: its pages must stay.
    """
    found = getattr(X, "_mmap", None) if getattr(X, "mode", None) in ("r", "r+") else None
    return found if found is not None and (X.flags.c_contiguous or X.flags.f_contiguous) else None


def give_back(mapped: mmap.mmap, X: np.ndarray, start: int, stop: int) -> None:
    """Tell the system that rows (of C order) or columns (of F order) start…stop are not needed again soon.

    The file still holds them; the process' memory does not grow with what it has seen.
    """
    stride = max(X.strides)
    _release(mapped, X, [(start * stride, stop * stride)])


def give_back_block(mapped: mmap.mmap, X: np.ndarray, rows: tuple[int, int], columns: tuple[int, int]) -> None:
    """The same for a block: piece by piece of its rows (of C order), or whole columns (of F order)."""
    if not X.flags.c_contiguous:
        give_back(mapped, X, *columns)
    elif columns == (0, X.shape[1]):
        give_back(mapped, X, *rows)
    else:
        first, last = (column * X.itemsize for column in columns)
        starts = range(rows[0] * X.strides[0], rows[1] * X.strides[0], X.strides[0])
        _release(mapped, X, [(start + first, start + last) for start in starts])


def _release(mapped: mmap.mmap, X: np.ndarray, spans: list[tuple[int, int]]) -> None:
    """Whole pages within spans of bytes of X; a page that a span begins in goes with it."""
    if not hasattr(mapped, "madvise"):
        return
    offset = X.__array_interface__["data"][0] - np.frombuffer(mapped, np.uint8, 1).__array_interface__["data"][0]
    for start, stop in spans:
        first = (offset + start) // mmap.PAGESIZE * mmap.PAGESIZE
        length = (offset + stop - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0:
            mapped.madvise(mmap.MADV_DONTNEED, first, length)
