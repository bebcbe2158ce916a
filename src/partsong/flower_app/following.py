"""A run from the coordinator's side: started, followed by its own files and Flower's real status, started anew."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partsong import errors
from partsong.consortium.locking import holder_of, is_held
from partsong.consortium.run_files import number_in, result_in
from partsong.consortium.server_folder import RunPlace, ServerFolder
from partsong.consortium.toml_text import write
from partsong.errors import FileError, PartsongError, PartyError
from partsong.federation.word_progress import FILE as STEPS
from partsong.flower_app.control import Control, ServerError, Status, controlling
from partsong.flower_app.progress_file import Lines
from partsong.flower_app.waiting import FILE as WAITING

STARTS = 3
POLL = 2.0
GRACE = 15.0
STOPPED = "stopped"
"""What Flower says of a run that somebody has stopped."""

Tell = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class News:
    """What comes of a run from now on: lines of its steps, its exchanges and of whom it waits for, and a result, which
    is known by its file. One that is there already is not this one: it stays until there is another, or, where it
    tells of a failure, until the run is started again.
    """

    place: RunPlace
    files: tuple[Lines, ...]
    before: tuple[int, int] | None

    @staticmethod
    def from_now(place: RunPlace) -> News:
        """Without what is there."""
        paths = (place.state / "words" / STEPS, place.progress, place.state / WAITING)
        return News(place, tuple(Lines.to_come(path) for path in paths), _identity(place.result))

    @property
    def is_over(self) -> bool:
        """Whether there is a result."""
        return _identity(self.place.result) not in (None, self.before)

    def forget_failure(self) -> None:
        """Once the run is started again: how it has failed before is no news of it. What is done stays done, and a
        result that has come meanwhile stays too.
        """
        result, aside = self.place.result, self.place.result.with_name(f".{self.place.result.name}.before")
        try:
            if self.before is None or result_in(self.place)["status"] != "failed":
                return
            result.replace(aside)
        except FileNotFoundError:
            return
        if _identity(aside) == self.before:
            aside.unlink()
        else:
            aside.replace(result)

    def lines(self) -> Iterator[Mapping[str, Any]]:
        """Those that have come."""
        for file in self.files:
            yield from file.new()


def run_to_end(server: ServerFolder, place: RunPlace, tell: Tell) -> dict[str, Any]:
    """Start it, follow it, and give back how it ended; one that ends without a word is started again, and goes on.

    One that is being worked on is followed, and not started a second time. That it is started is told before its
    process is up, which takes seconds, and once: {"starting": its name}.
    """
    told, is_told = News.from_now(place), False
    with controlling(server) as control:
        status = Status("unknown")
        for _ in range(STARTS):
            number = _at_work(control, place)
            if number is None:
                if not is_told:
                    tell({"starting": place.name})
                is_told, number = True, _started(control, told)
            try:
                status = _watched(control, number, told, tell)
            except KeyboardInterrupt:
                control.stop(number)
                end_work(place)
                raise
            if told.is_over:
                return _result(place)
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


def _at_work(control: Control, place: RunPlace) -> int | None:
    """Flower's number of a run that a process is at work on; what is left of one that is over is ended."""
    number = number_in(place) if is_held(place.lock) else None
    if number is None:
        return None
    if not control.status(number).is_over:
        return number
    end_work(place)
    return None


def _started(control: Control, told: News) -> int:
    """Flower's number of the run, a new one."""
    place = told.place
    number = control.start(place.name)
    write(place.number, str(number))
    told.forget_failure()
    return number


def _watched(control: Control, number: int, told: News, tell: Tell) -> Status:
    """Until it is over; what Flower says of it. A process that has died is not waited for."""
    was_seen, gone, ended = False, 0.0, 0.0
    while True:
        for line in told.lines():
            tell(line)
        status = control.status(number)
        if status.is_over:
            break
        is_there = is_held(told.place.lock)
        was_seen = was_seen or is_there
        if told.is_over:
            ended = ended or time.monotonic()
        elif was_seen and not is_there:
            gone = gone or time.monotonic()
        if (gone and time.monotonic() - gone > GRACE / 3) or (ended and time.monotonic() - ended > GRACE):
            control.stop(number)
            break
        time.sleep(POLL)
    for line in told.lines():
        tell(line)
    return status


def _identity(path: Path) -> tuple[int, int] | None:
    """Of a file that is never changed but replaced; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _result(place: RunPlace) -> dict[str, Any]:
    """The result; or the error that the run ended with, of its own class."""
    found = result_in(place)
    if found["status"] == "done":
        return found
    kind = vars(errors).get(found["type"])
    is_ours = isinstance(kind, type) and issubclass(kind, PartsongError)
    error = kind(found["error"]) if is_ours and kind is not None else PartyError(f"{found['type']}: {found['error']}")
    for note in found["notes"]:
        error.add_note(note)
    raise error
