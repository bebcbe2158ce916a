"""Messages of topic models in the words of `partsong topics fit`: arguments become its options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from partsong.errors import PartsongError

RENAMED = {"n_topics": "--topics", "random_state": "--seed", "max_iter": "--rounds"}
"""Arguments that have another name here; of all others it is the same."""

ARGUMENTS = (
    *("min_documents", "min_parties", "max_share", "max_words", "stop_words"),
    *("critic_rate", "mi_gradient", "fits_first", "server_rate"),
)
"""Names that are no words of English: they are replaced wherever they stand alone."""

WORDS = (
    *("epochs", "batch", "rate", "strength", "critic", "device", "method", "rounds", "server", "participation"),
    *("vocabulary", "weighting", "language"),
)
"""Names that are words as well: replaced before an equals sign, and where more or less of it is advised."""

_ALONE = r"(?<![\w/\\.'\"-])"
_NO_WORD = "|".join((*RENAMED, *ARGUMENTS))
_WORD = "|".join(WORDS)
_RULES = (
    (re.compile(rf"{_ALONE}({_NO_WORD}|{_WORD})=True\b"), ""),
    (re.compile(rf"{_ALONE}({_NO_WORD}|{_WORD})='([\w-]+)'"), " "),
    (re.compile(rf"{_ALONE}({_NO_WORD}|{_WORD})=(?=[\w'\"-])"), " "),
    (re.compile(rf"{_ALONE}({_NO_WORD})\b(?!['\"=/\\]|\.\w)"), ""),
    (re.compile(rf"(?<=\ba smaller )({_WORD})\b"), ""),
    (re.compile(rf"(?<=\ba larger )({_WORD})\b"), ""),
)


def as_topic_options(message: str) -> str:
    """The same message with --topics for n_topics, --rate for rate=, and so on."""
    for pattern, after in _RULES:
        message = pattern.sub(partial(_option, after), message)
    return message


@contextmanager
def in_options() -> Iterator[None]:
    """Errors that leave the block name options."""
    try:
        yield
    except PartsongError as error:
        if len(error.args) == 1:
            error.args = (as_topic_options(str(error)),)
        raise


def _option(after: str, found: re.Match[str]) -> str:
    """The option, what comes after it, and a value without its quotes where one was found."""
    name, *value = found.groups()
    return RENAMED.get(name, f"--{name.replace('_', '-')}") + after + "".join(value)
