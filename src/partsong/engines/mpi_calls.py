"""What every call of MPI needs: buffers short enough for it, and patience until it is done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from partsong.engines.communicator import Buffer

TAG = 20017
"""Of our messages between two ranks; use a duplicate of the communicator to receive messages with any tag yourself."""

PIECE = 1 << 30
"""Bytes or numbers in one call: counts in MPI are 32-bit integers."""

EAGER, PAUSE = 3e-4, 3e-5
"""Seconds for which a rank looks for the others without a pause, and between two looks after that."""


_unfinished: list[Any] = []
"""Requests that nobody waits for any longer; MPI may still write to their buffers."""


def have_arrived(*requests: Any, patience: float | None = None) -> bool:
    """Wait for requests: at once for those who are about to come, without using up the core for those who are not.

    False if they are not there after `patience` seconds. What was asked for goes on without us, then and after Ctrl-C.
    """
    began = time.monotonic()
    try:
        for request in requests:
            while not request.Test():
                waited = time.monotonic() - began
                if patience is not None and waited > patience:
                    _unfinished.extend(requests)
                    return False
                if waited > EAGER:
                    time.sleep(PAUSE)
    except BaseException:
        _unfinished.extend(requests)
        raise
    return True


def in_pieces(buffer: Buffer) -> Iterator[Any]:
    """Views of a one-dimensional buffer, short enough for one call."""
    flat = np.frombuffer(buffer, np.uint8) if isinstance(buffer, bytes) else buffer
    for start in range(0, len(flat), PIECE):
        yield flat[start : start + PIECE]
