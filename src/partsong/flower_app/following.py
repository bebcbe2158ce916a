"""A run from the coordinator's side: started, followed by its own files and Flower's real status, started anew."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partsong import errors
from partsong.consortium.locking import holder_of, is_held
from partsong.consortium.server_folder import RunPlace, ServerFolder
from partsong.consortium.toml_text import write
from partsong.errors import FileError, PartsongError, PartyError
from partsong.flower_app.control import Control, ServerError, Status, controlling
from partsong.flower_app.progress_file import whole_lines

STARTS = 3
POLL = 2.0
GRACE = 15.0
STOPPED = "stopped"
"""What Flower says of a run that somebody has stopped."""

Tell = Callable[[Mapping[str, Any]], None]


@dataclass(slots=True)
class Lines:
    """Lines of a file that grows, each told once."""

    path: Path
    at: int = 0

    @staticmethod
    def to_come(path: Path) -> Lines:
        """Without those that are there; a part of a line is none."""
        return Lines(path, whole_lines(path.read_bytes()) if path.exists() else 0)

    def new(self) -> Iterator[dict[str, Any]]:
        """Those that are whole and were not told yet."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.at += len(line)
                yield json.loads(line)


def run_to_end(server: ServerFolder, place: RunPlace, tell: Tell) -> dict[str, Any]:
    """Start it, follow it, and give back how it ended; one that ends without a word is started again, and goes on.

    One that is being worked on is followed, and not started a second time.
    """
    progress = Lines.to_come(place.progress)
    with controlling(server) as control:
        status = Status("unknown")
        for _ in range(STARTS):
            number = _started(control, place)
            try:
                status = _watched(control, number, place, progress, tell)
            except KeyboardInterrupt:
                control.stop(number)
                end_work(place)
                raise
            if place.result.exists():
                return _told(place)
            if status.sub_status == STOPPED:
                end_work(place)
                raise ServerError(f"Run {place.name!r} was stopped. Nothing is lost: --resume goes on with it.")
        raise ServerError(
            f"Run {place.name!r} has ended {STARTS} times without a word ({status.details or 'no details'}). Look at "
            "the server's log; it can be resumed."
        )


def end_work(place: RunPlace) -> None:
    """End the process that works on a run. A run that Flower has stopped is not told so, and would wait for sites."""
    for how, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        holder, until = holder_of(place.lock), time.monotonic() + patience
        if holder is None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(holder, how)
        while is_held(place.lock) and time.monotonic() < until:
            time.sleep(0.1)
    if is_held(place.lock):
        raise FileError(f"Run {place.name!r} is still worked on, by a process that cannot be ended from here.")


def _started(control: Control, place: RunPlace) -> int:
    """Flower's number of the run: a new one, or that of the process that is at work on it."""
    if is_held(place.lock) and place.number.exists():
        number = int(place.number.read_text())
        if not control.status(number).is_over:
            return number
        end_work(place)
    place.result.unlink(missing_ok=True)
    number = control.start(place.name)
    write(place.number, str(number))
    return number


def _watched(control: Control, number: int, place: RunPlace, progress: Lines, tell: Tell) -> Status:
    """Until it is over; what Flower says of it. A process that has died is not waited for."""
    was_seen, gone, ended = False, 0.0, 0.0
    while True:
        for line in progress.new():
            tell(line)
        status = control.status(number)
        if status.is_over:
            break
        is_there = is_held(place.lock)
        was_seen = was_seen or is_there
        if place.result.exists():
            ended = ended or time.monotonic()
        elif was_seen and not is_there:
            gone = gone or time.monotonic()
        if (gone and time.monotonic() - gone > GRACE / 3) or (ended and time.monotonic() - ended > GRACE):
            control.stop(number)
            break
        time.sleep(POLL)
    for line in progress.new():
        tell(line)
    return status


def _told(place: RunPlace) -> dict[str, Any]:
    """The result; or the error that the run ended with, of its own class."""
    found: dict[str, Any] = json.loads(place.result.read_text())
    if found["status"] == "done":
        return found
    kind = vars(errors).get(found["type"])
    is_ours = isinstance(kind, type) and issubclass(kind, PartsongError)
    error = kind(found["error"]) if is_ours and kind is not None else PartyError(f"{found['type']}: {found['error']}")
    for note in found["notes"]:
        error.add_note(note)
    raise error
