"""Typed parameters: whole numbers, reals and tables of TOML; an unknown key is an error that names the nearest one."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from partsong.errors import FileError, FormatError, ParameterError


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a file; editors may have put a byte order mark before it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path} cannot be read: {error}. Check the path.") from error
    except ValueError as error:  # also of a number with thousands of digits
        raise FormatError(f"{path} is not TOML: {error}. Correct it there.") from error


def only(table: Mapping[str, Any], known: Collection[str], where: str) -> Mapping[str, Any]:
    """The table itself, if it has no other keys than these."""
    if not isinstance(table, Mapping):
        raise ParameterError(f"{where} must be a table of settings, not {type(table).__name__}.")
    for key in table:
        if key not in known:
            raise ParameterError(f"{where} has no setting {str(key)[:60]!r}. {nearest(str(key), known)}")
    return table


def nearest(word: str, known: Collection[str]) -> str:
    """Which name may be meant, and all that there are."""
    if not known:
        return "There are none yet."
    near = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.4)
    guess = f"Did you mean {near[0]!r}? " if near else ""
    return f"{guess}Known are: {', '.join(known)}."


def whole(table: Mapping[str, Any], name: str, default: Any, least: int = 1) -> Any:
    """A whole number of at least so much, or the default where it is not set."""
    value = table.get(name, default)
    if name in table and (type(value) is not int or value < least):
        raise ParameterError(f"{name} must be a whole number of at least {least}; got {value!r}.")
    return value


def words(table: Mapping[str, Any], name: str, default: Any) -> Any:
    """A list of texts as a tuple, or the default."""
    if name not in table:
        return default
    value = table[name]
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) and word for word in value):
        raise ParameterError(f"{name} must be a list of texts; got {str(value)[:60]!r}.")
    return tuple(value)


def whole_number(name: str, value: Any, hint: str = "") -> int:
    """An integer of at least 1; True is not a number."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ParameterError(f"{name} must be a whole number of at least 1{hint}; got {value!r}.")
    return int(value)


def real_number(name: str, value: Any) -> float:
    """A number; text that looks like one is none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ParameterError(f"{name} must be a number; got {value!r}.")
    try:
        return float(value)
    except OverflowError as error:
        raise ParameterError(f"{name} must be a number below 1e308; got a whole number beyond that.") from error
