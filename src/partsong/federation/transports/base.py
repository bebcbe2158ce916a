"""How requests reach sites: bytes to names and back. A transport knows neither what is in them nor who may say what."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from partsong.errors import ParameterError

MAX_MESSAGE_BYTES = 1 << 31
"""A longer message is refused before it is looked at."""

PARTY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def require_name(name: str, whose: str) -> str:
    """Return a name that can be that of a folder everywhere; ParameterError where it cannot."""
    if not PARTY_NAME.fullmatch(name):
        raise ParameterError(
            f"{whose} cannot be called {name[:60]!r}. Use letters, digits, dots and dashes, at most 100, and begin "
            "with a letter or digit."
        )
    return name


# ---- replies ----------------------------------------------------------------------------------------------------
#
# Requests to parties and their replies: pushed without waiting, heard as they come; who needs all of them asks.


@dataclass(frozen=True, slots=True)
class NoReply:
    """Why there is no reply of a party that can be used."""

    reason: str


SiteReply = tuple[str, bytes | NoReply]
"""Who was heard, and with what."""


class ReplyQueue(Protocol):
    """One request is out at each party, at most; a new one takes the place of the one before."""

    def push(self, requests: Mapping[str, bytes], timeout: float) -> None:
        """Send requests, which are of no use after so many seconds."""

    def next_reply(self, timeout: float) -> SiteReply | None:
        """The next reply to a request that is out, or why there will be none; None where nothing came in time."""

    def cancel(self) -> Mapping[str, NoReply]:
        """Take back all that was not answered, and say why it was not."""


def ask_all(to: ReplyQueue, requests: Mapping[str, bytes], timeout: float) -> dict[str, bytes | NoReply]:
    """Push all requests, then wait for the replies; what was not answered in time is taken back."""
    to.cancel()
    to.push(requests, timeout)
    found: dict[str, bytes | NoReply] = {}
    until = time.monotonic() + timeout
    while len(found) < len(requests):
        heard = to.next_reply(max(0.0, until - time.monotonic()))
        if heard is None:
            break
        found[heard[0]] = heard[1]
    return {**to.cancel(), **found}


# ---- transport --------------------------------------------------------------------------------------------------

ReplyOrder = Callable[[Sequence[str]], str | None]
"""Who of those that are asked is heard next; those who wait longest come first. None: nobody in time."""


class Transport(ReplyQueue, Protocol):
    """Sends requests to sites, all at the same time; the same one may be sent twice. Who waits for all of them uses
    `ask`, who takes what comes uses `push`, `arrived` and `recall`: one of the two ways at a time.
    """

    def names(self) -> tuple[str, ...]:
        """All sites that can be asked."""

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> Mapping[str, bytes | NoReply]:
        """What each of them answers within so many seconds; a site that is missing from the result is lost."""


def first_in_first_out(waiting: Sequence[str]) -> str | None:
    """In the order in which they were asked."""
    return next(iter(waiting), None)


@dataclass(frozen=True, slots=True)
class InProcess:
    """Sites in this process, through the same bytes; one whose answer ends in an error is lost.

    A site that was pushed a request works when it is its `turn` to be heard, so that every order can be had.
    """

    sites: Mapping[str, Callable[[bytes], bytes]]
    turn: ReplyOrder = first_in_first_out
    pending: dict[str, bytes] = field(default_factory=dict, repr=False, compare=False)

    def names(self) -> tuple[str, ...]:
        """Theirs."""
        return tuple(sorted(self.sites))

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> Mapping[str, bytes | NoReply]:
        """One after another."""
        return {name: self._ask(name, request) for name, request in requests.items()}

    def push(self, requests: Mapping[str, bytes], timeout: float) -> None:
        """Nobody works yet."""
        for name, request in requests.items():
            self.pending.pop(name, None)
            self.pending[name] = request

    def next_reply(self, timeout: float) -> SiteReply | None:
        """Whose turn it is."""
        name = self.turn(tuple(self.pending))
        return None if name is None else (name, self._ask(name, self.pending.pop(name)))

    def cancel(self) -> dict[str, NoReply]:
        """Those that were not heard have not begun."""
        left = dict.fromkeys(self.pending, NoReply("its turn did not come"))
        self.pending.clear()
        return left

    def _ask(self, name: str, request: bytes) -> bytes | NoReply:
        try:
            return self.sites[name](request)
        except Exception as error:
            return NoReply(type(error).__name__)
