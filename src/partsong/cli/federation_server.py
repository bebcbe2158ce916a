"""What a coordinator does about sites: `init`, `invite`, `serve`, `admit`, `remove`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from partsong.cli.guard import guarded
from partsong.cli.options import AsJson, OptionalPath, OptionalText, examples
from partsong.cli.outputs import put_json
from partsong.errors import ParameterError, PartsongError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from partsong.consortium.roster import Card, Listed
    from partsong.consortium.server_folder import ServerFolder

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
    left = round(made.require_valid())
    if as_json:
        told = {"folder": folder, "name": made.name, "address": made.address, "certificate_days": left}
        put_json(told)
        return
    typer.echo(f"Federation {made.name!r} is in {folder}; its certificate is valid for {left} days.")
    typer.echo("Keep this folder to yourself: ca.key, control.key and coordinator.key are what it rests on.")
    typer.echo(f"Next: partsong federation invite SITE --folder {folder}")


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
        typer.echo("The site joins with it, and sends card.toml back: partsong federation admit CARD")


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
        typer.echo(f"The certificate ends in {left:.0f} days: partsong federation init {folder} --renew", err=True)
    typer.echo(f"Serving federation {server.name!r} for {server.address}; end with Ctrl-C.", err=True)
    try:
        superlink.serve(server, host)
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
    node = server.node_of(site) if site in server.cards() else None
    if node is not None:
        from partsong.flower_app.control import controlling

        with controlling(server) as control:
            if node in control.nodes():
                control.unregister(node)
    roster = server.remove(site)
    if as_json:
        put_json({"removed": site, **_told(roster), "file": server.path / "roster.toml"})
        return
    typer.echo(f"Removed: {site}. Sites are now: {', '.join(sorted(roster.keys)) or 'none'}.")
    typer.echo(f"Send {server.path / 'roster.toml'} to all others.")
    typer.echo(COMPARE)
    typer.echo(f"  {roster.fingerprint}")


def _admit_nodes(server: ServerFolder, cards: Sequence[Card]) -> None:
    from partsong.flower_app.control import controlling

    with controlling(server) as control:
        known = control.nodes()
        for card in cards:
            is_new = card.site not in server.cards()
            server.admit(card)
            if server.node_of(card.site) in known:
                continue
            try:
                server.set_node(card.site, control.register(card.node_key, card.site))
            except PartsongError:
                if is_new:
                    server.remove(card.site)
                raise


def _told(roster: Listed) -> dict[str, object]:
    return {"sites": sorted(roster.keys), "fingerprint": roster.fingerprint}
