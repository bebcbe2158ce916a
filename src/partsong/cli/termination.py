"""Signals: SIGTERM, which batch systems send before they kill, goes the way of Ctrl-C; both have their exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from partsong.interrupts import press

INTERRUPTED = 130
TERMINATED = 143


@dataclass(slots=True)
class _Received:
    sigterm: bool = False


_received = _Received()


def exit_code() -> int:
    """128 + the number of the signal that ended this command: 143 after SIGTERM, 130 after Ctrl-C."""
    return TERMINATED if _received.sigterm else INTERRUPTED


def adopt(code: int) -> None:
    """Take over the exit code of another rank of the same run, which a signal has ended."""
    _received.sigterm = code == TERMINATED


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Within this block SIGTERM goes the way of SIGINT; a handler of somebody else's is left alone.

    Where SIGINT is ignored, as in the background job of a script, SIGTERM still ends the command.
    """
    _received.sigterm = False

    def pass_on(*_: object) -> None:
        _received.sigterm = True
        if callable(signal.getsignal(signal.SIGINT)):
            signal.raise_signal(signal.SIGINT)
        elif not press():
            raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def leave(code: object) -> NoReturn:
    """End the process with this exit code, which no further signal can change: nothing is left to interrupt.

    After an interrupt the threads that still compute are not waited for.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if code in (INTERRUPTED, TERMINATED):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(exit_code())
    sys.exit(code)  # type: ignore[arg-type]
