"""SIGTERM, which batch systems and containers send before they kill: treated as Ctrl-C, so that a fit is saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

INTERRUPTED = 130
TERMINATED = 143


@dataclass(slots=True)
class _Received:
    sigterm: bool = False


_received = _Received()


def exit_code() -> int:
    """128 + the number of the signal that ended this command: 143 after SIGTERM, 130 after Ctrl-C."""
    return TERMINATED if _received.sigterm else INTERRUPTED


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Within this block SIGTERM goes the way of SIGINT; a handler of somebody else's is left alone.

    Where SIGINT is ignored, as in the background job of a script, SIGTERM still ends the command.
    """
    _received.sigterm = False

    def pass_on(*_: object) -> None:
        _received.sigterm = True
        if not callable(signal.getsignal(signal.SIGINT)):
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
