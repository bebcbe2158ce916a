"""`partsong federation status`: the state of a federation, at its server or at one of its sites."""

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
from partsong.errors import CompositionError, FileError, FormatError, PartsongError, format_count
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
from partsong.privacy.spending import DEFAULT_DELTA

STATUS = examples("partsong federation status --folder liver", "partsong federation status --folder site-north --json")
DAMAGED = "damaged"
"""Status of a run with a damaged file."""
Seen = TypeVar("Seen")


@handle_errors
def status(
    folder: Annotated[Path, typer.Option("--folder", "-f", help="The folder of the federation or of a site.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Show connected sites and all runs; at a site: what has left, what was spent, and where results are.

    The exit code is 1 if a site refuses all requests because its ledger or audit log is incomplete, if the server's
    certificate has expired, or if a file is missing or damaged.
    """
    if (folder / "joined.toml").exists():
        report, show = describe_site(SiteFolder.at(folder)), _show_site
        is_well = report["refuses"] is None
    else:
        report, show = describe_server(ServerFolder.at(folder)), _show_server
        days = (report["certificate_days"], report["served_certificate_days"])
        is_well = all(left is None or left >= 0 for left in days)
    if as_json:
        put_json(report)
    else:
        show(report)
        for text in report["problems"].values():
            typer.echo(f"PROBLEM: {visible(text)}")
    if not is_well or report["problems"] or any(run["status"] == DAMAGED for run in report["runs"].values()):
        raise typer.Exit(BAD_INPUT)


def _tried(problems: dict[str, str], what: str, look: Callable[[], Seen]) -> Seen | None:
    """Call `look`; if a file is missing or damaged, record it in `problems` and return None."""
    try:
        return look()
    except (PartsongError, OSError) as error:
        problems[what] = _reason(error)
        return None


def _reason(error: PartsongError | OSError) -> str:
    """Format an error and its notes on one line."""
    return str(failure(error, BAD_INPUT)["error"])


# ---- site -------------------------------------------------------------------------------------------------------

SECOND_LOOK = 0.2
"""Seconds before ledger and log are read again if they disagree."""
PIN_AGAIN = (
    "Restore your backup. Without a backup, {}ask two other sites for the fingerprint by phone and pass it: "
    "partsong federation join KIT --roster roster.toml --fingerprint FINGERPRINT"
)


def describe_site(site: SiteFolder) -> dict[str, Any]:
    """Describe a site: whether it is running, what has left, what was spent, where results are.

    `problems`: required files that are missing or damaged (`roster`, `shared_key`, `secret`, `policy`).
    `refuses`: why the site refuses all requests, if it does.
    """
    problems: dict[str, str] = {}
    roster = _tried(problems, "roster", lambda: _pinned(site))
    key = _tried(problems, "shared_key", site.shared_key)
    _tried(problems, "secret", site.secret)
    policy = _tried(problems, "policy", site.policy)
    report: dict[str, Any] = {name: getattr(site, name) for name in ("site", "federation", "address")}
    report |= {"folder": site.path, "node": "running" if is_held(site.path / "node.lock") else "stopped"}
    report |= {"fingerprint": None if roster is None else roster.fingerprint, "shared_key": key is not None}
    ledger, log = SiteLedger(site.path / "state" / "ledger.jsonl"), site.path / "state" / "audit.jsonl"
    report |= {
        "problems": problems,
        **_spent(ledger, policy),
        "audit": _audit(log),
        "refuses": _why_it_refuses(ledger, log),
    }
    return {**report, "runs": _runs_at_site(site.path)}


def _pinned(site: SiteFolder) -> credentials.Listed | None:
    """Return the pinned roster, or None if there never was one; a lost or damaged roster is an error."""
    try:
        found = site.roster()
    except PartsongError as error:
        error.add_note(
            f"The site has pinned this roster and refuses all requests without it. {PIN_AGAIN.format('remove it, ')}"
        )
        raise
    if found is None and site.has_roster:
        raise FileError(
            f"{site.path / 'roster.toml'} is missing. The site has pinned it and refuses all requests without it. "
            f"{PIN_AGAIN.format('')}"
        )
    return found


def _spent(ledger: SiteLedger, policy: Policy | None) -> dict[str, Any]:
    """Summarize the ledger. ε is None if no release had noise, or if the releases do not compose.

    `policy` None: site.toml is lost, the budget is unknown, and ε is computed at the default δ.
    """
    budget = None if policy is None else policy.privacy
    report: dict[str, Any] = {"epsilon_allowed": None if budget is None else budget.epsilon, "epsilon_spent": None}
    try:
        books = ledger.load()
    except FormatError:
        return {**report, "releases": None, "releases_without_noise": None, "directions": None, "openings": []}
    with contextlib.suppress(CompositionError):
        if books.privacy_units:
            report["epsilon_spent"] = books.epsilon(DEFAULT_DELTA if budget is None else budget.delta)
    report |= {"releases": books.serial, "releases_without_noise": books.noiseless}
    report["directions"] = books.directions(0 if policy is None else policy.other_rows_since)
    report["directions"] += 0 if policy is None else policy.directions_before or 0
    return {**report, "openings": [asdict(one) for one in books.openings]}


def _audit(path: Path) -> dict[str, Any]:
    try:
        found = verify_log(path)
    except FormatError as error:
        return {"file": path, "is_sound": False, "first_bad_line": getattr(error, "line", None)}
    return {"file": path, "is_sound": True, "lines": found.lines, "last": found.last, "head": found.head}


def _why_it_refuses(ledger: SiteLedger, log: Path) -> str | None:
    """Return why the site refuses all requests, or None.

    The two files are read one after the other without the lock of a running site; a second reading sees what was
    charged and logged in between.
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
    """List the runs that were started at a site, and where their results are."""
    names = {path.name for place in ("state/runs", "results") for path in (folder / place).glob("[!.]*")}
    runs: dict[str, dict[str, Any]] = {}
    for name in sorted(names):
        result = folder / "results" / name
        has_result, are_agreed = (
            (result / MODEL_FILE).exists(),
            (folder / "state" / "runs" / name / VOCABULARY_FILE).exists(),
        )
        status = "finished" if has_result or are_agreed else "started"
        runs[name] = {"status": status, "result": result if has_result else None}
    return runs


def _show_site(report: Mapping[str, Any]) -> None:
    mend, audit = report["problems"], report["audit"]
    none_yet = "none yet: partsong federation join KIT --roster roster.toml"
    no_key = "NONE: the server can test guesses of column names"
    typer.echo(
        f"Site {report['site']!r} of federation {report['federation']!r}, {report['address']}: node {report['node']}."
    )
    typer.echo(f"Roster: {report['fingerprint'] or ('PROBLEM' if 'roster' in mend else none_yet)}")
    typer.echo(f"Shared key: {'PROBLEM' if 'shared_key' in mend else 'yes' if report['shared_key'] else no_key}")
    typer.echo(_released(report))
    if audit["is_sound"]:
        typer.echo(f"Audit log: {format_count(audit['lines'], 'line')}, sound, last hash {audit['head']}")
    else:
        typer.echo(f"Audit log: NOT SOUND: partsong audit verify {quote(str(report['folder']))}")
    if report["refuses"] is not None:
        typer.echo(f"THE SITE REFUSES EVERY REQUEST (ledger): {report['refuses']}")
    for name, run in report["runs"].items():
        where = f": {run['result']}" if run["result"] else ""
        typer.echo(f"  run  {visible(name):<24}{run['status']}{where}")


def _released(report: Mapping[str, Any]) -> str:
    if report["releases"] is None:
        return "Released: unknown, because the ledger cannot be read"
    allowed, spent = report["epsilon_allowed"], report["epsilon_spent"]
    none = "budget unknown" if "policy" in report["problems"] else "no budget in site.toml"
    budget = none if allowed is None else f"of {allowed:g} allowed"
    noiseless = (
        f", {report['releases_without_noise']} of them without noise" if report["releases_without_noise"] else ""
    )
    noiseless += f" ({format_count(report['directions'], 'combination')} of rows)" if report["directions"] else ""
    cost = "0" if spent is None else f"{spent:.4g}"
    if spent is None and report["releases"] - (report["releases_without_noise"] or 0) > 0:
        cost = "releases with different units or relations do not compose"
    if report["openings"]:
        cost += f", of which an opening balance states {sum(one['epsilon'] or 0 for one in report['openings']):.4g}"
    of_what = "ε spent by the other releases" if noiseless else "ε spent"
    return f"Released: {format_count(report['releases'], 'time')}{noiseless}; {of_what}: {cost} ({budget})"


# ---- server -----------------------------------------------------------------------------------------------------


def describe_server(server: ServerFolder) -> dict[str, Any]:
    """Describe sites and runs at the server; `problems`: its `authority`, `certificate`, `coordinator_key`."""
    problems: dict[str, str] = {}
    authority = _tried(problems, "authority", lambda: server.authority)
    left = _tried(problems, "certificate", lambda: _whole_days(server.days_left()))
    if left is not None:
        _tried(problems, "certificate", server.require_pair)
    coordinator = _tried(problems, "coordinator_key", lambda: server.coordinator)
    is_up = is_held(server.path / "server.lock")
    served, sites = None, dict.fromkeys(server.cards(), "unknown")
    if is_up and authority is not None and left is not None:
        served = _served_days(server)
        sites = _sites(server) if (left if served is None else served) >= 0 else sites
    fingerprint = None if authority is None or coordinator is None else server.roster().fingerprint
    runs = {name: _describe_run(server.run(name)) for name in server.runs()}
    models = {name: server.run(name).model for name in runs if server.run(name).model.exists()}
    report: dict[str, Any] = {
        "name": server.name,
        "address": server.address,
        "server": "running" if is_up else "stopped",
    }
    report |= {"folder": server.path, "certificate_days": left, "served_certificate_days": served}
    return {**report, "fingerprint": fingerprint, "problems": problems, "sites": sites, "runs": runs, "models": models}


def _whole_days(left: float) -> int:
    """Round to whole days; the days of an expired certificate are negative."""
    return round(left) if left >= 0 else math.floor(left)


def _served_days(server: ServerFolder) -> int | None:
    """Return the days left of the certificate that the running server uses; None if it is the one in the folder."""
    own, shown = (server.path / "server.crt").read_bytes(), control.served_certificate(server)
    return (
        None
        if credentials.fingerprint(shown) == credentials.fingerprint(own)
        else _whole_days(credentials.days_left(shown))
    )


def _sites(server: ServerFolder) -> dict[str, str]:
    """Ask the running server which sites are connected."""
    with control.open_control(server) as connection:
        nodes = connection.nodes()
    found = {site: nodes.get(server.node_of(site) or 0) for site in server.cards()}
    return {site: "not registered" if node is None else node.status for site, node in found.items()}


def _describe_run(place: RunPlace) -> dict[str, Any]:
    """Describe a run and its completed exchanges; for a damaged file, which one and how to fix it."""
    done = 0
    try:
        done = len(place.progress.read_bytes().splitlines()) if place.progress.exists() else 0
        return {**_run_status(place), "rounds_done": done}
    except (PartsongError, OSError) as error:
        return {"status": DAMAGED, "error": _reason(error), "rounds_done": done}


def _run_status(place: RunPlace) -> dict[str, Any]:
    """Return the status: running, starting, done, failed (and why), or interrupted with the command to resume."""
    if is_held(place.lock):
        return {"status": "running"}
    if is_starting(place):
        return {"status": "starting"}
    if place.result.exists():
        return {name: value for name, value in result_in(place).items() if name in ("status", "error", "notes")}
    exchange_folder = settings_in(place).exchange_folder
    if exchange_folder is None and not (place.settings.exists() or place.number.exists()):
        return {"status": "interrupted"}
    resume = f"partsong federation run {quote(str(place.experiment))} --folder {quote(str(place.folder.parent.parent))}"
    resume += (
        f" --name {place.name}"
        + ("" if exchange_folder is None else f" --engine files --exchange-folder {quote(exchange_folder)}")
        + " --resume"
    )
    return {"status": "interrupted", "resume": resume}


def _show_server(report: Mapping[str, Any]) -> None:
    typer.echo(f"Federation {report['name']!r}, {report['address']}: the server is {report['server']}.")
    roster = (report["fingerprint"] or "PROBLEM") if report["sites"] else "no site yet"
    left, served = report["certificate_days"], report["served_certificate_days"]
    is_old = "" if served is None else f" (the server uses another one, {_validity(served)}: restart it)"
    typer.echo(f"Certificate: {'PROBLEM' if left is None else _validity(left)}{is_old}. Roster: {roster}")
    if left is not None and left < 0:
        renewing = f"partsong federation init {quote(str(report['folder']))} --renew"
        typer.echo(f"Sites refuse an expired certificate. Run {renewing}, then restart the server.")
    for site, state in report["sites"].items():
        typer.echo(f"  site {site:<24}{state}")
    for name, run in report["runs"].items():
        where = f"; model: {report['models'][name]}" if name in report["models"] else ""
        typer.echo(f"  run  {name:<24}{run['status']}, {run['rounds_done']} exchanges done{where}")
        for line in (*run.get("error", "").splitlines(), *run.get("notes", ())):
            typer.echo(f"       {visible(line)}")
        if "resume" in run:
            typer.echo(f"       resume it with: {run['resume']}")


def _validity(days: int) -> str:
    return f"{days} days left" if days >= 0 else f"expired {-days} day{'' if days == -1 else 's'} ago"
