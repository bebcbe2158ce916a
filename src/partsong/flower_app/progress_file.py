"""progress.jsonl: a line for each exchange of a run, in order, for people and for `status`; the record is elsewhere.

The line is written after the record. A process that is killed between the two leaves an exchange without a line, or
with a part of one: whoever goes on with the run first puts that right.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partsong.core import Round
from partsong.federation.arrivals_record import Ongoing
from partsong.federation.record import Record

UNTOLD = "its process has ended before it could tell of this exchange: bytes and seconds are not known"


@dataclass(frozen=True, slots=True)
class ProgressFile:
    """That file; `rounds` is how many exchanges there will be."""

    path: Path
    rounds: int

    def note(self, done: Round) -> dict[str, Any]:
        """The line of an exchange."""
        figures = {
            "participants": list(done.participants),
            "refused": dict(done.refused),
            "bytes_up": dict(done.bytes_up),
            "bytes_down": int(done.bytes_down),
            "seconds": round(done.seconds, 3),
            "metrics": {name: float(value) for name, value in done.metrics.items()},
        }
        number = done.index + 1
        return self._append({"round": number, "rounds": max(self.rounds, number), **figures})

    def catch_up(self, record: Record | None) -> None:
        """Take away a line without its end, and add the one of the last exchange where it is missing."""
        content = self.path.read_bytes() if self.path.exists() else b""
        size = whole_lines(content)
        if size < len(content):
            with self.path.open("r+b") as file:
                file.truncate(size)
        if record is None or record.index == 0:
            return
        lines = content[:size].splitlines()
        if not lines or json.loads(lines[-1])["round"] < record.index:
            unknown = {"refused": {}, "bytes_up": {}, "bytes_down": 0, "seconds": 0.0, "metrics": {}, "note": UNTOLD}
            number, heard = record.index, _last_heard(record)
            self._append({"round": number, "rounds": max(self.rounds, number), "participants": heard, **unknown})

    def _append(self, told: dict[str, Any]) -> dict[str, Any]:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")
        return told


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


def whole_lines(content: bytes) -> int:
    """Bytes up to the end of the last line that has one."""
    return content.rfind(b"\n") + 1


def _last_heard(record: Record) -> list[str]:
    """Who was in the last exchange: one site where nobody waits for others, and nobody where its work was refused."""
    if isinstance(record, Ongoing):
        return [] if record.index - 1 in record.faults else [record.order[-1]]
    return sorted(record.company or ())
