"""Rounds of ours and rounds of Flower alone in turns: one run, the same processes, messages of one size and form.

server: after each round of ours one in which nodes echo, and one in which they do the same work on rows and echo
client: "partsong" is answered by our layer, "echo" and "work" without it

A round is a message to each node and one back. Echoes have as many bytes as ours, in as many objects of Flower.
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
"""Seconds between two looks for replies, as `federation.transports.flower.Flower` has them."""

client = ClientApp()
server = ServerApp()
clock = Clock()
known: dict[str, Any] = {}


@client.query("partsong")
def ours(message, context):  # type: ignore[no-untyped-def]
    """Our layer."""
    from partsong.federation.flower import site_process
    from partsong.federation.setup.site_folder import SiteFolder

    if "product" not in known:
        known["product"] = SiteFolder.at(Path(str(context.node_config["site"]))).answering()
        watch_site(clock)
    clock.taken()
    began = time.perf_counter()
    with clock.watching():
        reply = site_process.answer_to(message, known["product"](site_process.content_of(message)))
    _note(context, "ours", time.perf_counter() - began, clock.taken())
    return reply


@client.query("echo")
def echo(message, context):  # type: ignore[no-untyped-def]
    """As many bytes as the request asks for."""
    return Message(_content(os.urandom(_wanted(message)), 0), reply_to=message)


@client.query("work")
def work(message, context):  # type: ignore[no-untyped-def]
    """The party's work on an H of this size, in memory; what it would upload, filled up to the size of ours."""
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
    """All rounds; seconds of each and our own clock's go to a file."""
    from partsong.federation.server.launch import FEDERATION, nodes_of, run_over
    from partsong.federation.setup.server_folder import ServerFolder
    from partsong.federation.transports.flower import Flower

    folder, told = ServerFolder.at(Path(os.environ[FEDERATION])), context.run_config
    turns = Turns(grid, tuple(nodes_of(folder).values()))
    watch_server(clock)
    place = folder.known_run(str(told["run"]))
    with clock.watching():
        run_over(lambda: folder.signed(Flower(turns.grid, nodes_of(folder))), folder, place, turns.between)
    Path(str(told["file"])).write_text(json.dumps(turns.found))


class Turns:
    """Called after each round of ours: notes it, and makes the others."""

    def __init__(self, grid: Any, nodes: tuple[int, ...]) -> None:
        self.grid, self.nodes = Noting(grid), nodes
        self.found: dict[str, Any] = {arm: [] for arm in ARMS} | {"clock": [], "sizes": [], "objects": []}
        self.began = time.perf_counter()

    def between(self, told: Any) -> None:
        """A round of each other kind, in changing order; whom a round waits for is told as well, and is none."""
        if "waiting" in told:
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
        """Seconds of a round of Flower: push, and pull until all are there."""
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
    """A grid that notes how many bytes and objects its last messages had."""

    def __init__(self, grid: Any) -> None:
        self.grid = grid
        self.sent: Any = None
        self.heard: Any = None

    def push_messages(self, messages: Any) -> Any:
        """As the grid does."""
        self.sent = messages[-1]
        with clock.part(FLOWER):
            return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Any) -> Any:
        """As the grid does."""
        found = list(self.grid.pull_messages(message_ids))
        self.heard = found[-1] if found else self.heard
        return found

    def get_nodes(self) -> Any:
        """As the grid does."""
        return self.grid.get_nodes()

    def noted(self) -> tuple[list[int], list[int]]:
        """Of the last message down and the last one up."""
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

        last = (self.sent, self.heard)
        sizes = [len(bytes(one.content["about"]["whole"])) for one in last]
        return sizes, [len(get_all_nested_objects(one)) for one in last]


def _content(data: bytes, number: int) -> RecordDict:
    """In the form of `federation.transports.flower`, without its hash."""
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
    """A line in the site's folder."""
    with (Path(str(context.node_config["site"])) / "clock.jsonl").open("a") as file:
        file.write(json.dumps({"arm": arm, "seconds": seconds, "spent": spent}) + "\n")
