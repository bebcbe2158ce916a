"""Commands of the coordinator: set up a federation, admit sites, run and stop experiments."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import msgspec
import typer

from partsong.console.options import AsJson, examples
from partsong.console.output import handle_errors, put_result, require_writable, warn
from partsong.errors import FileError, ParameterError
from partsong.federation.columns import labels_of
from partsong.federation.commands.demo import DEMO, demo
from partsong.federation.commands.site import JOIN, SHARED_KEY, join, shared_key
from partsong.federation.commands.status import STATUS, status
from partsong.federation.experiment import Experiment, with_seed
from partsong.federation.flower import control, server_process
from partsong.federation.locks import held, holder_of, is_held
from partsong.federation.server.launch import (
    build_server_plan,
    has_started,
    load_run_state,
    run_on_transport,
    site_nodes,
)
from partsong.federation.server.setup_phase import require_same_sites
from partsong.federation.setup.credentials import Card
from partsong.federation.setup.server_folder import (
    TIMEOUT,
    RunPlace,
    RunSettings,
    ServerFolder,
    is_starting,
    number_in,
    require_not_ended,
    result_in,
    settings_in,
)
from partsong.federation.site.state import make_folder
from partsong.federation.transports import files
from partsong.federation.transports.base import require_name
from partsong.federation.wire import missing_result_advice
from partsong.io.write import write_bytes

# ---- federation server ------------------------------------------------------------------------------------------

INIT = examples(
    "partsong federation init liver --address nmf.example.org:8443 --site north --site south --site west",
    "partsong federation init liver --renew",
)
INVITE = examples("partsong federation invite north --folder liver")
ADMIT = examples("partsong federation admit north-card.toml south-card.toml --folder liver")
REMOVE = examples("partsong federation remove north --folder liver")
SERVE = examples("partsong federation serve --folder liver", "partsong federation serve --folder liver --host 0.0.0.0")
KIT = "Kit for {!r}: {}. Nothing in it is secret; it has to arrive unchanged."
ADMITTING = "The site joins with it, and sends card.toml back: partsong federation admit CARD --folder {}"
ENGINE = "flower: over TLS; files: through a folder that all reach, or that somebody carries."


class Engine(StrEnum):
    """What carries messages."""

    FLOWER = "flower"
    FILES = "files"


Folder = Annotated[Path, typer.Option("--folder", "-f", help="The federation's folder, as made by init.")]


@handle_errors
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder for all that the federation is.", show_default=False)],
    name: Annotated[str | None, typer.Option(help="Name of the federation.", show_default="the folder's")] = None,
    address: Annotated[str | None, typer.Option(help="host:port under which sites reach the server.")] = None,
    site: Annotated[list[str] | None, typer.Option(help="A site to make a startup kit for; can be repeated.")] = None,
    renew: Annotated[
        bool, typer.Option("--renew", help="A new certificate for the server of a federation that is there.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a federation: an authority, a certificate for the server, keys, and a startup kit for each site."""
    if renew:
        if name is not None or address is not None or site:
            raise ParameterError("--renew changes neither name, address nor sites. Leave them out.")
        made = ServerFolder.at(folder)
        made.renewed()
    else:
        if address is None:
            raise ParameterError("A new federation needs --address HOST:PORT.")
        for one in site or ():
            require_name(one, "A site")
        made = ServerFolder.made(folder, name or folder.resolve().name, address)
    kits = {one: made.invite(one) for one in dict.fromkeys(site or ())}
    left, is_served = round(made.require_valid()), is_held(made.path / "server.lock")
    if is_served:
        warn(
            "The server that runs still shows the certificate that it has begun with. End it (partsong federation stop "
            f"--server --folder {quote(str(folder))}) and serve again: runs can be resumed, and nodes come back."
        )
    lines = [
        f"Federation {made.name!r} is in {folder}; its certificate is valid for {left} days.",
        "Keep this folder to yourself: ca.key, control.key and coordinator.key are what it rests on.",
        *(KIT.format(one, kit) for one, kit in kits.items()),
    ]
    if kits:
        lines.append(f"Next: send each site its kit. {ADMITTING.format(quote(str(folder)))}")
    else:
        lines.append(f"Next: partsong federation invite SITE --folder {quote(str(folder))}")
    told = {"folder": folder, "name": made.name, "address": made.address, "certificate_days": left}
    put_result({**told, "is_served": is_served, "kits": kits}, lines, as_json)


