"""Flower without partsong: an app that sends as many random bytes per round as partsong.

In each of run_config["rounds"] rounds the server sends `down` bytes to all `nodes` and receives `up` bytes from each,
by Flower's send_and_receive.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()


@client.query("bare")
def answer(message, context):  # type: ignore[no-untyped-def]
    """Answer with as many bytes as requested."""
    return Message(_content(int(message.content["bytes"]["up"][0])), reply_to=message)


@server.main()
def main(grid, context):  # type: ignore[no-untyped-def]
    """Run the rounds and write the seconds of each to a file."""
    settings = context.run_config
    nodes = [int(node) for node in str(settings["nodes"]).split()]
    seconds = []
    for _ in range(int(settings["rounds"])):
        began = time.perf_counter()
        content = [_asked(int(settings["down"]), int(settings["up"])) for _ in nodes]
        messages = [Message(one, node, "query.bare") for one, node in zip(content, nodes, strict=True)]
        replies = grid.send_and_receive(messages)
        if any(reply.has_error() for reply in replies):
            raise RuntimeError("a node has failed")
        seconds.append(time.perf_counter() - began)
    Path(str(settings["file"])).write_text(json.dumps(seconds))


def _asked(down, up):  # type: ignore[no-untyped-def]
    from flwr.app import MetricRecord

    content = _content(down)
    content["bytes"] = MetricRecord({"up": [up]})
    return content


def _content(size):  # type: ignore[no-untyped-def]
    array = Array(dtype="uint8", shape=(size,), stype="bytes", data=os.urandom(size))
    return RecordDict({"arrays": ArrayRecord({"0": array})})
