"""Send requests to several sites at once; collect each site's answer or error."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from partsong.core.interfaces import Message
from partsong.engines.rounds import no_party_left_error
from partsong.errors import FormatError, PartsongError, PartyError, SiteLost, UploadError
from partsong.federation.server.state import ReleaseCounters, UnreceivedWork
from partsong.federation.site.state import Attempt
from partsong.federation.toml_files import Count
from partsong.federation.transports.base import NoReply, Transport
from partsong.federation.wire import Nonce, Refusal, Reply, Request, error_from_refusal, recovery_advice


@dataclass(frozen=True, slots=True)
class Responses:
    """Messages and notes in name order, refusals, and the errors of all sites that sent no message."""

    on_party_error: str
    inbox: dict[str, Message] = field(default_factory=dict)
    notes: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    faults: dict[str, PartsongError] = field(default_factory=dict)

    @property
    def unreceived(self) -> UnreceivedWork:
        """Work of earlier rounds that counts at its site, although the server did not receive it."""
        found: dict[str, list[Attempt]] = {}
        for name in self.inbox:
            with suppress(msgspec.ValidationError):  # usually absent; a site may send anything
                found[name] = msgspec.convert(self.notes[name].get("alone"), list[tuple[Count, Count]])
        return found

    @property
    def lost(self) -> frozenset[str]:
        """Sites that no longer know the run that they had started."""
        return frozenset(name for name, refusal in self.refusals.items() if refusal.code == "not-started")

    def require(self, stage: str, index: int, excused: Collection[str] = ()) -> None:
        """Raise the first error if errors end the run, except for sites that are `excused`."""
        faults = {name: error for name, error in self.faults.items() if name not in excused}
        if faults and self.on_party_error == "raise":
            name, error = next(iter(faults.items()))
            error.add_note(f"(site {name!r}, {stage}, round {index})")
            error.add_note(recovery_advice(self.refusals.get(name)))
            raise error

    def require_some(self, stage: str, index: int, excused: Collection[str] = ()) -> None:
        """Like `require`, and raise if there is no message at all."""
        self.require(stage, index, excused)
        if not self.inbox:
            raise no_party_left_error(self.faults, index)

    def check_messages(self, check: Callable[[str, Message], None]) -> Responses:
        """Return the responses with an error in place of each message that fails the check."""
        faults, inbox = dict(self.faults), dict[str, Message]()
        for name, message in self.inbox.items():
            try:
                check(name, message)
                inbox[name] = message
            except PartsongError as error:
                faults[name] = error
        notes = {name: note for name, note in self.notes.items() if name in inbox}
        return Responses(self.on_party_error, inbox, notes, self.refusals, faults)


@dataclass(frozen=True, slots=True)
class SiteClient:
    """The server's end of a transport.

    `seen` has the largest serial number of each site, which `counters` stores for later runs. `informed` has the sites
    that were sent the names of columns that they lack.
    """

    transport: Transport
    timeout: float
    on_party_error: str
    seen: dict[str, int] = field(default_factory=dict)
    counters: ReleaseCounters = ReleaseCounters()
    informed: set[str] = field(default_factory=set)

    def ask(
        self,
        names: Sequence[str],
        nonce: Nonce,
        body: Message = Message({}),
        note: Mapping[str, Any] | None = None,
        notes: Mapping[str, Mapping[str, Any]] | None = None,
        timeout: float | None = None,
    ) -> Responses:
        """Run one exchange of at most `timeout` seconds (default: `self.timeout`). `note` goes to all sites, `notes` to
        each.
        """
        common, own = note or {}, notes or {}
        requests = {
            name: self.request(name, nonce, body, {**common, **own.get(name, {})}).to_bytes() for name in sorted(names)
        }
        replies = self.transport.ask(requests, self.timeout if timeout is None else timeout) if requests else {}
        responses, before = Responses(self.on_party_error), dict(self.seen)
        for name in requests:
            try:
                read = self.read(name, nonce, replies.get(name, NoReply("no reply in time")))
            except PartyError as error:
                responses.faults[name] = error
                continue
            if isinstance(read.answer, Refusal):
                responses.refusals[name] = read.answer
                responses.faults[name] = error_from_refusal(name, read.answer, nonce.round)
            else:
                responses.inbox[name], responses.notes[name] = read.answer, read.note
        if self.seen != before:
            self.counters.update(self.seen)
        return responses

    def request(self, name: str, nonce: Nonce, body: Message, note: Mapping[str, Any]) -> Request:
        """Build a request to a site, with the largest serial number that it has sent."""
        return Request(name, nonce, body, note, self.seen.get(name, 0))

    def read(self, name: str, nonce: Nonce, reply: bytes | NoReply) -> Reply:
        """Parse the reply to a request; SiteLost if there is none, UploadError if it cannot be used."""
        if isinstance(reply, NoReply):
            raise no_reply_error(name, nonce, reply.reason)
        try:
            read = Reply.from_bytes(reply)
        except FormatError as error:
            raise UploadError(f"Site {name!r} sent an unreadable reply in round {nonce.round}: {error}") from error
        if read.party != name or (read.nonce != nonce and not isinstance(read.answer, Refusal)):
            raise UploadError(
                f"Site {name!r} sent a reply that does not belong to the request of round {nonce.round}: replayed, or "
                "from another party. It was not used."
            )
        self.seen[name] = max(self.seen.get(name, 0), read.serial)
        return read


def no_reply_error(name: str, nonce: Nonce, why: str) -> SiteLost:
    """Return the error for a site without a usable reply."""
    return SiteLost(f"Site {name!r} did not reply in round {nonce.round}: {why}.")