@handle_errors
def invite(
    site: Annotated[str, typer.Argument(help="The name of a site.", show_default=False)],
    folder: Folder = Path(),
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The kit, a .zip.", show_default="in kits/")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a startup kit for a site: address, authority, what to do, and the roster once the site is in it."""
    server = ServerFolder.at(folder)
    kit = server.invite(site, output)
    roster = server.roster()
    listed = roster.fingerprint if site in roster.keys else None
    then = f"It has the roster, whose fingerprint is {listed}."
    if listed is None:
        then = ADMITTING.format(quote(str(folder)))
    put_result({"site": site, "kit": kit, "roster": listed}, (KIT.format(site, kit), then), as_json)


@handle_errors
def serve(
    folder: Folder = Path(),
    host: Annotated[
        str | None, typer.Option(help="Address to listen on, such as 0.0.0.0.", show_default="that of --address")
    ] = None,
) -> None:
    """Run the server, in the foreground, until Ctrl-C; nothing is left running afterwards."""
    server = ServerFolder.at(folder)
    left = server.require_valid()
    if left < 30:
        renewing = f"partsong federation init {quote(str(folder))} --renew"
        typer.echo(f"The certificate ends in {left:.0f} days: {renewing}", err=True)
    typer.echo(f"Serving federation {server.name!r} for {server.address}; end with Ctrl-C.", err=True)
    try:
        server_process.serve(server, host, lambda line: typer.echo(line, err=True))
    except KeyboardInterrupt:
        typer.echo("The server has stopped.", err=True)


@handle_errors
def admit(
    cards: Annotated[list[Path], typer.Argument(help="card.toml files of sites.", show_default=False)],
    folder: Folder = Path(),
    engine: Annotated[Engine, typer.Option(help=f"{ENGINE} Then no server has to run.")] = Engine.FLOWER,
    as_json: AsJson = False,
) -> None:
    """Take in cards of sites: their nodes are let in from now on, and the roster has their keys."""
    server = ServerFolder.at(folder)
    taken = [Card.read(path) for path in cards]
    if engine is Engine.FLOWER:
        _admit_nodes(server, taken)
    else:
        for card in taken:
            server.admit(card)
    names = [card.site for card in taken]
    _put_roster(server, f"Admitted: {', '.join(names)}", {"admitted": names}, as_json)


@handle_errors
def remove(
    site: Annotated[str, typer.Argument(help="The site to take out.", show_default=False)],
    folder: Folder = Path(),
    as_json: AsJson = False,
) -> None:
    """Take a site out: its node is not let in any more, and the roster is without it. Models that are made stay."""
    server = ServerFolder.at(folder)
    _remove_node(server, site)
    server.remove(site)
    _put_roster(server, f"Removed: {site}", {"removed": site}, as_json)


def _put_roster(server: ServerFolder, said: str, told: Mapping[str, Any], as_json: bool) -> None:
    """What was done, and the roster that all sites need now."""
    roster, place = server.roster(), server.path / "roster.toml"
    sites = sorted(roster.keys)
    lines = (
        f"{said}. Sites are now: {', '.join(sites) or 'none'}.",
        f"When all are in, send {place} to all. Each site compares its fingerprint BY TELEPHONE with two others:",
        f"  {roster.fingerprint}",
    )
    put_result({**told, "sites": sites, "fingerprint": roster.fingerprint, "file": place}, lines, as_json)


def _admit_nodes(server: ServerFolder, cards: Sequence[Card]) -> None:
    """A node is registered before its card is taken in; one that is known already keeps its number."""
    with control.open_control(server) as connection:
        for card in cards:
            server.require_admissible(card)
            number = connection.register(card.node_key, card.site)
            server.admit(card)
            server.set_node(card.site, number)


def _remove_node(server: ServerFolder, site: str) -> None:
    """Also one whose number was not written down, because `admit` was killed; that takes a server that runs."""
    card = server.cards().get(site)
    if card is None or (server.node_of(site) is None and not is_held(server.path / "server.lock")):
        return
    with control.open_control(server) as connection:
        number = connection.find_node(card.node_key, site)
        if number is not None:
            connection.unregister(number)


# ---- federation run report --------------------------------------------------------------------------------------
#
# What `partsong federation run` says: a line for each exchange, whom it waits for, and how a run has ended.


def line_of(told: Mapping[str, Any]) -> str:
    """What was told of a run under way, for people."""
    if "starting" in told:
        return f"starting the server's part of run {told['starting']!r}, which takes some seconds"
    if "waiting" in told:
        answered = f" ({told['answered']} of {told['of']} have answered)" if "of" in told else ""
        return f"waiting for {', '.join(told['waiting'])}{answered}"
    heard = f"{len(told['participants'])} site{'' if len(told['participants']) == 1 else 's'}"
    refused = "".join(f"; not {name}" for name in sorted(told["refused"]))
    most = max(told["bytes_up"].values(), default=0)
    which, after = f"exchange {told.get('round')} of {told.get('rounds')}", ""
    if "step" in told:
        which, after = f"words, step {told['step']} of at most {told['steps']}", f"; next: {told['next']}"
    return (
        f"{which}: {heard}{refused}, at most {most} bytes up and {told['bytes_down']} down each, "
        f"{told['seconds']:.1f} s{after}"
    )


def put_end(
    place: RunPlace, told: Mapping[str, Any], output: Path | None, as_json: bool, public: Sequence[str] = ()
) -> None:
    """Where the model of a run that is done goes, and how it went; `public` are names that were given for columns."""
    if output is not None:
        shutil.copyfile(place.model, output)
    model = output or place.model
    named = {"named_columns": _named(place, public)} if public else {}
    lines = [f"Done in {told['seconds']:.1f} s: {told['rounds']} exchanges.", f"Model: {model}"]
    for count in named.values():
        lines.append(f"{count} columns have one of the {len(public)} names in --names; the others keep their hashes.")
    put_result({**told, **named, "model": model, "folder": place.folder}, lines, as_json)
    for site, why in sorted(told.get("without_result", {}).items()):
        warn(f"Site {site!r} has no result of this run: {why} {missing_result_advice(why)}")


def _named(place: RunPlace, public: Sequence[str]) -> int:
    """How many columns of a run are called by names that are public."""
    record, known = load_run_state(place.state), set(public)
    labels = () if record is None else labels_of(record.columns, record.run, public)
    return sum(label in known for label in labels)


# ---- federation runs --------------------------------------------------------------------------------------------
#
# What a coordinator does with experiments: `run`, `stop`.

RUN = examples(
    "partsong federation run experiment.toml --folder liver -o model.safetensors",
    "partsong federation run experiment.toml --folder liver --resume",
    "partsong federation run experiment.toml --folder liver --engine files --exchange-folder /mnt/liver",
)
STOP = examples("partsong federation stop first-try --folder liver", "partsong federation stop --server --folder liver")


@handle_errors
def run(
    experiment: Annotated[Path, typer.Argument(help="experiment.toml: what everybody runs.", show_default=False)],
    folder: Folder = Path(),
    name: Annotated[str | None, typer.Option(help="What the run is called.", show_default="the file's name")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was broken off.")] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=1, help="Seconds that a site may take to answer.", show_default=f"{TIMEOUT:g}; --resume: as before"
        ),
    ] = None,
    engine: Annotated[Engine, typer.Option(help=ENGINE)] = Engine.FLOWER,
    exchange_folder: Annotated[
        Path | None, typer.Option(help="With --engine files: where requests are dropped.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the model goes as well (.safetensors).")
    ] = None,
    names: Annotated[
        Path | None,
        typer.Option(
            help="A text file with names of columns that are public, one a line; others are told by their hashes.",
            show_default="none; --resume: as before",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment over all sites, follow it, and write the model."""
    require_writable("--output", output, (".safetensors",))
    if (exchange_folder is None) == (engine is Engine.FILES):
        raise ParameterError("--engine files and --exchange-folder FOLDER go together.")
    given = () if names is None else _names_in(names)
    server = ServerFolder.at(folder)
    place, seed = _prepared(server, experiment, name or experiment.stem, resume, engine)
    before = settings_in(place)
    settings = RunSettings(
        before.timeout if timeout is None else timeout,
        before.names if names is None else given,
        None if exchange_folder is None else str(exchange_folder.absolute()),
    )
    if resume and (done := _done_before(place, settings.names)) is not None:
        typer.echo(f"Run {place.name!r} is done, and every site that was in it has been told.", err=as_json)
        return put_end(place, done, output, as_json, given)

    typer.echo(f"seed {seed}", err=as_json)
    try:
        with held(place.command, f"Another command follows run {place.name!r}"):
            write_bytes(place.settings, msgspec.json.encode(settings))
            told = _run_to_end(
                server, place, exchange_folder, lambda line: None if as_json else typer.echo(line_of(line))
            )
    except KeyboardInterrupt:
        typer.echo("Stopped. All whole exchanges are kept: --resume goes on with the run.", err=True)
        raise
    put_end(place, told, output, as_json, given)


@handle_errors
def stop(
    name: Annotated[str | None, typer.Argument(help="The run to stop.", show_default=False)] = None,
    folder: Folder = Path(),
    whole_server: Annotated[bool, typer.Option("--server", help="Stop the server itself.")] = False,
    as_json: AsJson = False,
) -> None:
    """Stop a run, which can be resumed, or the server."""
    if (name is None) == (not whole_server):
        raise ParameterError("Name the run to stop, or give --server for the server itself.")
    server = ServerFolder.at(folder)
    if name is None:
        holder = holder_of(server.path / "server.lock")
        if holder is None:
            raise FileError("The server does not run on this machine.")
        os.kill(holder, signal.SIGTERM)
        told: dict[str, Any] = {"stopped": "server", "process": holder}
    else:
        place = server.known_run(name)
        number, is_at_work = number_in(place), is_held(place.lock)
        if number is not None:
            with control.open_control(server) as connection:
                is_stopped = not connection.status(number).is_over and connection.stop(number)
            is_at_work = is_at_work or is_stopped
        if not is_at_work:
            raise _not_at_work(place, folder)
        control.end_run_process(place)
        told = {"stopped": name}
    put_result(told, (f"Stopped: {told['stopped']}.",), as_json)


def _not_at_work(place: RunPlace, folder: Path) -> FileError:
    """Why a run cannot be stopped."""
    if not is_starting(place):
        return FileError(
            f"Nobody works on run {place.name!r}: it was never started, is over, or was broken off and can be resumed. "
            f"Which of them: partsong federation status --folder {quote(str(folder))}"
        )
    return FileError(
        f"Run {place.name!r} is just starting (process {holder_of(place.command)}), and there is nothing to stop yet. "
        "Try again in some seconds, or end the command that starts it with Ctrl-C."
    )


def _run_to_end(
    server: ServerFolder, place: RunPlace, exchange_folder: Path | None, tell: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    """By the server that runs, or over files by this process."""
    if exchange_folder is None:
        return control.run_to_end(server, place, tell)
    return run_on_transport(lambda: files.request_transport(exchange_folder, server, place), server, place, tell)


def _names_in(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"--names {path} cannot be read: {error}. Check the path.") from error
    return tuple(dict.fromkeys(line for line in lines if line))


def _prepared(server: ServerFolder, experiment: Path, name: str, resume: bool, engine: Engine) -> tuple[RunPlace, int]:
    """The folder of a run with its experiment, and its seed; everything that can be checked here is.

    A name is used up once a site has begun: before that, an experiment that was corrected may have it.
    """
    before = Experiment.read(server.known_run(name).experiment) if resume else None
    wanted, written = with_seed(experiment, before)
    place = server.run(name)
    if before is None and has_started(place.state):
        raise FileError(f"There is a run {name!r} already. Go on with it by --resume, or choose another --name.")
    if before is not None and before.told() != wanted.told():
        raise ParameterError(f"Run {name!r} was begun with other settings. Resume it with its own, or name another.")
    record = None if before is None else load_run_state(place.state)
    if record is not None:
        require_same_sites(record, server.cards())
    if engine is Engine.FLOWER:
        control.require_flower()
        site_nodes(server)
    if not server.cards():
        admitting = f"partsong federation admit CARD --folder {quote(str(server.path))}"
        raise ParameterError(f"No site has been admitted yet. With the card of each: {admitting}")
    try:
        plan = build_server_plan(wanted, server)
    except ParameterError as error:  # about keys of the file, which are no options of this command
        raise ParameterError(f"{experiment}: {error}") from error
    if record is not None:
        require_not_ended(place, record, plan.exchanges)
    if before is None and place.folder.exists():
        _forget(place)
    make_folder(place.folder)
    write_bytes(place.experiment, written)
    return place, wanted.seed


def _forget(place: RunPlace) -> None:
    """Let go of a run that has begun at no site: its name is free for an experiment that was corrected."""
    busy, locks = f"Run {place.name!r} is being worked on by another process", (place.lock, place.command)
    with held(place.lock, busy), held(place.command, busy):
        for path in place.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path not in locks:
                path.unlink()


def _done_before(place: RunPlace, names: Sequence[str]) -> dict[str, Any] | None:
    """How a run has ended that is done, with these names of columns; None where something is left to do. A site where
    it was never started is not told its end: for that nothing is left to do.
    """
    told = result_in(place) if place.result.exists() else None
    if told is None or not place.model.exists() or settings_in(place).names != names:
        return None
    record = load_run_state(place.state)
    return told if told["status"] == "done" and record is not None and not record.without_result else None


# ---- federation -------------------------------------------------------------------------------------------------
#
# `partsong federation`: parties on their own machines, over TLS.

app = typer.Typer(
    name="federation",
    help="Run experiments between institutions: one coordinator, and sites that keep their rows.",
    epilog="Coordinator: init, invite, serve, admit, run. Site: shared-key, join, status. All on this machine: demo.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)

app.command(epilog=INIT)(init)
app.command(epilog=INVITE)(invite)
app.command(epilog=ADMIT)(admit)
app.command(epilog=REMOVE)(remove)
app.command(epilog=SERVE)(serve)
app.command("shared-key", epilog=SHARED_KEY)(shared_key)
app.command(epilog=JOIN)(join)
app.command(epilog=RUN)(run)
app.command(epilog=STATUS)(status)
app.command(epilog=STOP)(stop)
app.command(epilog=DEMO)(demo)
