"""`partsong federation status`: how a federation is, at its server or at one of its sites."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, TypeVar

import typer

from partsong.console.options import AsJson, examples
from partsong.console.output import BAD_INPUT, failure, handle_errors, put_json, visible
from partsong.errors import CompositionError, FileError, FormatError, PartsongError
from partsong.federation.audit_log import AuditLog, verify_log
from partsong.federation.consistency import require_consistent
from partsong.federation.flower import control
from partsong.federation.ledger import SiteLedger
from partsong.federation.locks import is_held
from partsong.federation.policy import Policy
from partsong.federation.setup import credentials
from partsong.federation.setup.server_folder import RunPlace, ServerFolder, is_starting, result_in, settings_in
from partsong.federation.setup.site_folder import SiteFolder
from partsong.federation.site.results import MODEL_FILE
from partsong.federation.site.state import VOCABULARY_FILE
from partsong.privacy.spending import USUAL_DELTA

STATUS = examples("partsong federation status --folder liver", "partsong federation status --folder site-north --json")
DAMAGED = "damaged"
"""How a run is of which a file is: nothing more is known of it."""
Seen = TypeVar("Seen")


@handle_errors
def status(
    folder: Annotated[
        Path, typer.Option("--folder", "-f", help="The federation's folder, or that of a site.")
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Say who is there and how every run is; at a site: what has left, what was spent, and where results are.

    The exit code is 1 where a site refuses everything, for its ledger and its audit log are not whole, where sites
    refuse the server, for its certificate has expired, and where a file is missing or damaged; all else is shown.
    """
    if (folder / "joined.toml").exists():
        told, show = site_told(SiteFolder.at(folder)), _show_site
        is_well = told["refuses"] is None
    else:
        told, show = server_told(ServerFolder.at(folder)), _show_server
        days = (told["certificate_days"], told["served_certificate_days"])
        is_well = all(left is None or left >= 0 for left in days)
    if as_json:
        put_json(told)
    else:
        show(told)
        for text in told["to_mend"].values():
            typer.echo(f"TO MEND: {visible(text)}")
    if not is_well or told["to_mend"] or any(run["status"] == DAMAGED for run in told["runs"].values()):
        raise typer.Exit(BAD_INPUT)


def _tried(to_mend: dict[str, str], what: str, look: Callable[[], Seen]) -> Seen | None:
    """What is seen there; None where it is missing or damaged, which is added to what has to be mended."""
    try:
        return look()
    except (PartsongError, OSError) as error:
        to_mend[what] = _reason(error)
        return None


def _reason(error: PartsongError | OSError) -> str:
    """An error with what was added to it, in one line."""
    return str(failure(error, BAD_INPUT)["error"])


# ---- site -------------------------------------------------------------------------------------------------------

SECOND_LOOK = 0.2
"""Seconds after which ledger and log are read again, if they do not tell of each other."""
PIN_AGAIN = (
    "Put your own copy back. If there is none, {}have the fingerprint read to you by two other sites, by telephone, "
    "and give what you hear: partsong federation join KIT --roster roster.toml --fingerprint FINGERPRINT"
)


def site_told(site: SiteFolder) -> dict[str, Any]:
    """What somebody who answers for a site asks: is it up, what has left, what was spent, where are the results.

    `to_mend` is what it must not be without and has lost, or is damaged: `roster`, `shared_key`, `secret`, `policy`.
    `refuses`: why it refuses everything, where it does.
    """
    to_mend: dict[str, str] = {}
    roster = _tried(to_mend, "roster", lambda: _pinned(site))
    key = _tried(to_mend, "shared_key", site.shared_key)
    _tried(to_mend, "secret", site.secret)
    policy = _tried(to_mend, "policy", site.policy)
    told: dict[str, Any] = {name: getattr(site, name) for name in ("site", "federation", "address")}
    told |= {"folder": site.path, "node": "running" if is_held(site.path / "node.lock") else "stopped"}
    told |= {"fingerprint": None if roster is None else roster.fingerprint, "shared_key": key is not None}
    ledger, log = SiteLedger(site.path / "state" / "ledger.jsonl"), site.path / "state" / "audit.jsonl"
    told |= {
        "to_mend": to_mend,
        **_spent(ledger, policy),
        "audit": _audit(log),
        "refuses": _why_it_refuses(ledger, log),
    }
    return {**told, "runs": _runs_at_site(site.path)}


def _pinned(site: SiteFolder) -> credentials.Listed | None:
    """The roster; None where none was pinned yet, an error with the way out where it is gone, or damaged."""
    try:
        found = site.roster()
    except PartsongError as error:
        error.add_note(f"The site has pinned it, and answers nobody without it. {PIN_AGAIN.format('remove it, and ')}")
        raise
    if found is None and site.has_roster:
        raise FileError(
            f"{site.path / 'roster.toml'} is missing: this site has pinned a roster, and answers nobody without it. "
            f"{PIN_AGAIN.format('')}"
        )
    return found


