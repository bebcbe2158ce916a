"""Before the first round: who is there, on which columns they agree, and what they start with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from partsong.core import Layout, Message, Program, Schedule
from partsong.errors import FeatureError, ParameterError, PartsongError, UploadError
from partsong.federation.asking import Asked, Desk
from partsong.federation.columns import SAME, agreed, listed, strangers_in
from partsong.federation.naming import ASK, READ, TELL, missing_at
from partsong.federation.record import Record
from partsong.federation.wire import Kind, Nonce

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
        record = replace(record, started=record.started | asked.inbox.keys(), seen=dict(desk.seen))
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
