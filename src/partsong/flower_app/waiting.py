"""For whom a run waits: a line when the first requests are out, later after some seconds, and then ever more seldom.

    waiting.jsonl    {"waiting": names, "answered": how many of those who were asked together, "of": how many they are}

Where nobody waits for others, there is no number of answers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partsong.engines.replies import Heard, Lost, all_replies
from partsong.federation.transport import Transport
from partsong.flower_app.progress_file import whole_lines

FILE = "waiting.jsonl"
FIRST, SELDOM = 5.0, 120.0
"""Seconds before the first line, and the longest between two; each pause is twice the one before."""

Tell = Callable[[Mapping[str, Any]], None]


@dataclass(slots=True)
class WaitingLines:
    """That file."""

    path: Path

    def note(self, told: Mapping[str, Any]) -> None:
        """One more line, in the place of a part of one that a process has left which was killed."""
        content = self.path.read_bytes() if self.path.exists() else b""
        with self.path.open("r+b" if content else "wb") as file:
            file.seek(whole_lines(content))
            file.truncate()
            file.write(json.dumps(told).encode() + b"\n")


@dataclass(slots=True)
class Telling:
    """A transport that tells for whom it waits. `before`: called before anything is sent; `pause`: until the next line
    but one, 0 before the first request.
    """

    transport: Transport
    tell: Tell
    before: Callable[[], None] = lambda: None
    first: float = FIRST
    out: set[str] = field(default_factory=set)
    together: int = 0
    due: float = 0.0
    pause: float = 0.0

    def names(self) -> tuple[str, ...]:
        """Those of the transport."""
        return self.transport.names()

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> Mapping[str, bytes | Lost]:
        """As the transport does."""
        self.together = len(requests)
        try:
            return all_replies(self, requests, timeout)
        finally:
            self.together = 0

    def push(self, requests: Mapping[str, bytes], timeout: float) -> None:
        """Hand requests over."""
        self.before()
        self.transport.push(requests, timeout)
        if requests:
            self.out |= requests.keys()
            is_first = self.pause == 0
            self.due = time.monotonic() + (0.0 if is_first else self.first)
            self.pause = self.first if is_first else 2 * self.first

    def arrived(self, timeout: float) -> Heard | None:
        """The next reply; whom it waits for is told meanwhile."""
        until = time.monotonic() + timeout
        while True:
            end = min(until, self.due) if self.out else until
            heard = self.transport.arrived(max(0.0, end - time.monotonic()))
            if heard is not None:
                self.out.discard(heard[0])
                return heard
            now = time.monotonic()
            if now >= until or now < end:
                return None
            self.due, self.pause = now + self.pause, min(2 * self.pause, SELDOM)
            answered = {"answered": self.together - len(self.out), "of": self.together} if self.together else {}
            self.tell({"waiting": sorted(self.out), **answered})

    def recall(self) -> Mapping[str, Lost]:
        """As the transport does."""
        self.out.clear()
        return self.transport.recall()
