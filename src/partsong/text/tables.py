"""Tables of buckets: at how many parties something falls into each, counted without telling what.

A word falls into one bucket of each table, by keyed hash. A party marks its words' buckets with 1, once however many of
its words are there; sums over parties are counters from 0 to N, several of which travel in one whole number below 2⁵³.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.text.keys import lanes, within
from partsong.text.packing import EXACT_BITS

LOAD = 2 / 3
"""Words per bucket."""
FEWEST_LAST = 5
"""Fewer tables only sort out; what they leave is looked at again."""
MOST_TO_SORT_OUT = 4
"""Exchanges that are planned ahead."""
EXCHANGE = 40_000
"""Numbers that take a party about as long to send under masks as the keys and shares of one more masked sum."""


@dataclass(frozen=True, slots=True)
class Tables:
    """`tables` independent tables of `buckets` each, in exchange `number` of `parties` parties.

    With the last tables, which are five or more, goes another one for wide words alone (see `cells`), to know how many
    of them there are.
    """

    number: int
    tables: int
    buckets: int
    parties: int

    @property
    def count(self) -> int:
        """Tables in all."""
        return self.tables + (self.tables >= FEWEST_LAST)

    @property
    def size(self) -> int:
        """Counters in all."""
        return self.count * self.buckets

    @property
    def base(self) -> int:
        """Counters are digits from 0 to N of a number."""
        return self.parties + 1

    @property
    def counters_per_number(self) -> int:
        """How many counters travel in one number: as many digits as 52 bits have room for."""
        digits = 1
        while self.base ** (digits + 1) <= 1 << EXACT_BITS:
            digits += 1
        return digits

    @property
    def numbers(self) -> int:
        """How many numbers a party sends."""
        return -(-self.size // self.counters_per_number)

    def places(self, key: bytes, names: Any) -> Any:
        """The bucket of each name in each table, as an array (n × count) of positions among all counters."""
        chosen = within(lanes(key, f"tables {self.number}", names, self.count), self.buckets)
        return (chosen + np.arange(self.count) * self.buckets).astype(np.int32)

    def marked(self, places: Any, is_wide: Any) -> Any:
        """What a party adds: a 1 in every bucket that a word of its falls into, packed."""
        marks = np.zeros((self.counters_per_number, self.numbers), dtype=bool)
        marks.reshape(-1)[places[:, : self.tables].reshape(-1)] = True
        marks.reshape(-1)[places[is_wide, self.tables :]] = True
        packed = np.zeros(self.numbers, dtype=np.int64)
        for place, row in enumerate(marks):
            packed += row * np.int64(self.base**place)
        return packed

    def counters(self, total: Any) -> Any:
        """Sums by table and bucket (count × buckets), from the sum of what was added."""
        unpacked = np.empty((self.counters_per_number, self.numbers), dtype=np.int64)
        left = np.asarray(total, dtype=np.int64)
        for digits in unpacked:
            left, digits[:] = np.divmod(left, self.base)
        return unpacked.reshape(-1)[: self.size].reshape(self.count, self.buckets)

    def survivors(self, bitmap: Any, places: Any, is_wide: Any) -> Any:
        """Which words fall into buckets that passed, in every table."""
        passed = np.unpackbits(bitmap, count=self.size).astype(bool)
        found = passed[places]
        return found[:, : self.tables].all(axis=1) & (found.all(axis=1) | ~is_wide)


@dataclass(frozen=True, slots=True)
class Tally:
    """What the server reads from the counters of an exchange.

    `chance`: of a word that falls anywhere, to meet another one in every table: the share of buckets in use, multiplied
    over the tables. `words` and `passing` estimate how many different words took part and how many of them pass, from
    above; `wide` those that are wide, known from the last tables alone.
    """

    chance: float
    words: float
    passing: float
    wide: float
    bitmap: Any

    @classmethod
    def of(cls, tables: Tables, total: Any, min_parties: int) -> Tally:
        """From the sum over parties."""
        counters = tables.counters(total)
        used = (counters > 0).mean(axis=1)
        passed = counters >= min_parties
        shares = passed.mean(axis=1)
        uneven = 1 + tables.buckets / 2**32
        return cls(
            math.prod(min(1.0, float(share) * uneven) for share in used[: tables.tables]),
            _distinct(float(used[: tables.tables].mean()), tables.buckets),
            _distinct(float(shares[: tables.tables].mean()), tables.buckets),
            _distinct(float(shares[tables.tables :].sum()), tables.buckets),
            np.packbits(passed.reshape(-1)),
        )


def next_tables(before: Tables, tally: Tally, chance: float, wanted: float) -> Tables:
    """Tables for the words that are left, until a chance of `chance` is below `wanted`.

    With two thirds of a word per bucket, about half of the buckets are in use and each table halves the chance: near to
    the fewest counters in all. Where most words that took part will not pass, a few tables drop most of these first,
    if that saves more than the exchange costs. Tables so full that they could not tell are taken to drop nearly all.
    """
    load = tally.words / before.buckets
    left = min(tally.words, tally.passing * (1.5 + load))
    passing = min(left, tally.passing) if load < 1.5 else 0.0
    last = max(FEWEST_LAST, math.ceil(math.log2(max(1.0, chance / wanted))) + 1)
    numbers_per_word = 1 / (LOAD * before.counters_per_number)

    def cheapest(left: float, last: int, exchanges: int) -> tuple[float, int]:
        """How many numbers it takes from here on, and how many tables come next."""
        ways = [((max(last, FEWEST_LAST) + 1) * left * numbers_per_word, max(last, FEWEST_LAST))]
        for first in range(1, FEWEST_LAST) if exchanges else ():
            rest, _ = cheapest(passing + (left - passing) / 2**first, last - first, exchanges - 1)
            ways.append((first * left * numbers_per_word + EXCHANGE + rest, first))
        return min(ways)

    _, tables = cheapest(left, last, MOST_TO_SORT_OUT)
    return Tables(before.number + 1, tables, math.ceil(left / LOAD) + 64, before.parties)


def _distinct(share: float, buckets: int) -> float:
    """How many different words fill such a share of the buckets: −B log(1 − share)."""
    return -buckets * math.log(max(1.0 - share, 0.5 / buckets))
