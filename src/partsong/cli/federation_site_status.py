"""`partsong federation status` at a site: what has left, what was spent, where results are, what is to be mended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from partsong.cli.federation_books import books_told, show_books
from partsong.cli.federation_mending import Mending
from partsong.cli.outputs import visible
from partsong.errors import FileError, PartsongError

if TYPE_CHECKING:
    from partsong.consortium.roster import Listed
    from partsong.consortium.site_folder import SiteFolder
    from partsong.federation.policy import Policy

PIN_AGAIN = (
    "Put your own copy back. If there is none, {}have the fingerprint read to you by two other sites, by telephone, "
    "and give what you hear: partsong federation join KIT --roster roster.toml --fingerprint FINGERPRINT"
)


def site_told(site: SiteFolder) -> dict[str, Any]:
    """What somebody who answers for a site asks: is it up, what has left, what was spent, where are the results.

    `to_mend` is what it must not be without and has lost, or is damaged: `roster`, `shared_key`, `secret`, `policy`.
    """
    from partsong.consortium.locking import is_held

    mending = Mending()
    roster = mending.tried("roster", lambda: _pinned(site))
    key = mending.tried("shared_key", site.shared_key)
    mending.tried("secret", site.secret)
    policy = mending.tried("policy", lambda: _policy(site))
    books = books_told(site.path / "state", policy)
    told: dict[str, Any] = {name: getattr(site, name) for name in ("site", "federation", "address")}
    told |= {"folder": site.path, "node": "running" if is_held(site.path / "node.lock") else "stopped"}
    told |= {"fingerprint": None if roster is None else roster.fingerprint, "shared_key": key is not None}
    return {**told, "to_mend": mending.found, **books, "runs": _runs(site.path)}


def show_site(told: dict[str, Any]) -> None:
    """The same in lines for people."""
    mend = told["to_mend"]
    none_yet = "none yet: partsong federation join KIT --roster roster.toml"
    no_key = "NONE: the server can test likely names of columns"
    typer.echo(f"Site {told['site']!r} of federation {told['federation']!r}, {told['address']}: node {told['node']}.")
    typer.echo(f"Roster: {told['fingerprint'] or ('TO MEND' if 'roster' in mend else none_yet)}")
    typer.echo(f"Shared key: {'TO MEND' if 'shared_key' in mend else 'yes' if told['shared_key'] else no_key}")
    for text in mend.values():
        typer.echo(f"TO MEND: {visible(text)}")
    for line in show_books(told):
        typer.echo(line)
    for name, run in told["runs"].items():
        where = f": {run['result']}" if run["result"] else ""
        typer.echo(f"  run  {visible(name):<24}{run['status']}{where}")


def _pinned(site: SiteFolder) -> Listed | None:
    """The roster; None where none was pinned yet, an error with the way out where it is gone, or damaged."""
    from partsong.consortium.used_folder import ROSTER, has_had

    try:
        found = site.roster()
    except PartsongError as error:
        error.add_note(f"The site has pinned it, and answers nobody without it. {PIN_AGAIN.format('remove it, and ')}")
        raise
    if found is None and has_had(site.path, ROSTER):
        place = site.path / "roster.toml"
        raise FileError(
            f"{place} is gone: this site has pinned a roster, and answers nobody without it. {PIN_AGAIN.format('')}"
        )
    return found


def _policy(site: SiteFolder) -> Policy:
    """As it is in site.toml, which every error about it names."""
    from partsong.consortium.used_folder import require_policy

    require_policy(site.path)
    place = str(site.path / "site.toml")
    try:
        return site.policy()
    except PartsongError as error:
        if place not in str(error):
            error.add_note(f"It is in {place}.")
        raise


def _runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Those that were begun at a site, and where their results are."""
    from partsong.federation.finishing import MODEL
    from partsong.federation.site_files import VOCABULARY

    names = {path.name for place in ("state/runs", "results") for path in (folder / place).glob("[!.]*")}
    runs: dict[str, dict[str, Any]] = {}
    for name in sorted(names):
        result = folder / "results" / name
        has_result, are_agreed = (result / MODEL).exists(), (folder / "state" / "runs" / name / VOCABULARY).exists()
        status = "over" if has_result or are_agreed else "begun"
        runs[name] = {"status": status, "result": result if has_result else None}
    return runs
