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
    if not hasattr(mapped, "madvise"):
        return
    stride = max(X.strides)
    offset = X.__array_interface__["data"][0] - np.frombuffer(mapped, np.uint8, 1).__array_interface__["data"][0]
    first = (offset + start * stride) // mmap.PAGESIZE * mmap.PAGESIZE
    length = (offset + stop * stride - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        mapped.madvise(mmap.MADV_DONTNEED, first, length)
