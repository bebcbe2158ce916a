"""Start a federation, or Flower alone, as processes, and measure rounds of them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from partsong.federation.commands import demo
from partsong.federation.flower.control import FLOWER_SETTINGS, ServerControl, open_control
from partsong.federation.setup.credentials import Kit
from partsong.federation.setup.server_folder import RunPlace, ServerFolder
from partsong.federation.setup.site_folder import SiteFolder

RANK, COLUMNS, ROWS = 10, 2000, 200


@dataclass(slots=True)
class Federation:
    """A running server and sites, as processes of this machine."""

    folder: Path
    server: ServerFolder
    sites: dict[str, SiteFolder]
    running: demo.Processes
    control: ServerControl
    runs: int = 0

    def start(self, text: str, *words: str) -> tuple[str, RunPlace]:
        """Start a run in the background."""
        self.runs += 1
        name = f"run-{self.runs}"
        (self.folder / f"{name}.toml").write_text(text)
        self.running.start(
            name, "run", self.folder / f"{name}.toml", "--folder", self.server.path, "--name", name, "--json", *words
        )
        return name, self.server.run(name)

    def ended(self, name: str) -> None:
        """Wait for a run to end; raise with its log if it failed."""
        if self.running.running.pop(name).wait(600) != 0:
            raise RuntimeError((self.folder / f"{name}.log").read_text()[-2000:])

    def rounds(self, text: str, *words: str) -> list[float]:
        """Run rounds and return the seconds of each."""
        name, place = self.start(text, *words)
        self.ended(name)
        return [line["seconds"] for line in lines_of(place.progress)]

    def audited(self, site: str, run: str) -> list[dict[str, Any]]:
        """Read the lines of a site's audit log that belong to a run."""
        return [line for line in lines_of(self.sites[site].path / "state" / "audit.jsonl") if line["run"] == run]


@contextmanager
def federation(folder: Path, names: tuple[str, ...], module: str | None = None) -> Iterator[Federation]:
    """Create and start a federation, and stop it at the end; with `module`, that app answers at the nodes."""
    folder.mkdir(parents=True)
    server, sites = demo.set_up(folder, names)
    for name, site in sites.items():
        np.save(folder / f"{name}.npy", demo.rows_of(name, ROWS, COLUMNS))
        (site.path / "site.toml").write_text("minimum_parties = 3\nsecure_aggregation = false\n")
    with demo.processes(folder) as running:
        demo.start_server(running, server)
        with open_control(server) as control:
            demo.register(control, server)
            for name, site in sites.items():
                if module is None:
                    demo.start_node(running, site)
                else:
                    _start(running, name, [sys.executable, "-m", "benchmarks.flower.node", module, site.path])
            demo.wait_for(running, control, server, names)
            yield Federation(folder, server, sites, running, control)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a JSON Lines file."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def app_run(server: ServerFolder, module: str, settings: dict[str, Any], patience: float = 600.0) -> Any:
    """Run the app of a module and read what it writes to `settings["file"]`."""
    from flwr.common.serde import fab_to_proto, user_config_to_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.supercore.fab import Fab

    from benchmarks.flower.node import bundle

    content = bundle(module)
    fab = fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {}))
    with open_control(server) as control:
        started = control.client.StartRun(StartRunRequest(fab=fab, override_config=user_config_to_proto(settings)))
        until = time.monotonic() + patience
        while not control.status(started.run_id).is_over:
            if time.monotonic() > until:
                raise TimeoutError(f"The run of {module} did not end within {patience:.0f} s.")
            time.sleep(1.0)
    return json.loads(Path(settings["file"]).read_text())


def bare_rounds(server: ServerFolder, nodes: list[int], sizes: tuple[int, int], count: int) -> list[float]:
    """Run the bare app over unmodified Flower and return the seconds of each round."""
    up, down = sizes
    settings = {"rounds": count, "nodes": " ".join(map(str, nodes)), "up": up, "down": down}
    return list(app_run(server, "bare", {**settings, "file": str(server.path / "bare.json")}))


def rounds_in_turns(made: Federation, text: str, patience: float) -> dict[str, Any]:
    """Alternate rounds with and without partsong's layer in one run (`benchmarks.flower.layer`)."""
    place = made.server.run("layer")
    place.folder.mkdir(parents=True)
    place.experiment.write_text(text)
    place.settings.write_text(json.dumps({"timeout": 120.0}))
    found: dict[str, Any] = app_run(
        made.server, "layer", {"run": place.name, "file": str(made.folder / "layer.json")}, patience
    )
    found["sites"] = {name: lines_of(site.path / "clock.jsonl") for name, site in made.sites.items()}
    return found


@contextmanager
def flower_alone(
    folder: Path, running: demo.Processes, names: tuple[str, ...]
) -> Iterator[tuple[ServerFolder, list[int]]]:
    """Unmodified SuperLink and SuperNodes of Flower, with TLS and node keys."""
    server = ServerFolder.made(folder, "bare", f"127.0.0.1:{demo.free_port()}")
    place = server.path
    port = server.address.rpartition(":")[2]
    tls = ["--ssl-ca-certfile", place / "ca.crt", "--ssl-certfile", place / "server.crt"]
    words = ["--host", "127.0.0.1", "--port", port, "--database", place / "flower" / "state.db", *tls]
    words += ["--ssl-keyfile", place / "server.key", "--enable-supernode-auth"]
    _start(running, "bare", [_program("flower-superlink"), *words, "--disable-runtime-dependency-installation"])
    with open_control(server) as control:
        numbers = []
        for name in names:
            site = _site(folder, server, name)
            numbers.append(_tried(lambda key=site.card().node_key, name=name: control.register(key, name)))
            words = ["--superlink", server.address, "--port", demo.free_port(), "--root-certificates", place / "ca.crt"]
            _start(
                running,
                name,
                [_program("flower-supernode"), *words, "--auth-supernode-private-key", site.path / "node"],
            )
        _wait(control, numbers)
        yield server, numbers


def _site(folder: Path, server: ServerFolder, name: str) -> SiteFolder:
    kit = server.invite(name, folder / f"{name}.zip")
    np.save(folder / f"{name}.npy", np.ones((4, 3)))
    return SiteFolder.joining(folder / f"site-{name}", Kit.read(kit), folder / f"{name}.npy", {})


def _start(running: demo.Processes, name: str, command: list[Any]) -> None:
    """Start a process of Flower without telemetry and update checks, at its own polling interval."""
    settings = {key: value for key, value in FLOWER_SETTINGS.items() if "POLL" not in key}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")} | settings
    environment["FLWR_HOME"] = str(running.folder / f"flower-{name}")
    with (running.folder / f"{name}.log").open("ab") as log:
        running.running[name] = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )


def _program(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def _tried(call: Callable[[], int]) -> int:
    until = time.monotonic() + 120
    while True:
        try:
            return call()
        except ConnectionError:
            if time.monotonic() > until:
                raise


def _wait(control: ServerControl, numbers: list[int]) -> None:
    until = time.monotonic() + 180
    while time.monotonic() < until:
        nodes = control.nodes()
        if all(nodes[number].status == "online" for number in numbers):
            return
        time.sleep(1.0)
    raise RuntimeError("Not all nodes of Flower connected within three minutes.")
