"""Which words of topics occur together, in documents or in windows that slide over them: whole counts, which add up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from partsong.errors import DataError, ParameterError, ShapeError

WINDOW = 110
"""Words in a window of C_v (Röder, Both & Hinneburg, 2015)."""


@dataclass(frozen=True, slots=True)
class TopicPairs:
    """What has to be counted for topics: their words (columns, ascending) and the pairs within a topic.

    A pair is a pair of positions in `words`, the smaller first; pairs of words of different topics are not counted.
    """

    words: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]

    @staticmethod
    def of(topics: Sequence[Sequence[int]]) -> TopicPairs:
        """Of lists of columns."""
        words = tuple(sorted({int(word) for topic in topics for word in topic}))
        if words and words[0] < 0:
            raise ParameterError(f"Words of topics are columns of the counts, from 0; got {words[0]}.")
        place = {word: i for i, word in enumerate(words)}
        lists = [sorted({place[int(word)] for word in topic}) for topic in topics]
        pairs = {(a, b) for inside in lists for i, a in enumerate(inside) for b in inside[i + 1 :]}
        return TopicPairs(words, tuple(sorted(pairs)))


@dataclass(frozen=True, slots=True, eq=False)
class Cooccurrence:
    """In how many of `documents` each word occurs, and each pair; int64, in the order of `asked`."""

    asked: TopicPairs
    documents: int
    words: np.ndarray
    pairs: np.ndarray

    def __add__(self, other: Cooccurrence) -> Cooccurrence:
        if self.asked != other.asked:
            raise ShapeError("Counts of different words cannot be added. Count the words of the same topics.")
        return Cooccurrence(
            self.asked, self.documents + other.documents, self.words + other.words, self.pairs + other.pairs
        )

    def by_topic(self, topics: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Of each topic's words that occur at all: in how many documents two of them do together, (c × c).

        The diagonal is in how many each does. Topics must be among those that were asked for.
        """
        place = {word: i for i, word in enumerate(self.asked.words)}
        joint = {pair: int(count) for pair, count in zip(self.asked.pairs, self.pairs, strict=True)}
        joint |= {(i, i): int(count) for i, count in enumerate(self.words)}
        try:
            inside = [[place[word] for word in dict.fromkeys(map(int, topic))] for topic in topics]
            known = [[i for i in positions if self.words[i] > 0] for positions in inside]
            counts = [[joint[min(a, b), max(a, b)] for a in positions for b in positions] for positions in known]
        except KeyError as error:
            raise ParameterError(
                f"Words or pairs of these topics were not counted (the first: {error}). Count with the same topics."
            ) from error
        sizes = [(len(positions), len(positions)) for positions in known]
        return [np.array(each, np.int64).reshape(size) for each, size in zip(counts, sizes, strict=True)]


def count_pairs(X: Any, asked: TopicPairs) -> Cooccurrence:
    """From documents × words (sparse or dense), in which every entry above zero is an occurrence."""
    rows = sparse.csr_array(X)
    if asked.words and asked.words[-1] >= rows.shape[1]:
        raise ShapeError(f"Topics name column {asked.words[-1]}, but the documents have {rows.shape[1]} columns.")
    chosen = rows[:, list(asked.words)]
    occurs = sparse.csr_array(((chosen.data > 0).astype(np.int64), chosen.indices, chosen.indptr), chosen.shape)
    words = np.bincount(occurs.indices, occurs.data, len(asked.words)).astype(np.int64)
    together = (occurs.T @ occurs).tocsr()
    first, second = (np.array([pair[i] for pair in asked.pairs], np.int64) for i in (0, 1))
    pairs = np.asarray(together[first, second]).reshape(-1) if len(first) else np.zeros(0)
    return Cooccurrence(asked, int(rows.shape[0]), words, pairs.astype(np.int64))


def windows(texts: Iterable[Sequence[str]], columns: Mapping[str, int], size: int = WINDOW) -> Any:
    """Each window of `size` words as a row of 0 and 1 (CSR), with `columns` for the words that matter.

    A text that is no longer than a window, or empty, is one. gensim forgets a word that is twice in a window as soon as
    one of the two leaves it; here it is there until both have.
    """
    if size < 1:
        raise ParameterError(f"A window holds at least one word; got {size}.")
    starts: list[int] = []
    lengths: list[int] = []
    words: list[int] = []
    base = 0
    for text in texts:
        if isinstance(text, str):
            raise DataError("A text for windows is a list of words, and this is one string. Split it into words first.")
        last = max(0, len(text) - size)
        ends: dict[int, int] = {}
        for position, word in enumerate(text):
            column = columns.get(word)
            if column is None:
                continue
            first = max(position - size + 1, 0, ends.get(column, -1) + 1)
            end = min(position, last)
            if end >= first:
                starts.append(base + first)
                lengths.append(end - first + 1)
                words.append(column)
            ends[column] = max(end, ends.get(column, -1))
        base += last + 1
    long = np.array(lengths, np.int64)
    rows = np.repeat(np.array(starts, np.int64) - np.cumsum(long) + long, long) + np.arange(long.sum())
    width = max(columns.values(), default=-1) + 1
    entries = np.ones(len(rows), np.float32), (rows, np.repeat(np.array(words, np.int64), long))
    return sparse.coo_array(entries, (base, width)).tocsr()
