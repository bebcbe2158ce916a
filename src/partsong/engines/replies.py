"""Requests to parties and their replies: pushed without waiting, heard as they come; who needs all of them asks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Lost:
    """Why there is no reply of a party that can be used."""

    why: str


Heard = tuple[str, bytes | Lost]
"""Who was heard, and with what."""


class Replies(Protocol):
    """One request is out at each party, at most; a new one takes the place of the one before."""

    def push(self, requests: Mapping[str, bytes], timeout: float) -> None:
        """Send requests, which are of no use after so many seconds."""

    def arrived(self, timeout: float) -> Heard | None:
        """The next reply to a request that is out, or why there will be none; None where nothing came in time."""

    def recall(self) -> Mapping[str, Lost]:
        """Take back all that was not answered, and say why it was not."""


def all_replies(to: Replies, requests: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Lost]:
    """Push all requests, then wait for the replies; what was not answered in time is taken back."""
    to.recall()
    to.push(requests, timeout)
    found: dict[str, bytes | Lost] = {}
    until = time.monotonic() + timeout
    while len(found) < len(requests):
        heard = to.arrived(max(0.0, until - time.monotonic()))
        if heard is None:
            break
        found[heard[0]] = heard[1]
    return {**to.recall(), **found}
