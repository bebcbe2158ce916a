"""Arrays mapped from files: pages that have been read can be given back."""

from __future__ import annotations

import mmap

import numpy as np


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
