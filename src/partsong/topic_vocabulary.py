"""Which words a topic model knows: its own documents', a public list's, hashes, or those that parties agree on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.aggregate.reduction import InTheOpen
from partsong.core import Engine, Reduction, Round, Schedule, Shard
from partsong.engines.parallel import Parallel
from partsong.errors import DataTypeError, ParameterError
from partsong.programs.frequency_sums import FrequencySums
from partsong.settings import real_number, whole_number
from partsong.streams import key
from partsong.text.agreed import Agreement, agree, masks_for_words
from partsong.text.agreement import VocabularyAgreement
from partsong.text.counts import Counted, count
from partsong.text.held_words import word_shards
from partsong.text.keys import key_from_seed
from partsong.text.vocabulary import HashedVocabulary, Vocabulary
from partsong.text.words import Words
from partsong.topic_advice import Advising
from partsong.topic_words import TFIDF, Weighing, frequencies_of, matrix_of

AGREE, HASH = "agree", "hash"
HASHED_COLUMNS = 10_000
FEWEST_MASKED = 3
"""Parties from which on a sum can be masked."""
LONGEST, MOST_BYTES = 32, 1024
"""Bytes of UTF-8 that a word has at most, to be agreed on: unless told otherwise, and whatever was told."""


@dataclass(frozen=True, slots=True)
class WordRule:
    """What was asked for: a source of words, and which of them are kept.

    `longest_word` is in bytes of UTF-8, and of an agreement alone: longer words stay at their parties.
    """

    source: Any = AGREE
    min_documents: int = 2
    min_parties: int | None = None
    max_words: int | None = None
    max_share: float = 1.0
    longest_word: int = LONGEST

    def __post_init__(self) -> None:
        for name in ("min_documents", "longest_word"):
            whole_number(name, getattr(self, name))
        if self.longest_word > MOST_BYTES:
            raise ParameterError(
                f"longest_word={self.longest_word}: a word of so many bytes is none. {MOST_BYTES} are the most; each "
                "word that is not of up to eleven plain letters takes a place of this size."
            )
        for name in ("min_parties", "max_words"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name))
        if not 0 < real_number("max_share", self.max_share) <= 1:
            raise ParameterError(f"max_share must be above 0 and at most 1; got {self.max_share!r}.")

    def fixed(self, words: Words, seed: int) -> Vocabulary | HashedVocabulary | None:
        """Columns that do not depend on documents; None where these have to be looked at.

        Hashes are keyed, by the seed in a simulation; whoever has the model has the key.
        """
        if isinstance(self.source, Vocabulary | HashedVocabulary):
            return self.source
        if isinstance(self.source, str) and self.source == AGREE:
            return None
        if isinstance(self.source, str) and self.source == HASH:
            columns = HASHED_COLUMNS if self.max_words is None else int(self.max_words)
            return HashedVocabulary(columns, key(seed, "hashed words").to_bytes(16, "little"))
        if isinstance(self.source, str | os.PathLike):
            return Vocabulary.of_file(self.source, words)
        if isinstance(self.source, Iterable) and not isinstance(self.source, bytes | Mapping | Iterator):
            listed = list(self.source)
            if all(isinstance(word, str) for word in listed):
                return Vocabulary(tuple(dict.fromkeys(word for line in listed for word in words.of(line))))
        raise DataTypeError(
            f"vocabulary must be {AGREE!r}, {HASH!r}, the path of a file with one word per line, a list of words or a "
            f"Vocabulary; this is {type(self.source).__name__}."
        )

    def pruned(self, vocabulary: Vocabulary, min_documents: int = 1) -> Vocabulary:
        """The words that are left of those of documents."""
        return vocabulary.pruned(min_documents, float(self.max_share), self.max_words)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rows of every party by one weighing; `agreement` tells how the words were found, where they were agreed on."""

    weighing: Weighing
    counted: Mapping[str, Counted]
    agreement: Agreement | None = None

    @property
    def rows(self) -> dict[str, Counted]:
        """By weight."""
        return {name: self.weighing.weighed(counted) for name, counted in self.counted.items()}


