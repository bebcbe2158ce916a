"""Read TOML files and tables of messages into typed dataclasses, and write such values as TOML.

    @dataclass(frozen=True)
    class Budget:
        epsilon: Annotated[float, Meta(gt=0)]
        unit: Literal["row", "party"] = "row"

    load_toml(Path("budget.toml"), Budget)

The annotations are the format: msgspec checks types and bounds, and `__post_init__` may raise a ParameterError for the
rest. A class may say two more things. `ADVICE`, a class variable, has a sentence for keys that people expect and that
do not exist. `VERSION` is the version of the file format that this class reads: a file may have a key `version` (1 if
it has none), and a newer one is refused before anything else in it is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tomli_w
from msgspec import inspect

from partsong.core.parameters import nearest, read_toml
from partsong.errors import FormatError, ParameterError, PartsongError
from partsong.io.write import replacing

T = TypeVar("T")

MOST_LETTERS = 60
"""Of a value, in an error."""


def load_toml(
    path: Path, kind: type[T], *, error: type[PartsongError] = ParameterError, way_out: str = "Correct it there."
) -> T:
    """Read a TOML file as a value of a dataclass. Errors name the file, the key, the value and what is expected.

    `error` and `way_out` are for files that people receive and do not write: FormatError, and where to get it again.
    """
    table = read_toml(path)
    _require_known_version(table.pop("version", 1), getattr(kind, "VERSION", 1), path)
    return parse_table(table, kind, str(path), error=error, way_out=way_out)


def parse_table(
    table: Any, kind: type[T], where: str, *, error: type[PartsongError] = ParameterError, way_out: str = ""
) -> T:
    """Convert plain values to a value of a dataclass; `where` begins every error."""
    fields = inspect.type_info(kind)
    if problem := _unknown_key(table, fields, ()):
        raise error(f"{where} {problem}")
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as found:
        if isinstance(found.__cause__, PartsongError):
            raise type(found.__cause__)(f"{where}: {found.__cause__}") from found
        raise error(f"{where}{_problem(str(found), table, fields)} {way_out}".rstrip()) from found


def format_toml(value: Any) -> str:
    """Format a dataclass or a mapping as TOML; None is left out."""
    return tomli_w.dumps(_without_none(msgspec.to_builtins(value)))


def save_toml(path: Path, value: Any, *, private: bool = False) -> None:
    """Write a TOML file, whole or not at all; one that is `private` can be read by its owner alone."""
    content = format_toml(value).encode()
    with replacing(path, private=private) as draft:
        draft.write_bytes(content)


def _require_known_version(version: Any, known: int, path: Path) -> None:
    if type(version) is not int or version < 1:
        raise FormatError(f"{path}: version must be a whole number of at least 1; got {_short(version)}. Remove it.")
    if version > known:
        raise FormatError(
            f"{path} has version = {_short(version)}, and this partsong reads versions up to {known}. Update partsong: "
            "pip install --upgrade partsong"
        )


def _unknown_key(table: Any, kind: inspect.Type, path: tuple[str, ...]) -> str:
    """Describe the first key that the type does not have; empty if there is none."""
    kind = _plain(kind)
    if not isinstance(table, Mapping) or not isinstance(kind, inspect.DataclassType):
        return ""
    fields = {field.name: field.type for field in kind.fields}
    for key, value in table.items():
        if key in fields:
            if problem := _unknown_key(value, fields[key], (*path, key)):
                return problem
            continue
        advice = getattr(kind.cls, "ADVICE", {}).get(key) or nearest(str(key), fields)
        return f"has no setting {_short('.'.join((*path, str(key))))}. {advice}"
    return ""


def _problem(message: str, table: Any, kind: inspect.Type) -> str:
    """Say in words what msgspec found: "Expected `int`, got `str` - at `$.privacy.epsilon`"."""
    where = re.search(r" - at `\$([^`\[]*)", message)
    keys = [key for key in (where[1] if where else "").split(".") if key]
    value = table
    for key in keys:
        kind, value = _field(kind, key), value[key]
    if missing := re.match(r"Object missing required field `([^`]*)`", message):
        return f" needs {'.'.join([*keys, missing[1]])}: {_in_words(_field(kind, missing[1]))}. Add it."
    named = f": {'.'.join(keys)}" if keys else ""
    return f"{named} must be {_in_words(kind)}; got {_short(value)}."


def _field(kind: inspect.Type, name: str) -> inspect.Type:
    kind = _plain(kind)
    assert isinstance(kind, inspect.DataclassType)
    return next(field.type for field in kind.fields if field.name == name)


def _plain(kind: inspect.Type) -> inspect.Type:
    """The type itself where None is also allowed."""
    if isinstance(kind, inspect.UnionType):
        return next((one for one in kind.types if not isinstance(one, inspect.NoneType)), kind)
    return kind


def _in_words(kind: inspect.Type) -> str:
    kind = _plain(kind)
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.LiteralType):
        return " or ".join(f'"{value}"' for value in kind.values)
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
        bounds = ((kind.gt, "above"), (kind.ge, "of at least"), (kind.lt, "below"), (kind.le, "of at most"))
        limits = " and ".join(f"{name} {bound:.4g}" for bound, name in bounds if bound is not None)
        return f"{noun} {limits}".rstrip()
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        return f"a list of {_in_words(kind.item_type).removeprefix('a ')}s"
    return "a text" if isinstance(kind, inspect.StrType) else "a table of settings"


def _short(value: Any) -> str:
    """A value as an error shows it."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no more than 4300 digits, and 0x… may have more
        return "a number with thousands of digits"
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}…"


def _without_none(table: Any) -> Any:
    if not isinstance(table, dict):
        return table
    return {name: _without_none(value) for name, value in table.items() if value is not None}
