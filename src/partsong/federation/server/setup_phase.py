"""Before the first round: who is there, on which columns they agree, and what they start with."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from partsong.core.interfaces import Layout, Message, Program, Schedule
from partsong.engines.rounds import nobody_left
from partsong.errors import FeatureError, FormatError, ParameterError, PartsongError, SiteLost, UploadError
from partsong.federation.columns import ASK, READ, SAME, TELL, agreed, listed, missing_at, strangers_in
from partsong.federation.locks import locked
from partsong.federation.server.state import Record
from partsong.federation.transports.base import Lost, Transport
from partsong.federation.wire import Kind, Nonce, Refusal, Reply, Request, error_of, way_on
from partsong.io.write import replacing

# ---- serials ----------------------------------------------------------------------------------------------------
#
# The largest serial number that each site has told, over all runs of a federation: one small file at the server.
#
# A site whose ledger is shorter than that was restored from an older copy, whichever run it has released in.


@dataclass(frozen=True, slots=True)
class Serials:
    """That file; without a path nothing is kept from run to run."""

    path: Path | None = None

    def known(self, names: Iterable[str]) -> dict[str, int]:
        """Of these sites, as far as they were heard before."""
        kept = self._read()
        return {name: kept[name] for name in names if name in kept}

    def keep(self, seen: Mapping[str, int]) -> None:
        """Take in what was seen; on the disk when this returns. Runs that go on at the same time take turns."""
        if self.path is None:
            return
        with locked(self.path.with_name(f"{self.path.name}.lock"), waits=True):
            kept = self._read()
            after = larger(kept, seen)
            if after != kept:
                with replacing(self.path, private=True) as draft:
                    draft.write_text(json.dumps(after, sort_keys=True) + "\n", encoding="utf-8")

    def _read(self) -> dict[str, int]:
        if self.path is None or not self.path.exists():
            return {}
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            is_sound = all(type(number) is int and number >= 0 for number in kept.values())
        except (ValueError, AttributeError):
            is_sound = False
        if not is_sound:
            raise FormatError(
                f"{self.path} does not hold the number of releases that each site has told. Take it from a copy: "
                "without it a site that was restored from an older one is not noticed."
            )
        return dict(kept)


def larger(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """The larger number of each name."""
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}


# ---- asking -----------------------------------------------------------------------------------------------------
#
# One exchange with several sites: requests out, replies in, and an error for each that gave none.


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

    @property
    def lost(self) -> frozenset[str]:
        """Sites that do not know the run any more, although they were started in it."""
        return frozenset(name for name, refusal in self.refusals.items() if refusal.code == "not-started")

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


# ---- beginning --------------------------------------------------------------------------------------------------

Begun = TypeVar("Begun", bound=Record)


@dataclass(frozen=True, slots=True)
class Agenda:
    """The name of a run, its experiment in plain values, and which columns are to be agreed on."""

    run: str
    experiment: Mapping[str, Any]
    rule: str


def begun(agenda: Agenda, program: Program, schedule: Schedule, desk: Desk) -> Record:
    """Columns are agreed on by hashes, and the layout follows."""
    names = tuple(sorted(desk.transport.names()))
    if not names:
        raise ParameterError("A federation needs at least one site; the transport knows none.")
    hello = _with_one_key(agenda, desk, _hello(agenda, desk, names, names), names)
    hello.require_some("hello", 0)
    if agenda.rule != SAME:
        hello = _with_common_columns(hello)
    columns = agreed({name: message["columns"] for name, message in hello.inbox.items()}, agenda.rule)
    types = {str(note.get("type")) for note in hello.notes.values()}
    seen = {name: desk.seen.get(name, 0) for name in sorted(hello.inbox.keys() | hello.refusals.keys())}
    layout = Layout(names, len(columns), schedule.seed, "float64" if "float64" in types else "float32")
    server, model = program.start_server(layout)
    return Record(agenda.run, dict(agenda.experiment), layout, columns, 0, server, model, seen=seen)


def require_same_sites(record: Record, names: Collection[str]) -> None:
    """A run is over the same sites from its start to its end."""
    gone, new = sorted(set(record.layout.parties) - set(names)), sorted(set(names) - set(record.layout.parties))
    if gone or new:
        told = [f"gone: {', '.join(gone)}"] if gone else []
        told += [f"new: {', '.join(new)}"] if new else []
        raise ParameterError(
            f"The sites have changed since run {record.run!r} was begun ({'; '.join(told)}), and it is resumed with "
            "the same ones only. Begin a new run, under another name and with another seed. Sites that are admitted do "
            "not end a run under way, but one that is broken off is not resumed after that."
        )


def joined(
    agenda: Agenda,
    desk: Desk,
    record: Begun,
    keep: Callable[[Begun], None],
    among: Collection[str] | None = None,
) -> tuple[Begun, dict[str, PartsongError]]:
    """Start the sites that have not, of all or of some; those that cannot are asked again before the next round.

    Who has begun is kept before anybody's error ends the run: from then on its settings stay what they are.
    """
    names = record.layout.parties if among is None else sorted(among)
    new = tuple(name for name in names if name not in record.started)
    if not new:
        return record, {}
    asked = desk.ask(new, *start_of(agenda, record))
    if asked.inbox:
        record = replace(record, started=record.started.union(asked.inbox), seen=dict(desk.seen))
        keep(record)
    lacking = {name: refusal.counts for name, refusal in asked.refusals.items() if refusal.code == "columns"}
    for name, counts in lacking.items():
        helpers = sorted(record.started)
        if counts.get("missing") and name not in desk.named and tell_names(agenda, desk, record, name, helpers):
            desk.named.add(name)
    if lacking and desk.faulty == "stop":
        told = "; ".join(
            f"{name}: " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
            for name, counts in sorted(lacking.items())
        )
        raise FeatureError(
            f"These sites hold other columns than most ({told}). Which ones is in the log of each site. Bring them to "
            'one list, or take columns = "common".'
        )
    asked.require("start", record.index)
    return record, asked.faults


def start_of(agenda: Agenda, record: Record) -> tuple[Nonce, Message, dict[str, Any]]:
    """What a site is told when a run is started there: the same each time, also where the experiment has since been
    written otherwise, with numbers that are equal.
    """
    layout = {"parties": list(record.layout.parties), "n_features": record.layout.n_features}
    layout |= {"seed": record.layout.seed, "dtype": record.layout.dtype}
    note = {"layout": layout, "experiment": dict(record.experiment), "rule": agenda.rule}
    return Nonce(agenda.run, kind=Kind.START), Message({"columns": record.columns}), note


def tell_names(agenda: Agenda, desk: Desk, record: Record, lacking: str, helpers: Collection[str]) -> bool:
    """Let a site that has the agreed columns tell another which it lacks: the first that does. Whether one has; without
    a roster all decline.
    """
    recorded = replace(agenda, experiment=record.experiment)
    offered = _hello(recorded, desk, (lacking,), record.layout.parties).inbox
    ask = Nonce(agenda.run, kind=Kind.NAMES, phase=ASK)
    key = desk.ask((lacking,), ask, note=_told(recorded, record.layout.parties)).inbox
    if lacking not in offered or lacking not in key:
        return False
    columns = missing_at(offered[lacking]["columns"], record.columns)
    letter = Message({**key[lacking].arrays, "columns": columns})
    for helper in helpers:
        told = desk.ask((helper,), Nonce(agenda.run, kind=Kind.NAMES, phase=TELL), letter, {"for": lacking}).inbox
        read = Nonce(agenda.run, kind=Kind.NAMES, phase=READ)
        if helper in told and desk.ask((lacking,), read, told[helper], {"from": helper}).inbox:
            return True
    return False


def _hello(
    agenda: Agenda, desk: Desk, names: tuple[str, ...], parties: tuple[str, ...], usual_key: str | None = None
) -> Asked:
    note = _told(agenda, parties)
    if usual_key is not None:
        note["shared_key"] = usual_key
    return desk.ask(names, Nonce(agenda.run, kind=Kind.HELLO), note=note).checked(_require_columns)


def _told(agenda: Agenda, parties: tuple[str, ...]) -> dict[str, Any]:
    """What a site has to know before it says whether it would take part."""
    return {"experiment": dict(agenda.experiment), "parties": list(parties)}


def _require_columns(name: str, offer: Message) -> None:
    """A site that takes part names columns by hashes, each once."""
    try:
        is_sound = set(offer.arrays) == {"columns"} and bool(listed(offer["columns"]))
    except ParameterError:
        is_sound = False
    if not is_sound:
        raise UploadError(
            f"Site {name!r} has not told its columns as one list of different hashes: nothing of it was used. Look at "
            "the partsong that is installed there."
        )


def _with_common_columns(hello: Asked) -> Asked:
    """The same, where one site alone keeps all others from having a column in common: that one is at fault."""
    offers = {name: set(listed(message["columns"])) for name, message in hello.inbox.items()}
    if set.intersection(*offers.values()):
        return hello
    odd = [name for name in offers if len(offers) > 2 and set.intersection(*_without(offers, name))]
    told = f" Without {' or '.join(map(repr, odd))} the others do have some." if odd else ""
    error = FeatureError(f"No column is held by all of {', '.join(offers)}.{told} Compare the names at two of them.")
    if len(odd) != 1:
        raise error

    def require_usual(name: str, _: Message) -> None:
        if name == odd[0]:
            raise error

    rest = hello.checked(require_usual)
    rest.require("hello", 0)
    return rest


def _without(offers: Mapping[str, set[bytes]], name: str) -> list[set[bytes]]:
    return [rows for other, rows in offers.items() if other != name]


def _with_one_key(agenda: Agenda, desk: Desk, hello: Asked, parties: tuple[str, ...]) -> Asked:
    """The same, where sites whose shared key is not that of most were told so, and have refused."""
    marks = {name: str(note.get("shared_key", "")) for name, note in hello.notes.items()}
    strangers, usual = strangers_in(marks)
    if not strangers:
        return hello
    again = _hello(agenda, desk, strangers, parties, usual)
    inbox = {name: message for name, message in hello.inbox.items() if name not in strangers} | again.inbox
    notes = {name: note for name, note in hello.notes.items() if name not in strangers} | again.notes
    return Asked(hello.faulty, agenda.run, inbox, notes, hello.refusals | again.refusals, hello.faults | again.faults)
