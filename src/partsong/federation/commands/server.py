"""Commands of the coordinator: set up a federation, admit sites, run and stop experiments."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from partsong.console.options import AsJson, OptionalFloat, OptionalPath, OptionalText, examples
from partsong.console.output import BAD_INPUT, guarded, put_json, require_writable, warn
from partsong.errors import FileError, ParameterError, PartsongError
from partsong.federation.commands import site as federation_secret
from partsong.federation.commands import status as federation_status
from partsong.federation.setup.run_place import TIMEOUT

if TYPE_CHECKING:
    from partsong.federation.setup.credentials import Card, Listed
    from partsong.federation.setup.run_place import RunPlace
    from partsong.federation.setup.server_folder import ServerFolder


# ---- federation demo --------------------------------------------------------------------------------------------
#
# `partsong federation demo`: a server and four sites as processes of their own, on this machine.

DEMO = examples("partsong federation demo", "partsong federation demo --keep here")


@guarded
def demo(
    keep: Annotated[
        OptionalPath, typer.Option(help="A new folder in which all files stay.", show_default="nothing stays")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """A federation on this machine, with one site killed on the way; ends by comparing bits with one process."""
    from partsong.federation.commands.demo import run_demo

    if keep is not None and keep.exists():
        raise FileError(f"--keep {keep}: there is something already. Name a new folder.")
    with tempfile.TemporaryDirectory() as scratch:
        folder = keep or Path(scratch) / "demo"
        folder.mkdir(parents=True)
        told = run_demo(folder.resolve(), lambda line: typer.echo(line, err=as_json))
    if as_json:
        put_json(told)
    if not told["is_same"]:
        raise typer.Exit(BAD_INPUT)


# ---- federation server ------------------------------------------------------------------------------------------

INIT = examples(
    "partsong federation init liver --address nmf.example.org:8443 --site north --site south --site west",
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
    name: Annotated[OptionalText, typer.Option(help="Name of the federation.", show_default="the folder's")] = None,
    address: Annotated[
        OptionalText, typer.Option(help="host:port under which sites reach the server.", show_default=False)
    ] = None,
    site: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="A site to make a startup kit for; can be repeated.", show_default=False),
    ] = None,
    renew: Annotated[
        bool, typer.Option("--renew", help="A new certificate for the server of a federation that is there.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a federation: an authority, a certificate for the server, keys, and a startup kit for each site."""
    from partsong.federation.locks import is_held
    from partsong.federation.setup.credentials import require_name
    from partsong.federation.setup.server_folder import ServerFolder

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
    if as_json:
        told = {"folder": folder, "name": made.name, "address": made.address, "certificate_days": left}
        put_json({**told, "is_served": is_served, "kits": kits})
        return
    typer.echo(f"Federation {made.name!r} is in {folder}; its certificate is valid for {left} days.")
    typer.echo("Keep this folder to yourself: ca.key, control.key and coordinator.key are what it rests on.")
    for one, kit in kits.items():
        typer.echo(f"Kit for {one!r}: {kit}. Nothing in it is secret; it has to arrive unchanged.")
    if not kits:
        typer.echo(f"Next: partsong federation invite SITE --folder {quote(str(folder))}")
    elif not renew:
        typer.echo("Next: send each site its kit. Each joins with it, and sends card.toml back:")
        typer.echo(f"  partsong federation admit CARD … --folder {quote(str(folder))}")


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
    from partsong.federation.setup.server_folder import ServerFolder

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
    from partsong.federation.flower import server_process as superlink
    from partsong.federation.setup.server_folder import ServerFolder

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
    from partsong.federation.setup.credentials import Card
    from partsong.federation.setup.server_folder import ServerFolder

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
    from partsong.federation.setup.server_folder import ServerFolder

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
    from partsong.federation.flower.control import end_work

    end_work(place)
    if as_json:
        put_json({"stopped": place.name, "was_running": True})
        return
    typer.echo(f"Stopped: {place.name}. What was dropped for sites stays there: --resume hears who has answered it.")


def _admit_nodes(server: ServerFolder, cards: Sequence[Card]) -> None:
    """A node that is known already keeps its number, also where `admit` was killed before that was written down."""
    from partsong.federation.flower.control import controlling

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
    from partsong.federation.locks import is_held

    card = server.cards().get(site)
    if card is None:
        return
    node = server.node_of(site)
    if node is None and not is_held(server.path / "server.lock"):
        return
    from partsong.federation.flower.control import controlling

    with controlling(server) as control:
        found = control.known(card.node_key, site) if node is None else node
        if found in control.nodes():
            control.unregister(found)


