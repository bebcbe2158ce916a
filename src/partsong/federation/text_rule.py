"""The table [words] of experiment.toml: which words of texts a run is about, and the program that agrees on them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from partsong.federation.toml_files import Positive, parse_table
from partsong.topics.agreement.protocol import DONE, Count, VocabularyAgreement
from partsong.topics.fitting import weighting_of
from partsong.topics.shared_vocabulary import AGREE, LONGEST, WordRule
from partsong.topics.tokenizer import Words
from partsong.topics.vocabulary import TFIDF, Vocabulary, Weighing


@dataclass(frozen=True, slots=True)
class WordRounds(VocabularyAgreement):
    """The agreement as a program of a federation, which ends itself. It has no factor: its rank is 0."""

    @property
    def rank(self) -> int:
        return 0

    def components(self, server: Count) -> Any:
        return np.zeros((0, 0))

    @staticmethod
    def is_over(server: Count) -> bool:
        return server.step.stage == DONE


@dataclass(frozen=True, slots=True)
class WordsTable:
    """The keys of [words], with the names and defaults of `FederatedTopicModel`.

    There is no key for a pattern: sites do not run expressions that a server sends.
    """

    min_documents: Positive = 1
    min_parties: Positive | None = None
    max_words: Positive | None = None
    max_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    longest_word: Positive = LONGEST
    weighting: str | None = None
    language: str = "english"
    stop_words: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    shortest: Positive = 2
    lower: bool = True
    strip_accents: bool = False


@dataclass(frozen=True, slots=True)
class TextRule:
    """Words in ≥ `min_documents` documents at each of ≥ `min_parties` sites; those in more than `max_share` of all
    documents are dropped, and the `max_words` most frequent ones are kept. `words`: what a word is. `weighting`: what
    it weighs.
    """

    rule: WordRule
    words: Words
    weighting: str

    @staticmethod
    def from_table(table: Any, method: str) -> TextRule:
        """Parse the table of an experiment with that method."""
        found = parse_table(table, WordsTable, "words")
        limits = found.min_documents, found.min_parties, found.max_words, found.max_share, found.longest_word
        language = Words(
            found.language,
            found.stop_words,
            shortest=found.shortest,
            lower=found.lower,
            strip_accents=found.strip_accents,
        )
        return TextRule(WordRule(AGREE, *limits), language, weighting_of(found.weighting, method))

    @property
    def min_documents(self) -> int:
        """Least number of documents at each site."""
        return self.rule.min_documents

    @property
    def min_parties(self) -> int:
        """Least number of sites; 2 by default."""
        return 2 if self.rule.min_parties is None else self.rule.min_parties

    @property
    def rounds(self) -> WordRounds:
        """The program by which sites agree on the words."""
        return WordRounds(self.min_documents, self.min_parties, longest=self.rule.longest_word)

    @property
    def told(self) -> str:
        """The rule as one text, equal at all sites that were asked for the same."""
        sizes = self.min_documents, self.min_parties, self.rule.max_words, self.rule.longest_word
        rule = [*sizes, float(self.rule.max_share)]
        return json.dumps([rule, self.weighting, self.words.to_json()])

    def n_kept(self, documents: Any, n_documents: int) -> int:
        """Count the agreed words that are kept, from their document frequencies, which is all that a server knows."""
        few = int(np.count_nonzero(np.asarray(documents) <= float(self.rule.max_share) * max(1, n_documents)))
        return few if self.rule.max_words is None else min(few, self.rule.max_words)

    def weighing(self, agreed: Vocabulary) -> Weighing:
        """The words that are kept, and what they weigh."""
        kept = self.rule.pruned(agreed)
        own = Vocabulary(kept.words)
        return (
            Weighing(self.words, own, kept.documents, kept.n_documents)
            if self.weighting == TFIDF
            else Weighing(self.words, own)
        )
