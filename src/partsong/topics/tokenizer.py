"""Tokenizer: split texts into words, with stop words by language.

Words are runs of letters of any script, including combining marks: vowel signs, points, accents, joiners. Stop words
are articles, pronouns, prepositions, conjunctions, auxiliaries, and letters after apostrophes; the lists were written
for this library. They have the accents of the language; `Words` strips accents from lists and texts alike.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from partsong.core.parameters import whole_number
from partsong.errors import DataTypeError, FormatError, ParameterError
from partsong.topics.documents import read_word_list

LETTERS = r"[^\W\d_]+"
"""Runs of letters; `find_runs` also includes combining marks and joiners."""

_LETTER = r"[^\W\d_]"
JOINERS = "\u200c\u200d"
"""Zero-width characters that separate or join letters."""
_PLACES = (range(0x300, 0x1F000), range(0xE0000, 0xE1000))
"""Unicode ranges with combining marks; searching all code points takes five times as long."""
_ABOVE = "\U00010000-\U0001efff\U000e0000-\U000e0fff"
"""Marks above 16 bits, as two ranges, because a regular expression class of many ranges is slow."""
_plain = re.compile(LETTERS)
_worth_a_look = re.compile("[\u0300-\u036f\u0483-\u0487\u0591-\u200d\u20d0-\U0010ffff]")
"""Characters that may be marks or joiners; letters of Latin, Greek and Cyrillic, dashes and quotes are not."""

STOP_WORDS = Path(__file__).with_name("stop_words")
"""A file of words for each language."""
LISTS = {
    **{path.stem: frozenset(path.read_text("utf-8").split()) for path in sorted(STOP_WORDS.glob("*.txt"))},
    "none": frozenset[str](),
}


def find_runs(text: str) -> list[str]:
    """Return the runs of letters of a text in NFC, in order.

    A run starts with a letter. Marks inside or at the end are part of it; so is a joiner (U+200C, U+200D) followed by a
    letter or mark of the same run.
    """
    if text.isascii() or not _may_have_marks(text):
        return _plain.findall(text)
    return _with_marks().findall(text)


@cache
def marks() -> tuple[int, ...]:
    """Return the code points of categories Mn and Mc; computed when a text first needs them."""
    return tuple(place for place in chain(*_PLACES) if unicodedata.category(chr(place)) in ("Mn", "Mc"))


def _may_have_marks(text: str) -> bool:
    """Quick check: most texts have no marks and are split faster without them."""
    first = _worth_a_look.search(text)
    return first is not None and _likely().search(text, first.start()) is not None


@cache
def _likely() -> re.Pattern[str]:
    return re.compile(f"[{JOINERS}{_ranges(place for place in marks() if place <= 0xFFFF)}{_ABOVE}]")


@cache
def _with_marks() -> re.Pattern[str]:
    marked = f"[{_ranges(marks())}]+{_LETTER}*"
    return re.compile(f"{_LETTER}+(?:{marked}|[{JOINERS}]+(?:{marked}|{_LETTER}+))*")


def _ranges(places: Iterable[int]) -> str:
    """Ascending code points as ranges of a regular expression class."""
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in _unbroken(places))


def _unbroken(places: Iterable[int]) -> Iterator[tuple[int, int]]:
    first = last = -1
    for place in places:
        if place != last + 1:
            if last >= 0:
                yield first, last
            first = place
        last = place
    yield first, last


@dataclass(frozen=True, slots=True)
class Words:
    """Word options: lower case, runs that match `pattern`, at least `shortest` characters, no stop words.

    The default pattern `LETTERS` matches letters of any script with marks and joiners (`find_runs`); other patterns are
    used as regular expressions. Marks that NFC does not combine with their letters count as characters: में has three.

    `language` selects a list of stop words ("none": no list), to which `stop_words` are added. Texts are normalized to
    NFC, so that é is one letter however it is encoded; `strip_accents` converts it to e. All parties of a federation
    must use the same options, and a model stores them.
    """

    language: str = "english"
    stop_words: tuple[str, ...] = ()
    pattern: str = LETTERS
    shortest: int = 2
    lower: bool = True
    strip_accents: bool = False
    _find: Any = field(init=False, repr=False, compare=False)
    _stopped: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.language not in LISTS:
            raise ParameterError(
                f"There is no list of stop words for {self.language!r}. Lists: {', '.join(LISTS)}. For another "
                "language use 'none' and pass its stop_words.",
                parameter="language",
            )
        if isinstance(self.stop_words, str) or not all(isinstance(word, str) for word in self.stop_words):
            raise DataTypeError(
                "stop_words must be a collection of words. From a file, use stop_words_of('words.txt').",
                parameter="stop_words",
            )
        whole_number("shortest", self.shortest)
        try:
            expression = re.compile(self.pattern)
        except (re.error, TypeError):
            raise ParameterError(
                f"pattern is not a regular expression: {self.pattern!r}.", parameter="pattern"
            ) from None
        if expression.groups > 1:
            raise ParameterError(
                f"pattern may have at most one group; {self.pattern!r} has {expression.groups}.", parameter="pattern"
            )
        object.__setattr__(self, "stop_words", tuple(sorted(set(self.stop_words))))
        object.__setattr__(self, "_find", find_runs if self.pattern == LETTERS else expression.findall)
        listed = {self._normal(word) for word in (*LISTS[self.language], *self.stop_words)}
        object.__setattr__(self, "_stopped", frozenset(listed))

    def of(self, text: str) -> list[str]:
        """Return the words of a text in order, with repetitions."""
        shortest, stopped = self.shortest, self._stopped
        return [word for word in self._find(self._normal(text)) if len(word) >= shortest and word not in stopped]

    def to_json(self) -> str:
        """Return all options as JSON, for a model file."""
        return json.dumps({name: value for name, value in asdict(self).items() if not name.startswith("_")})

    @classmethod
    def from_json(cls, text: str) -> Words:
        """Read options from a model file."""
        try:
            options = json.loads(text)
            known = {one.name for one in fields(cls) if one.init}
            if not isinstance(options, dict) or set(options) - known:
                raise ValueError
            return cls(**{**options, "stop_words": tuple(options.get("stop_words", ()))})
        except (ValueError, TypeError):
            raise FormatError("The word options of a model cannot be read. Save the model again.") from None

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Words.from_json, (self.to_json(),)

    def _normal(self, text: str) -> str:
        lowered = text.lower() if self.lower else text
        if lowered.isascii():
            return lowered
        if not self.strip_accents:
            return unicodedata.normalize("NFC", lowered)
        return "".join(letter for letter in unicodedata.normalize("NFKD", lowered) if not unicodedata.combining(letter))


def stop_words_of(source: str | os.PathLike[str] | Iterable[str]) -> tuple[str, ...]:
    """Return stop words from a UTF-8 text file with one word per line, or from a collection."""
    listed = read_word_list(source) if isinstance(source, str | os.PathLike) else source
    return tuple(sorted({word.strip() for word in listed} - {""}))
