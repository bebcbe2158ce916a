"""Options of `partsong topics fit` that need or exclude each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import typer

from partsong.topic_names import ALONE, DESCENDING, SERVERS, TOGETHER

OF_A_CRITIC = ("strength", "critic", "mi_gradient", "critic_rate")
OF_FOUND_WORDS = ("min_documents", "min_parties", "max_share", "max_words", "longest_word")
"""Which of the words of texts are taken."""


def require_meaningful(n_files: int, given: Mapping[str, Any], between: Iterable[str], descent: Iterable[str]) -> None:
    """Refuse what has no meaning for one file, or for several, for the method, or for the vocabulary."""
    method = given.get("method")
    for name in descent:
        meant = [one for one in DESCENDING if one in (ALONE if n_files == 1 else TOGETHER)]
        meant = [one for one in meant if one.endswith("-mi")] if name in OF_A_CRITIC else meant
        if name in given and method not in meant:
            _refuse(name, f"This is for --method {' and '.join(meant)}.")
        if name in given and name in OF_A_CRITIC[1:] and given.get("strength") == 0:
            _refuse(name, "With --strength 0 there is no critic: give another strength, or leave this out.")
    if method in ("lda", "fedlda") and given.get("weighting", "counts") != "counts":
        _refuse("weighting", f"{method} is a model of counts: leave it out.")
    if n_files > 1:
        if method in ALONE:
            _refuse("method", f"{method} is for one file.")
        if "server_rate" in given and given.get("server", SERVERS[0]) == SERVERS[0]:
            steps = ", ".join(SERVERS[1:])
            _refuse("server_rate", f"This is for --server {steps}: an average has no rate. Give one, or leave it out.")
    else:
        _require_alone(given, between)
    _require_found_words(given)


def _require_alone(given: Mapping[str, Any], between: Iterable[str]) -> None:
    if given.get("method") in TOGETHER:
        _refuse("method", f"{given['method']} is between parties: give several files.")
    for name in between:
        if name in given:
            _refuse(name, "This is between parties: give several files.")
    if given.get("vocabulary") == "agree":
        _refuse("vocabulary", "Only several parties can agree: give several files.")


def _require_found_words(given: Mapping[str, Any]) -> None:
    """Words that are given are all taken, and hashes have as many columns as asked for."""
    source = given.get("vocabulary", "agree")
    for name in OF_FOUND_WORDS:
        if source == "agree" or name not in given or (source == "hash" and name == "max_words"):
            continue
        why = (
            "With --vocabulary hash no word is left out; --max-words is the number of columns."
            if source == "hash"
            else "A given --vocabulary is taken as it is: leave this out, or give a file with fewer words."
        )
        _refuse(name, why)


def _refuse(name: str, why: str) -> NoReturn:
    raise typer.BadParameter(why, param_hint=f"--{name.replace('_', '-')}")
