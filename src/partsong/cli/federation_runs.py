"""What a coordinator does with experiments: `run`, `stop`."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from partsong.cli.federation_run_report import line_of, put_end
from partsong.cli.federation_server import ENGINE, Engine, Folder, stop_over_files
from partsong.cli.guard import guarded
from partsong.cli.options import AsJson, OptionalFloat, OptionalPath, OptionalText, examples
from partsong.cli.outputs import put_json, require_writable
from partsong.consortium.run_place import TIMEOUT
from partsong.errors import FileError, ParameterError

if TYPE_CHECKING:
    from partsong.consortium.server_folder import RunPlace, ServerFolder
    from partsong.federation.transport import Transport

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
    from partsong.consortium.server_folder import ServerFolder
    from partsong.consortium.toml_text import write

    public = None if names is None else _names_in(names)
    server = ServerFolder.at(folder)
    place = _prepared(server, experiment, name or experiment.stem, resume, engine)
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
    from partsong.consortium.locking import held

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
    from partsong.consortium.locking import holder_of, is_held
    from partsong.consortium.server_folder import ServerFolder

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
        from partsong.consortium.run_files import number_in
        from partsong.flower_app.control import controlling
        from partsong.flower_app.following import end_work

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
    from partsong.consortium.locking import holder_of
    from partsong.consortium.run_files import is_starting

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
    from partsong.consortium.file_drop import requests_in
    from partsong.flower_app.following import News, run_to_end
    from partsong.flower_app.running import run_over

    if drop is None:
        return run_to_end(server, place, tell)

    def opened() -> Transport:
        """By `run_over`, which holds the run then."""
        News.from_now(place).forget_failure()
        return requests_in(drop, server, place)

    return run_over(opened, server, place, tell)


def _settings(place: RunPlace, timeout: float | None, names: list[str] | None) -> dict[str, Any]:
    """How patiently, and which names are public; what was not given is as it was when the run was last worked on."""
    from partsong.consortium.run_files import settings_in

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


def _prepared(server: ServerFolder, experiment: Path, name: str, resume: bool, engine: Engine) -> RunPlace:
    """The folder of a run with its experiment; everything that can be checked here is."""
    from partsong.consortium.early_end import require_not_ended
    from partsong.consortium.toml_text import write
    from partsong.federation.beginning import require_same_sites
    from partsong.federation.conducting import has_begun, record_in
    from partsong.federation.experiment import Experiment
    from partsong.federation.site_files import make_folder
    from partsong.flower_app.control import require_flower
    from partsong.flower_app.running import nodes_of, plan_for

    with _about(experiment):
        wanted = Experiment.read(experiment)
    place = server.run(name)
    is_free, is_other = place.is_begun and not has_begun(place.state), False
    if resume:
        before = Experiment.read(server.known_run(name).experiment)
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
    write(place.experiment, experiment.read_bytes())
    return place


def _forget(place: RunPlace) -> None:
    """Let go of a run that has begun at no site: its name is free for an experiment that was corrected."""
    from partsong.consortium.locking import held

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
    from partsong.consortium.run_files import result_in, settings_in
    from partsong.federation.conducting import record_in

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
