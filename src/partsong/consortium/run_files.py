"""What the small files of a run at the server say; one that is damaged is an error with its name and the way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from partsong.consortium.locking import is_held
from partsong.consortium.run_place import RunPlace
from partsong.errors import FormatError


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
