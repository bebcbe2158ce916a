"""The set-up of a run: which sites are there, on which columns they agree, and what each of them starts with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from partsong.core.interfaces import Layout, Message, Program, Schedule
from partsong.errors import FeatureError, ParameterError, PartsongError, UploadError
from partsong.federation.columns import ASK, READ, SAME, TELL, agreed, listed, missing_at, strangers_in
from partsong.federation.server.site_client import Responses, SiteClient
from partsong.federation.server.state import RunState
from partsong.federation.wire import Kind, Nonce

Run = TypeVar("Run", bound=RunState)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The name of a run, its experiment in plain values, and which columns are to be agreed on."""

    run: str
    experiment: Mapping[str, Any]
    rule: str


def negotiate(plan: RunPlan, program: Program, schedule: Schedule, client: SiteClient) -> RunState:
    """A new run: the sites agree on columns by hashes, and the layout follows."""
    names = tuple(sorted(client.transport.names()))
    if not names:
        raise ParameterError("A federation needs at least one site; the transport knows none.")
    hello = _with_one_key(plan, client, _hello(plan, client, names, names), names)
    hello.require_some("hello", 0)
    if plan.rule != SAME:
        hello = _with_common_columns(hello)
    columns = agreed({name: message["columns"] for name, message in hello.inbox.items()}, plan.rule)
    types = {str(note.get("type")) for note in hello.notes.values()}
    seen = {name: client.seen.get(name, 0) for name in sorted(hello.inbox.keys() | hello.refusals.keys())}
    layout = Layout(names, len(columns), schedule.seed, "float64" if "float64" in types else "float32")
    server, model = program.start_server(layout)
    return RunState(plan.run, dict(plan.experiment), layout, columns, 0, server, model, seen=seen)


def require_same_sites(run: RunState, names: Collection[str]) -> None:
    """Refuse other sites than those that the run was begun with."""
    gone, new = sorted(set(run.layout.parties) - set(names)), sorted(set(names) - set(run.layout.parties))
    if gone or new:
        changes = [f"gone: {', '.join(gone)}"] if gone else []
        changes += [f"new: {', '.join(new)}"] if new else []
        raise ParameterError(
            f"The sites have changed since run {run.run!r} was begun ({'; '.join(changes)}), and it is resumed with "
            "the same ones only. Begin a new run, under another name and with another seed. Sites that are admitted do "
            "not end a run under way, but one that is broken off is not resumed after that."
        )


def start_sites(
    plan: RunPlan,
    client: SiteClient,
    run: Run,
    keep: Callable[[Run], None],
    among: Collection[str] | None = None,
) -> tuple[Run, dict[str, PartsongError]]:
    """Start the sites `among` these (None: all) that are not started yet; returns the errors of those that cannot.

    Sites that have started are kept before an error ends the run: its settings cannot change from then on.
    """
    names = run.layout.parties if among is None else sorted(among)
    new = tuple(name for name in names if name not in run.started)
    if not new:
        return run, {}
    asked = client.ask(new, *start_request(plan, run))
    if asked.inbox:
        run = replace(run, started=run.started.union(asked.inbox), seen=dict(client.seen))
        keep(run)
    lacking = {name: refusal.counts for name, refusal in asked.refusals.items() if refusal.code == "columns"}
    for name, counts in lacking.items():
        helpers = sorted(run.started)
        if counts.get("missing") and name not in client.informed and tell_names(plan, client, run, name, helpers):
            client.informed.add(name)
    if lacking and client.faulty == "stop":
        shown = "; ".join(
            f"{name}: " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
            for name, counts in sorted(lacking.items())
        )
        raise FeatureError(
            f"These sites hold other columns than most ({shown}). Which ones is in the log of each site. Bring them to "
            'one list, or take columns = "common".'
        )
    asked.require("start", run.index)
    return run, asked.faults


