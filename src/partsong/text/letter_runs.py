"""Runs of letters of any script, with the marks that they carry: vowel signs, points, accents, joiners."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain

LETTERS = r"[^\W\d_]+"
"""Runs of letters; `find_runs` takes along the marks and joiners that stand among them."""

_LETTER = r"[^\W\d_]"
JOINERS = "\u200c\u200d"
"""Between letters they say how these are written: apart, or together."""
_PLACES = (range(0x300, 0x1F000), range(0xE0000, 0xE1000))
"""Where Unicode has marks; to look at all of its places takes five times as long."""
_ABOVE = "\U00010000-\U0001efff\U000e0000-\U000e0fff"
"""Those of them that take more than 16 bits, where a class of many ranges is slow."""
_plain = re.compile(LETTERS)
_worth_a_look = re.compile("[\u0300-\u036f\u0483-\u0487\u0591-\u200d\u20d0-\U0010ffff]")
"""Letters of Latin, Greek and Cyrillic texts, dashes and quotation marks are not among these."""


def find_runs(text: str) -> list[str]:
    """The runs of a text in NFC, in order.

    A run starts with a letter. A mark within it or at its end is part of it; so is a joiner (U+200C, U+200D) that a
    letter or a mark of the same run follows.
    """
    if text.isascii() or not _may_have_marks(text):
        return _plain.findall(text)
    return _with_marks().findall(text)


@cache
def marks() -> tuple[int, ...]:
    """Code points of the categories Mn and Mc in this Python's Unicode; looked up when the first text needs them."""
    return tuple(place for place in chain(*_PLACES) if unicodedata.category(chr(place)) in ("Mn", "Mc"))


def _may_have_marks(text: str) -> bool:
    """A quick look: most texts have none, and are split faster without them."""
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
    """Ascending places as ranges of a class."""
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