def _spent(ledger: SiteLedger, policy: Policy | None) -> dict[str, Any]:
    """What the ledger says; ε is None where no release had noise, or where they do not add up to one promise.

    `policy` None: it is gone, no budget is known, and ε is that of the usual δ.
    """
    budget = None if policy is None else policy.privacy
    told: dict[str, Any] = {"epsilon_allowed": None if budget is None else budget.epsilon, "epsilon_spent": None}
    try:
        books = ledger.load()
    except FormatError:
        return {**told, "releases": None, "releases_without_noise": None, "directions": None, "openings": []}
    with contextlib.suppress(CompositionError):
        if books.privacy_units:
            told["epsilon_spent"] = books.epsilon(USUAL_DELTA if budget is None else budget.delta)
    told |= {"releases": books.serial, "releases_without_noise": books.noiseless}
    told["directions"] = books.directions(0 if policy is None else policy.other_rows_since)
    told["directions"] += 0 if policy is None else policy.directions_before or 0
    return {**told, "openings": [asdict(one) for one in books.openings]}


def _audit(path: Path) -> dict[str, Any]:
    try:
        found = verify_log(path)
    except FormatError as error:
        return {"file": path, "is_sound": False, "first_bad_line": getattr(error, "line", None)}
    return {"file": path, "is_sound": True, "lines": found.lines, "last": found.last, "head": found.head}


def _why_it_refuses(ledger: SiteLedger, log: Path) -> str | None:
    """What the site says to itself before it answers anything. The two files are read one after the other, without the
    lock of a site that may be at work: what was charged and logged in between is seen at a second look.
    """
    why = None
    for wait in (0, SECOND_LOOK):
        time.sleep(wait)
        try:
            require_consistent(ledger, AuditLog(log))
        except PartsongError as error:
            why = str(error)
        else:
            return None
    return why


def _runs_at_site(folder: Path) -> dict[str, dict[str, Any]]:
    """Those that were begun at a site, and where their results are."""
    names = {path.name for place in ("state/runs", "results") for path in (folder / place).glob("[!.]*")}
    runs: dict[str, dict[str, Any]] = {}
    for name in sorted(names):
        result = folder / "results" / name
        has_result, are_agreed = (
            (result / MODEL_FILE).exists(),
            (folder / "state" / "runs" / name / VOCABULARY_FILE).exists(),
        )
        status = "over" if has_result or are_agreed else "begun"
        runs[name] = {"status": status, "result": result if has_result else None}
    return runs


def _show_site(told: Mapping[str, Any]) -> None:
    mend, audit = told["to_mend"], told["audit"]
    none_yet = "none yet: partsong federation join KIT --roster roster.toml"
    no_key = "NONE: the server can test likely names of columns"
    typer.echo(f"Site {told['site']!r} of federation {told['federation']!r}, {told['address']}: node {told['node']}.")
    typer.echo(f"Roster: {told['fingerprint'] or ('TO MEND' if 'roster' in mend else none_yet)}")
    typer.echo(f"Shared key: {'TO MEND' if 'shared_key' in mend else 'yes' if told['shared_key'] else no_key}")
    typer.echo(_released(told))
    if audit["is_sound"]:
        typer.echo(f"Audit log: {audit['lines']} lines, sound, last hash {audit['head']}")
    else:
        typer.echo(f"Audit log: NOT SOUND: partsong audit verify {quote(str(told['folder']))}")
    if told["refuses"] is not None:
        typer.echo(f"THE SITE REFUSES EVERY REQUEST (ledger): {told['refuses']}")
    for name, run in told["runs"].items():
        where = f": {run['result']}" if run["result"] else ""
        typer.echo(f"  run  {visible(name):<24}{run['status']}{where}")


def _released(told: Mapping[str, Any]) -> str:
    if told["releases"] is None:
        return "Released: unknown, for the ledger cannot be read"
    allowed, spent = told["epsilon_allowed"], told["epsilon_spent"]
    none = "its budget is not known" if "policy" in told["to_mend"] else "no budget in site.toml"
    budget = none if allowed is None else f"of {allowed:g} allowed"
    noiseless = f", {told['releases_without_noise']} of them without noise" if told["releases_without_noise"] else ""
    noiseless += f" ({told['directions']} combinations of rows)" if told["directions"] else ""
    cost = "0" if spent is None else f"{spent:.4g}"
    if spent is None and told["releases"] - (told["releases_without_noise"] or 0) > 0:
        cost = "releases about different units or relations do not compose"
    if told["openings"]:
        cost += f", of which an opening balance states {sum(one['epsilon'] or 0 for one in told['openings']):.4g}"
    of_what = "ε spent by the others" if noiseless else "ε spent"
    return f"Released: {told['releases']} times{noiseless}; {of_what}: {cost} ({budget})"


# ---- server -----------------------------------------------------------------------------------------------------


