"""A bell at the server: Flower's nodes look for requests every three seconds, and here a look lasts until there is one.

A look that has found nothing is not answered but made again, for the same node, when the server has handed something
over; after `PATIENCE` seconds it is answered as it is. Messages are handed over piece by piece, and who finds one that
is not whole waits for seconds: so nobody looks before all pieces are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

LOOK = "/v1/fleet/pull-messages"
HANDED_OVER = frozenset({"/v1/runtime/push-messages", "/v1/runtime/push-object"})
PATIENCE = 20.0
"""Less than the 30 seconds after which a node's call breaks off."""
MOST_BYTES = 1 << 16
GLANCE = 0.5
SETTLED = 0.1
LONGEST = 5.0

Scope = dict[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


@dataclass(slots=True)
class Doorbell:
    """An ASGI middleware; `rings` counts what was handed over, `open` what is being handed over."""

    app: App
    patience: float = PATIENCE
    rings: int = 0
    open: int = 0
    last: float = -math.inf
    waiting: set[asyncio.Event] = field(default_factory=set)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Pass on; ring after what nodes may be waiting for."""
        path = scope.get("path") if scope["type"] == "http" else None
        if path == LOOK:
            await self._look(scope, receive, send)
            return
        if path not in HANDED_OVER:
            await self.app(scope, receive, send)
            return
        self.open += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.open -= 1
            self.rings, self.last = self.rings + 1, time.monotonic()
            for one in self.waiting:
                one.set()

    async def _look(self, scope: Scope, receive: Any, send: Any) -> None:
        """Until something is found, somebody refuses, the node has gone, or time is up."""
        body = await _whole(receive)
        until = time.monotonic() + self.patience
        gone = asyncio.ensure_future(_gone(receive))
        try:
            while True:
                await self._whole_messages()
                before, answer = self.rings, Answer()
                await self.app(_copied(scope), Replayed(body, gone), answer)
                if self.rings == before and answer.is_empty:
                    await self._rung(gone, until)
                if not answer.is_empty or time.monotonic() >= until or gone.done() or is_ending():
                    break
            for message in answer.messages:
                await send(message)
        finally:
            gone.cancel()

    async def _whole_messages(self) -> None:
        until = time.monotonic() + LONGEST
        while (self.open or time.monotonic() - self.last < SETTLED) and time.monotonic() < until:
            await asyncio.sleep(SETTLED / 2)

    async def _rung(self, gone: asyncio.Future[None], until: float) -> None:
        bell = asyncio.Event()
        ringing = asyncio.ensure_future(bell.wait())
        self.waiting.add(bell)
        try:
            while time.monotonic() < until and not is_ending():
                left = min(GLANCE, max(0.0, until - time.monotonic()))
                done, _ = await asyncio.wait((ringing, gone), timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    return
        finally:
            self.waiting.discard(bell)
            ringing.cancel()


@dataclass(slots=True)
class Answer:
    """What the app has sent, kept back."""

    messages: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, message: dict[str, Any]) -> None:
        """As ASGI's send."""
        self.messages.append(message)

    @property
    def is_empty(self) -> bool:
        """A good answer with nothing in it."""
        is_good = any(one.get("status") == 200 for one in self.messages)
        return is_good and not any(one.get("body") for one in self.messages)


@dataclass(slots=True)
class Replayed:
    """A request that is read once more."""

    body: bytes
    gone: asyncio.Future[None]
    is_read: bool = False

    async def __call__(self) -> dict[str, Any]:
        """As ASGI's receive."""
        if not self.is_read:
            self.is_read = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(self.gone)
        return {"type": "http.disconnect"}


def is_ending() -> bool:
    """Whether this process was told to stop: its web server waits for open calls."""
    server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return bool(getattr(server, "should_exit", False))


async def _whole(receive: Any) -> bytes:
    """The body of a request; what is longer than a look can be is cut off, and then refused by the app."""
    body, more = b"", True
    while more and len(body) <= MOST_BYTES:
        message = await receive()
        body += message.get("body", b"")
        more = message["type"] == "http.request" and message.get("more_body", False)
    return body


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _copied(scope: Scope) -> Scope:
    """Frameworks keep things in a scope; each look has its own."""
    return {**scope, "state": dict(scope.get("state") or {})}
