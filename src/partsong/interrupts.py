"""Ctrl-C that loses nothing: the first is a wish, the second an order."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

ENDING = "Interrupted: waiting for the iteration or the last solve that is running. Press Ctrl-C again to stop at once."


@dataclass(slots=True)
class Interrupts:
    """How often Ctrl-C was pressed while it was held back."""

    count: int = 0


@contextmanager
def held(note: str = ENDING) -> Iterator[Interrupts]:
    """Within this block the first Ctrl-C is only counted (and `note` is shown); every further one breaks off.

    Nothing is held where signals do not arrive (threads other than the main one), are ignored, or have a handler of
    somebody else's; an outer block of this kind goes on counting.
    """
    pressed = Interrupts()

    def hold(number: int, frame: object) -> None:
        pressed.count += 1
        if pressed.count > 1:
            raise KeyboardInterrupt
        if note and sys.stderr is not None:
            sys.stderr.write(f"{note}\n")

    is_ours_to_take = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not is_ours_to_take:
        yield pressed
        return
    before = signal.signal(signal.SIGINT, hold)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
