"""Choose the vocabulary of a topic model: own documents, a public list, hashes, or an agreement of the parties."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Reduction, Round, Schedule, Shard
from partsong.core.parameters import real_number, whole_number
from partsong.core.streams import key
from partsong.engines.local import Parallel
from partsong.errors import DataTypeError, ParameterError
from partsong.methods.counts import FrequencySums
from partsong.topics.agreement.encoding import key_from_seed
from partsong.topics.agreement.protocol import Agreement, VocabularyAgreement, agree, secure_sum_for_words
from partsong.topics.agreement.tables import word_shards
from partsong.topics.tokenizer import Words
from partsong.topics.vocabulary import (
    TFIDF,
    DocumentRows,
    HashedVocabulary,
    TextVectorizer,
    Vocabulary,
    count_words,
    frequencies_of,
    rows_as_matrix,
)

AGREE, HASH = "agree", "hash"
HASHED_COLUMNS = 10_000
FEWEST_MASKED = 3
"""Minimum number of parties for a secure sum."""
LONGEST, MOST_BYTES = 32, 1024
"""Default and largest maximum number of UTF-8 bytes of a word in an agreement."""


@dataclass(frozen=True, slots=True)
class VocabularyConfig:
    """The source of words, and which of them are kept.

    `max_word_bytes` (UTF-8) applies only to an agreement: longer words are not sent.
    """

    source: Any = AGREE
    min_documents: int = 2
    min_parties: int | None = None
    max_words: int | None = None
    max_df: float = 1.0
    max_word_bytes: int = LONGEST

    def __post_init__(self) -> None:
        for name in ("min_documents", "max_word_bytes"):
            whole_number(name, getattr(self, name))
        if self.max_word_bytes > MOST_BYTES:
            raise ParameterError(
                f"max_word_bytes must be at most {MOST_BYTES}; got {self.max_word_bytes}. Every word that is not of up "
                "to eleven plain letters takes this many bytes.",
                parameter="max_word_bytes",
            )
        for name in ("min_parties", "max_words"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name))
        if not 0 < real_number("max_df", self.max_df) <= 1:
            raise ParameterError(f"max_df must be above 0 and at most 1; got {self.max_df!r}.", parameter="max_df")

    def fixed(self, words: Words, seed: int) -> Vocabulary | HashedVocabulary | None:
        """Return columns that do not depend on documents; None if documents are needed.

        Hashes are keyed, in a simulation by the seed; the key is in the model.
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
            f"Vocabulary; this is {type(self.source).__name__}.",
            parameter="vocabulary",
        )

    def pruned(self, vocabulary: Vocabulary, min_documents: int = 1) -> Vocabulary:
        """Prune a vocabulary of documents."""
        return vocabulary.pruned(min_documents, float(self.max_df), self.max_words)


DEFAULTS = {"min_documents": 1, "max_df": 1.0, "max_word_bytes": LONGEST}
"""Defaults of model arguments that are not None."""


def vocabulary_config(source: Any, asked: Mapping[str, Any], least: int) -> VocabularyConfig:
    """Return the configuration from a model's arguments, with at least `least` documents by default.

    Arguments without effect are refused: a given vocabulary is used unchanged, and for hashes only max_words counts.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    rule = VocabularyConfig(source, **{"min_documents": least, **given})
    is_hashed = isinstance(source, str) and source == HASH
    if isinstance(source, str) and source == AGREE:
        return rule
    for name, value in given.items():
        if value == DEFAULTS.get(name) or (is_hashed and name == "max_words"):
            continue
        why = (
            f"vocabulary={HASH!r} gives every word a column. Remove {name}; max_words is the number of columns."
            if is_hashed
            else f"a given vocabulary is used unchanged. Remove {name}, or pass only the words to use."
        )
        raise ParameterError(f"{name}={value!r} selects words from the texts, but {why}", parameter=name)
    return rule


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rows of all parties and their vectorizer; `agreement` describes the agreement on words, if there was one."""

    weighing: TextVectorizer
    counted: Mapping[str, DocumentRows]
    agreement: Agreement | None = None

    @property
    def rows(self) -> dict[str, DocumentRows]:
        """The weighted rows by party."""
        return {name: self.weighing.weighed(counted) for name, counted in self.counted.items()}


def prepare(
    rule: VocabularyConfig, parties: Mapping[str, Sequence[str]], words: Words, seed: int, weighting: str
) -> Prepared:
    """Prepare rows without pooling documents: words by agreement, document frequencies by sums.

    A single party uses its own words and frequencies.
    """
    columns, agreement, is_alone = rule.fixed(words, seed), None, len(parties) == 1
    if columns is None and is_alone:
        (texts,) = parties.values()
        columns = rule.pruned(Vocabulary.of_documents(texts, words), rule.min_documents)
    elif columns is None:
        agreement = _agreed(rule, parties, words, seed)
        columns = rule.pruned(agreement.vocabulary)
    counted = {name: count_words(texts, words, columns) for name, texts in parties.items()}
    if all(own.n_empty == len(own.is_empty) for own in counted.values()):
        first = next(iter(counted.values()))
        first.require_words("These texts" if is_alone else "Every party, for example the first")
    if weighting != TFIDF:
        return Prepared(TextVectorizer(words, _listed(columns)), counted, agreement)
    if isinstance(columns, Vocabulary) and columns.documents is not None:
        documents, n_documents = columns.documents, columns.n_documents
    elif is_alone:
        documents, n_documents = frequencies_of(*counted.values())
    else:
        documents, n_documents = summed_frequencies(counted, seed)
    weighing = TextVectorizer(words, _listed(columns), np.asarray(documents, np.int64), int(n_documents))
    return Prepared(weighing, counted, agreement)


def _listed(columns: Vocabulary | HashedVocabulary) -> Vocabulary | HashedVocabulary:
    """The vocabulary without document frequencies."""
    return Vocabulary(columns.words) if isinstance(columns, Vocabulary) else columns


def _agreed(rule: VocabularyConfig, parties: Mapping[str, Sequence[str]], words: Words, seed: int) -> Agreement:
    """Agree with key and secrets from the seed: the same seed gives the same words in the same order."""
    fewest = 2 if rule.min_parties is None else int(rule.min_parties)
    asked = VocabularyAgreement(int(rule.min_documents), fewest, longest=int(rule.max_word_bytes))
    secrets = {name: key(seed, "secret", name) for name in parties}
    shards = word_shards(parties, words, key_from_seed(seed), secrets)
    return agree(shards, Parallel(), asked, reduction=counting_reduction(len(parties)), seed=seed)


def summed_frequencies(counted: Mapping[str, DocumentRows], seed: int) -> tuple[np.ndarray, int]:
    """Sum the document frequencies of all parties."""
    program = FrequencySums()
    shards = [Shard(name, rows_as_matrix(own.rows), key(seed, "secret", name)) for name, own in counted.items()]
    return program.counts(run_single_round(program, shards, seed).checkpoint.server)


def run_single_round(program: Any, shards: Sequence[Shard], seed: int) -> Round:
    """Run a program of one round, with secure sums if there are enough parties."""
    (done,) = Parallel().run(program, shards, Schedule(1, seed), reduction=counting_reduction(len(shards)))
    return done


def counting_reduction(parties: int) -> Reduction:
    """Return a reduction for exact sums of whole numbers; secure for three or more parties."""
    return secure_sum_for_words(parties) if parties >= FEWEST_MASKED else PlainReduction()
