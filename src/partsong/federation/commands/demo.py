"""`partsong federation demo`: a complete federation on one machine, with TLS, keys, a roster, secure aggregation and a
site that is killed.

It ends by comparing the model, bit for bit, with the same run in one process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer

from partsong.aggregation.plaintext import PlainReduction
from partsong.console.options import AsJson, examples
from partsong.console.output import BAD_INPUT, handle_errors, put_json
from partsong.core.interfaces import Schedule, Shard
from partsong.core.streams import stream
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.errors import FileError, PartsongError, PartyError
from partsong.federation.experiment import Experiment
from partsong.federation.flower.control import ServerControl, open_control, require_flower
from partsong.federation.server.state import Journal
from partsong.federation.setup.credentials import Kit, require_address
from partsong.federation.setup.server_folder import ServerFolder
from partsong.federation.setup.site_folder import SiteFolder
from partsong.federation.site.plan import build_plan
from partsong.io.model_file import load_model
from partsong.privacy.exposure import PartyExposure, party_exposures, worst_party

NAMES = ("east", "north", "south", "west")
EXPERIMENT = 'method = "exact"\nrank = 3\nrounds = 2\nsecure_aggregation = true\nmask_bound = 1e6\nseed = 7\n'
VICTIM = "north"
PATIENCE = 120.0

Tell = Callable[[str], None]


@dataclass(slots=True)
class Processes:
    """Background processes in their own process groups, each with a log."""

    folder: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *words: str | Path) -> None:
        """Start `partsong federation …` in the background."""
        command = [sys.executable, "-m", "partsong", "federation", *map(str, words)]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, name: str) -> None:
        """Kill a process and its children, like a power cut."""
        process = self.running.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def require(self, name: str) -> None:
        """Raise with the end of its log if a process has ended."""
        if self.running[name].poll() is not None:
            last = (self.folder / f"{name}.log").read_text(errors="replace")[-800:]
            raise PartyError(f"The process of {name!r} has ended: {last}")


@contextmanager
def processes(folder: Path) -> Iterator[Processes]:
    """Yield a set of processes, and end all of them on exit."""
    made = Processes(folder)
    try:
        yield made
    finally:
        for process in made.running.values():
            process.terminate()
        until = time.monotonic() + 5.0
        while time.monotonic() < until and any(process.poll() is None for process in made.running.values()):
            time.sleep(0.1)
        for name in list(made.running):
            made.kill(name)


DEMO = examples("partsong federation demo", "partsong federation demo --keep here")


@handle_errors
def demo(
    keep: Annotated[
        Path | None, typer.Option(help="Keep all files in this new folder.", show_default="files are deleted")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a federation on this machine, kill one site, and compare the model bit for bit with one process."""
    if keep is not None and keep.exists():
        raise FileError(f"--keep {keep} exists already. Pass a new folder.")
    with TemporaryDirectory() as scratch:
        folder = keep or Path(scratch) / "demo"
        folder.mkdir(parents=True)
        result = run_demo(folder.resolve(), lambda line: typer.echo(line, err=as_json))
    if as_json:
        put_json(result)
    if not result["is_same"]:
        raise typer.Exit(BAD_INPUT)


def run_demo(folder: Path, tell: Tell) -> dict[str, Any]:
    """Run the demo in a new folder; return its duration and whether the bits are equal."""
    require_flower()
    began = time.perf_counter()
    server, sites = set_up(folder)
    tell(f"Made a federation of {len(sites)} sites, with keys and a roster: {server.roster().fingerprint}")
    with processes(folder) as running:
        start_server(running, server, lambda: warm(sites))
        tell(f"The server runs at {server.address} with TLS and accepts registered nodes only.")
        with open_control(server) as control:
            register(control, server)
            for site in sites.values():
                start_node(running, site)
            wait_for(running, control, server, NAMES)
            tell("All nodes are connected. Running: " + EXPERIMENT.strip().replace("\n", ", "))
            experiment = folder / "experiment.toml"
            experiment.write_text(EXPERIMENT)
            running.start("run", "run", experiment, "--folder", server.path, "--name", "demo", "--json")
            _follow_and_kill(running, server, sites[VICTIM], tell)
        code = running.running["run"].wait(PATIENCE)
    if code != 0:
        raise PartyError(f"The run ended with exit code {code}: {(folder / 'run.log').read_text()[-800:]}")
    is_same = compare(server, sites, "demo")
    seconds = time.perf_counter() - began
    tell(f"The model is {'' if is_same else 'NOT '}bit for bit equal to that of one process. {seconds:.0f} s")
    tell(str(_exposure(sites)))
    result = json.loads((folder / "run.log").read_text().splitlines()[-1])
    return {"is_same": is_same, "seconds": seconds, "rounds": result["rounds"], "absent": result["absent"]}


