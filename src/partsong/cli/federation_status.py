"""`partsong federation status`: how a federation is, at its server or at one of its sites."""

from __future__ import annotations

import math
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from partsong.cli.federation_mending import Mending, reason
from partsong.cli.federation_site_status import show_site, site_told
from partsong.cli.guard import BAD_INPUT, guarded
from partsong.cli.options import AsJson, examples
from partsong.cli.outputs import put_json, visible
from partsong.errors import PartsongError

if TYPE_CHECKING:
    from partsong.consortium.server_folder import RunPlace, ServerFolder

STATUS = examples("partsong federation status --folder liver", "partsong federation status --folder site-north --json")

DAMAGED = "damaged"
"""How a run is of which a file is: nothing more is known of it."""


@guarded
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
        from partsong.consortium.site_folder import SiteFolder

        told = site_told(SiteFolder.at(folder))
        show = show_site
    else:
        from partsong.consortium.server_folder import ServerFolder

        told = server_told(ServerFolder.at(folder))
        show = _show_server
    if as_json:
        put_json(told)
    else:
        show(told)
    has_damaged = any(run["status"] == DAMAGED for run in told["runs"].values())
    if told.get("refuses") is not None or _is_expired(told) or told["to_mend"] or has_damaged:
        raise typer.Exit(BAD_INPUT)


def server_told(server: ServerFolder) -> dict[str, Any]:
    """Sites and runs, as the coordinator sees them; `to_mend`: its `authority`, `certificate`, `coordinator_key`."""
    from partsong.consortium.locking import is_held

    mending = Mending()
    authority = mending.tried("authority", lambda: server.authority)
    left = mending.tried("certificate", lambda: _whole_days(server.days_left()))
    if left is not None:
        mending.tried("certificate", server.require_pair)
    coordinator = mending.tried("coordinator_key", lambda: server.coordinator)
    is_up = is_held(server.path / "server.lock")
    served, sites = None, _unknown(server)
    if is_up and authority is not None and left is not None:
        served = _served_days(server)
        sites = _sites(server) if (left if served is None else served) >= 0 else sites
    fingerprint = None if authority is None or coordinator is None else server.roster().fingerprint
    runs = {name: _run_told(server.run(name)) for name in server.runs()}
    models = {name: server.run(name).model for name in runs if server.run(name).model.exists()}
    told: dict[str, Any] = {"name": server.name, "address": server.address, "server": "running" if is_up else "stopped"}
    told |= {"folder": server.path, "certificate_days": left, "served_certificate_days": served}
    told |= {"fingerprint": fingerprint, "to_mend": mending.found}
    return {**told, "sites": sites, "runs": runs, "models": models}


def _show_server(told: dict[str, Any]) -> None:
    typer.echo(f"Federation {told['name']!r}, {told['address']}: the server is {told['server']}.")
    roster = (told["fingerprint"] or "TO MEND") if told["sites"] else "nobody yet"
    left, served = told["certificate_days"], told["served_certificate_days"]
    is_old = "" if served is None else f" (the server shows another, {_validity(served)}: end it, and serve again)"
    typer.echo(f"Certificate: {'TO MEND' if left is None else _validity(left)}{is_old}. Roster: {roster}")
    for text in told["to_mend"].values():
        typer.echo(f"TO MEND: {visible(text)}")
    if left is not None and left < 0:
        renewing = f"partsong federation init {quote(str(told['folder']))} --renew"
        typer.echo(f"Sites refuse it: {renewing}, then end the server, and serve again.")
    for site, state in told["sites"].items():
        typer.echo(f"  site {site:<24}{state}")
    for name, run in told["runs"].items():
        where = f"; model: {told['models'][name]}" if name in told["models"] else ""
        typer.echo(f"  run  {name:<24}{run['status']}, {run['rounds_done']} exchanges done{where}")
        for line in run.get("error", "").splitlines():
            typer.echo(f"       {visible(line)}")
        for line in run.get("notes", ()):
            typer.echo(f"       {visible(line)}")
        if "resume" in run:
            typer.echo(f"       it goes on with: {run['resume']}")


def _sites(server: ServerFolder) -> dict[str, str]:
    """Who is there, by a server that runs and can be asked."""
    from partsong.flower_app.control import controlling

    with controlling(server) as control:
        nodes = control.nodes()
    found = {site: nodes.get(server.node_of(site) or 0) for site in server.cards()}
    return {site: "not registered" if node is None else node.status for site, node in found.items()}


def _unknown(server: ServerFolder) -> dict[str, str]:
    """The same where nobody can be asked."""
    return dict.fromkeys(server.cards(), "unknown")


def _whole_days(left: float) -> int:
    """To the nearest; a certificate that has expired has none left, and less than none."""
    return round(left) if left >= 0 else math.floor(left)


def _validity(days: int) -> str:
    return f"{days} days left" if days >= 0 else f"expired {-days} day{'' if days == -1 else 's'} ago"


def _is_expired(told: dict[str, Any]) -> bool:
    """Whether the certificate that sites see, or will see, is not valid any more; a site has none."""
    days = (told.get("certificate_days"), told.get("served_certificate_days"))
    return any(left is not None and left < 0 for left in days)


def _served_days(server: ServerFolder) -> int | None:
    """Days that the certificate is valid which a running server shows; None where it is the one in the folder."""
    from partsong.consortium.certificates import days_left, fingerprint
    from partsong.flower_app.control import shown_certificate

    own, shown = (server.path / "server.crt").read_bytes(), shown_certificate(server)
    return None if fingerprint(shown) == fingerprint(own) else _whole_days(days_left(shown))


def _run_told(place: RunPlace) -> dict[str, Any]:
    """How a run is, with the exchanges that are done; of one with a file that is damaged, which, and the way out."""
    done = 0
    try:
        done = len(place.progress.read_bytes().splitlines()) if place.progress.exists() else 0
        return {**_how_it_is(place), "rounds_done": done}
    except (PartsongError, OSError) as error:
        return {"status": DAMAGED, "error": reason(error), "rounds_done": done}


def _how_it_is(place: RunPlace) -> dict[str, Any]:
    """Running, starting, done, failed and why, or broken off and how it goes on."""
    from partsong.consortium.locking import is_held
    from partsong.consortium.run_files import is_starting, result_in

    if is_held(place.lock):
        return {"status": "running"}
    if is_starting(place):
        return {"status": "starting"}
    if place.result.exists():
        return {name: value for name, value in result_in(place).items() if name in ("status", "error", "notes")}
    resume = _resuming(place)
    return {"status": "broken off", **({} if resume is None else {"resume": resume})}


def _resuming(place: RunPlace) -> str | None:
    """The command that goes on with a run that was broken off, by the engine that it had last; None where none had."""
    from partsong.consortium.run_files import settings_in

    settings = settings_in(place)
    experiment, folder = quote(str(place.experiment)), quote(str(place.folder.parent.parent))
    if (drop := settings.get("drop")) is not None:
        return (
            f"partsong federation run {experiment} --folder {folder} --name {place.name} --engine files --drop "
            f"{quote(drop)} --resume"
        )
    if not (place.settings.exists() or place.number.exists()):
        return None
    return f"partsong federation run {experiment} --folder {folder} --name {place.name} --resume"
