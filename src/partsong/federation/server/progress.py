"""What is told of a run while it is worked on: files of lines of JSON, which `status` and `run` follow.

progress.jsonl           a line for each exchange, in order
state/words/steps.jsonl  a line for each step of an agreement on words
state/waiting.jsonl      for whom the run waits: {"waiting": names, "answered": replies so far, "of": requests},
                         without the numbers in an asynchronous run

They are for people; the record of a run is its journal. A process that is killed can leave an incomplete line, which
the next line replaces.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partsong.core.interfaces import Round
from partsong.federation.server.state import AsyncRunState, RunState
from partsong.federation.transports.base import NoReply, SiteReply, Transport, ask_all
from partsong.topics.agreement.protocol import DONE, FREQUENCIES, MOST_EXCHANGES, TABLES, WORDS, AgreementStep

WAITING = "waiting.jsonl"
AGREEMENT, STEPS = "words", "steps.jsonl"
"""The folder of an agreement on words, in that of its run, and the file of its steps."""
NEXT_STEP = {
    TABLES: "tables of hashes",
    WORDS: "the words",
    FREQUENCIES: "documents with each word",
    DONE: "nothing",
}
UNKNOWN_FIGURES = "its process ended before it could tell of this exchange: bytes and seconds are not known"
FIRST_PAUSE, MAX_PAUSE = 5.0, 120.0
"""Seconds before the second line on waiting, and the longest between two; each pause is twice the one before."""

Report = Callable[[Mapping[str, Any]], None]


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line, in place of an incomplete one."""
    content = path.read_bytes() if path.exists() else b""
    with path.open("r+b" if content else "wb") as file:
        file.seek(_complete_bytes(content))
        file.truncate()
        file.write(json.dumps(line).encode() + b"\n")


def _complete_bytes(content: bytes) -> int:
    """Bytes up to the end of the last complete line."""
    return content.rfind(b"\n") + 1


@dataclass(slots=True)
class JsonLines:
    """A file that grows, of which each line is read once."""

    path: Path
    offset: int = 0

    @staticmethod
    def from_end(path: Path) -> JsonLines:
        """Skip the complete lines that are there."""
        return JsonLines(path, _complete_bytes(path.read_bytes()) if path.exists() else 0)

    def read_new(self) -> Iterator[dict[str, Any]]:
        """Complete lines that were not read yet."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                yield json.loads(line)


@dataclass(frozen=True, slots=True)
class ProgressFile:
    """progress.jsonl; `rounds` is how many exchanges there will be."""

    path: Path
    rounds: int

    def append_round(self, done: Round) -> dict[str, Any]:
        """Write the line of an exchange, which is in the journal already."""
        metrics = {name: float(value) for name, value in done.metrics.items()}
        return self._append(done.index + 1, {**_figures(done), "metrics": metrics})

    def catch_up(self, record: RunState | None) -> None:
        """Write the line of the last exchange in the journal if the process was killed before it did."""
        lines = list(JsonLines(self.path).read_new())
        if record is None or record.index <= (lines[-1]["round"] if lines else 0):
            return
        known = {
            "participants": _last_participants(record),
            "refused": {},
            "bytes_up": {},
            "bytes_down": 0,
            "seconds": 0.0,
        }
        self._append(record.index, {**known, "metrics": {}, "note": UNKNOWN_FIGURES})

    def _append(self, number: int, figures: Mapping[str, Any]) -> dict[str, Any]:
        line = {"round": number, "rounds": max(self.rounds, number), **figures}
        append_line(self.path, line)
        return line


def _last_participants(record: RunState) -> list[str]:
    """Who was in the last exchange: one site in an asynchronous run, and nobody where its work was refused."""
    if isinstance(record, AsyncRunState):
        return [] if record.index - 1 in record.faults else [record.order[-1]]
    return sorted(record.cohort or ())


def append_step(path: Path, done: Round) -> dict[str, Any]:
    """Write the line of a step, which is on the disk already.

    A process that was killed between the two left the line before incomplete or missing; an incomplete one is replaced.
    """
    following = NEXT_STEP[AgreementStep.from_array(done.model["step"]).stage]
    line = {"step": done.index + 1, "steps": MOST_EXCHANGES, **_figures(done), "next": following}
    append_line(path, line)
    return line


def _figures(done: Round) -> dict[str, Any]:
    return {
        "participants": list(done.participants),
        "refused": dict(done.refused),
        "bytes_up": dict(done.bytes_up),
        "bytes_down": int(done.bytes_down),
        "seconds": round(done.seconds, 3),
    }


@dataclass(slots=True)
class ReportingTransport:
    """A transport that tells for whom it waits: at the first request, after some seconds, then ever more seldom.

    `pause` is until the next line but one, 0 before the first request.
    """

    transport: Transport
    report: Report
    first: float = FIRST_PAUSE
    pending: set[str] = field(default_factory=set)
    batch_size: int = 0
    report_at: float = 0.0
    pause: float = 0.0

    def names(self) -> tuple[str, ...]:
        """Those of the transport."""
        return self.transport.names()

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> Mapping[str, bytes | NoReply]:
        """As the transport does."""
        self.batch_size = len(requests)
        try:
            return ask_all(self, requests, timeout)
        finally:
            self.batch_size = 0

    def push(self, requests: Mapping[str, bytes], timeout: float) -> None:
        """Hand requests over."""
        self.transport.push(requests, timeout)
        if requests:
            self.pending |= requests.keys()
            is_first = self.pause == 0
            self.report_at = time.monotonic() + (0.0 if is_first else self.first)
            self.pause = self.first if is_first else 2 * self.first

    def next_reply(self, timeout: float) -> SiteReply | None:
        """The next reply; whom it waits for is told meanwhile."""
        until = time.monotonic() + timeout
        while True:
            end = min(until, self.report_at) if self.pending else until
            heard = self.transport.next_reply(max(0.0, end - time.monotonic()))
            if heard is not None:
                self.pending.discard(heard[0])
                return heard
            now = time.monotonic()
            if now >= until or now < end:
                return None
            self.report_at, self.pause = now + self.pause, min(2 * self.pause, MAX_PAUSE)
            answered = (
                {"answered": self.batch_size - len(self.pending), "of": self.batch_size} if self.batch_size else {}
            )
            self.report({"waiting": sorted(self.pending), **answered})

    def cancel(self) -> Mapping[str, NoReply]:
        """As the transport does."""
        self.pending.clear()
        return self.transport.cancel()
