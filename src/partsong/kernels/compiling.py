"""How this package compiles: numba without the GIL, kept on disk where there is a disk to keep it on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

FAST = {"contract", "reassoc", "nsz", "arcp"}
"""What compilers may do to sums and quotients: NaN and infinity keep their meaning."""


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """numba.njit(nogil=True, **options), with machine code cached between processes where a cache can be had.

    numba looks for NUMBA_CACHE_DIR, the package's own __pycache__ and the user's cache folder, and raises RuntimeError
    while decorating when it may write to none of them (a read-only installation and no home). Functions are then
    compiled anew in each process, silently: the results are the same, only the first call takes seconds longer.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:
            return njit(nogil=True, **options)(function)

    return decorate
