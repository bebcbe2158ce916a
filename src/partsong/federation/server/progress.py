"""Progress files of a run (JSON lines), which `status` and `run` follow.

progress.jsonl           a line for each exchange, in order
state/words/steps.jsonl  a line for each step of an agreement on words
state/waiting.jsonl      sites the run is waiting for: {"waiting": names, "answered": replies so far, "of": requests},
                         without the numbers in an asynchronous run

They are information for people; the record of a run is its journal. A killed process can leave an incomplete line,
which the next line replaces.
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
"""The folder of an agreement on words, in the folder of its run, and the file of its steps."""
NEXT_STEP = {
    TABLES: "tables of hashes",
    WORDS: "the words",
    FREQUENCIES: "documents with each word",
    DONE: "nothing",
}
UNKNOWN_FIGURES = "the process ended before it could report this exchange: bytes and seconds are unknown"
FIRST_PAUSE, MAX_PAUSE = 5.0, 120.0
"""Seconds before the second waiting line, and the longest pause; each pause is twice the one before."""

Report = Callable[[Mapping[str, Any]], None]


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line, replacing an incomplete one."""
    content = path.read_bytes() if path.exists() else b""
    with path.open("r+b" if content else "wb") as file:
        file.seek(_complete_bytes(content))
        file.truncate()
        file.write(json.dumps(line).encode() + b"\n")


def _complete_bytes(content: bytes) -> int:
    """Number of bytes up to the end of the last complete line."""
    return content.rfind(b"\n") + 1


@dataclass(slots=True)
class JsonLines:
    """Follows a growing file and reads each line once."""

    path: Path
    offset: int = 0

    @staticmethod
    def from_end(path: Path) -> JsonLines:
        """Start after the complete lines that exist now."""
        return JsonLines(path, _complete_bytes(path.read_bytes()) if path.exists() else 0)

    def read_new(self) -> Iterator[dict[str, Any]]:
        """Yield complete lines that were not read yet."""
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
    """progress.jsonl; `rounds` is the expected number of exchanges."""

    path: Path
    rounds: int

    def append_round(self, done: Round) -> dict[str, Any]:
        """Append the line of an exchange that is already in the journal."""
        metrics = {name: float(value) for name, value in done.metrics.items()}
        return self._append(done.index + 1, {**_figures(done), "metrics": metrics})

    def catch_up(self, record: RunState | None) -> None:
        """Append the line of the journal's last exchange if the process was killed before it did."""
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
    """Return the sites in the last exchange: one in an asynchronous run, none if its work failed."""
    if isinstance(record, AsyncRunState):
        return [] if record.index - 1 in record.faults else [record.order[-1]]
    return sorted(record.cohort or ())


def append_step(path: Path, done: Round) -> dict[str, Any]:
    """Append the line of a step that is already on disk.

    A process killed between the two leaves the line missing or incomplete; an incomplete line is replaced.
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
    """Wraps a transport and reports which sites it is waiting for: at the first request, then after growing pauses.

    `pause` is the pause after the next line, 0 before the first request.
    """

    transport: Transport
    report: Report
    first: float = FIRST_PAUSE
    pending: set[str] = field(default_factory=set)
    batch_size: int = 0
    report_at: float = 0.0
    pause: float = 0.0

    def names(self) -> tuple[str, ...]:
        """Return the names of the sites."""
        return self.transport.names()

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> Mapping[str, bytes | NoReply]:
        """Send requests and wait for the replies."""
        self.batch_size = len(requests)
        try:
            return ask_all(self, requests, timeout)
        finally:
            self.batch_size = 0

    def push(self, requests: Mapping[str, bytes], timeout: float) -> None:
        """Send requests."""
        self.transport.push(requests, timeout)
        if requests:
            self.pending |= requests.keys()
            is_first = self.pause == 0
            self.report_at = time.monotonic() + (0.0 if is_first else self.first)
            self.pause = self.first if is_first else 2 * self.first

    def next_reply(self, timeout: float) -> SiteReply | None:
        """Return the next reply, and report meanwhile which sites are pending."""
        until = time.monotonic() + timeout
        while True:
            end = min(until, self.report_at) if self.pending else until
            arrival = self.transport.next_reply(max(0.0, end - time.monotonic()))
            if arrival is not None:
                self.pending.discard(arrival[0])
                return arrival
            now = time.monotonic()
            if now >= until or now < end:
                return None
            self.report_at, self.pause = now + self.pause, min(2 * self.pause, MAX_PAUSE)
            answered = (
                {"answered": self.batch_size - len(self.pending), "of": self.batch_size} if self.batch_size else {}
            )
            self.report({"waiting": sorted(self.pending), **answered})

    def cancel(self) -> Mapping[str, NoReply]:
        """Withdraw all pending requests."""
        self.pending.clear()
        return self.transport.cancel()
