"""How a site's node ends: Flower takes leave of the server, and a server that hangs is not waited for."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from partsong.errors import CompositionError

PATIENCE = 2.5
"""Seconds that Flower has for it once a signal has come; it takes one where the server answers."""
STOPPED = "The node has stopped."


def run_to_a_signal(node: Callable[[], None]) -> None:
    """Flower's node, until a signal ends it; SystemExit where it has ended by itself, with an error."""
    try:
        node()
    except SystemExit as ended:
        if ended.code:
            raise


def leave_soon() -> None:
    """From now on a signal that ends Flower's node ends this process within PATIENCE, with exit code 0. All that a
    site has to keep is on its disk before it sends anything, and the next start ends what the server still believes.
    """
    from flwr.supernode import start_client_internal as node

    try:
        original = node.register_signal_handlers
    except AttributeError as error:
        raise CompositionError("Flower's node is not the one that this was written for. Install flwr 1.41.") from error

    def registered(*words: Any, **settings: Any) -> None:
        original(*words, **settings)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _with_an_end(signal.getsignal(number)))

    node.register_signal_handlers = registered


def _with_an_end(handler: Any) -> Callable[[int, Any], None]:
    def handle(number: int, frame: Any) -> None:
        threading.Thread(target=_end, daemon=True, name="leaving").start()
        handler(number, frame)

    return handle


def _end() -> None:
    time.sleep(PATIENCE)
    sys.stderr.write(f"{STOPPED}\n")
    sys.stderr.flush()
    os._exit(0)
