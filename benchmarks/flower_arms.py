"""Processes of a federation, of Flower alone, and of ours without our layer, each ready to be asked for rounds."""

from __future__ import annotations

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

from partsong import federation_demo as demo
from partsong.consortium.server_folder import RunPlace, ServerFolder
from partsong.consortium.site_folder import SiteFolder
from partsong.flower_app.control import Control, controlling
from partsong.flower_app.environment import QUIET
from partsong.flower_app.supernode import free_port

RANK, COLUMNS, ROWS = 10, 2000, 200


@dataclass(slots=True)
class Federation:
    """A server and sites that run, as processes of this machine."""

    folder: Path
    server: ServerFolder
    sites: dict[str, SiteFolder]
    running: demo.Processes
    control: Control
    runs: int = 0

    def start(self, text: str, *words: str) -> tuple[str, RunPlace]:
        """A run, in the background."""
        self.runs += 1
        name = f"run-{self.runs}"
        (self.folder / f"{name}.toml").write_text(text)
        self.running.start(
            name, "run", self.folder / f"{name}.toml", "--folder", self.server.path, "--name", name, "--json", *words
        )
        return name, self.server.run(name)

    def ended(self, name: str) -> None:
        """Wait for the end of a run, and say what it said where it failed."""
        if self.running.running.pop(name).wait(600) != 0:
            raise RuntimeError((self.folder / f"{name}.log").read_text()[-2000:])

    def rounds(self, text: str, *words: str) -> list[float]:
        """Seconds of the rounds of a run."""
        name, place = self.start(text, *words)
        self.ended(name)
        return [line["seconds"] for line in lines_of(place.progress)]

    def audited(self, site: str, run: str) -> list[dict[str, Any]]:
        """What has left a site in a run."""
        return [line for line in lines_of(self.sites[site].path / "state" / "audit.jsonl") if line["run"] == run]


@contextmanager
def federation(folder: Path, names: tuple[str, ...]) -> Iterator[Federation]:
    """Made, started, and ended with all its processes."""
    folder.mkdir(parents=True)
    server, sites = demo.set_up(folder, names)
    for name, site in sites.items():
        np.save(folder / f"{name}.npy", demo.rows_of(name, ROWS, COLUMNS))
        (site.path / "site.toml").write_text("minimum_parties = 3\nmasked = false\n")
    with demo.processes(folder) as running:
        demo.start_server(running, server)
        with controlling(server) as control:
            demo.register(control, server)
            for site in sites.values():
                demo.start_node(running, site)
            demo.wait_for(running, control, server, names)
            yield Federation(folder, server, sites, running, control)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Those that are whole."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@dataclass(slots=True)
class Bare:
    """Rounds of the bare app, over Flower's own processes or over ours."""

    server: ServerFolder
    nodes: list[int]
    way: str
    sizes: tuple[int, int]
    runs: int = 0

    def rounds(self, count: int) -> list[float]:
        """Seconds of each."""
        import hashlib

        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        from benchmarks.flower_node import bundle

        self.runs += 1
        file, content = self.server.path / f"bare-{self.way}-{self.runs}.json", bundle()
        up, down = self.sizes
        told = {"rounds": count, "nodes": " ".join(map(str, self.nodes)), "up": up, "down": down}
        told |= {"way": self.way, "file": str(file)}
        fab = fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {}))
        with controlling(self.server) as control:
            started = control.client.StartRun(StartRunRequest(fab=fab, override_config=user_config_to_proto(told)))
            until = time.monotonic() + 600
            while not control.status(started.run_id).is_over and time.monotonic() < until:
                time.sleep(1.0)
        return list(json.loads(file.read_text()))


def add_nodes(made: Federation, names: tuple[str, ...]) -> list[int]:
    """Nodes of ours that answer without us, at the same server."""
    numbers = []
    for name in names:
        site = _site(made.folder, made.server, name)
        numbers.append(made.control.register(site.card().node_key, name))
        _start(made.running, name, [sys.executable, "-m", "benchmarks.flower_node", str(site.path)])
    _wait(made.control, numbers)
    return numbers


@contextmanager
def flower_alone(
    folder: Path, running: demo.Processes, names: tuple[str, ...]
) -> Iterator[tuple[ServerFolder, list[int]]]:
    """Flower's own SuperLink and SuperNodes, as they come, with TLS and node keys."""
    server = ServerFolder.made(folder, "bare", f"127.0.0.1:{free_port()}")
    place = server.path
    port = server.address.rpartition(":")[2]
    tls = ["--ssl-ca-certfile", place / "ca.crt", "--ssl-certfile", place / "server.crt"]
    words = ["--host", "127.0.0.1", "--port", port, "--database", place / "flower" / "state.db", *tls]
    words += ["--ssl-keyfile", place / "server.key", "--enable-supernode-auth"]
    _start(running, "bare", [_program("flower-superlink"), *words, "--disable-runtime-dependency-installation"])
    with controlling(server) as control:
        numbers = []
        for name in names:
            site = _site(folder, server, name)
            numbers.append(_tried(lambda key=site.card().node_key, name=name: control.register(key, name)))
            words = ["--superlink", server.address, "--port", free_port(), "--root-certificates", place / "ca.crt"]
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
    return SiteFolder.joining(folder / f"site-{name}", demo._kit(kit, folder), folder / f"{name}.npy", {})


def _start(running: demo.Processes, name: str, command: list[Any]) -> None:
    """A process of Flower's own, with what institutions would switch off switched off, and its own pace."""
    settings = {key: value for key, value in QUIET.items() if "POLL" not in key}
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


def _wait(control: Control, numbers: list[int]) -> None:
    until = time.monotonic() + 180
    while time.monotonic() < until:
        nodes = control.nodes()
        if all(nodes[number].status == "online" for number in numbers):
            return
        time.sleep(1.0)
    raise RuntimeError("Not all nodes of Flower were there after three minutes.")