def _told(roster: Listed) -> dict[str, object]:
    return {"sites": sorted(roster.keys), "fingerprint": roster.fingerprint}


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
    is_step = "step" in told
    which = f"words, step {told['step']} of at most {told['steps']}" if is_step else _exchange(told)
    after = f"; next: {told['next']}" if is_step else ""
    return (
        f"{which}: {heard}{refused}, at most {most} bytes up and {told['bytes_down']} down each, "
        f"{told['seconds']:.1f} s{after}"
    )


def put_end(
    place: RunPlace, told: Mapping[str, Any], output: Path | None, as_json: bool, public: Sequence[str] = ()
) -> None:
    """Where the model of a run that is done goes, and how it went; `public` are names that were given for columns."""
    from partsong.federation.wire import way_to_result

    if output is not None:
        shutil.copyfile(place.model, output)
    model = output or place.model
    if as_json:
        named = {"named_columns": _named(place, public)} if public else {}
        put_json({**told, **named, "model": model, "folder": place.folder})
        return
    missed = missed_in(place, told)
    typer.echo(f"Done in {told['seconds']:.1f} s: {told['rounds']} exchanges, {missed} times a site was not there.")
    typer.echo(f"Model: {model}")
    for site, why in sorted(told.get("without_result", {}).items()):
        warn(f"Site {site!r} has no result of this run: {why} {way_to_result(why)}")
    if public and not _named(place, public):
        warn(
            f"No column is called by a name in --names ({len(public)} there), and all keep their hashes. Where sites "
            "share a key, nobody without it can tell: names are then known at the sites alone. Else compare the file "
            "with the names at a site, letter by letter."
        )


def _named(place: RunPlace, public: Sequence[str]) -> int:
    """How many columns of a run are called by names that are public."""
    from partsong.federation.columns import labels_of
    from partsong.federation.server.launch import record_in

    record, known = record_in(place.state), set(public)
    labels = () if record is None else labels_of(record.columns, record.run, public)
    return sum(label in known for label in labels)


def missed_in(place: RunPlace, told: Mapping[str, Any]) -> int:
    """How often a site was not there that the experiment has asked for; who was not drawn for a round was not."""
    from partsong.federation.experiment import Experiment

    schedule = Experiment.read(place.experiment).schedule(len(told["parties"]))
    asked = {index: set(schedule.participants(told["parties"], int(index))) for index in told["absent"]}
    return sum(len(asked[index] & set(names)) for index, names in told["absent"].items())


def _exchange(told: Mapping[str, Any]) -> str:
    return f"exchange {told['round']} of {told['rounds']}"


# ---- federation runs --------------------------------------------------------------------------------------------
#
# What a coordinator does with experiments: `run`, `stop`.

RUN = examples(
    "partsong federation run experiment.toml --folder liver -o model.safetensors",
    "partsong federation run experiment.toml --folder liver --resume",
    "partsong federation run experiment.toml --folder liver --engine files --drop /mnt/liver",
)
STOP = examples("partsong federation stop first-try --folder liver", "partsong federation stop --server --folder liver")


