"""What `partsong federation status` finds missing or damaged: told as lines, while all else is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from partsong.cli.guard import BAD_INPUT, failure
from partsong.errors import PartsongError

Seen = TypeVar("Seen")


@dataclass(frozen=True, slots=True)
class Mending:
    """What has to be mended, with the way out of each: `found` by what it is."""

    found: dict[str, str] = field(default_factory=dict)

    def tried(self, what: str, look: Callable[[], Seen]) -> Seen | None:
        """What is seen there; None where it is missing or damaged, which is written down."""
        try:
            return look()
        except (PartsongError, OSError) as error:
            self.found[what] = reason(error)
            return None


def reason(error: PartsongError | OSError) -> str:
    """An error with what was added to it, in one line."""
    return str(failure(error, BAD_INPUT)["error"])
