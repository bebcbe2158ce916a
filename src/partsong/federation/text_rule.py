"""The table [words] of experiment.toml: which words of texts a run is about, and the program that agrees on them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from partsong.federation.toml_files import Positive, parse_table
from partsong.topics.agreement.protocol import VocabularyAgreement
from partsong.topics.fitting import weighting_of
from partsong.topics.shared_vocabulary import AGREE, LONGEST, WordRule
from partsong.topics.tokenizer import Words
from partsong.topics.vocabulary import TFIDF, Vocabulary, Weighing


@dataclass(frozen=True, slots=True)
class TextRule:
    """The keys of [words], with the names and defaults of `FederatedTopicModel`.

    Words in ≥ `min_documents` documents at each of ≥ `min_parties` sites; those in more than `max_share`
    of all documents are dropped, and the `max_words` most frequent ones are kept. `weighting`: what a word weighs, by
    default what the method takes. There is no key for a pattern: sites do not run expressions that a server sends.
    """

    min_documents: Positive = 1
    min_parties: Positive = 2
    max_words: Positive | None = None
    max_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    longest_word: Positive = LONGEST
    weighting: str | None = None
    language: str = "english"
    stop_words: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    shortest: Positive = 2
    lower: bool = True
    strip_accents: bool = False

    def __post_init__(self) -> None:
        _ = self.rule, self.words  # which check what goes beyond types

    @staticmethod
    def from_table(table: Any, method: str) -> TextRule:
        """Parse the table of an experiment with that method."""
        found = parse_table(table, TextRule, "words")
        return replace(found, weighting=weighting_of(found.weighting, method))

    @property
    def rule(self) -> WordRule:
        """Which words are kept."""
        limits = self.min_documents, self.min_parties, self.max_words, self.max_share, self.longest_word
        return WordRule(AGREE, *limits)

    @property
    def words(self) -> Words:
        """What a word is."""
        return Words(
            self.language,
            self.stop_words,
            shortest=self.shortest,
            lower=self.lower,
            strip_accents=self.strip_accents,
        )

    @property
    def rounds(self) -> VocabularyAgreement:
        """The program by which sites agree on the words."""
        return VocabularyAgreement(self.min_documents, self.min_parties, longest=self.longest_word)

    @property
    def told(self) -> str:
        """The rule as one text, equal at all sites that were asked for the same."""
        rule = [self.min_documents, self.min_parties, self.max_words, self.longest_word, float(self.max_share)]
        return json.dumps([rule, self.weighting, self.words.to_json()])

    def n_kept(self, documents: Any, n_documents: int) -> int:
        """Count the agreed words that are kept, from their document frequencies, which is all that a server knows."""
        few = int(np.count_nonzero(np.asarray(documents) <= float(self.max_share) * max(1, n_documents)))
        return few if self.max_words is None else min(few, self.max_words)

    def weighing(self, agreed: Vocabulary) -> Weighing:
        """The words that are kept, and what they weigh."""
        kept = self.rule.pruned(agreed)
        frequencies = (kept.documents, kept.n_documents) if self.weighting == TFIDF else ()
        return Weighing(self.words, Vocabulary(kept.words), *frequencies)
