"""steps.jsonl: a line for each step of an agreement on words, for the people at the server; the record is elsewhere.

The line is written after the record, as those of rounds are. A process that is killed between the two leaves a step
without a line, or with a part of one, which the next line replaces.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partsong.core import Round
from partsong.text.agreement import MOST_EXCHANGES
from partsong.text.agreement_steps import DONE, FREQUENCIES, TABLES, WORDS, Step

FILE = "steps.jsonl"
NEXT = {TABLES: "tables of hashes", WORDS: "the words", FREQUENCIES: "documents with each word", DONE: "nothing"}


@dataclass(frozen=True, slots=True)
class StepLines:
    """That file."""

    path: Path

    def note(self, done: Round) -> dict[str, Any]:
        """The line of a step: its number, of how many at most, who has answered, and what comes next."""
        told = {
            "step": done.index + 1,
            "steps": MOST_EXCHANGES,
            "participants": list(done.participants),
            "refused": dict(done.refused),
            "bytes_up": dict(done.bytes_up),
            "bytes_down": int(done.bytes_down),
            "seconds": round(done.seconds, 3),
            "next": NEXT[Step.read(done.model["step"]).stage],
        }
        content = self.path.read_bytes() if self.path.exists() else b""
        with self.path.open("r+b" if content else "wb") as file:
            file.seek(content.rfind(b"\n") + 1)
            file.truncate()
            file.write(json.dumps(told).encode() + b"\n")
        return told
