"""Where noise comes from: the operating system, or, for tests and experiments alone, a seed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from partsong.core.streams import Name, stream
from partsong.errors import PartsongError

Source = Callable[[int], bytes]
"""A number of bytes in, as many uniform bytes out; no byte is handed out twice."""


def system_source(count: int) -> bytes:
    """Bytes of the operating system's cryptographic generator."""
    return os.urandom(count)


class InsecureSource:
    """Bytes that whoever knows the seed knows too: noise drawn from them protects nothing.

    For tests and for experiments that must come out the same twice. Two sources of the same seed and names hand out the
    same bytes, so that each message needs names of its own (party, round): noise used twice is no noise.
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
            f"A source of randomness was asked for {8 * count} bytes and gave {len(drawn)}; nothing was sent. "
            "Use `system_source`."
        )
    return np.frombuffer(drawn, "<u8").astype(np.uint64, copy=False)
