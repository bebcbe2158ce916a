"""Sources of randomness for noise: the operating system, or a seed (for tests and experiments only)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from partsong.core.streams import Name, stream
from partsong.errors import PartsongError

Source = Callable[[int], bytes]
"""A function that returns the given number of uniform bytes; no byte is returned twice."""


def system_source(count: int) -> bytes:
    """Bytes of the operating system's cryptographic generator."""
    return os.urandom(count)


class InsecureSource:
    """Reproducible bytes from a seed. Noise drawn from them protects nothing: anyone with the seed can remove it.

    For tests and reproducible experiments. Two sources with the same seed and names return the same bytes, so each
    message needs its own names (party, round): noise that is used twice gives no protection.
    """

    def __init__(self, seed: int, *names: Name) -> None:
        self._generator = stream(seed, "insecure noise", *names)

    def __call__(self, count: int) -> bytes:
        """The next bytes of the stream."""
        return self._generator.bytes(count)


def words(count: int, source: Source) -> Any:
    """`count` independent uniform 64-bit words."""
    if count == 0:
        return np.empty(0, np.uint64)
    drawn = source(8 * count)
    if len(drawn) != 8 * count:
        raise PartsongError(
            f"The source of randomness returned {len(drawn)} bytes instead of {8 * count}; nothing was sent. "
            "Use `system_source`."
        )
    return np.frombuffer(drawn, "<u8").astype(np.uint64, copy=False)
