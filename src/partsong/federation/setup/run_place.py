"""The folder of one run at the server, and what its small files say. A damaged file is an error with its name."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from partsong.errors import FormatError, ParameterError
from partsong.federation.locks import is_held
from partsong.federation.server.state import AsyncRunState, RunState

TIMEOUT = 600.0
"""Seconds that a site may take to answer, where nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """settings.json: seconds that a site may take to answer, public names of columns, and the folder for files."""

    timeout: float = TIMEOUT
    names: tuple[str, ...] = ()
    drop: str | None = None


@dataclass(frozen=True, slots=True)
class RunPlace:
    """That folder, and what is where in it."""

    folder: Path

    @property
    def name(self) -> str:
        """The run's."""
        return self.folder.name

    @property
    def experiment(self) -> Path:
        """What is run."""
        return self.folder / "experiment.toml"

    @property
    def settings(self) -> Path:
        """How patiently, as JSON."""
        return self.folder / "settings.json"

    @property
    def state(self) -> Path:
        """The journal of the run."""
        return self.folder / "state"

    @property
    def progress(self) -> Path:
        """One line of JSON for each round that was done."""
        return self.folder / "progress.jsonl"

    @property
    def result(self) -> Path:
        """How it ended, as JSON."""
        return self.folder / "result.json"

    @property
    def model(self) -> Path:
        """What came out."""
        return self.folder / "model.safetensors"

    @property
    def number(self) -> Path:
        """The number that Flower gave it last."""
        return self.folder / "flower-run"

    @property
    def lock(self) -> Path:
        """Held while somebody works on it."""
        return self.folder / "lock"

    @property
    def command(self) -> Path:
        """Held by the command that has it worked on, also before that begins."""
        return self.folder / "command.lock"


def result_in(place: RunPlace) -> dict[str, Any]:
    """How a run has ended: its `status` is done, or failed with `type`, `error` and `notes`."""
    try:
        found = json.loads(place.result.read_bytes())
        if found["status"] == "done" or {"type", "error", "notes"} <= found.keys():
            return dict(found)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise FormatError(
        f"{place.result} is damaged: it does not say how the run has ended. Remove it; run … --resume goes on from the "
        "run's own journal, and writes it anew."
    )


def forget_failure(place: RunPlace) -> None:
    """Remove a result that does not say that the run is done: whoever works on it now writes another."""
    with contextlib.suppress(FormatError):  # a damaged one says nothing
        if not place.result.exists() or result_in(place)["status"] == "done":
            return
    place.result.unlink()


def settings_in(place: RunPlace) -> RunSettings:
    """How a run is worked on, as it was last given."""
    if not place.settings.exists():
        return RunSettings()
    try:
        return msgspec.json.decode(place.settings.read_bytes(), type=RunSettings)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"{place.settings} is damaged: it does not say how the run is worked on ({error}). Remove it; --timeout, "
            "--names and --drop then have to be given once more with --resume, if they were given before."
        ) from error


def is_starting(place: RunPlace) -> bool:
    """Whether a command is about to have a run worked on: it holds the run, and nobody works on it yet."""
    return is_held(place.command) and not is_held(place.lock) and not place.result.exists()


def read_number(path: Path) -> int | None:
    """The number in a file; None where there is none, or no number in it: whoever needs it makes it anew."""
    try:
        return int(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def number_in(place: RunPlace) -> int | None:
    """The number that Flower gave a run last; None where it was never started there."""
    return read_number(place.number)


def require_not_ended(place: RunPlace, record: RunState, arrivals: int) -> None:
    """Refuse to go on with such a run of so many `arrivals`; one that was broken off may go on, with other ends too.

    Where sites have not heard the end, they are told again, and no more.
    """
    if not isinstance(record, AsyncRunState) or record.without_result or not place.result.exists():
        return
    arrived = record.index - len(record.faults)
    if arrived < arrivals and result_in(place)["status"] == "done":
        raise ParameterError(
            f"Run {place.name!r} is over: it has ended by time_budget or tol after {arrived} of {arrivals} "
            f"arrivals, and its sites have its model and answer no more of it. The model is {place.model}. To go on "
            "for longer, begin a new run under another --name, with a larger time_budget or a smaller tol."
        )
