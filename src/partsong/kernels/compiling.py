"""Compile functions with numba: without the GIL, cached on disk if possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

FAST = {"contract", "reassoc", "nsz", "arcp"}
"""Allowed fast-math optimizations of sums and quotients; NaN and infinity keep their meaning."""


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return numba.njit(nogil=True, **options) with machine code cached between processes if possible.

    numba tries NUMBA_CACHE_DIR, the __pycache__ of the package and the user's cache folder. It raises RuntimeError at
    decoration if none is writable (a read-only installation without a home folder). Functions are then compiled in
    each process: results are the same, only the first call takes seconds longer.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:
            return njit(nogil=True, **options)(function)

    return decorate
