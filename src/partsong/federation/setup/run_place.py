"""The folder of one run at the server, and what its small files say. A damaged file is an error with its name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partsong.errors import FormatError, ParameterError
from partsong.federation.locks import is_held
from partsong.federation.server.state import AsyncRunState, RunState

TIMEOUT = 600.0  # seconds that a site may take to answer, where nobody says otherwise


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
    def is_begun(self) -> bool:
        """Whether there is anything in it; drafts of a process that was killed are nothing."""
        return self.folder.is_dir() and any(not path.name.startswith(".") for path in self.folder.iterdir())

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
    found = _object(place.result) or {}
    is_failed = found.get("status") == "failed" and isinstance(found.get("notes"), list)
    is_told = is_failed and all(isinstance(text, str) for text in (found.get("type"), found.get("error")))
    if found.get("status") == "done" or is_told:
        return found
    raise FormatError(
        f"{place.result} is damaged: it does not say how the run has ended. Remove it; run … --resume goes on from the "
        "run's own journal, and writes it anew."
    )


def forget_failure(place: RunPlace) -> None:
    """Remove a result that does not say that the run is done: whoever works on it now writes another."""
    if place.result.exists() and (_object(place.result) or {}).get("status") != "done":
        place.result.unlink()


def settings_in(place: RunPlace) -> dict[str, Any]:
    """`timeout`, public `names` of columns and the folder `drop` of a run, as they were last given; none at first."""
    if not place.settings.exists():
        return {}
    found = _object(place.settings)
    if found is not None and _are_settings(found):
        return found
    raise FormatError(
        f"{place.settings} is damaged: it does not say how the run is worked on. Remove it; --timeout, --names and "
        "--drop then have to be given once more with --resume, if they were given before."
    )


def is_starting(place: RunPlace) -> bool:
    """Whether a command is about to have a run worked on: it holds the run, and nobody works on it yet, or any more.
    A result that came after its settings, which each command writes first, is of this command: the run is over then.
    """
    settings, result = _written(place.settings), _written(place.result)
    is_over = settings is not None and result is not None and result >= settings
    return is_held(place.command) and not is_held(place.lock) and not is_over


def number_in(place: RunPlace) -> int | None:
    """The number that Flower gave a run last; None where it was never started there."""
    if not place.number.exists():
        return None
    try:
        return int(place.number.read_bytes())
    except ValueError as error:
        raise FormatError(
            f"{place.number} is damaged: it does not hold Flower's number of the run. Remove it; run … --resume starts "
            "the server's part anew."
        ) from error


def _are_settings(found: dict[str, Any]) -> bool:
    names, timeout = found.get("names", []), found.get("timeout", 1.0)
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return is_list and type(timeout) in (int, float) and isinstance(found.get("drop", ""), str)


def _written(path: Path) -> int | None:
    """When, in nanoseconds; None where there is no such file."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _object(path: Path) -> dict[str, Any] | None:
    """What is in a file of JSON; None where that is no object."""
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def require_not_ended(place: RunPlace, record: RunState, arrivals: int) -> None:
    """Refuse to go on with such a run of so many `arrivals`; one that was broken off may go on, with other ends too.

    Where sites have not heard the end, they are told again, and no more.
    """
    if not isinstance(record, AsyncRunState) or not place.result.exists():
        return
    arrived = record.index - len(record.faults)
    if arrived >= arrivals:
        return
    if record.without_result:
        return
    if result_in(place)["status"] == "done":
        raise ParameterError(
            f"Run {place.name!r} is over: it has ended by time_budget or tol after {arrived} of {arrivals} "
            f"arrivals, and its sites have its model and answer no more of it. The model is {place.model}. To go on "
            "for longer, begin a new run under another --name, with a larger time_budget or a smaller tol."
        )
