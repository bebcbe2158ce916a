"""Which words a topic model knows: its own documents', a public list's, hashes, or those that parties agree on."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.aggregation.plaintext import InTheOpen
from partsong.aggregation.server_update import Replace
from partsong.core.interfaces import Checkpoint, Engine, Program, Reduction, Round, Schedule, Shard
from partsong.core.parameters import real_number, whole_number
from partsong.core.streams import key
from partsong.engines.local import Parallel
from partsong.engines.rounds import WAYS_ON
from partsong.engines.upload_checks import WAYS_ON_WITH_ALL
from partsong.errors import DataTypeError, DivergenceError, ParameterError, PartsongError, UploadError
from partsong.methods.counts import FrequencySums
from partsong.methods.fednmf import TopicRounds
from partsong.methods.mutual_information.critics import JensenShannon, MutualInformation
from partsong.topics.agreement.encoding import key_from_seed
from partsong.topics.agreement.protocol import Agreement, VocabularyAgreement, agree, masks_for_words
from partsong.topics.agreement.tables import word_shards
from partsong.topics.tokenizer import Words
from partsong.topics.vocabulary import (
    COUNTS,
    TFIDF,
    Counted,
    HashedVocabulary,
    Vocabulary,
    Weighing,
    count,
    frequencies_of,
    matrix_of,
)
from partsong.training.loop import NOTHING, EmptyModelWarning, Task, warn_of_nothing
from partsong.training.result import Finished

# ---- topic advice -----------------------------------------------------------------------------------------------
#
# What topic models tell of a fit that goes wrong: ways out that these models have.

OF_ENGINES = (WAYS_ON, WAYS_ON_WITH_ALL)
"""Leaving a party out, and checkpoints: a topic model has neither."""

BEYOND = 1e9
"""Rows of topics have no such numbers, unless by steps that are too large; it is what masks let pass by themselves."""


@dataclass(frozen=True, slots=True)
class Advising:
    """An engine whose errors end with what the caller of a topic model can do; all else is that of `engine`.

    `weighting` is what the rows of a descent are; tf-idf is not proposed to those that have it.
    """

    engine: Engine
    weighting: str = ""

    def run(
        self,
        program: Program,
        shards: Sequence[Shard],
        schedule: Schedule,
        *,
        reduction: Reduction,
        resume: Checkpoint | None = None,
    ) -> Iterator[Round]:
        try:
            yield from self.engine.run(program, shards, schedule, reduction=reduction, resume=resume)
        except PartsongError as error:
            notes = [note for note in getattr(error, "__notes__", ()) if note not in OF_ENGINES]
            if isinstance(program, TopicRounds) and _has_run_away(error, reduction):
                raise _with(DivergenceError(told_of_steps(program, self.weighting)), notes) from None
            _with(error, notes)
            raise


def _has_run_away(error: PartsongError, reduction: Reduction) -> bool:
    """Numbers that are not finite, all zero, or beyond what wide masks let pass."""
    is_beyond = isinstance(error, UploadError) and getattr(reduction, "bound", 0.0) >= BEYOND
    return is_beyond or isinstance(error, DivergenceError)


def told_of_steps(program: TopicRounds, weighting: str) -> str:
    """That the steps of a descent are too large, and what to do about it."""
    descent, rate = program.descent, getattr(program.descent.information, "rate", None)
    critic = "" if rate is None else f", critic_rate={rate:g}"
    return (
        "Numbers grew beyond all measure, or all topics have fallen to zero: the steps are too large for these texts "
        f"(rate={descent.rate:g}, batch={descent.batch}{critic}). {_smaller_steps(program, weighting)}"
    )


def warn_of_no_topics(task: Task, done: Finished, weighting: str) -> None:
    """Say so where W H is zero and X is not."""
    if not isinstance(task.program, TopicRounds):
        warn_of_nothing(task, done)
    elif done.squared_norm > 0 and done.squared_error >= (1 - NOTHING) * done.squared_norm:
        told = f"The topics are zero: they explain nothing of these texts. {_smaller_steps(task.program, weighting)}"
        warnings.warn(told, EmptyModelWarning, stacklevel=2)


def _smaller_steps(program: TopicRounds, weighting: str) -> str:
    """Settings that make them smaller. The largest eigenvalue of W_SᵀW_S/b, which bounds steps of H, is convex: over
    larger batches it is smaller on average.
    """
    information, ways = program.descent.information, ["a smaller rate", "a larger batch"]
    if isinstance(information, MutualInformation):
        ways.append("a smaller critic_rate")
        if not isinstance(information.bound, JensenShannon):
            ways.append("mi_gradient='js'")
    if not isinstance(program.server_update, Replace):
        ways.append("a smaller server_rate")
    if weighting == COUNTS:
        ways.append("weighting='tfidf', by which all rows have norm 1")
    return f"Take {', '.join(ways[:-1])} or {ways[-1]}."


def _with(error: PartsongError, notes: Sequence[str]) -> PartsongError:
    error.__notes__ = list(notes)
    return error


# ---- topic vocabulary -------------------------------------------------------------------------------------------

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


# ---- topic word rule --------------------------------------------------------------------------------------------
#
# The rule of words that a topic model was asked for by its arguments.

UNASKED = {"min_documents": 1, "max_share": 1.0, "longest_word": LONGEST}
"""What arguments of a model are where nothing was asked for; else it is None."""


def word_rule(source: Any, asked: Mapping[str, Any], least: int) -> WordRule:
    """The rule of a model's arguments, with `least` documents unless asked for.

    Refuses what it would not go by: a given vocabulary is taken as it is, and of hashes only their number is chosen.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    rule = WordRule(source, **{"min_documents": least, **given})
    is_hashed = isinstance(source, str) and source == HASH
    if isinstance(source, str) and source == AGREE:
        return rule
    for name, value in given.items():
        if value == UNASKED.get(name) or (is_hashed and name == "max_words"):
            continue
        why = (
            f"vocabulary={HASH!r} gives every word a column, and leaves none out. Leave {name} out; max_words is the "
            "number of columns."
            if is_hashed
            else f"a given vocabulary is taken as it is. Leave {name} out, or give the words that you want."
        )
        raise ParameterError(f"{name}={value!r} is about words that are found in the texts, and {why}")
    return rule
