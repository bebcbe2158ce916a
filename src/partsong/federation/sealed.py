"""Requests and replies that are signed from end to end, over any transport: who hands them on can change nothing.

coordinator, its key pinned at the sites  ── request, signed ──►  site
coordinator  ◄── reply, signed for that request ──  site, its key known from the roster
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from partsong.engines.replies import Heard
from partsong.errors import FormatError, ParameterError
from partsong.federation.signatures import Sign, Verify, Way
from partsong.federation.transport import Lost, Transport

UNSIGNED = "unsigned"


@dataclass(frozen=True, slots=True)
class Signed:
    """The coordinator's side: another transport, whose requests are signed and whose replies are looked at."""

    transport: Transport
    sign: Sign = field(repr=False)
    known: Mapping[str, Verify] = field(repr=False)
    out: dict[str, bytes] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.transport.names()) - set(self.known))
        if unknown:
            raise ParameterError(f"No key is known of {', '.join(unknown)}. Admit their cards first.")

    def names(self) -> tuple[str, ...]:
        """Those of the transport."""
        return self.transport.names()

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> Mapping[str, bytes | Lost]:
        """As the transport does; a reply without the site's signature for this very request is as good as none."""
        sent = self._signed(requests)
        replies = self.transport.ask(sent, timeout)
        return {name: self._opened(name, sent[name], reply) for name, reply in replies.items() if name in sent}

    def push(self, requests: Mapping[str, bytes], timeout: float) -> None:
        """Sign requests, and hand them over."""
        sent = self._signed(requests)
        self.out.update(sent)
        self.transport.push(sent, timeout)

    def arrived(self, timeout: float) -> Heard | None:
        """The next reply, opened."""
        heard = self.transport.arrived(timeout)
        if heard is None:
            return None
        name, reply = heard
        return name, self._opened(name, self.out.pop(name, b""), reply)

    def recall(self) -> Mapping[str, Lost]:
        """As the transport does."""
        self.out.clear()
        return self.transport.recall()

    def _signed(self, requests: Mapping[str, bytes]) -> dict[str, bytes]:
        return {name: Way("request", name).signed(self.sign, request) for name, request in requests.items()}

    def _opened(self, name: str, request: bytes, reply: bytes | Lost) -> bytes | Lost:
        if isinstance(reply, Lost):
            return reply
        try:
            return Way("reply", name, identity(request)).opened(self.known[name], reply)
        except FormatError:
            return Lost("its reply was not signed by its key in the roster for this request, and was not used")


@dataclass(frozen=True, slots=True)
class SignedSite:
    """A site's side: `answer` sees what the pinned coordinator has signed for this site, and nothing else.

    `refuse` takes a code and a reason, and gives the bytes that say no.
    """

    name: str
    answer: Callable[[bytes], bytes] = field(repr=False)
    refuse: Callable[[str, str], bytes] = field(repr=False)
    sign: Sign = field(repr=False)
    coordinator: Verify = field(repr=False)

    def __call__(self, data: bytes) -> bytes:
        """The reply, signed; also where it is a refusal."""
        try:
            request = Way("request", self.name).opened(self.coordinator, data)
        except FormatError as error:
            reply = self.refuse(UNSIGNED, str(error))
        else:
            reply = self.answer(request)
        return Way("reply", self.name, identity(data)).signed(self.sign, reply)


def identity(request: bytes) -> str:
    """By which a reply names the request that it answers: SHA-256 of all its bytes."""
    return hashlib.sha256(request).hexdigest()
