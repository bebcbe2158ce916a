"""Calls for replies that hold up nobody.

A site that is killed while it sends a reply leaves one that is not whole, and Flower's call for it, with all replies
that it was made for, waits for the rest: for three minutes, in 1.41. So each call has a thread of its own, and one that
takes long is left behind; what was asked for with it is asked for anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Pull:
    """One call, until when it may last, and what came of it."""

    ids: frozenset[str]
    until: float
    is_over: threading.Event = field(default_factory=threading.Event)
    replies: list[Any] = field(default_factory=list)
    error: Exception | None = None

    def make(self, grid: Any) -> None:
        """The call itself."""
        try:
            self.replies = list(grid.pull_messages(sorted(self.ids)))
        except Exception as error:
            self.error = error
        finally:
            self.is_over.set()


@dataclass(slots=True)
class Pulls:
    """Calls that are not over; one that has lasted `patience` seconds, and what `slowest` bytes a second need, is left
    behind.
    """

    patience: float = 5.0
    slowest: float = 1e6
    out: list[Pull] = field(default_factory=list)

    def left_behind(self) -> frozenset[str]:
        """The messages of calls that take too long."""
        return frozenset(given for pull in self.out if self._is_late(pull) for given in pull.ids)

    def replies(self, grid: Any, sizes: Mapping[str, int], timeout: float) -> list[Any]:
        """What has come, of these messages, whose replies have about so many bytes, and of calls from before; an error
        of a call is raised.
        """
        known = {given for pull in self.out for given in pull.ids}
        current = next((pull for pull in self.out if not self._is_late(pull)), None)
        if current is None and (free := sizes.keys() - known):
            lasting = self.patience + sum(sizes[given] for given in free) / self.slowest
            current = Pull(frozenset(free), time.monotonic() + lasting)
            self.out.append(current)
            threading.Thread(target=current.make, args=(grid,), daemon=True).start()
        if current is not None:
            current.is_over.wait(min(timeout, max(0.0, current.until - time.monotonic())))
        over = [pull for pull in self.out if pull.is_over.is_set()]
        self.out = [pull for pull in self.out if pull not in over]
        found = [reply for pull in over for reply in pull.replies]
        errors = [pull.error for pull in over if pull.error is not None]
        if errors and not found:
            raise errors[0]
        return found

    def _is_late(self, pull: Pull) -> bool:
        return time.monotonic() >= pull.until
