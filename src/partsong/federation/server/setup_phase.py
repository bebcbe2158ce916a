"""Set-up of a run: find the sites, agree on columns, and start each site."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from partsong.core.interfaces import Layout, Message, Program, Schedule
from partsong.errors import FeatureError, ParameterError, PartsongError, UploadError
from partsong.federation.columns import ASK, READ, SAME, TELL, agreed, listed, missing_at, strangers_in
from partsong.federation.server.site_client import Responses, SiteClient
from partsong.federation.server.state import RunState
from partsong.federation.wire import Kind, Nonce
from partsong.privacy.forecast import MAX_COLUMNS

Run = TypeVar("Run", bound=RunState)


def negotiate(
    name: str, experiment: Mapping[str, Any], program: Program, schedule: Schedule, client: SiteClient
) -> RunState:
    """Set up a new run: the sites agree on columns by hashes, from which the layout follows."""
    names = tuple(sorted(client.transport.names()))
    if not names:
        raise ParameterError("The transport has no sites. Admit at least one site.")
    proposal = {"experiment": dict(experiment), "parties": list(names)}
    hello = _require_shared_key(client, name, proposal, _hello(client, name, proposal, names))
    hello.require_some("hello", 0)
    offers = {site: message["columns"] for site, message in hello.inbox.items()}
    columns = agreed(offers, _rule(experiment), leaves_out=client.on_party_error == "skip")
    types = {str(note.get("type")) for note in hello.notes.values()}
    seen = {site: client.seen.get(site, 0) for site in sorted(hello.inbox.keys() | hello.refusals.keys())}
    layout = Layout(names, len(columns), schedule.seed, "float64" if "float64" in types else "float32")
    _require_promised_columns(experiment.get("privacy") or {}, layout.n_features)
    server, model = program.start_server(layout)
    return RunState(name, dict(experiment), layout, columns, 0, server, model, seen=seen)


def _require_promised_columns(privacy: Mapping[str, Any], n_features: int) -> None:
    """Refuse other columns than the mechanism of privacy was chosen for; nothing has been spent yet."""
    stated, is_moment = privacy.get("n_features"), privacy.get("mechanism", "rounds") != "rounds"
    if (buckets := privacy.get("buckets") or 0) > n_features:
        raise ParameterError(
            f"The sites agree on {n_features} columns, but the table privacy has buckets = {buckets}. Nothing was "
            "spent. Set fewer buckets, or none, and run again."
        )
    if stated is not None and stated != n_features:
        raise ParameterError(
            f"The sites agree on {n_features} columns, but the table privacy has n_features = {stated}. Nothing was "
            f"spent. Set n_features = {n_features}, and run again."
        )
    if stated is None and is_moment and n_features > MAX_COLUMNS and privacy.get("buckets") is None:
        raise ParameterError(
            f"The sites agree on {n_features} columns, of which one private moment has {n_features}² / 2 products. "
            f'Nothing was spent. Set n_features = {n_features} in the table privacy: mechanism "auto" then takes '
            "buckets of columns, and a mechanism that is named is kept."
        )


def require_same_sites(run: RunState, names: Collection[str]) -> None:
    """Refuse a change of sites since the run started."""
    gone, new = sorted(set(run.layout.parties) - set(names)), sorted(set(names) - set(run.layout.parties))
    if gone or new:
        changes = [f"gone: {', '.join(gone)}"] if gone else []
        changes += [f"new: {', '.join(new)}"] if new else []
        raise ParameterError(
            f"The sites have changed since run {run.run!r} started ({'; '.join(changes)}), and a run is resumed only "
            "with the same sites. Start a new run with another name and another seed. Admitting a site does not end an "
            "active run, but prevents resuming it later."
        )


def start_sites(
    client: SiteClient, run: Run, keep: Callable[[Run], None], among: Collection[str] | None = None
) -> tuple[Run, dict[str, PartsongError]]:
    """Start the sites `among` these (None: all) that have not started. Returns the errors of those that cannot.

    Started sites are recorded before an error ends the run, because its settings can no longer change then.
    """
    names = run.layout.parties if among is None else sorted(among)
    new = tuple(name for name in names if name not in run.started)
    if not new:
        return run, {}
    asked = client.ask(new, *start_request(run))
    if asked.inbox:
        run = replace(run, started=run.started.union(asked.inbox), seen=dict(client.seen))
        keep(run)
    lacking = {name: refusal.counts for name, refusal in asked.refusals.items() if refusal.code == "columns"}
    for name, counts in lacking.items():
        if counts.get("missing") and name not in client.informed and send_column_names(client, run, name):
            client.informed.add(name)
    if lacking and client.on_party_error == "raise":
        shown = "; ".join(
            f"{name}: " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
            for name, counts in sorted(lacking.items())
        )
        raise FeatureError(
            f"These sites have other columns than most ({shown}). The log of each site names them. Use "
            'the same columns at all sites, or set columns = "common".'
        )
    asked.require("start", run.index)
    return run, asked.faults


def start_request(run: RunState) -> tuple[Nonce, Message, dict[str, Any]]:
    """Return nonce, body and note of the start request.

    They come from the stored run, so that the bytes stay the same even if the experiment file now writes the same
    numbers with other digits.
    """
    layout = {"parties": list(run.layout.parties), "n_features": run.layout.n_features}
    layout |= {"seed": run.layout.seed, "dtype": run.layout.dtype}
    note = {"layout": layout, "experiment": dict(run.experiment), "rule": _rule(run.experiment)}
    return Nonce(run.run, kind=Kind.START), Message({"columns": run.columns}), note


def send_column_names(client: SiteClient, run: RunState, lacking: str) -> bool:
    """Let a started site, which has the agreed columns, send another site the names of those that it lacks.

    Returns whether one did. Without a roster all sites decline.
    """
    proposal = {"experiment": dict(run.experiment), "parties": list(run.layout.parties)}
    ask, tell, read = (Nonce(run.run, kind=Kind.NAMES, phase=phase) for phase in (ASK, TELL, READ))
    offered = _hello(client, run.run, proposal, (lacking,)).inbox
    key = client.ask((lacking,), ask, note=proposal).inbox
    if lacking not in offered or lacking not in key:
        return False
    columns = missing_at(offered[lacking]["columns"], run.columns)
    letter = Message({**key[lacking].arrays, "columns": columns})
    for helper in sorted(run.started):
        sealed = client.ask((helper,), tell, letter, {"for": lacking}).inbox
        if helper in sealed and client.ask((lacking,), read, sealed[helper], {"from": helper}).inbox:
            return True
    return False


def _rule(experiment: Mapping[str, Any]) -> str:
    """The rule by which columns are agreed on."""
    return str(experiment.get("columns", SAME))


def _hello(client: SiteClient, run: str, proposal: Mapping[str, Any], names: tuple[str, ...]) -> Responses:
    """Ask sites whether they would take part, and for hashes of their columns."""
    return client.ask(names, Nonce(run, kind=Kind.HELLO), note=proposal).check_messages(_require_columns)


def _require_columns(name: str, offer: Message) -> None:
    """Refuse an offer that is not one list of distinct hashes."""
    try:
        is_sound = set(offer.arrays) == {"columns"} and bool(listed(offer["columns"]))
    except ParameterError:
        is_sound = False
    if not is_sound:
        raise UploadError(
            f"Site {name!r} has not sent its columns as one list of distinct hashes, so its reply was not used. Check "
            "the version of partsong at the site."
        )


def _require_shared_key(client: SiteClient, run: str, proposal: Mapping[str, Any], hello: Responses) -> Responses:
    """Return the responses after sending the most common key's mark to sites with another shared key, which refuse."""
    marks = {name: str(note.get("shared_key", "")) for name, note in hello.notes.items()}
    strangers, usual = strangers_in(marks)
    if not strangers:
        return hello
    again = _hello(client, run, {**proposal, "shared_key": usual}, strangers)
    inbox = {name: message for name, message in hello.inbox.items() if name not in strangers} | again.inbox
    notes = {name: note for name, note in hello.notes.items() if name not in strangers} | again.notes
    return Responses(hello.on_party_error, inbox, notes, hello.refusals | again.refusals, hello.faults | again.faults)
