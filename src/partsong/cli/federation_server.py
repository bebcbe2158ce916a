"""What a coordinator does about sites: `init`, `invite`, `serve`, `admit`, `remove`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from partsong.cli.guard import guarded
from partsong.cli.options import AsJson, OptionalPath, OptionalText, examples
from partsong.cli.outputs import put_json, warn
from partsong.errors import ParameterError, PartsongError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from partsong.consortium.roster import Card, Listed
    from partsong.consortium.server_folder import RunPlace, ServerFolder

INIT = examples(
    "partsong federation init liver --name liver --address nmf.example.org:8443",
    "partsong federation init liver --renew",
)
INVITE = examples("partsong federation invite north --folder liver")
ADMIT = examples("partsong federation admit north-card.toml south-card.toml --folder liver")
REMOVE = examples("partsong federation remove north --folder liver")
SERVE = examples("partsong federation serve --folder liver", "partsong federation serve --folder liver --host 0.0.0.0")
COMPARE = "Each site compares its fingerprint BY TELEPHONE with two other sites:"

ENGINE = "flower: over TLS; files: through a folder that all reach, or that somebody carries."


class Engine(StrEnum):
    """What carries messages."""

    FLOWER = "flower"
    FILES = "files"


Folder = Annotated[Path, typer.Option("--folder", "-f", help="The federation's folder, as made by init.")]


@guarded
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder for all that the federation is.", show_default=False)],
    name: Annotated[OptionalText, typer.Option(help="What the federation is called.", show_default=False)] = None,
    address: Annotated[
        OptionalText, typer.Option(help="host:port under which sites reach the server.", show_default=False)
    ] = None,
    renew: Annotated[
        bool, typer.Option("--renew", help="A new certificate for the server of a federation that is there.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a federation: an authority, a certificate for the server, and keys, in one folder."""
    from partsong.consortium.locking import is_held
    from partsong.consortium.server_folder import ServerFolder

    if renew:
        if name is not None or address is not None:
            raise ParameterError("--renew changes neither name nor address. Leave them out.")
        made = ServerFolder.at(folder)
        made.renewed()
    else:
        if name is None or address is None:
            raise ParameterError("A new federation needs --name and --address.")
        made = ServerFolder.made(folder, name, address)
    left, is_served = round(made.require_valid()), is_held(made.path / "server.lock")
    if is_served:
        warn(
            "The server that runs still shows the certificate that it has begun with. End it (partsong federation stop "
            f"--server --folder {quote(str(folder))}) and serve again: runs can be resumed, and nodes come back."
        )
    if as_json:
        told = {"folder": folder, "name": made.name, "address": made.address, "certificate_days": left}
        put_json({**told, "is_served": is_served})
        return
    typer.echo(f"Federation {made.name!r} is in {folder}; its certificate is valid for {left} days.")
    typer.echo("Keep this folder to yourself: ca.key, control.key and coordinator.key are what it rests on.")
    typer.echo(f"Next: partsong federation invite SITE --folder {quote(str(folder))}")


