"""The table [words] of experiment.toml: which words of texts a run is about, by the names that topic models have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.errors import ParameterError
from partsong.federation.keys import only, words
from partsong.federation.word_rounds import WordRounds
from partsong.text.vocabulary import Vocabulary
from partsong.text.words import Words
from partsong.topic_methods import weighting_of
from partsong.topic_vocabulary import AGREE, WordRule
from partsong.topic_words import TFIDF, Weighing

OF_THE_VOCABULARY = ("min_documents", "min_parties", "max_words", "max_share", "longest_word")
OF_A_TEXT = ("language", "stop_words", "shortest", "lower", "strip_accents")
KEYS = (*OF_THE_VOCABULARY, "weighting", *OF_A_TEXT)
WHERE = "The table words of the experiment"


@dataclass(frozen=True, slots=True)
class TextRule:
    """Words in ≥ `min_documents` documents at each of ≥ `min_parties` sites, of which those in more than `max_share` of
    all documents are dropped, and the `max_words` most frequent ones are kept; what a word is, and what it weighs.

    All as in `FederatedTopicModel`, but for a pattern of one's own: sites run no expressions that a server sends.
    """

    rule: WordRule
    words: Words
    weighting: str

    @staticmethod
    def from_table(table: Mapping[str, Any], method: str) -> TextRule:
        """From the table of an experiment with that method; an unknown key is an error."""
        only(table, KEYS, WHERE)
        kept = {name: table[name] for name in OF_THE_VOCABULARY if table.get(name) is not None}
        options = {name: table[name] for name in OF_A_TEXT if name in table}
        for name in ("lower", "strip_accents"):
            if not isinstance(options.get(name, False), bool):
                raise ParameterError(f"{name} is true or false; got {options[name]!r}.")
        if not isinstance(options.get("language", ""), str):
            raise ParameterError(f"language must be a text; got {str(options['language'])[:60]!r}.")
        options["stop_words"] = words(options, "stop_words", ())
        rule = WordRule(AGREE, **{"min_documents": 1, **kept})
        return TextRule(rule, Words(**options), weighting_of(table.get("weighting"), method))

    @property
    def min_documents(self) -> int:
        """At each of these sites."""
        return self.rule.min_documents

    @property
    def min_parties(self) -> int:
        """Two, where nothing is said."""
        return 2 if self.rule.min_parties is None else self.rule.min_parties

    @property
    def rounds(self) -> WordRounds:
        """The protocol by which the words are found."""
        return WordRounds(self.min_documents, self.min_parties, longest=self.rule.longest_word)

    @property
    def told(self) -> str:
        """All of it as one text, which is the same at all sites that were asked for the same."""
        sizes = self.min_documents, self.min_parties, self.rule.max_words, self.rule.longest_word
        rule = [*sizes, float(self.rule.max_share)]
        return json.dumps([rule, self.weighting, self.words.to_json()])

    def n_kept(self, documents: Any, n_documents: int) -> int:
        """How many of the agreed words are left, by their document frequencies, which is all that a server knows."""
        few = int(np.count_nonzero(np.asarray(documents) <= float(self.rule.max_share) * max(1, n_documents)))
        return few if self.rule.max_words is None else min(few, self.rule.max_words)

    def weighing(self, agreed: Vocabulary) -> Weighing:
        """What texts are in this run: the words that are left, and what they weigh."""
        kept = self.rule.pruned(agreed)
        own = Vocabulary(kept.words)
        return (
            Weighing(self.words, own, kept.documents, kept.n_documents)
            if self.weighting == TFIDF
            else Weighing(self.words, own)
        )
