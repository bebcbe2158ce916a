"""From a text to its words."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from partsong.errors import DataTypeError, FormatError, ParameterError
from partsong.text.documents import read_word_list
from partsong.text.letter_runs import LETTERS, find_runs
from partsong.text.stop_words import LISTS

__all__ = ["LETTERS", "Words", "stop_words_of"]


@dataclass(frozen=True, slots=True)
class Words:
    """Which words a text has: lower case, runs that match `pattern`, from `shortest` characters on, no stop words.

    `LETTERS` are letters of any script with the marks and joiners that stand among them (`letter_runs.find_runs`); any
    other pattern is taken as it is. Marks that NFC does not merge with their letters count as characters: में has three.

    `language` names a list of stop words ("none": no list), to which `stop_words` are added. Texts are brought to the
    normal form NFC, so that an é is one letter however it was typed; `strip_accents` makes it an e. All parties of a
    federation have to take the same, and a model keeps it.
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
                f"There is no list of stop words for {self.language!r}. There are: {', '.join(LISTS)}. For another "
                "language take 'none', and pass stop_words (stop_words_of reads them from a file)."
            )
        if isinstance(self.stop_words, str) or not all(isinstance(word, str) for word in self.stop_words):
            raise DataTypeError("stop_words is a collection of words; from a file: stop_words_of('words.txt').")
        if isinstance(self.shortest, bool) or not isinstance(self.shortest, int) or self.shortest < 1:
            raise ParameterError(f"shortest must be a whole number of at least 1; got {self.shortest!r}.")
        try:
            expression = re.compile(self.pattern)
        except (re.error, TypeError):
            raise ParameterError(f"pattern is not a regular expression: {self.pattern!r}.") from None
        if expression.groups > 1:
            raise ParameterError(f"pattern may have one group at most; {self.pattern!r} has {expression.groups}.")
        object.__setattr__(self, "stop_words", tuple(sorted(set(self.stop_words))))
        object.__setattr__(self, "_find", find_runs if self.pattern == LETTERS else expression.findall)
        listed = {self._normal(word) for word in (*LISTS[self.language], *self.stop_words)}
        object.__setattr__(self, "_stopped", frozenset(listed))

    def of(self, text: str) -> list[str]:
        """The words of a text, in order, each as often as it occurs."""
        shortest, stopped = self.shortest, self._stopped
        return [word for word in self._find(self._normal(text)) if len(word) >= shortest and word not in stopped]

    def to_json(self) -> str:
        """All options, for a model file."""
        return json.dumps({name: value for name, value in asdict(self).items() if not name.startswith("_")})

    @classmethod
    def from_json(cls, text: str) -> Words:
        """From a model file."""
        try:
            options = json.loads(text)
            known = {one.name for one in fields(cls) if one.init}
            if not isinstance(options, dict) or set(options) - known:
                raise ValueError
            return cls(**{**options, "stop_words": tuple(options.get("stop_words", ()))})
        except (ValueError, TypeError):
            raise FormatError("The options of the words of a model cannot be read. Save the model again.") from None

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
    """Stop words from a text file in UTF-8 with one word per line, or from a collection."""
    listed = read_word_list(source) if isinstance(source, str | os.PathLike) else source
    return tuple(sorted({word.strip() for word in listed} - {""}))
