"""Ctrl-C that loses nothing: the first is a wish, the second an order."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

ENDING = "Interrupted: waiting for the iteration or the last solve that is running. Press Ctrl-C again to stop at once."


@dataclass(slots=True)
class Interrupts:
    """How often Ctrl-C was pressed while it was held back."""

    count: int = 0


_holding: list[Callable[[int, object], None]] = []


def press() -> bool:
    """Where SIGINT is ignored: an interrupt by other means, for the block that holds them; False if there is none."""
    if not _holding:
        return False
    _holding[0](signal.SIGINT, None)
    return True


@contextmanager
def held(note: str = ENDING) -> Iterator[Interrupts]:
    """Within this block the first Ctrl-C is only counted (and `note` is shown); every further one breaks off.

    Nothing is held where signals do not arrive (threads other than the main one) or have a handler of somebody else's;
    an outer block of this kind goes on counting. Where they are ignored, `press` takes their place.
    """
    pressed = Interrupts()

    def hold(number: int, frame: object) -> None:
        pressed.count += 1
        if pressed.count > 1:
            raise KeyboardInterrupt
        if note and sys.stderr is not None:
            sys.stderr.write(f"{note}\n")

    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.SIG_IGN and not _holding:
        _holding.append(hold)
        try:
            yield pressed
        finally:
            _holding.clear()
        return
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield pressed
        return
    before = signal.signal(signal.SIGINT, hold)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
