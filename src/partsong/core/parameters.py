"""Typed parameters: whole numbers, reals, choices and booleans, for Python, the command line and TOML.

A function declares its parameters by annotating its keyword arguments:

    def fedprox(problem: Problem, *, strength: Annotated[float, AtLeast(0)] = 0.1, local_steps: Steps = 10): ...

`parameters_of` reads the signature. Each `Parameter` checks a value (`parse`), reads command-line text (`read`) and
converts a value to plain data for files (`plain`). The error for an unknown name suggests the nearest one.
"""

from __future__ import annotations

import difflib
import inspect
import math
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Protocol, get_args, get_origin, get_type_hints

from partsong.core import renamed
from partsong.errors import FileError, FormatError, ParameterError


class Kind(Protocol):
    """The type of a parameter. `str(kind)` describes it; `example` is a valid value, as plain data."""

    @property
    def example(self) -> Any: ...
    def parse(self, name: str, value: Any) -> Any:
        """Return the checked value; for a choice, the object behind its name."""

    def read(self, text: str) -> Any:
        """Return plain data from command-line text; other text is returned unchanged, for `parse` to refuse."""

    def plain(self, value: Any) -> Any:
        """Return the value as plain data: a choice by its name, or by its repr if it has no name."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number of at least `least`."""

    least: int = 1

    @property
    def example(self) -> int:
        return self.least

    def __str__(self) -> str:
        return f"whole number ≥ {self.least}"

    def parse(self, name: str, value: Any) -> int:
        return whole_number(name, value, least=self.least)

    def read(self, text: str) -> Any:
        return _number(text, int)

    def plain(self, value: Any) -> Any:
        return _plain_number(value)


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number within bounds: more than `above` or at least `least`, and at most `most`."""

    above: float | None = None
    least: float | None = None
    most: float | None = None

    @property
    def example(self) -> float:
        return next(float(bound) for bound in (self.most, self.least, 1.0) if bound is not None)

    def __str__(self) -> str:
        low = "" if self.above is None else f" > {self.above:g}"
        low = low if self.least is None else f" ≥ {self.least:g}"
        return f"number{low}" if self.most is None else f"number{low}, ≤ {self.most:g}"

    def parse(self, name: str, value: Any) -> float:
        number = real_number(name, value)
        is_low = (self.above is not None and number <= self.above) or (self.least is not None and number < self.least)
        if math.isfinite(number) and not is_low and (self.most is None or number <= self.most):
            return number
        raise ParameterError(f"{name} must be {self.bounds_text()}; got {value!r}.", parameter=name)

    def bounds_text(self) -> str:
        """The allowed range, as worded in an error."""
        if self.most is not None and self.least is not None:
            return f"from {self.least:g} to {self.most:g}"
        low = "" if self.above is None else f"above {self.above:g}"
        low = low if self.least is None else f"of at least {self.least:g}"
        return f"a number {low}".rstrip() if self.most is None else f"{low} and at most {self.most:g}"

    def read(self, text: str) -> Any:
        return _number(text, float)

    def plain(self, value: Any) -> Any:
        return _plain_number(value)


def Above(bound: float) -> Number:
    """A number above the bound."""
    return Number(above=bound)


def AtLeast(bound: float) -> Number:
    """A number at or above the bound."""
    return Number(least=bound)


SHARE = Number(above=0, most=1)
"""A number above 0 and at most 1."""
FACTOR = Number(least=0, most=1)
"""A number from 0 to 1."""


@dataclass(frozen=True, slots=True)
class WordOrNumber:
    """One word, or a number."""

    word: str
    number: Number

    @property
    def example(self) -> str:
        return self.word

    @property
    def names(self) -> tuple[str, ...]:
        """The word."""
        return (self.word,)

    def __str__(self) -> str:
        return f'"{self.word}" or {self.number}'

    def parse(self, name: str, value: Any) -> str | float:
        if isinstance(value, str) and value != self.word:
            message = f'{name} must be "{self.word}" or {self.number.bounds_text()}; got {value[:60]!r}.'
            raise ParameterError(message, parameter=name)
        return value if isinstance(value, str) else self.number.parse(name, value)

    def read(self, text: str) -> Any:
        return self.number.read(text)

    def plain(self, value: Any) -> Any:
        return _plain_number(value)


@dataclass(frozen=True, slots=True)
class TrueOrFalse:
    """A boolean."""

    example: bool = True

    def __str__(self) -> str:
        return "true or false"

    def parse(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ParameterError(f"{name} must be true or false; got {value!r}.", parameter=name)
        return value

    def read(self, text: str) -> Any:
        return {"true": True, "yes": True, "false": False, "no": False}.get(text.lower(), text)

    def plain(self, value: Any) -> Any:
        return value


@dataclass(frozen=True)
class Choice:
    """One of several names, each of which stands for a value.

    From Python, an object with all `needed` attributes is accepted too; if `needed` is empty, only names are. `reason`
    is added to the error for any other value.
    """

    values: Mapping[str, Any]
    needed: tuple[str, ...] = ()
    reason: str = ""

    @staticmethod
    def of(*names: str, reason: str = "") -> Choice:
        """A choice of names that stand for themselves."""
        return Choice(dict(zip(names, names, strict=True)), reason=reason)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in order."""
        return tuple(self.values)

    @property
    def example(self) -> str:
        return next(iter(self.values))

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __str__(self) -> str:
        return ", ".join(f'"{name}"' for name in self.values)

    def parse(self, name: str, value: Any) -> Any:
        if isinstance(value, str) and value in self.values:
            return self.values[value]
        if self._is_one(value) or self.name_of(value) is not None:
            return value
        reason = f" {self.reason}" if self.reason else ""
        message = f"{name} is {str(value)[:60]!r}. {suggest_name(str(value), self.values, name)}{reason}"
        raise ParameterError(message, parameter=name)

    def _is_one(self, value: Any) -> bool:
        if not self.needed or isinstance(value, (str, type)):
            return False
        return all(hasattr(value, attribute) for attribute in self.needed)

    def read(self, text: str) -> Any:
        return text

    def plain(self, value: Any) -> Any:
        return value if value is None or isinstance(value, str) else self.name_of(value) or repr(value)

    def name_of(self, value: Any) -> str | None:
        """Return the name that stands for a value, or None."""
        return next((name for name, one in self.values.items() if type(one) is type(value) and one == value), None)