def start_request(plan: RunPlan, run: RunState) -> tuple[Nonce, Message, dict[str, Any]]:
    """Nonce, body and note that start a run at a site.

    They stay the same bytes if the experiment has since been written with other digits for the same numbers.
    """
    layout = {"parties": list(run.layout.parties), "n_features": run.layout.n_features}
    layout |= {"seed": run.layout.seed, "dtype": run.layout.dtype}
    note = {"layout": layout, "experiment": dict(run.experiment), "rule": plan.rule}
    return Nonce(plan.run, kind=Kind.START), Message({"columns": run.columns}), note


def tell_names(plan: RunPlan, client: SiteClient, run: RunState, lacking: str, helpers: Collection[str]) -> bool:
    """Have one of the `helpers`, which hold the agreed columns, send a site the names of those that it lacks.

    Returns whether one has. Without a roster all decline.
    """
    recorded = replace(plan, experiment=run.experiment)
    offered = _hello(recorded, client, (lacking,), run.layout.parties).inbox
    ask = Nonce(plan.run, kind=Kind.NAMES, phase=ASK)
    key = client.ask((lacking,), ask, note=_proposal(recorded, run.layout.parties)).inbox
    if lacking not in offered or lacking not in key:
        return False
    columns = missing_at(offered[lacking]["columns"], run.columns)
    letter = Message({**key[lacking].arrays, "columns": columns})
    for helper in helpers:
        sealed = client.ask((helper,), Nonce(plan.run, kind=Kind.NAMES, phase=TELL), letter, {"for": lacking}).inbox
        read = Nonce(plan.run, kind=Kind.NAMES, phase=READ)
        if helper in sealed and client.ask((lacking,), read, sealed[helper], {"from": helper}).inbox:
            return True
    return False


def _hello(
    plan: RunPlan, client: SiteClient, names: tuple[str, ...], parties: tuple[str, ...], usual_key: str | None = None
) -> Responses:
    note = _proposal(plan, parties)
    if usual_key is not None:
        note["shared_key"] = usual_key
    return client.ask(names, Nonce(plan.run, kind=Kind.HELLO), note=note).checked(_require_columns)


def _proposal(plan: RunPlan, parties: tuple[str, ...]) -> dict[str, Any]:
    """What a site decides by whether it would take part."""
    return {"experiment": dict(plan.experiment), "parties": list(parties)}


def _require_columns(name: str, offer: Message) -> None:
    """Refuse an offer that is not one list of different hashes."""
    try:
        is_sound = set(offer.arrays) == {"columns"} and bool(listed(offer["columns"]))
    except ParameterError:
        is_sound = False
    if not is_sound:
        raise UploadError(
            f"Site {name!r} has not told its columns as one list of different hashes: nothing of it was used. Look at "
            "the partsong that is installed there."
        )


def _with_common_columns(hello: Responses) -> Responses:
    """The same responses; a site that alone keeps the others from having a column in common is at fault."""
    offers = {name: set(listed(message["columns"])) for name, message in hello.inbox.items()}
    if set.intersection(*offers.values()):
        return hello
    odd = [name for name in offers if len(offers) > 2 and set.intersection(*_without(offers, name))]
    hint = f" Without {' or '.join(map(repr, odd))} the others do have some." if odd else ""
    error = FeatureError(f"No column is held by all of {', '.join(offers)}.{hint} Compare the names at two of them.")
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


def _with_one_key(plan: RunPlan, client: SiteClient, hello: Responses, parties: tuple[str, ...]) -> Responses:
    """The same responses, after sites whose shared key is not that of most were sent its mark, and have refused."""
    marks = {name: str(note.get("shared_key", "")) for name, note in hello.notes.items()}
    strangers, usual = strangers_in(marks)
    if not strangers:
        return hello
    again = _hello(plan, client, strangers, parties, usual)
    inbox = {name: message for name, message in hello.inbox.items() if name not in strangers} | again.inbox
    notes = {name: note for name, note in hello.notes.items() if name not in strangers} | again.notes
    return Responses(hello.faulty, plan.run, inbox, notes, hello.refusals | again.refusals, hello.faults | again.faults)
