"""`partsong federation status`: how a federation is, at its server or at one of its sites."""

from __future__ import annotations

import math
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from partsong.cli.federation_books import books_told, show_books
from partsong.cli.guard import BAD_INPUT, guarded
from partsong.cli.options import AsJson, examples
from partsong.cli.outputs import put_json, visible

if TYPE_CHECKING:
    from partsong.consortium.server_folder import RunPlace, ServerFolder
    from partsong.consortium.site_folder import SiteFolder

STATUS = examples("partsong federation status --folder liver", "partsong federation status --folder site-north --json")


@guarded
def status(
    folder: Annotated[
        Path, typer.Option("--folder", "-f", help="The federation's folder, or that of a site.")
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Say who is there and how every run is; at a site: what has left, what was spent, and where results are.

    The exit code is 1 where a site refuses everything, for its ledger and its audit log are not whole, and where sites
    refuse the server, for its certificate has expired.
    """
    if (folder / "joined.toml").exists():
        from partsong.consortium.site_folder import SiteFolder

        told = site_told(SiteFolder.at(folder))
        show = _show_site
    else:
        from partsong.consortium.server_folder import ServerFolder

        told = server_told(ServerFolder.at(folder))
        show = _show_server
    if as_json:
        put_json(told)
    else:
        show(told)
    if told.get("refuses") is not None or _is_expired(told):
        raise typer.Exit(BAD_INPUT)


def server_told(server: ServerFolder) -> dict[str, Any]:
    """Sites and runs, as the coordinator sees them."""
    from partsong.consortium.locking import is_held

    is_up = is_held(server.path / "server.lock")
    served = _served_days(server) if is_up else None
    left = _whole_days(server.days_left())
    sites = _sites(server) if is_up and (left if served is None else served) >= 0 else _unknown(server)
    runs = {name: _run_told(server.run(name)) for name in server.runs()}
    models = {name: server.run(name).model for name in runs if server.run(name).model.exists()}
    told: dict[str, Any] = {"name": server.name, "address": server.address, "server": "running" if is_up else "stopped"}
    told |= {"folder": server.path, "certificate_days": left, "served_certificate_days": served}
    return {**told, "fingerprint": server.roster().fingerprint, "sites": sites, "runs": runs, "models": models}


def site_told(site: SiteFolder) -> dict[str, Any]:
    """What somebody who answers for a site asks: is it up, what has left, what was spent, where are the results."""
    from partsong.consortium.locking import is_held
    from partsong.federation.finishing import MODEL
    from partsong.federation.site_files import VOCABULARY

    roster = site.roster()
    names = {path.name for place in ("state/runs", "results") for path in (site.path / place).glob("[!.]*")}
    runs: dict[str, dict[str, Any]] = {}
    for name in sorted(names):
        result = site.path / "results" / name
        has_result, are_agreed = (result / MODEL).exists(), (site.path / "state" / "runs" / name / VOCABULARY).exists()
        status = "over" if has_result or are_agreed else "begun"
        runs[name] = {"status": status, "result": result if has_result else None}
    told: dict[str, Any] = {
        "site": site.site,
        "federation": site.federation,
        "address": site.address,
        "folder": site.path,
    }
    told["node"] = "running" if is_held(site.path / "node.lock") else "stopped"
    told |= {"fingerprint": None if roster is None else roster.fingerprint, "shared_key": site.shared_key() is not None}
    return {**told, **books_told(site), "runs": runs}


def _show_server(told: dict[str, Any]) -> None:
    typer.echo(f"Federation {told['name']!r}, {told['address']}: the server is {told['server']}.")
    roster = told["fingerprint"] if told["sites"] else "nobody yet"
    served = told["served_certificate_days"]
    is_old = "" if served is None else f" (the server shows another, {_validity(served)}: end it, and serve again)"
    typer.echo(f"Certificate: {_validity(told['certificate_days'])}{is_old}. Roster: {roster}")
    if told["certificate_days"] < 0:
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


def _show_site(told: dict[str, Any]) -> None:
    typer.echo(f"Site {told['site']!r} of federation {told['federation']!r}, {told['address']}: node {told['node']}.")
    typer.echo(f"Roster: {told['fingerprint'] or 'none yet: partsong federation join KIT --roster roster.toml'}")
    typer.echo(f"Shared key: {'yes' if told['shared_key'] else 'NONE: the server can test likely names of columns'}")
    for line in show_books(told):
        typer.echo(line)
    for name, run in told["runs"].items():
        where = f": {run['result']}" if run["result"] else ""
        typer.echo(f"  run  {visible(name):<24}{run['status']}{where}")


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
    """How a run is: running, starting, done, failed and why, or broken off and how it goes on."""
    from partsong.consortium.locking import is_held
    from partsong.consortium.run_files import result_in

    done = len(place.progress.read_text().splitlines()) if place.progress.exists() else 0
    if is_held(place.lock):
        return {"status": "running", "rounds_done": done}
    if place.result.exists():
        result = result_in(place)
        told = {name: value for name, value in result.items() if name in ("status", "error", "notes")}
        return {**told, "rounds_done": done}
    if is_held(place.command):
        return {"status": "starting", "rounds_done": done}
    resume = _resuming(place)
    return {"status": "broken off", "rounds_done": done, **({} if resume is None else {"resume": resume})}


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
    if not place.number.exists():
        return None
    return f"partsong federation run {experiment} --folder {folder} --name {place.name} --resume"
