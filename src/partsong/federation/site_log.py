"""The log of a site, for its owner alone: reasons with names and values, which never leave.

A server can ask for what is refused as often as it likes, and its own words may be in a reason: lines are cut, and a
log that is full takes the place of the one before it (site.log.1), so that both stay below FULL and a line.
"""

from __future__ import annotations

import contextlib
import os
from datetime import UTC, datetime
from pathlib import Path

LOG = "site.log"
LONGEST = 8192
"""Letters of a text that are kept: half of them from its end, where an error says what it is."""
FULL = 1 << 23
"""Bytes."""


def write_down(folder: Path, code: str, text: str) -> None:
    """One line, whatever is in the text; a log that cannot be written changes nothing else."""
    when = datetime.now(UTC).isoformat(timespec="seconds")
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in _cut(text))
    with contextlib.suppress(OSError, ValueError):
        place = folder / LOG
        if place.exists() and place.stat().st_size > FULL:
            os.replace(place, folder / f"{LOG}.1")
        descriptor = os.open(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(descriptor, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{when} [{code}] {line}\n")


def _cut(text: str) -> str:
    half, more = LONGEST // 2, len(text) - LONGEST
    return text if more <= 0 else f"{text[:half]} […{more} letters left out…] {text[-half:]}"