REQUIRED = object()
"""Default of a parameter that must be given."""

Steps = Annotated[int, Whole()]
"""Local steps of a party between two exchanges."""


@dataclass(frozen=True)
class Parameter:
    """One keyword argument of a function: its name, type and default."""

    name: str
    kind: Kind
    default: Any = REQUIRED
    allows_none: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names that it accepts as values."""
        return tuple(getattr(self.kind, "names", ()))

    @property
    def is_required(self) -> bool:
        """Whether it has no default."""
        return self.default is REQUIRED

    def parse(self, value: Any) -> Any:
        """Return the checked value; None if that is allowed."""
        return None if value is None and self.allows_none else self.kind.parse(self.name, value)

    def read(self, text: str) -> Any:
        """Return plain data from command-line text."""
        return self.kind.read(text)

    def plain(self, value: Any) -> Any:
        """Return the value as plain data for a file."""
        return None if value is None else self.kind.plain(value)


def parameters_of(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the keyword-only arguments of a function by their annotations; `bool` needs no further annotation."""
    hints = get_type_hints(function, include_extras=True)
    signature = inspect.signature(function)
    found = {}
    for name, one in signature.parameters.items():
        if one.kind is one.KEYWORD_ONLY:
            kind, allows_none = _kind_of(name, hints.get(name))
            default = REQUIRED if one.default is one.empty else one.default
            found[name] = Parameter(name, kind, default, allows_none or default is None)
    return found


def _kind_of(name: str, hint: Any) -> tuple[Kind, bool]:
    if hint is bool:
        return TrueOrFalse(), False
    for part in (hint, *get_args(hint)):
        if get_origin(part) is Annotated:
            kind: Kind = part.__metadata__[0]
            return kind, type(None) in (*get_args(hint), *get_args(part.__origin__))
    raise TypeError(f"The argument {name!r} needs an annotation such as Annotated[int, Whole()]; it has {hint!r}.")


def parse_all(
    parameters: Mapping[str, Parameter], given: Mapping[str, Any], where: str, known: Collection[str] = ()
) -> dict[str, Any]:
    """Return the given values, checked by name; an unknown name or a missing required one is an error.

    `known` are further names to suggest from.
    """
    for name in given:
        if name not in parameters:
            hint = suggest_name(str(name), known or parameters)
            raise ParameterError(f"{where} has no parameter {str(name)[:60]!r}. {hint}")
    if missing := [name for name, one in parameters.items() if one.is_required and given.get(name) is None]:
        kinds = "; ".join(f"{name} is {parameters[name].kind}" for name in missing)
        raise ParameterError(f"{where} needs {' and '.join(missing)}: {kinds}.", parameter=missing[0])
    return {name: parameters[name].parse(value) for name, value in given.items()}


def read_settings(texts: Collection[str], option: str) -> dict[str, str]:
    """Parse NAME=VALUE texts of the command line; each name at most once."""
    found: dict[str, str] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not sign or not name:
            raise ParameterError(f"{option} must have the form NAME=VALUE; got {text!r}.")
        if name in found:
            raise ParameterError(f"{option} sets {name} more than once.")
        found[name] = value.strip()
    return found


def _number(text: str, kind: type[int] | type[float]) -> Any:
    try:
        return kind(text)
    except ValueError:
        return text


def _plain_number(value: Any) -> Any:
    """A number of any library as a Python number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; a byte order mark is accepted."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path} cannot be read: {error}. Check the path.") from error
    except ValueError as error:  # also raised for a number with thousands of digits
        raise FormatError(f"{path} is not valid TOML: {error}. Correct that line.") from error


def require_known_keys(table: Mapping[str, Any], known: Collection[str], where: str) -> Mapping[str, Any]:
    """Return the table, if all its keys are known."""
    if not isinstance(table, Mapping):
        raise ParameterError(f"{where} must be a table of settings, not {type(table).__name__}.")
    for key in table:
        if key not in known:
            raise ParameterError(f"{where} has no setting {str(key)[:60]!r}. {suggest_name(str(key), known)}")
    return table


def suggest_name(word: str, known: Collection[str], parameter: str = "") -> str:
    """Suggest the name that may be meant, and list all known names; `parameter`: whose value the word is."""
    if not known:
        return "There are none yet."
    near = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.4)
    guess = renamed.hint(word, known, parameter) or (f"Did you mean {near[0]!r}? " if near else "")
    return f"{guess}Known are: {', '.join(known)}."


def whole_number(name: str, value: Any, hint: str = "", least: int = 1) -> int:
    """Return an integer of at least `least`; booleans are refused."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        message = f"{name} must be a whole number of at least {least}{hint}; got {value!r}."
        raise ParameterError(message, parameter=name)
    return int(value)


def real_number(name: str, value: Any) -> float:
    """Return a float; text and booleans are refused."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ParameterError(f"{name} must be a number; got {value!r}.", parameter=name)
    try:
        return float(value)
    except OverflowError as error:
        message = f"{name} must be a number below 1e308; got a larger whole number."
        raise ParameterError(message, parameter=name) from error
