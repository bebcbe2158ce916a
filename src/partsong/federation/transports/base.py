"""Transport protocol: send bytes to sites by name and collect replies. Transports know nothing of content or policy."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from partsong.errors import ParameterError

MAX_MESSAGE_BYTES = 1 << 31
"""A longer message is refused unread."""

PARTY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def require_name(name: str, whose: str) -> str:
    """Return a name that is a valid folder name on every system; else raise ParameterError."""
    if not PARTY_NAME.fullmatch(name):
        raise ParameterError(
            f"{whose} cannot be called {name[:60]!r}. Use at most 100 letters, digits, dots and dashes, starting with "
            "a letter or digit."
        )
    return name


# ---- replies ----------------------------------------------------------------------------------------------------
#
# Requests are pushed without waiting, and replies are taken as they arrive. `ask_all` waits for all of them.


@dataclass(frozen=True, slots=True)
class NoReply:
    """Why there is no usable reply of a party."""

    reason: str


SiteReply = tuple[str, bytes | NoReply]
"""A party, and its reply or the reason why there is none."""


class ReplyQueue(Protocol):
    """At most one pending request per party. A new request replaces the one before."""

    def push(self, requests: Mapping[str, bytes], timeout: float) -> None:
        """Send requests, which expire after `timeout` seconds."""

    def next_reply(self, timeout: float) -> SiteReply | None:
        """Return the next reply to a pending request, or why there will be none; None if nothing arrived in time."""

    def cancel(self) -> Mapping[str, NoReply]:
        """Withdraw all pending requests, and return why each has no reply."""


def ask_all(to: ReplyQueue, requests: Mapping[str, bytes], timeout: float) -> dict[str, bytes | NoReply]:
    """Push all requests, wait for the replies, and withdraw the requests that were not answered in time."""
    to.cancel()
    to.push(requests, timeout)
    found: dict[str, bytes | NoReply] = {}
    until = time.monotonic() + timeout
    while len(found) < len(requests):
        arrival = to.next_reply(max(0.0, until - time.monotonic()))
        if arrival is None:
            break
        found[arrival[0]] = arrival[1]
    return {**to.cancel(), **found}


# ---- transport --------------------------------------------------------------------------------------------------

ReplyOrder = Callable[[Sequence[str]], str | None]
"""Choose which pending party replies next; the longest pending come first. None: nobody replies in time."""


class Transport(ReplyQueue, Protocol):
    """Sends requests to sites concurrently. The same request may be sent twice.

    Callers use either `ask`, which waits for all replies, or `push`, `next_reply` and `cancel`; not both at a time.
    """

    def names(self) -> tuple[str, ...]:
        """Return the names of all sites."""

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> Mapping[str, bytes | NoReply]:
        """Return the replies that arrive within `timeout` seconds. A site that is missing from the result is lost."""


def first_in_first_out(waiting: Sequence[str]) -> str | None:
    """Reply in the order of the requests."""
    return next(iter(waiting), None)


@dataclass(frozen=True, slots=True)
class InProcess:
    """Sites in this process, reached through the same bytes. A site whose answer raises is lost.

    A site works on a pushed request when `turn` chooses it, so that every order of replies can be produced.
    """

    sites: Mapping[str, Callable[[bytes], bytes]]
    turn: ReplyOrder = first_in_first_out
    pending: dict[str, bytes] = field(default_factory=dict, repr=False, compare=False)

    def names(self) -> tuple[str, ...]:
        """Return the names of the sites."""
        return tuple(sorted(self.sites))

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> Mapping[str, bytes | NoReply]:
        """Ask the sites one after another."""
        return {name: self._ask(name, request) for name, request in requests.items()}

    def push(self, requests: Mapping[str, bytes], timeout: float) -> None:
        """Queue requests. The sites work later, in `next_reply`."""
        for name, request in requests.items():
            self.pending.pop(name, None)
            self.pending[name] = request

    def next_reply(self, timeout: float) -> SiteReply | None:
        """Let the site that `turn` chooses work, and return its reply."""
        name = self.turn(tuple(self.pending))
        return None if name is None else (name, self._ask(name, self.pending.pop(name)))

    def cancel(self) -> dict[str, NoReply]:
        """Drop the queued requests; their sites have not started work."""
        left = dict.fromkeys(self.pending, NoReply("its turn did not come"))
        self.pending.clear()
        return left

    def _ask(self, name: str, request: bytes) -> bytes | NoReply:
        try:
            return self.sites[name](request)
        except Exception as error:
            return NoReply(type(error).__name__)
