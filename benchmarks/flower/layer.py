"""Alternate rounds of partsong and of Flower alone in one run, with messages of equal size and form.

Server: after each round of partsong, one in which nodes echo, and one in which they do the same work on rows and echo.
Client: "partsong" is answered by partsong's layer, "echo" and "work" without it.

A round is one message to each node and one back. Echoes have as many bytes and Flower objects as partsong's messages.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from benchmarks.flower.arms import COLUMNS, RANK
from benchmarks.flower.clock import FLOWER, Clock, watch_server, watch_site

ARMS = ("ours", "echo", "work")
POLL = 0.5
"""Polling interval for replies in seconds, as in `federation.transports.flower.Flower`."""

client = ClientApp()
server = ServerApp()
clock = Clock()
known: dict[str, Any] = {}


@client.query("partsong")
def ours(message, context):  # type: ignore[no-untyped-def]
    """Answer through partsong's layer."""
    from partsong.federation.flower import site_process
    from partsong.federation.setup.site_folder import SiteFolder

    if "product" not in known:
        known["product"] = SiteFolder.at(Path(str(context.node_config["site"]))).answering()
        watch_site(clock)
    clock.taken()
    began = time.perf_counter()
    with clock.watching():
        reply = site_process.reply_message(message, known["product"](site_process.message_bytes(message)))
    _note(context, "ours", time.perf_counter() - began, clock.taken())
    return reply


@client.query("echo")
def echo(message, context):  # type: ignore[no-untyped-def]
    """Answer with as many bytes as requested."""
    return Message(_content(os.urandom(_wanted(message)), 0), reply_to=message)


@client.query("work")
def work(message, context):  # type: ignore[no-untyped-def]
    """Do the party's work on an H of this size in memory, and answer with an upload of equal size."""
    from partsong.core import runtime as threads

    began = time.perf_counter()
    program, shard, state = known.get("party") or _party(context)
    data, wanted = bytes(message.content["about"]["whole"]), _wanted(message)
    H = np.frombuffer(data[: 8 * RANK * COLUMNS]).reshape(RANK, COLUMNS)
    with threads.limit_kernel_threads(1):
        state, upload = program.local(shard, state, _model(H))
    known["party"] = program, shard, state
    sent = b"".join(np.ascontiguousarray(upload[name]).tobytes() for name in sorted(upload.arrays))
    _note(context, "work", time.perf_counter() - began, {})
    return Message(_content(sent + os.urandom(wanted - len(sent)), 0), reply_to=message)


@server.main()
def main(grid, context):  # type: ignore[no-untyped-def]
    """Run all rounds; write their seconds and the layer's times to a file."""
    from partsong.federation.server.launch import FEDERATION, run_on_transport, site_nodes
    from partsong.federation.setup.server_folder import ServerFolder
    from partsong.federation.transports.flower import FlowerTransport

    folder, settings = ServerFolder.at(Path(os.environ[FEDERATION])), context.run_config
    turns = Turns(grid, tuple(site_nodes(folder).values()))
    watch_server(clock)
    place = folder.known_run(str(settings["run"]))
    with clock.watching():
        run_on_transport(
            lambda: folder.signed(FlowerTransport(turns.grid, site_nodes(folder))), folder, place, turns.between
        )
    Path(str(settings["file"])).write_text(json.dumps(turns.found))


class Turns:
    """Called after each round of partsong: record it, and run the others."""

    def __init__(self, grid: Any, nodes: tuple[int, ...]) -> None:
        self.grid, self.nodes = Noting(grid), nodes
        self.found: dict[str, Any] = {arm: [] for arm in ARMS} | {"clock": [], "sizes": [], "objects": []}
        self.began = time.perf_counter()

    def between(self, event: Any) -> None:
        """Run a round of each other kind, in alternating order; ignore progress events about waiting."""
        if "waiting" in event:
            return
        self.found["ours"].append(time.perf_counter() - self.began)
        self.found["clock"].append(clock.taken())
        sizes, objects = self.grid.noted()
        self.found["sizes"], self.found["objects"] = sizes, [objects]
        others = ARMS[1:] if len(self.found["ours"]) % 2 else ARMS[:0:-1]
        for arm in others:
            self.found[arm].append(self.bare(f"query.{arm}", *sizes))
        self.found["objects"].append(self.grid.noted()[1])
        clock.taken()
        self.began = time.perf_counter()

    def bare(self, kind: str, down: int, up: int) -> float:
        """Run a round of Flower (push, then pull until all replied) and return its seconds."""
        began = time.perf_counter()
        numbers = [np.random.default_rng().random(down // 8).tobytes() for _ in self.nodes]
        asked = [_content(one + bytes(down - len(one)), up) for one in numbers]
        waiting = set(self.grid.push_messages([Message(a, n, kind) for a, n in zip(asked, self.nodes, strict=True)]))
        while waiting:
            replies = list(self.grid.pull_messages(list(waiting)))
            if any(reply.has_error() for reply in replies):
                raise RuntimeError("a node has failed")
            waiting -= {reply.metadata.reply_to_message_id for reply in replies}
            if waiting:
                time.sleep(POLL)
        return time.perf_counter() - began


class Noting:
    """A grid that records the bytes and objects of its last messages."""

    def __init__(self, grid: Any) -> None:
        self.grid = grid
        self.sent: Any = None
        self.received: Any = None

    def push_messages(self, messages: Any) -> Any:
        """Delegate to the grid."""
        self.sent = messages[-1]
        with clock.part(FLOWER):
            return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Any) -> Any:
        """Delegate to the grid."""
        found = list(self.grid.pull_messages(message_ids))
        self.received = found[-1] if found else self.received
        return found

    def get_nodes(self) -> Any:
        """Delegate to the grid."""
        return self.grid.get_nodes()

    def noted(self) -> tuple[list[int], list[int]]:
        """Sizes of the last message down and the last one up."""
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

        last = (self.sent, self.received)
        sizes = [len(bytes(one.content["about"]["whole"])) for one in last]
        return sizes, [len(get_all_nested_objects(one)) for one in last]


def _content(data: bytes, number: int) -> RecordDict:
    """Wrap content as `federation.transports.flower` does, without its hash."""
    return RecordDict({"about": ConfigRecord({"bytes": number, "sha256": "0" * 64, "whole": data})})


def _wanted(message: Any) -> int:
    return int(message.content["about"]["bytes"])


def _party(context: Any) -> tuple[Any, Any, Any]:
    from partsong.core.interfaces import Layout, Shard
    from partsong.federation.setup.site_folder import SiteFolder
    from partsong.methods import build

    site = SiteFolder.at(Path(str(context.node_config["site"])))
    shard = Shard(site.site, site.opened().data.matrix(), 1)
    program = build("exact", RANK, local_steps=5)
    return program, shard, program.start_party(shard, Layout.of([shard], 5))


def _model(H: Any) -> Any:
    from partsong.core.interfaces import Message as Model

    return Model({"H": H, "amount": np.zeros(()), "restart": np.zeros(())})


def _note(context: Any, arm: str, seconds: float, spent: dict[str, float]) -> None:
    """Append a line to the record in the site's folder."""
    with (Path(str(context.node_config["site"])) / "clock.jsonl").open("a") as file:
        file.write(json.dumps({"arm": arm, "seconds": seconds, "spent": spent}) + "\n")
