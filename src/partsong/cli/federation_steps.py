"""What `partsong federation run` tells of an agreement on words while it waits for the first exchange of its run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partsong.consortium.server_folder import RunPlace

EVERY = 1.0
"""Seconds between two looks."""

Tell = Callable[[Mapping[str, Any]], None]


@contextmanager
def telling_steps(place: RunPlace, tell: Tell) -> Iterator[Tell]:
    """Each step that is done while the block lasts is told once, whichever process works on the run; by what it gives,
    an exchange is told after the steps before it.
    """
    from partsong.federation.word_progress import FILE
    from partsong.flower_app.following import Lines

    lines, over, turn = Lines.to_come(place.state / "words" / FILE), threading.Event(), threading.Lock()

    def tell_in_order(*exchange: Mapping[str, Any]) -> None:
        with turn:
            for line in (*lines.new(), *exchange):
                tell(line)

    def follow() -> None:
        while not over.wait(EVERY):
            tell_in_order()

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield tell_in_order
    finally:
        over.set()
        follower.join()
        tell_in_order()