@guarded
def invite(
    site: Annotated[str, typer.Argument(help="The name of a site.", show_default=False)],
    folder: Folder = Path(),
    output: Annotated[
        OptionalPath, typer.Option("--output", "-o", help="The kit: a .zip, or a folder.", show_default="in kits/")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a startup kit for a site: address, authority, what to do, and the roster once the site is in it."""
    from partsong.consortium.server_folder import ServerFolder

    server = ServerFolder.at(folder)
    kit = server.invite(site, output)
    roster = server.roster()
    is_listed = site in roster.keys
    if as_json:
        put_json({"site": site, "kit": kit, "roster": roster.fingerprint if is_listed else None})
        return
    typer.echo(f"Kit for {site!r}: {kit}. Nothing in it is secret; it has to arrive unchanged.")
    if is_listed:
        typer.echo(f"It has the roster, whose fingerprint is {roster.fingerprint}.")
    else:
        admitting = f"partsong federation admit CARD --folder {quote(str(folder))}"
        typer.echo(f"The site joins with it, and sends card.toml back: {admitting}")


@guarded
def serve(
    folder: Folder = Path(),
    host: Annotated[
        OptionalText, typer.Option(help="Address to listen on, such as 0.0.0.0.", show_default="that of --address")
    ] = None,
) -> None:
    """Run the server, in the foreground, until Ctrl-C; nothing is left running afterwards."""
    from partsong.consortium.server_folder import ServerFolder
    from partsong.flower_app import superlink

    server = ServerFolder.at(folder)
    left = server.require_valid()
    if left < 30:
        renewing = f"partsong federation init {quote(str(folder))} --renew"
        typer.echo(f"The certificate ends in {left:.0f} days: {renewing}", err=True)
    typer.echo(f"Serving federation {server.name!r} for {server.address}; end with Ctrl-C.", err=True)
    try:
        superlink.serve(server, host, lambda line: typer.echo(line, err=True))
    except KeyboardInterrupt:
        typer.echo("The server has stopped.", err=True)


@guarded
def admit(
    cards: Annotated[list[Path], typer.Argument(help="card.toml files of sites.", show_default=False)],
    folder: Folder = Path(),
    engine: Annotated[Engine, typer.Option(help=f"{ENGINE} Then no server has to run.")] = Engine.FLOWER,
    as_json: AsJson = False,
) -> None:
    """Take in cards of sites: their nodes are let in from now on, and the roster has their keys."""
    from partsong.consortium.roster import Card
    from partsong.consortium.server_folder import ServerFolder

    server = ServerFolder.at(folder)
    taken = [Card.read(path) for path in cards]
    if engine is Engine.FLOWER:
        _admit_nodes(server, taken)
    else:
        for card in taken:
            server.admit(card)
    roster = server.roster()
    if as_json:
        put_json({"admitted": [card.site for card in taken], **_told(roster), "file": server.path / "roster.toml"})
        return
    typer.echo(f"Admitted: {', '.join(card.site for card in taken)}. Sites are now: {', '.join(sorted(roster.keys))}.")
    typer.echo(f"When all are in, send {server.path / 'roster.toml'} to all.")
    typer.echo(COMPARE)
    typer.echo(f"  {roster.fingerprint}")


@guarded
def remove(
    site: Annotated[str, typer.Argument(help="The site to take out.", show_default=False)],
    folder: Folder = Path(),
    as_json: AsJson = False,
) -> None:
    """Take a site out: its node is not let in any more, and the roster is without it. Models that are made stay."""
    from partsong.consortium.server_folder import ServerFolder

    server = ServerFolder.at(folder)
    _remove_node(server, site)
    roster = server.remove(site)
    if as_json:
        put_json({"removed": site, **_told(roster), "file": server.path / "roster.toml"})
        return
    typer.echo(f"Removed: {site}. Sites are now: {', '.join(sorted(roster.keys)) or 'none'}.")
    typer.echo(f"Send {server.path / 'roster.toml'} to all others.")
    typer.echo(COMPARE)
    typer.echo(f"  {roster.fingerprint}")


def stop_over_files(place: RunPlace, as_json: bool) -> None:
    """End the process that works on a run over files, as Ctrl-C does where it was started; it can be resumed."""
    from partsong.flower_app.following import end_work

    end_work(place)
    if as_json:
        put_json({"stopped": place.name, "was_running": True})
        return
    typer.echo(f"Stopped: {place.name}. What was dropped for sites stays there: --resume hears who has answered it.")


def _admit_nodes(server: ServerFolder, cards: Sequence[Card]) -> None:
    """A node that is known already keeps its number, also where `admit` was killed before that was written down."""
    from partsong.flower_app.control import controlling

    with controlling(server) as control:
        for card in cards:
            is_new = card.site not in server.cards()
            server.admit(card)
            try:
                number = control.known(card.node_key, card.site)
                number = control.register(card.node_key, card.site) if number is None else number
                server.set_node(card.site, number)
            except PartsongError:
                if is_new:
                    server.remove(card.site)
                raise


def _remove_node(server: ServerFolder, site: str) -> None:
    """Also one whose number was not written down, because `admit` was killed; that takes a server that runs."""
    from partsong.consortium.locking import is_held

    card = server.cards().get(site)
    if card is None:
        return
    node = server.node_of(site)
    if node is None and not is_held(server.path / "server.lock"):
        return
    from partsong.flower_app.control import controlling

    with controlling(server) as control:
        found = control.known(card.node_key, site) if node is None else node
        if found in control.nodes():
            control.unregister(found)


def _told(roster: Listed) -> dict[str, object]:
    return {"sites": sorted(roster.keys), "fingerprint": roster.fingerprint}
