"""What a coordinator does with experiments: `run`, `status`, `stop`."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from partsong.cli.federation_server import Folder
from partsong.cli.guard import guarded
from partsong.cli.options import AsJson, OptionalPath, OptionalText, examples
from partsong.cli.outputs import put_json, require_writable
from partsong.errors import FileError, ParameterError

if TYPE_CHECKING:
    from partsong.consortium.server_folder import RunPlace, ServerFolder

RUN = examples(
    "partsong federation run experiment.toml --folder liver -o model.safetensors",
    "partsong federation run experiment.toml --folder liver --resume",
)
STATUS = examples("partsong federation status --folder liver", "partsong federation status --folder liver --json")
STOP = examples("partsong federation stop first-try --folder liver", "partsong federation stop --server --folder liver")


@guarded
def run(
    experiment: Annotated[Path, typer.Argument(help="experiment.toml: what everybody runs.", show_default=False)],
    folder: Folder = Path(),
    name: Annotated[OptionalText, typer.Option(help="What the run is called.", show_default="the file's name")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was broken off.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a site may take to answer.")] = 600.0,
    output: Annotated[
        OptionalPath, typer.Option("--output", "-o", help="Where the model goes as well (.safetensors).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment over all sites, follow it, and write the model."""
    if output is not None:
        require_writable("--output", output, (".safetensors",))
    from partsong.consortium.server_folder import ServerFolder
    from partsong.consortium.toml_text import write

    server = ServerFolder.at(folder)
    place = _prepared(server, experiment, name or experiment.stem, resume)
    write(place.settings, json.dumps({"timeout": timeout}) + "\n")
    from partsong.flower_app.following import run_to_end

    told = run_to_end(server, place, lambda line: None if as_json else typer.echo(_line(line)))
    if output is not None:
        shutil.copyfile(place.model, output)
    model = output or place.model
    if as_json:
        put_json({**told, "model": model, "folder": place.folder})
        return
    missed = sum(len(names) for names in told["absent"].values())
    typer.echo(f"Done in {told['seconds']:.1f} s: {told['rounds']} exchanges, {missed} times a site was not there.")
    typer.echo(f"Model: {model}")


@guarded
def status(folder: Folder = Path(), as_json: AsJson = False) -> None:
    """Say who is there, and how every run is."""
    from partsong.consortium.server_folder import ServerFolder

    server = ServerFolder.at(folder)
    sites, is_up = _sites(server)
    runs = {name: _run_told(server.run(name)) for name in server.runs()}
    roster = server.roster()
    days = round(server.require_valid())
    if as_json:
        told = {"name": server.name, "address": server.address, "server": "running" if is_up else "stopped"}
        put_json({**told, "certificate_days": days, "fingerprint": roster.fingerprint, "sites": sites, "runs": runs})
        return
    typer.echo(f"Federation {server.name!r}, {server.address}: the server is {'running' if is_up else 'stopped'}.")
    typer.echo(f"Certificate: {days} days left. Roster: {roster.fingerprint if roster.keys else 'nobody yet'}")
    for site, state in sites.items():
        typer.echo(f"  site {site:<24}{state}")
    for run_name, told in runs.items():
        typer.echo(f"  run  {run_name:<24}{told['status']}, {told['rounds_done']} exchanges done")


@guarded
def stop(
    name: Annotated[OptionalText, typer.Argument(help="The run to stop.", show_default=False)] = None,
    folder: Folder = Path(),
    whole_server: Annotated[bool, typer.Option("--server", help="Stop the server itself.")] = False,
    as_json: AsJson = False,
) -> None:
    """Stop a run, which can be resumed, or the server."""
    from partsong.consortium.locking import holder_of
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
        from partsong.flower_app.control import controlling

        place = server.known_run(str(name))
        if not place.number.exists():
            raise FileError(f"Run {name!r} was never started.")
        with controlling(server) as control:
            told = {"stopped": name, "was_running": control.stop(int(place.number.read_text()))}
    if as_json:
        put_json(told)
    else:
        typer.echo(f"Stopped: {told['stopped']}.")


def _prepared(server: ServerFolder, experiment: Path, name: str, resume: bool) -> RunPlace:
    """The folder of a run with its experiment; everything that can be checked here is."""
    from partsong.consortium.toml_text import write
    from partsong.federation.experiment import Experiment
    from partsong.federation.site_files import make_folder
    from partsong.flower_app.control import require_flower
    from partsong.flower_app.running import nodes_of, plan_for

    wanted, place = Experiment.read(experiment), server.run(name)
    if resume:
        before = Experiment.read(server.known_run(name).experiment)
        if before.told() != wanted.told():
            raise ParameterError(
                f"Run {name!r} was begun with other settings. Resume it with its own, or name another."
            )
    elif place.folder.exists():
        raise FileError(f"There is a run {name!r} already. Go on with it by --resume, or choose another --name.")
    require_flower()
    nodes = nodes_of(server)
    if not nodes:
        raise ParameterError("No site has been admitted yet: partsong federation admit CARD …")
    plan_for(wanted, server)
    make_folder(place.folder)
    write(place.experiment, experiment.read_bytes())
    return place


def _line(told: Mapping[str, Any]) -> str:
    heard = f"{len(told['participants'])} sites"
    refused = "".join(f"; not {name}" for name in sorted(told["refused"]))
    most = max(told["bytes_up"].values(), default=0)
    return (
        f"exchange {told['round']} of {told['rounds']}: {heard}{refused}, at most {most} bytes up and "
        f"{told['bytes_down']} down each, {told['seconds']:.1f} s"
    )


def _sites(server: ServerFolder) -> tuple[dict[str, str], bool]:
    """Who is there, if the server can be asked."""
    from partsong.consortium.locking import holder_of

    if holder_of(server.path / "server.lock") is None:
        return dict.fromkeys(server.cards(), "unknown"), False
    from partsong.flower_app.control import controlling

    with controlling(server) as control:
        nodes = control.nodes()
    found = {site: nodes.get(server.node_of(site) or 0) for site in server.cards()}
    return {site: "not registered" if node is None else node.status for site, node in found.items()}, True


def _run_told(place: RunPlace) -> dict[str, Any]:
    from partsong.consortium.locking import holder_of

    done = len(place.progress.read_text().splitlines()) if place.progress.exists() else 0
    if holder_of(place.lock) is not None:
        return {"status": "running", "rounds_done": done}
    if place.result.exists():
        return {"status": json.loads(place.result.read_text())["status"], "rounds_done": done}
    return {"status": "broken off", "rounds_done": done}