def server_told(server: ServerFolder) -> dict[str, Any]:
    """Sites and runs, as the coordinator sees them; `to_mend`: its `authority`, `certificate`, `coordinator_key`."""
    to_mend: dict[str, str] = {}
    authority = _tried(to_mend, "authority", lambda: server.authority)
    left = _tried(to_mend, "certificate", lambda: _whole_days(server.days_left()))
    if left is not None:
        _tried(to_mend, "certificate", server.require_pair)
    coordinator = _tried(to_mend, "coordinator_key", lambda: server.coordinator)
    is_up = is_held(server.path / "server.lock")
    served, sites = None, dict.fromkeys(server.cards(), "unknown")
    if is_up and authority is not None and left is not None:
        served = _served_days(server)
        sites = _sites(server) if (left if served is None else served) >= 0 else sites
    fingerprint = None if authority is None or coordinator is None else server.roster().fingerprint
    runs = {name: _run_told(server.run(name)) for name in server.runs()}
    models = {name: server.run(name).model for name in runs if server.run(name).model.exists()}
    told: dict[str, Any] = {"name": server.name, "address": server.address, "server": "running" if is_up else "stopped"}
    told |= {"folder": server.path, "certificate_days": left, "served_certificate_days": served}
    return {**told, "fingerprint": fingerprint, "to_mend": to_mend, "sites": sites, "runs": runs, "models": models}


def _whole_days(left: float) -> int:
    """To the nearest; a certificate that has expired has none left, and less than none."""
    return round(left) if left >= 0 else math.floor(left)


def _served_days(server: ServerFolder) -> int | None:
    """Days that the certificate is valid which a running server shows; None where it is the one in the folder."""
    own, shown = (server.path / "server.crt").read_bytes(), control.served_certificate(server)
    return (
        None
        if credentials.fingerprint(shown) == credentials.fingerprint(own)
        else _whole_days(credentials.days_left(shown))
    )


def _sites(server: ServerFolder) -> dict[str, str]:
    """Who is there, by a server that runs and can be asked."""
    with control.open_control(server) as connection:
        nodes = connection.nodes()
    found = {site: nodes.get(server.node_of(site) or 0) for site in server.cards()}
    return {site: "not registered" if node is None else node.status for site, node in found.items()}


def _run_told(place: RunPlace) -> dict[str, Any]:
    """How a run is, with the exchanges that are done; of one with a file that is damaged, which, and the way out."""
    done = 0
    try:
        done = len(place.progress.read_bytes().splitlines()) if place.progress.exists() else 0
        return {**_how_it_is(place), "rounds_done": done}
    except (PartsongError, OSError) as error:
        return {"status": DAMAGED, "error": _reason(error), "rounds_done": done}


def _how_it_is(place: RunPlace) -> dict[str, Any]:
    """Running, starting, done, failed and why, or broken off and the command that goes on with it, by the engine that
    it had last.
    """
    if is_held(place.lock):
        return {"status": "running"}
    if is_starting(place):
        return {"status": "starting"}
    if place.result.exists():
        return {name: value for name, value in result_in(place).items() if name in ("status", "error", "notes")}
    exchange_folder = settings_in(place).exchange_folder
    if exchange_folder is None and not (place.settings.exists() or place.number.exists()):
        return {"status": "broken off"}
    resume = f"partsong federation run {quote(str(place.experiment))} --folder {quote(str(place.folder.parent.parent))}"
    resume += (
        f" --name {place.name}"
        + ("" if exchange_folder is None else f" --engine files --exchange-folder {quote(exchange_folder)}")
        + " --resume"
    )
    return {"status": "broken off", "resume": resume}


def _show_server(told: Mapping[str, Any]) -> None:
    typer.echo(f"Federation {told['name']!r}, {told['address']}: the server is {told['server']}.")
    roster = (told["fingerprint"] or "TO MEND") if told["sites"] else "nobody yet"
    left, served = told["certificate_days"], told["served_certificate_days"]
    is_old = "" if served is None else f" (the server shows another, {_validity(served)}: end it, and serve again)"
    typer.echo(f"Certificate: {'TO MEND' if left is None else _validity(left)}{is_old}. Roster: {roster}")
    if left is not None and left < 0:
        renewing = f"partsong federation init {quote(str(told['folder']))} --renew"
        typer.echo(f"Sites refuse it: {renewing}, then end the server, and serve again.")
    for site, state in told["sites"].items():
        typer.echo(f"  site {site:<24}{state}")
    for name, run in told["runs"].items():
        where = f"; model: {told['models'][name]}" if name in told["models"] else ""
        typer.echo(f"  run  {name:<24}{run['status']}, {run['rounds_done']} exchanges done{where}")
        for line in (*run.get("error", "").splitlines(), *run.get("notes", ())):
            typer.echo(f"       {visible(line)}")
        if "resume" in run:
            typer.echo(f"       it goes on with: {run['resume']}")


def _validity(days: int) -> str:
    return f"{days} days left" if days >= 0 else f"expired {-days} day{'' if days == -1 else 's'} ago"
