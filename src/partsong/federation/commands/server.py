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
from partsong.errors import FileError, ParameterError, format_count
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
from partsong.federation.site.plan import Plan
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
KIT = "Kit for {!r}: {}. It holds no secret, but must arrive unchanged."
ADMITTING = "The site joins with it and sends back card.toml. Then run: partsong federation admit CARD --folder {}"
ENGINE = "flower: over TLS; files: through a shared folder, or one carried between machines."


class Engine(StrEnum):
    """How messages travel."""

    FLOWER = "flower"
    FILES = "files"


Folder = Annotated[Path, typer.Option("--folder", "-f", help="The federation's folder, made by init.")]


@handle_errors
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder for the federation.", show_default=False)],
    name: Annotated[str | None, typer.Option(help="Name of the federation.", show_default="that of the folder")] = None,
    address: Annotated[str | None, typer.Option(help="host:port at which sites reach the server.")] = None,
    site: Annotated[list[str] | None, typer.Option(help="A site to make a startup kit for. Repeatable.")] = None,
    renew: Annotated[
        bool, typer.Option("--renew", help="Renew the server certificate of an existing federation.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a federation: a certificate authority, a server certificate, keys, and a startup kit for each site."""
    if renew:
        if name is not None or address is not None or site:
            raise ParameterError("--renew cannot change the name, address or sites. Remove those options.")
        made = ServerFolder.at(folder)
        made.renewed()
    else:
        if address is None:
            raise ParameterError("A new federation needs an address. Pass --address HOST:PORT.")
        for one in site or ():
            require_name(one, "A site")
        made = ServerFolder.made(folder, name or folder.resolve().name, address)
    kits = {one: made.invite(one) for one in dict.fromkeys(site or ())}
    left, is_served = round(made.require_valid()), is_held(made.path / "server.lock")
    if is_served:
        warn(
            "The running server still uses its old certificate. Restart it: partsong federation stop --server "
            f"--folder {quote(str(folder))}, then serve again. Runs can be resumed, and nodes reconnect."
        )
    lines = [
        f"Federation {made.name!r} is in {folder}; its certificate is valid for {left} days.",
        "Keep this folder private: ca.key, control.key and coordinator.key protect the federation.",
        *(KIT.format(one, kit) for one, kit in kits.items()),
    ]
    if kits:
        lines.append(f"Next: send each site its kit. {ADMITTING.format(quote(str(folder)))}")
    else:
        lines.append(f"Next: partsong federation invite SITE --folder {quote(str(folder))}")
    result = {"folder": folder, "name": made.name, "address": made.address, "certificate_days": left}
    put_result({**result, "is_served": is_served, "kits": kits}, lines, as_json)


@handle_errors
def invite(
    site: Annotated[str, typer.Argument(help="The name of a site.", show_default=False)],
    folder: Folder = Path(),
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The kit to write (.zip).", show_default="in kits/")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a startup kit for a site: address, certificate, instructions, and the roster once the site is in it."""
    server = ServerFolder.at(folder)
    kit = server.invite(site, output)
    roster = server.roster()
    listed = roster.fingerprint if site in roster.keys else None
    then = f"It contains the roster with fingerprint {listed}."
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
    """Run the server in the foreground until Ctrl-C."""
    server = ServerFolder.at(folder)
    left = server.require_valid()
    if left < 30:
        renewing = f"partsong federation init {quote(str(folder))} --renew"
        typer.echo(f"The certificate expires in {left:.0f} days. Renew it: {renewing}", err=True)
    typer.echo(f"Serving federation {server.name!r} for {server.address}; stop it with Ctrl-C.", err=True)
    try:
        server_process.serve(server, host, lambda line: typer.echo(line, err=True))
    except KeyboardInterrupt:
        typer.echo("The server has stopped.", err=True)


@handle_errors
def admit(
    cards: Annotated[list[Path], typer.Argument(help="card.toml files of sites.", show_default=False)],
    folder: Folder = Path(),
    engine: Annotated[Engine, typer.Option(help=f"{ENGINE} The latter needs no running server.")] = Engine.FLOWER,
    as_json: AsJson = False,
) -> None:
    """Admit sites by their cards: the server accepts their nodes, and the roster lists their keys."""
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
    site: Annotated[str, typer.Argument(help="The site to remove.", show_default=False)],
    folder: Folder = Path(),
    as_json: AsJson = False,
) -> None:
    """Remove a site: the server rejects its node, and the roster drops it. Existing models stay."""
    server = ServerFolder.at(folder)
    _remove_node(server, site)
    server.remove(site)
    _put_roster(server, f"Removed: {site}", {"removed": site}, as_json)


def _put_roster(server: ServerFolder, done: str, result: Mapping[str, Any], as_json: bool) -> None:
    """Print what was done, and the roster that all sites need now."""
    roster, place = server.roster(), server.path / "roster.toml"
    sites = sorted(roster.keys)
    lines = (
        f"{done}. Sites are now: {', '.join(sites) or 'none'}.",
        f"When all are admitted, send {place} to each. Each site compares its fingerprint BY PHONE with two others:",
        f"  {roster.fingerprint}",
    )
    put_result({**result, "sites": sites, "fingerprint": roster.fingerprint, "file": place}, lines, as_json)


def _admit_nodes(server: ServerFolder, cards: Sequence[Card]) -> None:
    """Register each node, then its card; a known node keeps its number."""
    with control.open_control(server) as connection:
        for card in cards:
            server.require_admissible(card)
            number = connection.register(card.node_key, card.site)
            server.admit(card)
            server.set_node(card.site, number)


def _remove_node(server: ServerFolder, site: str) -> None:
    """Unregister a node, even one whose number is not on disk because `admit` was killed (needs a running server)."""
    card = server.cards().get(site)
    if card is None or (server.node_of(site) is None and not is_held(server.path / "server.lock")):
        return
    with control.open_control(server) as connection:
        number = connection.find_node(card.node_key, site)
        if number is not None:
            connection.unregister(number)


# ---- federation run report --------------------------------------------------------------------------------------
#
# Progress lines of `partsong federation run`, and its result.


def format_progress(event: Mapping[str, Any]) -> str:
    """Format one progress event of a run."""
    if "starting" in event:
        return f"starting the server process of run {event['starting']!r} (a few seconds)"
    if "waiting" in event:
        answered = f" ({event['answered']} of {event['of']} have answered)" if "of" in event else ""
        return f"waiting for {', '.join(event['waiting'])}{answered}"
    answers = format_count(len(event["participants"]), "site")
    refused = "".join(f"; not {name}" for name in sorted(event["refused"]))
    most = max(event["bytes_up"].values(), default=0)
    which, after = f"exchange {event.get('round')} of {event.get('rounds')}", ""
    if "step" in event:
        which, after = f"words, step {event['step']} of at most {event['steps']}", f"; next: {event['next']}"
    return (
        f"{which}: {answers}{refused}, at most {most} bytes up and {event['bytes_down']} down each, "
        f"{event['seconds']:.1f} s{after}"
    )


def describe_privacy(experiment: Experiment, plan: Plan) -> list[str]:
    """Describe the mechanism of a private moment and what to expect of it, before anything is spent."""
    planned = experiment.privacy_plan(plan.request.parties)
    if planned is None or planned.mechanism == "rounds":
        return []
    unknown = "No forecast: n_rows and n_features, public numbers, are not in the table privacy."
    return [f'mechanism "{planned.mechanism}": {format_count(plan.exchanges, "exchange")}', str(planned) or unknown]


def put_end(
    place: RunPlace, result: Mapping[str, Any], output: Path | None, as_json: bool, public: Sequence[str] = ()
) -> None:
    """Write the model of a finished run and print the result; `public` are the names passed for columns."""
    if output is not None:
        shutil.copyfile(place.model, output)
    model = output or place.model
    named = {"named_columns": _named(place, public)} if public else {}
    lines = [f"Done in {result['seconds']:.1f} s: {format_count(result['rounds'], 'exchange')}.", f"Model: {model}"]
    lines += [result["privacy"]["verdict"]] if "privacy" in result else []
    for count in named.values():
        lines.append(f"Columns with a name in --names: {count}. The others are shown as hashes.")
    put_result({**result, **named, "model": model, "folder": place.folder}, lines, as_json)
    for site, why in sorted(result.get("without_result", {}).items()):
        warn(f"Site {site!r} has no result of this run: {why} {missing_result_advice(why)}")


def _named(place: RunPlace, public: Sequence[str]) -> int:
    """Count the columns of a run whose names are public."""
    record, known = load_run_state(place.state), set(public)
    labels = () if record is None else labels_of(record.columns, record.run, public)
    return sum(label in known for label in labels)


# ---- federation runs --------------------------------------------------------------------------------------------
#
# Experiments: `run`, `stop`.

RUN = examples(
    "partsong federation run experiment.toml --folder liver -o model.safetensors",
    "partsong federation run experiment.toml --folder liver --resume",
    "partsong federation run experiment.toml --folder liver --engine files --exchange-folder /mnt/liver",
)
STOP = examples("partsong federation stop first-try --folder liver", "partsong federation stop --server --folder liver")


@handle_errors
def run(
    experiment: Annotated[Path, typer.Argument(help="experiment.toml: the settings of the run.", show_default=False)],
    folder: Folder = Path(),
    name: Annotated[str | None, typer.Option(help="Name of the run.", show_default="that of the file")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted run.")] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=1, help="Seconds to wait for the answer of a site.", show_default=f"{TIMEOUT:g}; --resume: as before"
        ),
    ] = None,
    engine: Annotated[Engine, typer.Option(help=ENGINE)] = Engine.FLOWER,
    exchange_folder: Annotated[
        Path | None, typer.Option(help="With --engine files: the folder for requests and answers.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write the model here (.safetensors).")
    ] = None,
    names: Annotated[
        Path | None,
        typer.Option(
            help="Text file with public column names, one per line. Other columns appear as hashes.",
            show_default="none; --resume: as before",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment at all sites, show its progress, and write the model."""
    require_writable("--output", output, (".safetensors",))
    if (exchange_folder is None) == (engine is Engine.FILES):
        raise ParameterError("--engine files and --exchange-folder FOLDER need each other. Pass both or neither.")
    given = () if names is None else _names_in(names)
    server = ServerFolder.at(folder)
    place, seed, said = _prepare_run(server, experiment, name or experiment.stem, resume, engine)
    before = settings_in(place)
    settings = RunSettings(
        before.timeout if timeout is None else timeout,
        before.names if names is None else given,
        None if exchange_folder is None else str(exchange_folder.absolute()),
    )
    if resume and (done := _finished_result(place, settings.names)) is not None:
        typer.echo(f"Run {place.name!r} is done, and every site in it has the result.", err=as_json)
        return put_end(place, done, output, as_json, given)

    for line in (f"seed {seed}", *said):
        typer.echo(line, err=as_json)
    try:
        with held(place.command, f"Another command follows run {place.name!r}"):
            write_bytes(place.settings, msgspec.json.encode(settings))
            result = _run_to_end(
                server, place, exchange_folder, lambda line: None if as_json else typer.echo(format_progress(line))
            )
    except KeyboardInterrupt:
        typer.echo("Stopped. All complete exchanges are kept. Continue the run with --resume.", err=True)
        raise
    put_end(place, result, output, as_json, given)


@handle_errors
def stop(
    name: Annotated[str | None, typer.Argument(help="The run to stop.", show_default=False)] = None,
    folder: Folder = Path(),
    whole_server: Annotated[bool, typer.Option("--server", help="Stop the server.")] = False,
    as_json: AsJson = False,
) -> None:
    """Stop a run, which can be resumed, or the server."""
    if (name is None) == (not whole_server):
        raise ParameterError("Nothing to stop. Pass the name of a run, or --server to stop the server.")
    server = ServerFolder.at(folder)
    if name is None:
        holder = holder_of(server.path / "server.lock")
        if holder is None:
            raise FileError("No server is running on this machine.")
        os.kill(holder, signal.SIGTERM)
        result: dict[str, Any] = {"stopped": "server", "process": holder}
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
        result = {"stopped": name}
    put_result(result, (f"Stopped: {result['stopped']}.",), as_json)


def _not_at_work(place: RunPlace, folder: Path) -> FileError:
    """Return the error for a run that cannot be stopped."""
    if not is_starting(place):
        return FileError(
            f"Run {place.name!r} is not in progress: it was never started, has ended, or can be resumed. "
            f"See partsong federation status --folder {quote(str(folder))}"
        )
    return FileError(
        f"Run {place.name!r} is starting (process {holder_of(place.command)}) and cannot be stopped yet. "
        "Try again in a few seconds, or stop the command that starts it with Ctrl-C."
    )


def _run_to_end(
    server: ServerFolder, place: RunPlace, exchange_folder: Path | None, tell: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    """Run on the running server, or over files in this process."""
    if exchange_folder is None:
        return control.run_to_end(server, place, tell)
    return run_on_transport(lambda: files.request_transport(exchange_folder, server, place), server, place, tell)


def _names_in(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"--names {path} cannot be read: {error}. Check the path.") from error
    return tuple(dict.fromkeys(line for line in lines if line))


def _prepare_run(
    server: ServerFolder, experiment: Path, name: str, resume: bool, engine: Engine
) -> tuple[RunPlace, int, list[str]]:
    """Check the experiment and prepare the folder of its run; return the folder, the seed, and what to say before it.

    A name is taken once a site has started the run; until then, a corrected experiment may reuse it.
    """
    before = Experiment.read(server.known_run(name).experiment) if resume else None
    wanted, written = with_seed(experiment, before)
    place = server.run(name)
    if before is None and has_started(place.state):
        raise FileError(f"Run {name!r} exists already. Continue it with --resume, or choose another --name.")
    record, n_parties = None if before is None else load_run_state(place.state), max(1, len(server.cards()))
    started = None if record is None else record.experiment
    asked = wanted
    try:
        wanted = wanted.with_mechanism_for(n_parties, started)
    except ParameterError as error:
        raise ParameterError(f"{experiment}: {error}") from error
    if before is not None and before.with_mechanism_for(n_parties, started).to_dict() != wanted.to_dict():
        raise ParameterError(
            f"Run {name!r} was started with other settings. Resume it with those, or choose another --name."
        )
    if record is not None:
        require_same_sites(record, server.cards())
    if engine is Engine.FLOWER:
        control.require_flower()
        site_nodes(server)
    if not server.cards():
        admitting = f"partsong federation admit CARD --folder {quote(str(server.path))}"
        raise ParameterError(f"No site is admitted yet. For the card of each site, run {admitting}")
    try:
        plan = build_server_plan(wanted, server)
    except ParameterError as error:  # about keys of the file, not options of this command
        raise ParameterError(f"{experiment}: {error}") from error
    if record is not None:
        require_not_ended(place, record, plan.exchanges)
    if before is None and place.folder.exists():
        _discard_run(place)
    make_folder(place.folder)
    write_bytes(place.experiment, written)
    return place, wanted.seed, describe_privacy(asked if started is None else wanted, plan)


def _discard_run(place: RunPlace) -> None:
    """Delete a run that no site has started, so that a corrected experiment can use its name."""
    busy, locks = f"Run {place.name!r} is in use by another process", (place.lock, place.command)
    with held(place.lock, busy), held(place.command, busy):
        for path in place.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path not in locks:
                path.unlink()


def _finished_result(place: RunPlace, names: Sequence[str]) -> dict[str, Any] | None:
    """Return the result of a run that is done with these column names; None if something is left to do.

    Sites where the run was never started need no result.
    """
    result = result_in(place) if place.result.exists() else None
    if result is None or not place.model.exists() or settings_in(place).names != names:
        return None
    record = load_run_state(place.state)
    return result if result["status"] == "done" and record is not None and not record.without_result else None


# ---- federation -------------------------------------------------------------------------------------------------
#
# `partsong federation`: parties on their own machines, over TLS or files.

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