@guarded
def run(
    experiment: Annotated[Path, typer.Argument(help="experiment.toml: what everybody runs.", show_default=False)],
    folder: Folder = Path(),
    name: Annotated[OptionalText, typer.Option(help="What the run is called.", show_default="the file's name")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was broken off.")] = False,
    timeout: Annotated[
        OptionalFloat,
        typer.Option(
            min=1, help="Seconds that a site may take to answer.", show_default=f"{TIMEOUT:g}; --resume: as before"
        ),
    ] = None,
    engine: Annotated[Engine, typer.Option(help=ENGINE)] = Engine.FLOWER,
    drop: Annotated[
        OptionalPath, typer.Option(help="With --engine files: where requests are dropped.", show_default=False)
    ] = None,
    output: Annotated[
        OptionalPath, typer.Option("--output", "-o", help="Where the model goes as well (.safetensors).")
    ] = None,
    names: Annotated[
        OptionalPath,
        typer.Option(
            help="A text file with names of columns that are public, one a line; others are told by their hashes.",
            show_default="none; --resume: as before",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment over all sites, follow it, and write the model."""
    if output is not None:
        require_writable("--output", output, (".safetensors",))
    if (drop is None) == (engine is Engine.FILES):
        raise ParameterError("--engine files and --drop FOLDER go together.")
    from partsong.federation.setup.credentials import write
    from partsong.federation.setup.server_folder import ServerFolder

    public = None if names is None else _names_in(names)
    server = ServerFolder.at(folder)
    place, seed = _prepared(server, experiment, name or experiment.stem, resume, engine)
    settings = _settings(place, timeout, public)
    given = public or []
    if resume and (before := _done_before(place, settings["names"])) is not None:
        if not as_json:
            has_told = "every site that was in it has been told"
            typer.echo(f"Run {place.name!r} is done, and {has_told}: there is nothing to go on with.")
        return put_end(place, before, output, as_json, given)
    over = {} if drop is None else {"drop": str(drop.absolute())}
    write(place.settings, json.dumps({**settings, **over}) + "\n")

    def tell(line: Mapping[str, Any]) -> None:
        if not as_json:
            typer.echo(line_of(line))

    typer.echo(f"seed {seed}", err=as_json)

    try:
        with _commanding(place):
            told = _run_to_end(server, place, drop, tell)
    except KeyboardInterrupt:
        typer.echo("Stopped. All whole exchanges are kept: --resume goes on with the run.", err=True)
        raise
    put_end(place, told, output, as_json, given)


@contextmanager
def _commanding(place: RunPlace) -> Iterator[None]:
    """By which `status` knows a run that is just starting; another command that follows it as well is no obstacle."""
    from partsong.federation.locks import held

    with ExitStack() as stack:
        with suppress(FileError):
            stack.enter_context(held(place.command, "another command follows it"))
        yield


@guarded
def stop(
    name: Annotated[OptionalText, typer.Argument(help="The run to stop.", show_default=False)] = None,
    folder: Folder = Path(),
    whole_server: Annotated[bool, typer.Option("--server", help="Stop the server itself.")] = False,
    as_json: AsJson = False,
) -> None:
    """Stop a run, which can be resumed, or the server."""
    from partsong.federation.locks import holder_of, is_held
    from partsong.federation.setup.server_folder import ServerFolder

    if (name is None) == (not whole_server):
        raise ParameterError("Name the run to stop, or give --server for the server itself.")
    server = ServerFolder.at(folder)
    if whole_server:
        holder = holder_of(server.path / "server.lock")
        if holder is None:
            raise FileError("The server does not run on this machine.")
        os.kill(holder, signal.SIGTERM)
        told: dict[str, Any] = {"stopped": "server", "process": holder}
    else:
        from partsong.federation.flower.control import controlling, end_work
        from partsong.federation.setup.run_place import number_in

        place = server.known_run(str(name))
        number = number_in(place)
        if number is None:
            if is_held(place.lock):
                return stop_over_files(place, as_json)
            raise _not_at_work(place, f"Run {name!r} was never started, or is over.")
        with controlling(server) as control:
            is_over = control.status(number).is_over
            if is_over and not is_held(place.lock):
                raise _not_at_work(
                    place,
                    f"Run {name!r} is not being worked on: it is over, or was broken off and can be resumed. Which of "
                    f"them: partsong federation status --folder {quote(str(folder))}",
                )
            told = {"stopped": name, "was_running": is_over or control.stop(number)}
        end_work(place)
    if as_json:
        put_json(told)
    else:
        typer.echo(f"Stopped: {told['stopped']}.")


def _not_at_work(place: RunPlace, otherwise: str) -> FileError:
    """Why a run cannot be stopped that nobody works on: a command is just starting it, or what is said otherwise."""
    from partsong.federation.locks import holder_of
    from partsong.federation.setup.run_place import is_starting

    if not is_starting(place):
        return FileError(otherwise)
    holder = holder_of(place.command)
    return FileError(
        f"Run {place.name!r} is just starting, and there is nothing to stop yet. Try again in some seconds, or end the "
        f"command that starts it{f' (process {holder})' if holder else ''} with Ctrl-C where it was given."
    )


def _run_to_end(
    server: ServerFolder, place: RunPlace, drop: Path | None, tell: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    """By the server that runs, or over files by this process."""
    from partsong.federation.flower.control import run_to_end
    from partsong.federation.server.launch import run_over
    from partsong.federation.transports.files import requests_in

    if drop is None:
        return run_to_end(server, place, tell)

    return run_over(lambda: requests_in(drop, server, place), server, place, tell)


def _settings(place: RunPlace, timeout: float | None, names: list[str] | None) -> dict[str, Any]:
    """How patiently, and which names are public; what was not given is as it was when the run was last worked on."""
    from partsong.federation.setup.run_place import settings_in

    kept = settings_in(place)
    return {
        "timeout": kept.get("timeout", TIMEOUT) if timeout is None else timeout,
        "names": kept.get("names", []) if names is None else names,
    }


def _names_in(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"--names {path} cannot be read: {error}. Check the path.") from error
    return list(dict.fromkeys(line for line in lines if line))


def _prepared(server: ServerFolder, experiment: Path, name: str, resume: bool, engine: Engine) -> tuple[RunPlace, int]:
    """The folder of a run with its experiment, and its seed; everything that can be checked here is."""
    from partsong.federation.experiment import Experiment, with_seed
    from partsong.federation.flower.control import require_flower
    from partsong.federation.server.launch import has_begun, nodes_of, plan_for, record_in
    from partsong.federation.server.setup_phase import require_same_sites
    from partsong.federation.setup.credentials import write
    from partsong.federation.setup.run_place import require_not_ended
    from partsong.federation.site.state import make_folder

    before = Experiment.read(server.known_run(name).experiment) if resume else None
    wanted, written = with_seed(experiment, before)
    place = server.run(name)
    is_free, is_other = place.is_begun and not has_begun(place.state), False
    if before is not None:
        is_other = before.told() != wanted.told()
        if is_other and not is_free:
            raise ParameterError(
                f"Run {name!r} was begun with other settings. Resume it with its own, or name another."
            )
        record = record_in(place.state)
        if record is not None and not is_other:
            require_same_sites(record, server.cards())
            require_not_ended(place, record, plan_for(wanted, server).exchanges)
    elif place.is_begun and not (is_free and place.result.exists()):
        raise FileError(f"There is a run {name!r} already. Go on with it by --resume, or choose another --name.")
    if engine is Engine.FLOWER:
        require_flower()
        nodes_of(server)
    if not server.cards():
        admitting = f"partsong federation admit CARD --folder {quote(str(server.path))}"
        raise ParameterError(f"No site has been admitted yet. With the card of each: {admitting}")
    with _about(experiment):
        plan_for(wanted, server)
    if is_free and (is_other or not resume):
        _forget(place)
    make_folder(place.folder)
    write(place.experiment, written)
    return place, wanted.seed


def _forget(place: RunPlace) -> None:
    """Let go of a run that has begun at no site: its name is free for an experiment that was corrected."""
    from partsong.federation.locks import held

    busy, locks = f"Run {place.name!r} is being worked on by another process", (place.lock, place.command)
    with held(place.lock, busy), held(place.command, busy):
        for path in place.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path not in locks:
                path.unlink()


def _done_before(place: RunPlace, public: Sequence[str]) -> dict[str, Any] | None:
    """How a run has ended that is done, with these names of columns; None where something is left to do. A site where
    it was never started is not told its end: for that nothing is left to do.
    """
    from partsong.federation.server.launch import record_in
    from partsong.federation.setup.run_place import result_in, settings_in

    told = result_in(place) if place.result.exists() else None
    if told is None or not (place.model.exists() and place.settings.exists()):
        return None
    names, record = settings_in(place).get("names", []), record_in(place.state)
    is_told = told["status"] == "done" and record is not None and not record.without_result
    return told if is_told and public == names else None


@contextmanager
def _about(experiment: Path) -> Iterator[None]:
    """Errors about keys of the file are told as such: they are no options of this command."""
    try:
        yield
    except ParameterError as error:
        raise ParameterError(f"{experiment}: {error}") from error


# ---- federation -------------------------------------------------------------------------------------------------
#
# `partsong federation`: parties on their own machines, over TLS.

app = typer.Typer(
    name="federation",
    help="Run experiments between institutions: one coordinator, and sites that keep their rows.",
    epilog="Coordinator: init, invite, serve, admit, run. Site: secret, join, status. All of it on this machine: demo.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)

app.command(epilog=INIT)(init)
app.command(epilog=INVITE)(invite)
app.command(epilog=ADMIT)(admit)
app.command(epilog=REMOVE)(remove)
app.command(epilog=SERVE)(serve)
app.command(epilog=federation_secret.SECRET)(federation_secret.secret)
app.command(epilog=federation_secret.JOIN)(federation_secret.join)
app.command(epilog=RUN)(run)
app.command(epilog=federation_status.STATUS)(federation_status.status)
app.command(epilog=STOP)(stop)
app.command(epilog=DEMO)(demo)
