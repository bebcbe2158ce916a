"""Read TOML files and tables in messages into typed dataclasses, and write such values as TOML.

    @dataclass(frozen=True)
    class Budget:
        epsilon: Annotated[float, Meta(gt=0)]
        unit: Literal["row", "party"] = "row"

    load_toml(Path("budget.toml"), Budget)

The annotations are the schema: msgspec checks types and bounds, `one_of` lists names that are known at run time only,
and `__post_init__` may raise a ParameterError for the rest. A class may have two class variables. `ADVICE` maps keys
that people expect, but that do not exist, to a sentence of advice. `VERSION` is the newest format version that the
class reads: a file may have a key `version` (default 1), and a newer one is refused before anything else is read.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import tomli_w
from msgspec import Meta, inspect

from partsong.core.parameters import read_toml, suggest_name
from partsong.core.renamed import hint
from partsong.errors import FormatError, ParameterError, PartsongError
from partsong.io.write import write_text

T = TypeVar("T")

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
FINITE = sys.float_info.max
"""Upper bound of a number that must be finite: Annotated[float, Meta(gt=0, le=FINITE)]."""

MOST_LETTERS = 60
"""Characters of a value that an error shows."""


def one_of(names: Collection[str]) -> Meta:
    """Allow these names only: for a string, an enumeration, or the items of a list."""
    return Meta(extra={"one_of": tuple(names)})


def load_toml(
    path: Path, kind: type[T], *, error: type[PartsongError] = ParameterError, way_out: str = "Correct it there."
) -> T:
    """Read a TOML file as a value of a dataclass. Errors name the file, the key, the value and what is expected.

    `error` and `way_out` are for files that people receive instead of writing them: FormatError, and where to get the
    file again.
    """
    return parse_table(read_table(path, kind), kind, str(path), error=error, way_out=way_out)


def read_table(path: Path, kind: type) -> dict[str, Any]:
    """Read a TOML file as a table, without its `version`; refuse a version that the class cannot read."""
    table = read_toml(path)
    version, known = table.pop("version", 1), getattr(kind, "VERSION", 1)
    if type(version) is not int or version < 1:
        raise FormatError(f"{path}: version must be a whole number of at least 1; got {_short(version)}. Remove it.")
    if version > known:
        raise FormatError(
            f"{path} has version = {_short(version)}, and this partsong reads versions up to {known}. Update partsong: "
            "pip install --upgrade partsong"
        )
    return table


def parse_table(
    table: Any, kind: type[T], where: str, *, error: type[PartsongError] = ParameterError, way_out: str = ""
) -> T:
    """Convert plain values to a dataclass; every error starts with `where`."""
    fields = inspect.type_info(kind)
    if problem := _unknown_name(table, fields, ()):
        raise error(f"{where}{problem} {way_out}".rstrip())
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as found:
        keys = _keys_in(str(found))
        if isinstance(found.__cause__, PartsongError):
            place = f"{where}, table {'.'.join(keys)}" if keys else where
            raise type(found.__cause__)(f"{place}: {found.__cause__}") from found
        raise error(f"{where}{_problem(str(found), keys, table, fields)} {way_out}".rstrip()) from found


def require_known(table: Mapping[str, Any], known: Collection[str], where: str, advice: Mapping[str, str]) -> None:
    """Refuse keys other than these, with a sentence of `advice` or the nearest key."""
    for key in table:
        if key not in known:
            raise ParameterError(f"{where}{_unknown(str(key), str(key), known, advice)}")


def format_toml(value: Any) -> str:
    """Format a dataclass or a mapping as TOML; entries that are None are omitted."""
    return tomli_w.dumps(_without_none(msgspec.to_builtins(value)))


def save_toml(path: Path, value: Any, *, private: bool = False) -> None:
    """Write a TOML file atomically; only its owner can read a `private` one."""
    write_text(path, format_toml(value), private=private)


def _unknown_name(value: Any, kind: inspect.Type, path: tuple[str, ...]) -> str:
    """Describe the first unknown key, or unknown value of `one_of`; empty if there is none."""
    allowed, kind = _allowed(kind), _plain(kind)
    if isinstance(value, str) and allowed and value not in allowed:
        return f": {'.'.join(path)} has {_short(value)}. {suggest_name(value, allowed)}"
    if isinstance(value, list | tuple) and isinstance(kind, inspect.ListType | inspect.VarTupleType):
        return next((found for item in value if (found := _unknown_name(item, kind.item_type, path))), "")
    if not isinstance(value, Mapping) or not isinstance(kind, inspect.DataclassType):
        return ""
    fields = {field.name: field.type for field in kind.fields}
    for key, inner in value.items():
        if key not in fields:
            return _unknown(key, ".".join((*path, str(key))), fields, getattr(kind.cls, "ADVICE", {}))
        if problem := _unknown_name(inner, fields[key], (*path, key)):
            return problem
    return ""


def _unknown(key: str, full: str, known: Collection[str], advice: Mapping[str, str]) -> str:
    return f" has no setting {_short(full)}. {advice.get(key) or suggest_name(str(key), known)}"


def _keys_in(message: str) -> list[str]:
    """Return the keys in "Expected `int`, got `str` - at `$.privacy.epsilon`"; for an item of a list, the list's."""
    found = re.search(r" - at `\$([^`\[]*)", message)
    return [key for key in (found[1] if found else "").split(".") if key]


