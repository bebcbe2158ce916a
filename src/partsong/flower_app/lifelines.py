"""Who ends with whom at the server: nobody outlives it, and what starts its apps is started again, some times.

Flower asks the server's app to end when its parent has gone, by a signal that an app does not hear while it waits for a
reply; and a server whose executor has died takes up no run any more, without a word.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from partsong.errors import CompositionError
from partsong.flower_app.doorbell import is_ending

SERVER = "PARTSONG_SERVER_PROCESS"
"""The variable in which `serve` tells its children its number."""
GLANCE = 1.0
DEATHS = 6
LIFE = 60.0
"""An executor that has lived for so many seconds dies for another reason than the one before it."""


@dataclass(slots=True)
class Executor:
    """How often in a row it has died young, and whether it was given up."""

    deaths: int = 0
    has_failed: bool = False

    @property
    def told(self) -> str:
        """For people."""
        return (
            f"What starts runs here has died {self.deaths} times in a row, each time within {LIFE:.0f} seconds: the "
            "server has ended. What it has said is above; all runs can be resumed."
        )

    def died(self, seconds: float) -> float:
        """After a life of so many seconds; how long to wait before the next: 1, 2, 4, … of them."""
        self.deaths = 1 if seconds >= LIFE else self.deaths + 1
        self.has_failed = self.deaths > DEATHS
        return float(GLANCE * 2 ** (self.deaths - 1))


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


def keep_executor() -> Executor:
    """From now on the executor of the server in this process is started again when it has died; one that dies at once,
    whenever it is started, ends the server.
    """
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan

    try:
        start = SuperLinkLifespan._start_superexec_if_needed
    except AttributeError as error:
        raise CompositionError(
            "Flower's server is not the one that this was written for. Install flwr 1.41."
        ) from error

    seen = Executor()

    def started(lifespan: Any) -> None:
        start(lifespan)
        threading.Thread(target=keep, args=(lifespan, start, seen), daemon=True, name="executor").start()

    SuperLinkLifespan._start_superexec_if_needed = started
    return seen


def keep(lifespan: Any, start: Any, seen: Executor) -> None:
    """Until the server ends, or the executor is given up."""
    while (process := lifespan.superexec_process) is not None:
        began = time.monotonic()
        process.wait()
        pause = seen.died(time.monotonic() - began)
        time.sleep(GLANCE if seen.has_failed else pause)
        if is_ending() or lifespan.superexec_process is not process:
            seen.has_failed = False
            return
        if seen.has_failed:
            end_server()
            return
        sys.stderr.write("What starts runs here has died; it is started again.\n")
        sys.stderr.flush()
        start(lifespan)


def end_server() -> None:
    """As its web server ends when it is told to, in order."""
    server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if server is not None:
        server.should_exit = True
