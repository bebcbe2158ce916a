"""Where an agreement on words stands: the step that all take next, and what parties and server keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import numpy as np

from partsong.text.cells import Naming
from partsong.text.keys import NAME_BYTES, names_of
from partsong.text.tables import Tables

TABLES, WORDS, FREQUENCIES, DONE = range(4)


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


@dataclass(frozen=True, slots=True)
class Left:
    """Words that have passed so far, their names under the key, and which are wide."""

    words: tuple[bytes, ...] = field(repr=False)
    names: Any = field(repr=False)
    is_wide: Any = field(repr=False)

    def some(self, chosen: Any) -> Left:
        """Those of them that are chosen by an array of booleans."""
        return Left(tuple(compress(self.words, chosen.tolist())), self.names[chosen], self.is_wide[chosen])

    def naming(self, key: bytes) -> Naming:
        """The names of any words, without work for those that are here."""
        at = {word: index for index, word in enumerate(self.words)}

        def named(words: Sequence[bytes]) -> Any:
            rows = np.array([at.get(word, -1) for word in words], dtype=np.int64)
            names = np.empty((len(words), NAME_BYTES), dtype=np.uint8)
            names[rows >= 0] = self.names[rows[rows >= 0]]
            names[rows < 0] = names_of(key, list(compress(words, (rows < 0).tolist())))
            return names

        return named


@dataclass(frozen=True, slots=True)
class Candidate:
    """A party on the way: its words that are left, their places in the last tables, and at last the agreed words."""

    key: bytes = field(repr=False)
    parties: int
    left: Left
    tables: Tables | None = None
    places: Any = field(default=None, repr=False)
    words: tuple[str, ...] = field(default=(), repr=False)
    holders: Any = field(default=None, repr=False)

    def narrowed(self, bitmap: Any) -> Candidate:
        """Without the words that are in a bucket that did not pass."""
        assert self.tables is not None
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
