"""Who ends with whom at the server: nobody outlives it, and what starts its apps is started again.

Flower asks the server's app to end when its parent has gone, by a signal that an app does not hear while it waits for a
reply; and a server whose executor has died takes up no run any more, without a word.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from partsong.errors import CompositionError
from partsong.flower_app.doorbell import is_ending

SERVER = "PARTSONG_SERVER_PROCESS"
"""The variable in which `serve` tells its children its number."""
GLANCE = 1.0


def end_with_the_server() -> None:
    """From now on this process ends when the server has gone. It can be ended at any point, as by a power cut."""
    number = os.environ.get(SERVER, "")
    if not number.isdigit() or os.name == "nt":
        return

    def watch() -> None:
        while is_there(int(number)):
            time.sleep(GLANCE)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()


def is_there(process: int) -> bool:
    """Whether a process with this number lives."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def keep_executor() -> None:
    """From now on the executor of the server in this process is started again when it has died."""
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan

    try:
        start = SuperLinkLifespan._start_superexec_if_needed
    except AttributeError as error:
        raise CompositionError(
            "Flower's server is not the one that this was written for. Install flwr 1.41."
        ) from error

    def started(lifespan: Any) -> None:
        start(lifespan)
        threading.Thread(target=keep, args=(lifespan, start), daemon=True, name="executor").start()

    SuperLinkLifespan._start_superexec_if_needed = started


def keep(lifespan: Any, start: Any) -> None:
    """Until the server ends."""
    while (process := lifespan.superexec_process) is not None:
        process.wait()
        time.sleep(GLANCE)
        if is_ending() or lifespan.superexec_process is not process:
            return
        sys.stderr.write("What starts runs here has died; it is started again.\n")
        sys.stderr.flush()
        start(lifespan)
