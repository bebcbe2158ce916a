"""The log of a site, for its owner alone: reasons with names and values, which never leave."""

from __future__ import annotations

import contextlib
import os
from datetime import UTC, datetime
from pathlib import Path


def write_down(folder: Path, code: str, text: str) -> None:
    """One line, whatever is in the text; a log that cannot be written changes nothing else."""
    when = datetime.now(UTC).isoformat(timespec="seconds")
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(folder / "site.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(descriptor, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{when} [{code}] {line}\n")