def _problem(message: str, keys: list[str], table: Any, kind: inspect.Type) -> str:
    """Describe what msgspec has found."""
    value = table
    for key in keys:
        kind, value = _field(kind, key), value[key]
    if missing := re.match(r"Object missing required field `([^`]*)`", message):
        return f" needs {'.'.join([*keys, missing[1]])}: {_in_words(_field(kind, missing[1]))}. Add it."
    named = f": {'.'.join(keys)}" if keys else ""
    plain = _plain(kind)
    values = plain.values if isinstance(plain, inspect.LiteralType) else ()
    advice = f" {hint(value, values)}".rstrip() if isinstance(value, str) else ""
    return f"{named} must be {_in_words(kind)}; got {_short(value)}.{advice}"


def _field(kind: inspect.Type, name: str) -> inspect.Type:
    kind = _plain(kind)
    assert isinstance(kind, inspect.DataclassType)
    return next(field.type for field in kind.fields if field.name == name)


def _plain(kind: inspect.Type) -> inspect.Type:
    """Return the type without metadata, and without None."""
    if isinstance(kind, inspect.UnionType):
        return _plain(next((one for one in kind.types if not isinstance(one, inspect.NoneType)), kind.types[0]))
    return _plain(kind.type) if isinstance(kind, inspect.Metadata) else kind


def _allowed(kind: inspect.Type) -> tuple[str, ...]:
    """Return the names of `one_of`."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    extra = (one.extra for one in kinds if isinstance(one, inspect.Metadata))
    return next((names["one_of"] for names in extra if names), ())


def _in_words(kind: inspect.Type) -> str:
    if allowed := _allowed(kind):
        return f"one of {', '.join(allowed)}"
    kind = _plain(kind)
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.LiteralType):
        return " or ".join(f'"{value}"' for value in kind.values)
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
        most = None if kind.le == FINITE else kind.le
        bounds = ((kind.gt, "above"), (kind.ge, "of at least"), (kind.lt, "below"), (most, "at most"))
        limits = " and ".join(f"{name} {bound:.4g}" for bound, name in bounds if bound is not None)
        return f"{noun} {limits}".rstrip()
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        return "a list of strings"
    return "a string" if isinstance(kind, inspect.StrType) else "a table of settings"


def _short(value: Any) -> str:
    """Format a value for an error."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no more than 4300 digits, and 0x… may have more
        return "a number with thousands of digits"
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}…"


def _without_none(table: Any) -> Any:
    if not isinstance(table, dict):
        return table
    return {name: _without_none(value) for name, value in table.items() if value is not None}
