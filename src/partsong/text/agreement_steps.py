"""Where an agreement on words stands: the step that all take next, and what parties and server keep."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import numpy as np

from partsong.core import Message
from partsong.errors import PartyError
from partsong.text.agreed_words import AgreedWords
from partsong.text.tables import Tables

TABLES, WORDS, FREQUENCIES, DONE = range(4)
MOST_COUNTERS = 1 << 27
_STOPPED = "Nothing was sent. Agree again, with a fresh key."


@dataclass(frozen=True, slots=True)
class Step:
    """What everybody does next: the stage, the number of the exchange, and sizes of tables or cells."""

    stage: int
    number: int
    tables: int = 0
    buckets: int = 0
    narrow: int = 0
    wide: int = 0

    def written(self) -> Any:
        """As an array."""
        return np.array([self.stage, self.number, self.tables, self.buckets, self.narrow, self.wide], dtype=np.int64)

    @classmethod
    def read(cls, numbers: Any) -> Step:
        """From an array."""
        return cls(*(int(number) for number in numbers))

    @classmethod
    def asked(cls, model: Message, last: int, party: str) -> Step:
        """The step that a server asks a party for, after its answer to step `last`.

        Pads and hashes are for one step each: a step that comes twice, or out of turn, or that no honest server asks
        for, is refused.
        """
        try:
            step = cls.read(model["step"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise PartyError(f"Party {party!r}: the server's step cannot be read. {_STOPPED}") from None
        if step.number != last + 1 or step.stage not in (TABLES, WORDS, FREQUENCIES):
            raise PartyError(
                f"Party {party!r} was asked for step {step.number} of the agreement after step {last}. Each is "
                f"answered once, in order: two answers under one pad could be read without the key. {_STOPPED}"
            )
        sizes = (step.tables, step.buckets, step.narrow, step.wide)
        if min(sizes) < 0 or max((step.tables + 1) * step.buckets, step.narrow, step.wide) > MOST_COUNTERS:
            raise PartyError(f"Party {party!r} was asked for tables or cells beyond all measure. {_STOPPED}")
        return step


@dataclass(frozen=True, slots=True)
class Left:
    """Words that have passed so far, their names under the key, and which are wide."""

    words: tuple[bytes, ...] = field(repr=False)
    names: Any = field(repr=False)
    is_wide: Any = field(repr=False)

    def some(self, chosen: Any) -> Left:
        """Those of them that are chosen by an array of booleans."""
        return Left(tuple(compress(self.words, chosen.tolist())), self.names[chosen], self.is_wide[chosen])


@dataclass(frozen=True, slots=True)
class Candidate:
    """A party on the way: its words that are left, their places in the last tables, and at last the agreed words.

    `answered` is the number of the last step that it has answered. `n_too_long` of its words, in enough documents, had
    more bytes than may be proposed; nobody else is told that number.
    """

    key: bytes = field(repr=False)
    parties: int
    left: Left
    answered: int = -1
    tables: Tables | None = None
    places: Any = field(default=None, repr=False)
    agreed: AgreedWords | None = field(default=None, repr=False)
    n_too_long: int = 0

    @property
    def words(self) -> tuple[str, ...]:
        """The agreed words; none before the end."""
        return () if self.agreed is None else self.agreed.words

    @property
    def holders(self) -> Any:
        """At how many parties each of them is."""
        return None if self.agreed is None else self.agreed.holders

    def narrowed(self, bitmap: Any, party: str) -> Candidate:
        """Without the words that are in a bucket that did not pass."""
        if self.tables is None or bitmap.dtype != np.uint8 or bitmap.shape != (-(-self.tables.size // 8),):
            raise PartyError(f"Party {party!r}: the server's bits are not those of the tables before. {_STOPPED}")
        passed = self.tables.survivors(bitmap, self.places, self.left.is_wide)
        return replace(self, left=self.left.some(passed), tables=None, places=None)


@dataclass(frozen=True, slots=True)
class Count:
    """The server on the way: `chance` bounds the probability that a word at too few parties passes."""

    step: Step
    parties: int
    chance: float = 1.0
    n_tables: int = 0
    n_passing: float = 0.0
    n_wide: float = 0.0
    readings: int = 0
