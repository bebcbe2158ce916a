"""One exchange with several sites: requests out, replies in, and an error for each that gave none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from partsong.core import Message
from partsong.engines.rounds import nobody_left
from partsong.errors import FormatError, PartsongError, UploadError
from partsong.federation.refusals import SiteLost, error_of
from partsong.federation.serials import Serials
from partsong.federation.transport import Lost, Transport
from partsong.federation.ways_on import way_on
from partsong.federation.wire import Nonce, Refusal, Reply, Request


@dataclass(frozen=True, slots=True)
class Asked:
    """What came of it: messages in name order, notes beside them, refusals, and errors of all who sent no message."""

    faulty: str
    run: str
    inbox: dict[str, Message] = field(default_factory=dict)
    notes: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    faults: dict[str, PartsongError] = field(default_factory=dict)

    @property
    def alone(self) -> dict[str, list[tuple[int, int]]]:
        """Works of earlier rounds that count at their party although they were not heard here."""
        told = {name: note["alone"] for name, note in self.notes.items() if _is_attempts(note.get("alone"))}
        return {name: [(at[0], at[1]) for at in attempts] for name, attempts in told.items() if name in self.inbox}

    def require(self, stage: str, index: int, excused: Collection[str] = ()) -> None:
        """Raise the first error, unless parties with one are left out, as those who are `excused` always are."""
        faults = {name: error for name, error in self.faults.items() if name not in excused}
        if faults and self.faulty == "stop":
            name, error = next(iter(faults.items()))
            error.add_note(f"(site {name!r}, {stage}, round {index})")
            error.add_note(way_on(self.refusals.get(name), name, self.run))
            raise error

    def require_some(self, stage: str, index: int, excused: Collection[str] = ()) -> None:
        """Raise the first error where nobody is left."""
        self.require(stage, index, excused)
        if not self.inbox:
            raise nobody_left(self.faults, index)

    def checked(self, check: Callable[[str, Message], None]) -> Asked:
        """The same, without the messages that do not pass, and what was told beside them."""
        faults, inbox = dict(self.faults), dict[str, Message]()
        for name, message in self.inbox.items():
            try:
                check(name, message)
                inbox[name] = message
            except PartsongError as error:
                faults[name] = error
        notes = {name: note for name, note in self.notes.items() if name in inbox}
        return Asked(self.faulty, self.run, inbox, notes, self.refusals, faults)


@dataclass(frozen=True, slots=True)
class Desk:
    """Where the server writes and reads; `seen` has the largest serial number of each site, and `serials` keeps it for
    runs to come. `named` are sites that were told which columns they lack.
    """

    transport: Transport
    timeout: float
    faulty: str
    seen: dict[str, int] = field(default_factory=dict)
    serials: Serials = Serials()
    named: set[str] = field(default_factory=set)

    def ask(
        self,
        names: Sequence[str],
        nonce: Nonce,
        body: Message = Message({}),
        note: Mapping[str, Any] | None = None,
        notes: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Asked:
        """One exchange; `note` goes to all, `notes` to each."""
        requests = {
            name: Request(
                name, nonce, body, {**(note or {}), **(notes or {}).get(name, {})}, self.seen.get(name, 0)
            ).written()
            for name in sorted(names)
        }
        replies = self.transport.ask(requests, self.timeout)
        asked, before = Asked(self.faulty, nonce.run), dict(self.seen)
        for name in requests:
            self._take(asked, name, nonce, replies.get(name, Lost("nothing was heard in time")))
        if self.seen != before:
            self.serials.keep(self.seen)
        return asked

    def _take(self, asked: Asked, name: str, nonce: Nonce, reply: bytes | Lost) -> None:
        if isinstance(reply, Lost):
            asked.faults[name] = SiteLost(f"Site {name!r} was not heard in round {nonce.round}: {reply.why}.")
            return
        try:
            read = Reply.read(reply)
        except FormatError as error:
            asked.faults[name] = UploadError(f"Site {name!r} sent what cannot be read in round {nonce.round}: {error}")
            return
        if read.party != name or (read.nonce != nonce and not isinstance(read.answer, Refusal)):
            asked.faults[name] = UploadError(
                f"Site {name!r} sent the answer to another request than that of round {nonce.round}: repeated, or for "
                "somebody else. Nothing of it was used."
            )
            return
        self.seen[name] = max(self.seen.get(name, 0), read.serial)
        if isinstance(read.answer, Refusal):
            asked.refusals[name] = read.answer
            asked.faults[name] = error_of(name, read.answer, nonce.round)
        else:
            asked.inbox[name], asked.notes[name] = read.answer, read.note


def _is_attempts(value: Any) -> bool:
    """Whether a site has told a list of rounds and attempts, and not something else."""
    return isinstance(value, list) and all(
        isinstance(at, list) and len(at) == 2 and all(type(number) is int and number >= 0 for number in at)
        for at in value
    )