def prepared_alone(rule: WordRule, texts: Sequence[str], words: Words, seed: int, weighting: str) -> Prepared:
    """Rows of documents that are all here."""
    fixed = rule.fixed(words, seed)
    columns = rule.pruned(Vocabulary.of_documents(texts, words), rule.min_documents) if fixed is None else fixed
    counted = count(texts, words, columns).require_words("These texts")
    frequencies = _known(columns) or frequencies_of(counted)
    return Prepared(_weighing(words, columns, frequencies, weighting), {"all": counted})


def prepared_together(
    rule: WordRule, parties: Mapping[str, Sequence[str]], words: Words, seed: int, weighting: str
) -> Prepared:
    """Rows of parties that do not pool their documents: words by agreement, frequencies by sums."""
    engine, agreement = Advising(Parallel()), None
    columns = rule.fixed(words, seed)
    if columns is None and len(parties) == 1:
        (texts,) = parties.values()
        columns = rule.pruned(Vocabulary.of_documents(texts, words), rule.min_documents)
    elif columns is None:
        agreement = _agreed(rule, parties, words, seed, engine)
        columns = rule.pruned(agreement.vocabulary)
    frequencies = _known(columns)
    counted = {name: count(texts, words, columns) for name, texts in parties.items()}
    _require_somebody(counted)
    if weighting == TFIDF and frequencies is None:
        frequencies = summed_frequencies(counted, seed, engine)
    return Prepared(_weighing(words, columns, frequencies, weighting), counted, agreement)


def summed_frequencies(counted: Mapping[str, Counted], seed: int, engine: Engine) -> tuple[np.ndarray, int]:
    """Document frequencies of all parties."""
    program = FrequencySums()
    shards = [Shard(name, matrix_of(own.rows), key(seed, "secret", name)) for name, own in counted.items()]
    done = only_round(engine, program, shards, seed)
    return program.counts(done.checkpoint.server)


def only_round(engine: Engine, program: Any, shards: Sequence[Shard], seed: int) -> Round:
    """The one round of a count, masked where there are enough parties for that."""
    (done,) = engine.run(program, shards, Schedule(1, seed), reduction=counting_among(len(shards)))
    return done


def counting_among(parties: int) -> Reduction:
    """Sums of whole numbers: exact, and masked from three parties on."""
    return masks_for_words(parties) if parties >= FEWEST_MASKED else InTheOpen()


def _agreed(rule: WordRule, parties: Mapping[str, Sequence[str]], words: Words, seed: int, engine: Engine) -> Agreement:
    """Key and secrets come from the seed: the same seed gives the same words in the same order."""
    fewest = 2 if rule.min_parties is None else int(rule.min_parties)
    asked = VocabularyAgreement(int(rule.min_documents), fewest, longest=int(rule.longest_word))
    secrets = {name: key(seed, "secret", name) for name in parties}
    shards = word_shards(parties, words, key_from_seed(seed), secrets)
    return agree(shards, engine, asked, reduction=counting_among(len(parties)), seed=seed)


def _known(columns: Vocabulary | HashedVocabulary) -> tuple[Any, int] | None:
    """Document frequencies that came with the words."""
    if isinstance(columns, Vocabulary) and columns.documents is not None:
        return columns.documents, columns.n_documents
    return None


def _weighing(
    words: Words, columns: Vocabulary | HashedVocabulary, frequencies: tuple[Any, int] | None, weighting: str
) -> Weighing:
    kept = Vocabulary(columns.words) if isinstance(columns, Vocabulary) else columns
    if weighting != TFIDF or frequencies is None:
        return Weighing(words, kept)
    return Weighing(words, kept, np.asarray(frequencies[0], np.int64), int(frequencies[1]))


def _require_somebody(counted: Mapping[str, Counted]) -> None:
    """Refuse parties of whom nobody has a word of the vocabulary."""
    if all(own.n_empty == len(own.is_empty) for own in counted.values()):
        next(iter(counted.values())).require_words("Every party, the first of them")