def set_up(folder: Path, names: tuple[str, ...] = NAMES) -> tuple[ServerFolder, dict[str, SiteFolder]]:
    """Do what coordinator and sites do by hand, without the phone calls."""
    server = ServerFolder.made(folder / "server", "demo", f"127.0.0.1:{free_port()}")
    sites = {}
    for name in names:
        sites[name] = site_of(folder, server, name)
        server.admit(sites[name].card())
    for name in names:
        server.invite(name, folder / f"{name}.zip")
        sites[name].pin(server.roster())
    return server, sites


def site_of(folder: Path, server: ServerFolder, name: str) -> SiteFolder:
    """Make a site with rows and keys that is not admitted yet."""
    kit = server.invite(name, folder / f"{name}.zip")
    np.save(folder / f"{name}.npy", rows_of(name))
    return SiteFolder.joining(folder / f"site-{name}", Kit.read(kit), folder / f"{name}.npy", {})


def warm(sites: dict[str, SiteFolder]) -> None:
    """Run one round in this process, so that compiled kernels are cached for all processes."""
    plan = build_plan(Experiment.from_table(tomllib.loads(EXPERIMENT)).to_dict(), len(sites), None)
    shards = [Shard(name, as_matrix(rows_of(name, 20)), 1) for name in sorted(sites)]
    next(iter(Sequential().run(plan.program, shards, Schedule(1, 1), reduction=PlainReduction())))


def start_server(running: Processes, server: ServerFolder, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Start the server and wait until it accepts connections."""
    running.start("server", "serve", "--folder", server.path)
    meanwhile()
    host, port = require_address(server.address)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        running.require("server")
        try:
            socket.create_connection((host, port), 1).close()
            return
        except OSError:
            time.sleep(0.2)
    raise PartyError(f"The server did not start within {PATIENCE:.0f} s.")


def start_node(running: Processes, site: SiteFolder) -> None:
    """Start a node, also after it was killed."""
    kit = running.folder / f"{site.site}.zip"
    running.start(site.site, "join", kit, "--folder", site.path, "--yes")


def register(control: ServerControl, server: ServerFolder) -> None:
    """Register all nodes, like `admit`."""
    for site, card in server.cards().items():
        server.set_node(site, control.register(card.node_key, site))


def wait_for(running: Processes, control: ServerControl, server: ServerFolder, names: tuple[str, ...]) -> None:
    """Wait until the nodes of these sites are connected."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        nodes = control.nodes()
        if all(nodes[server.node_of(name) or 0].status == "online" for name in names):
            return
        for name in names:
            running.require(name)
        time.sleep(0.5)
    raise PartyError(f"Not all nodes connected within {PATIENCE:.0f} s.")


def compare(server: ServerFolder, sites: dict[str, SiteFolder], run: str) -> bool:
    """Return whether one process with the recorded participation gives the same bits."""
    place = server.known_run(run)
    experiment, record = Experiment.read(place.experiment), Journal(place.state).load()
    if record is None:
        return False
    plan = build_plan(experiment.to_dict(), len(sites), dict(server.roster().keys))
    shards = [Shard(name, sites[name].opened().data.matrix(), sites[name].secret()) for name in sorted(sites)]
    schedule = Schedule(plan.exchanges, experiment.seed, record.absent(), record.dropouts())
    *_, last = Sequential().run(plan.program, shards, schedule, reduction=plan.reduction)
    program: Any = plan.program
    expected = np.ascontiguousarray(np.asarray(program.components(last.checkpoint.server)))
    found = load_model(place.model).components
    return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


def _exposure(sites: dict[str, SiteFolder]) -> PartyExposure:
    """Return the exposure of the most exposed site."""
    plan = build_plan(Experiment.from_table(tomllib.loads(EXPERIMENT)).to_dict(), len(sites), None)
    shards = [Shard(name, as_matrix(rows_of(name))) for name in sorted(sites)]
    return worst_party(party_exposures(plan.program, shards, plan.exchanges).values())


def rows_of(name: str, n_rows: int = 200, n_columns: int = 60) -> np.ndarray:
    """Rows of one site: three components plus noise."""
    rng = stream(7, "federation demo", name)
    parts = stream(7, "federation demo parts").gamma(0.5, size=(3, n_columns))
    return rng.gamma(0.5, size=(n_rows, 3)) @ parts + 0.05 * rng.random((n_rows, n_columns))


def free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _follow_and_kill(running: Processes, server: ServerFolder, site: SiteFolder, tell: Tell) -> None:
    """Follow the run, kill a site after the first round, and restart it."""
    place, shown, until = server.run("demo"), 0, time.monotonic() + 2 * PATIENCE
    while running.running["run"].poll() is None and time.monotonic() < until:
        lines = place.progress.read_text().splitlines() if place.progress.exists() else []
        for line in lines[shown:]:
            found = json.loads(line)
            tell(f"Exchange {found['round']} of {found['rounds']}: {', '.join(found['participants'])}")
        if lines and shown == 0:
            running.kill(site.site)
            tell(f"Killed {site.site} (kill -9) and restarted it.")
            start_node(running, site)
        shown = len(lines)
        time.sleep(0.3)
    if running.running["run"].poll() is None:
        raise PartsongError("The run took too long.")
