"""Texts of a site as what it works on: its words while sites agree on some, then how often it has the agreed ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, cast

import numpy as np

from partsong.core import Matrix
from partsong.federation.refusals import Denied
from partsong.federation.site_plan import Data
from partsong.federation.word_rule import TextRule
from partsong.privacy.admission import Roster
from partsong.privacy.key_agreement import fingerprint
from partsong.text.held_words import HeldWords
from partsong.text.words import Words
from partsong.topic_words import Weighing

SUFFIX = ".words"
"""An agreement on words is a run of its own before the run that it is for, whose name it has with this at the end."""

TEXTS = "texts"
"""The one column that sites name in it: its keyed hash is the same where the key is."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Documents, and the key of words that all sites share; without one nothing is done with them."""

    documents: tuple[str, ...] = field(repr=False)
    key: bytes = field(repr=False, default=b"")
    secret: int = field(repr=False, default=0)

    @property
    def unread(self) -> Data:
        """As many rows as documents, and no columns: these follow from a run's words."""
        return Data(np.empty((len(self.documents), 0)), (), self.secret)

    def held(self, rule: TextRule, run: str, roster: Roster | None) -> HeldData:
        """Its words, for the agreement of a run among the parties of a roster."""
        held = _held(self.documents, rule.words, run_key(self.key, run, roster or {}))
        return HeldData(replace(held, options=rule.told), (TEXTS,), self.secret)

    def counted(self, weighing: Weighing) -> CountedData:
        """How often it has the agreed words, by weight."""
        frequencies = None if weighing.documents is None else tuple(np.asarray(weighing.documents).tolist())
        rows = _rows(self.documents, weighing.words, weighing.vocabulary, frequencies, weighing.n_documents)
        return CountedData(rows, tuple(weighing.names), self.secret, weighing)


@dataclass(frozen=True, slots=True)
class HeldData(Data):
    """A site's words; no name of any is told to anybody, nor written into a log."""

    @property
    def hides_names(self) -> bool:
        """Words are in no log."""
        return True

    def run_of(self, name: str) -> str:
        """The run that an agreement is for."""
        return name.removesuffix(SUFFIX)

    def matrix(self, order: tuple[int, ...] | None = None) -> Matrix:
        """What the protocol asks for."""
        return cast(Matrix, self.rows)


@dataclass(frozen=True, slots=True)
class CountedData(Data):
    """Rows of documents over agreed words (CSR, float64); `context`: by which masks are among sites that were told the
    same frequencies of these words.
    """

    weighing: Weighing | None = field(repr=False, default=None)
    context: str = ""

    @property
    def hides_names(self) -> bool:
        """Words are in no log."""
        return True

    def run_of(self, name: str) -> str:
        """With its agreement it is one run."""
        return name.removesuffix(SUFFIX)

    def order(self, columns: Sequence[str]) -> tuple[int, ...]:
        """Where these words are; the error does not name them."""
        places = {name: at for at, name in enumerate(self.columns)}
        missing = sum(name not in places for name in columns)
        if missing:
            told = f"{missing} of the agreed words are no longer those of this run."
            raise Denied("columns", told, {"missing": missing, "extra": 0})
        return tuple(places[name] for name in columns)


def run_key(key: bytes, run: str, roster: Roster) -> bytes:
    """The key of words in one run among these signing keys: pads that follow from it hide what is sent once, so that no
    two runs share one, nor those of one name in two federations.
    """
    signing = [part for name, verifying in sorted(roster.items()) for part in (name, verifying)]
    return fingerprint("partsong words of a run", run, key, *signing)


@lru_cache(maxsize=1)
def _held(documents: tuple[str, ...], words: Words, key: bytes) -> HeldWords:
    """Read once in a process, as long as the texts stay as they are."""
    return HeldWords.of(documents, words, key)


@lru_cache(maxsize=1)
def _rows(
    documents: tuple[str, ...], words: Words, vocabulary: Any, frequencies: tuple[int, ...] | None, n_documents: int
) -> Any:
    """Counted once in a process."""
    weighing = Weighing(words, vocabulary, None if frequencies is None else np.array(frequencies), n_documents)
    return weighing.weighed(weighing.counted(documents)).rows.astype(np.float64)
