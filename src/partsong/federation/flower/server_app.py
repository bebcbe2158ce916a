"""Flower's ServerApp: runs one experiment over its grid, in a process per run."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from flwr.serverapp import ServerApp

from partsong.federation.flower.control import SERVER_PID
from partsong.federation.server.launch import run_over_flower

CHECK_SECONDS = 1.0

app = ServerApp()


@app.main()
def main(grid: Any, context: Any) -> None:
    """Run the experiment that the run configuration names."""
    exit_with_server()
    run_over_flower(grid, str(context.run_config["run"]))


def exit_with_server() -> None:
    """Exit this process at once when its server has ended.

    Flower ends it by a signal, which it does not handle while it waits for a reply.
    """
    server = int(os.environ[SERVER_PID])

    def watch() -> None:
        while _is_alive(server):
            time.sleep(CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
