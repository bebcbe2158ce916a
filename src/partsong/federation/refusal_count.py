"""Refusals without a line of their own in the audit log: a server can ask for what is refused as often as it likes.

    refusals    {"day", "count", "different": [SHA-256, …], "after": the number of a line, "unlisted": {code: count}}

Of n refusals of a day (UTC) the first MOST_DIFFERENT that differ have a line, and so have the 1st, 2nd, 4th, 8th … of
all: at most MOST_DIFFERENT + 1 + log₂ n lines. Each of the others is counted here before it leaves, and the next line
of any kind, which follows line `after`, has the counts. A process that is killed between a line and this file says
nothing twice, and forgets nothing: counts after a line that is not the last one are in a line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from partsong.io.write import replacing

FILE = "refusals"
MOST_DIFFERENT = 16


@dataclass(frozen=True, slots=True)
class Refusals:
    """Of one day: how many, hashes of the first that differ, and how many of each code no line has."""

    day: str = ""
    count: int = 0
    different: tuple[str, ...] = ()
    after: int = 0
    unlisted: Mapping[str, int] = field(default_factory=dict)

    def unlisted_after(self, last: int) -> dict[str, int]:
        """What the line that follows the last one has to say."""
        return dict(self.unlisted) if self.after == last else {}

    def has_line(self, digest: str) -> bool:
        """Whether one more, with this hash, has a line of its own."""
        is_new = digest not in self.different and len(self.different) < MOST_DIFFERENT
        return is_new or (self.count & (self.count + 1)) == 0

    def with_one(self, digest: str) -> Refusals:
        """With one more."""
        different = self.different if digest in self.different else (*self.different, digest)[:MOST_DIFFERENT]
        return replace(self, count=self.count + 1, different=different)

    def on(self, day: str) -> Refusals:
        """As they are on a day; what no line has stays."""
        return self if self.day == day else Refusals(day, after=self.after, unlisted=self.unlisted)


@dataclass(frozen=True, slots=True)
class RefusalCount:
    """The file, beside a log. One that cannot be understood was not written here, and is replaced."""

    path: Path

    @staticmethod
    def beside(log: Path) -> RefusalCount:
        """That of a log."""
        return RefusalCount(log.with_name(FILE))

    def today(self) -> Refusals:
        """Refusals of this day."""
        return self._read().on(_today())

    def keep(self, refusals: Refusals) -> None:
        """On the disk when this returns."""
        with replacing(self.path, private=True) as draft:
            draft.write_text(json.dumps(asdict(refusals)) + "\n", encoding="utf-8")

    def _read(self) -> Refusals:
        try:
            found = Refusals(**json.loads(self.path.read_text(encoding="utf-8")))
            numbers = (found.count, found.after, *found.unlisted.values())
            is_sound = all(type(number) is int and number >= 0 for number in numbers)
            return replace(found, different=tuple(map(str, found.different))) if is_sound else Refusals()
        except (OSError, ValueError, TypeError, AttributeError):
            return Refusals()


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
