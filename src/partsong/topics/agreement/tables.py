"""Tables of buckets: count at how many parties each bucket has a word, without revealing the words.

A word falls into one bucket of each table, by keyed hash. A party marks the buckets of its words with 1, even if
several of its words share one. Sums over parties are counters from 0 to N; several counters are packed into one whole
number below 2⁵³. `PartyWords` are the words of a party, `AgreedWords` the result of an agreement for every key holder.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, repeat
from typing import Any, cast
from weakref import WeakValueDictionary

import numpy as np

from partsong.core.interfaces import Matrix, Message, Shard
from partsong.core.states import state
from partsong.core.streams import fresh_seed
from partsong.errors import CompositionError, PartyError
from partsong.topics.agreement.encoding import EXACT_BITS, Cells, hash_names, keyed_numbers, require_key, scale_below
from partsong.topics.documents import as_documents
from partsong.topics.tokenizer import Words
from partsong.topics.vocabulary import document_frequencies

_kept: WeakValueDictionary[Any, AgreedWords] = WeakValueDictionary()
LOAD = 2 / 3
"""Words per bucket."""
FEWEST_LAST = 5
"""Fewer tables only filter; the remaining words are checked again."""
MOST_TO_SORT_OUT = 4
"""Number of exchanges to plan ahead."""
EXCHANGE = 40_000
"""Cost of one more secure sum (keys and shares), in masked numbers sent by a party."""


@state("words.agreed")
@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class AgreedWords:
    """Words in the order of a keyed hash, which reveals nothing to the server, and the number of parties with each.

    `columns` maps words to columns; `in_sum` are all words in the sum, including those that passed by chance and are
    dropped.
    """

    words: tuple[str, ...] = field(repr=False)
    holders: Any = field(repr=False)
    columns: Mapping[str, int] = field(repr=False)
    in_sum: frozenset[bytes] = field(repr=False)

    def require_sound(self, party: str, proposed: Iterable[bytes], most_rare: float) -> None:
        """Refuse sums that lack words of this party, or have more rare words than chance explains."""
        if not self.in_sum.issuperset(proposed):
            raise PartyError(
                f"Party {party!r}: words that it proposed and that passed are missing from the sum. Agree again."
            )
        n_rare = len(self.in_sum) - len(self.words)
        if n_rare > most_rare:
            raise PartyError(
                f"Party {party!r}: {n_rare} words at too few parties have passed, which is too unlikely to be chance: "
                "the server ignored its counts. The other parties have seen these words. Use another server and a new "
                "key."
            )


@dataclass(frozen=True, slots=True)
class CellSums:
    """The two sums of cells that are sent to all parties, with their layouts."""

    narrow: Cells
    wide: Cells
    sums: tuple[Any, Any] = field(repr=False)

    @classmethod
    def from_message(cls, narrow: Cells, wide: Cells, model: Message, party: str) -> CellSums:
        """Read the sums from a message of the server to a party."""
        try:
            sums = model["narrow"], model["wide"]
            shapes = tuple(tuple(int(size) for size in total.shape) for total in sums)
        except (KeyError, AttributeError):
            shapes = ()
        if shapes != (narrow.shape, wide.shape):
            raise PartyError(f"Party {party!r}: the server's sums of words do not match this step. Agree again.")
        return cls(narrow, wide, sums)

    def read(self, key: bytes, min_parties: int) -> AgreedWords | None:
        """Decode the words at ≥ `min_parties` parties; None if a sum cannot be decoded completely.

        Parties in one process have the same sums and the same key, so a result that one of them still holds is reused.
        """
        mark = (key, min_parties, self.narrow, self.wide, *(hashlib.blake2b(total).digest() for total in self._arrays))
        known = _kept.get(mark)
        if known is not None:
            return known
        found = self._read(key, min_parties)
        if found is not None:
            _kept[mark] = found
        return found

    @property
    def _arrays(self) -> tuple[Any, Any]:
        narrow, wide = (np.ascontiguousarray(total, dtype=np.int64) for total in self.sums)
        return narrow, wide

    def _read(self, key: bytes, min_parties: int) -> AgreedWords | None:
        naming = partial(hash_names, key)
        cells = (self.narrow, self.wide)
        short, others = (one.read(key, total, naming) for one, total in zip(cells, self._arrays, strict=True))
        if not (short.is_whole and others.is_whole):
            return None
        texts, holders = short.words + others.words, np.concatenate([short.holders, others.holders])
        order = np.argsort(np.concatenate([short.order, others.order]), kind="stable")
        order = order[holders[order] >= min_parties]
        words = tuple(texts[index].decode("utf-8", "surrogatepass") for index in order.tolist())
        columns = {word: column for column, word in enumerate(words)}
        return AgreedWords(words, holders[order], columns, frozenset(texts))


@dataclass(frozen=True, slots=True)
class PartyWords:
    """The words of a party with their document counts, and the shared key of the parties; private.

    `options` are the word options, which must be equal at all parties.
    """

    words: tuple[str, ...] = field(repr=False)
    documents: Any = field(repr=False)
    n_documents: int
    key: bytes = field(repr=False)
    options: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        """The number of documents, and no columns yet."""
        return self.n_documents, 0

    @property
    def dtype(self) -> Any:
        """The type for the layout; counts are whole numbers."""
        return np.dtype(np.float64)

    @classmethod
    def of(cls, documents: Iterable[Any], words: Words, key: bytes) -> PartyWords:
        """Count the words of documents, which may all be empty."""
        counted, n_documents = document_frequencies(as_documents(documents), words)
        listed = tuple(sorted(counted))
        frequencies = np.array([counted[word] for word in listed], dtype=np.int64)
        return cls(listed, frequencies, n_documents, require_key(key), words.to_json())

    def candidates(self, min_documents: int, longest: int) -> tuple[tuple[bytes, ...], int]:
        """Return the words to propose, as bytes: in enough documents, and at most `longest` bytes of UTF-8.

        Also return the number of longer words in enough documents.
        """
        chosen = compress(self.words, (np.asarray(self.documents) >= min_documents).tolist())
        texts = [word.encode("utf-8", "surrogatepass") for word in chosen]
        short = [text for text in texts if len(text) <= longest]
        return tuple([text for text in short if b"\0" not in text]), len(texts) - len(short)

    def frequencies_in(self, columns: Mapping[str, int]) -> Any:
        """Document counts of the words of all columns at this party."""
        found = np.zeros(len(columns), dtype=np.int64)
        at = np.fromiter(map(columns.get, self.words, repeat(-1)), np.int64, len(self.words))
        found[at[at >= 0]] = np.asarray(self.documents)[at >= 0]
        return found


def word_shards(
    documents: Mapping[str, Iterable[Any]], words: Words, key: bytes, secrets: Mapping[str, int] | None = None
) -> list[Shard]:
    """Create the shards of all parties for a run in one process."""
    return [
        Shard(name, cast(Matrix, PartyWords.of(texts, words, key)), fresh_seed() if secrets is None else secrets[name])
        for name, texts in documents.items()
    ]


def party_words(shard: Shard) -> PartyWords:
    """Return the words in a shard."""
    held: Any = shard.matrix
    if not isinstance(held, PartyWords):
        raise CompositionError(
            f"An agreement on words needs shards with words, but {shard.name!r} has {type(held).__name__}. Create the "
            "shard with word_shards."
        )
    return held


@state("words.tables")
@dataclass(frozen=True, slots=True)
class BucketTables:
    """`tables` independent tables of `buckets` each, in exchange `number` of `parties` parties.

    The last tables, five or more, come with an extra one for wide words only (see `encoding`), to estimate their
    number.
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
        """Base of the packed numbers, whose digits are counters from 0 to N."""
        return self.parties + 1

    @property
    def counters_per_number(self) -> int:
        """Counters per packed number: the digits that fit in 52 bits."""
        digits = 1
        while self.base ** (digits + 1) <= 1 << EXACT_BITS:
            digits += 1
        return digits

    @property
    def numbers(self) -> int:
        """Number of packed numbers that a party sends."""
        return -(-self.size // self.counters_per_number)

    def places(self, key: bytes, names: Any) -> Any:
        """Return the bucket of each name in each table, as an array (n × count) of counter positions."""
        chosen = scale_below(keyed_numbers(key, f"tables {self.number}", names, self.count), self.buckets)
        return (chosen + np.arange(self.count) * self.buckets).astype(np.int32)

    def marked(self, places: Any, is_wide: Any) -> Any:
        """Return the upload of a party: a 1 in every bucket with one of its words, packed."""
        marks = np.zeros((self.counters_per_number, self.numbers), dtype=bool)
        marks.reshape(-1)[places[:, : self.tables].reshape(-1)] = True
        marks.reshape(-1)[places[is_wide, self.tables :]] = True
        packed = np.zeros(self.numbers, dtype=np.int64)
        for place, row in enumerate(marks):
            packed += row * np.int64(self.base**place)
        return packed

    def counters(self, total: Any) -> Any:
        """Unpack the sum of all uploads into counters (count × buckets)."""
        unpacked = np.empty((self.counters_per_number, self.numbers), dtype=np.int64)
        left = np.asarray(total, dtype=np.int64)
        for digits in unpacked:
            left, digits[:] = np.divmod(left, self.base)
        return unpacked.reshape(-1)[: self.size].reshape(self.count, self.buckets)

    def survivors(self, bitmap: Any, places: Any, is_wide: Any) -> Any:
        """Mark the words whose buckets passed in every table."""
        passed = np.unpackbits(bitmap, count=self.size).astype(bool)
        found = passed[places]
        return found[:, : self.tables].all(axis=1) & (found.all(axis=1) | ~is_wide)


@dataclass(frozen=True, slots=True)
class Tally:
    """Statistics that the server computes from the counters of an exchange.

    `chance`: the probability that a random word meets another one in every table: the share of buckets in use,
    multiplied over the tables. `words` and `passing` are upper estimates of the number of different words and of those
    that pass; `wide` estimates wide words and is known only from the last tables.
    """

    chance: float
    words: float
    passing: float
    wide: float
    bitmap: Any

    @classmethod
    def of(cls, tables: BucketTables, total: Any, min_parties: int) -> Tally:
        """Compute the statistics of a sum over parties."""
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


def next_tables(before: BucketTables, tally: Tally, chance: float, wanted: float) -> BucketTables:
    """Plan tables for the remaining words, until `chance` falls below `wanted`.

    With two thirds of a word per bucket, about half of the buckets are in use and each table halves the chance, which
    nearly minimizes the number of counters. If most words will not pass, a few tables remove most of them first, if
    that saves more than an exchange costs. Overfull tables are assumed to remove nearly all.
    """
    load = tally.words / before.buckets
    left = min(tally.words, tally.passing * (1.5 + load))
    passing = min(left, tally.passing) if load < 1.5 else 0.0
    last = max(FEWEST_LAST, math.ceil(math.log2(max(1.0, chance / wanted))) + 1)
    numbers_per_word = 1 / (LOAD * before.counters_per_number)

    def cheapest(left: float, last: int, exchanges: int) -> tuple[float, int]:
        """Return the remaining cost in numbers, and the number of tables in the next exchange."""
        ways = [((max(last, FEWEST_LAST) + 1) * left * numbers_per_word, max(last, FEWEST_LAST))]
        for first in range(1, FEWEST_LAST) if exchanges else ():
            rest, _ = cheapest(passing + (left - passing) / 2**first, last - first, exchanges - 1)
            ways.append((first * left * numbers_per_word + EXCHANGE + rest, first))
        return min(ways)

    _, tables = cheapest(left, last, MOST_TO_SORT_OUT)
    return BucketTables(before.number + 1, tables, math.ceil(left / LOAD) + 64, before.parties)


def _distinct(share: float, buckets: int) -> float:
    """Estimate the number of different words from the share of buckets in use: −B log(1 − share)."""
    return -buckets * math.log(max(1.0 - share, 0.5 / buckets))
