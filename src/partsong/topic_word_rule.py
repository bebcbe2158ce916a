"""The rule of words that a topic model was asked for by its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partsong.errors import ParameterError
from partsong.topic_vocabulary import AGREE, HASH, LONGEST, WordRule

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
