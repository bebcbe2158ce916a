"""What commands leave behind: lines for people, one JSON object for programs, files that are checked beforehand."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import os
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from partsong.cli.choices import PACKAGES
from partsong.cli.wording import as_options
from partsong.errors import FileError, MissingExtra
from partsong.io.opening import place_of

FAILING = ("strict", "surrogateescape", "surrogatepass")
"""What streams do about characters outside their encoding that can end in an error."""


def put_json(content: Mapping[str, Any]) -> None:
    """One JSON object on one line of standard output."""
    typer.echo(json.dumps(as_json(content), allow_nan=False))


def put_failure(content: Mapping[str, Any]) -> None:
    """The same about a command that failed; where nothing can be written either, its exit code has to do."""
    with contextlib.suppress(OSError):
        put_json(content)


def as_json(value: Any) -> Any:
    """The same with null for NaN and infinite numbers, plain numbers for NumPy's, and text for paths."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A JSON file, whole or not at all."""
    write_text(path, json.dumps(as_json(content), indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """A text file, whole or not at all."""
    from partsong.io.atomic import replacing

    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8", newline="")


def visible(name: object) -> str:
    """A name that cannot disturb a terminal: line breaks and control characters are spelled out."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "backslashreplace").decode()
        for letter in str(name)
    )


def spell_out_what_cannot_be_written() -> None:
    """Let standard output and error take every character: those outside their encoding are spelled out.

    An error handler that was asked for (PYTHONIOENCODING=cp1252:replace) and that never fails is left alone.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in FAILING:
            stream.reconfigure(errors="backslashreplace")


def warn(message: str) -> None:
    """What a person should know although the command goes on; on standard error."""
    typer.echo(visible(f"Warning: {as_options(message)}"), err=True)


def warn_of_formulas(path: Path, names: Iterable[str] | None) -> None:
    """Warn of names in a text file that a spreadsheet would take for formulas; they are never changed."""
    from partsong.io.weights import first_formula

    name = path.name.lower().removesuffix(".gz")
    found = first_formula(names or ()) if name.endswith((".csv", ".tsv")) else None
    if found is not None:
        warn(
            f"{path}: a spreadsheet takes the name {found!r} for a formula and may run it. It was written as it is; "
            "rename it, or import that column as text."
        )


def require_writable(option: str, path: Path, endings: Sequence[str] = ()) -> None:
    """Refuse, before anything is computed, a file that could not be written afterwards."""
    name = path.name.lower()
    if endings and not name.endswith(tuple(endings)):
        raise typer.BadParameter(f"{path}: the name must end in {' or '.join(endings)}.", param_hint=option)
    package = next((package for ending, package in PACKAGES.items() if endings and name.endswith(ending)), None)
    if package is not None and importlib.util.find_spec(package.partition(".")[0]) is None:
        raise MissingExtra(
            f"{option} {path}: needs {package.partition('.')[0]}, which is not installed. "
            'Install it: pip install "partsong[io]", or write .csv instead.'
        )
    place = place_of(path)
    if place.is_dir():
        raise FileError(f"{option} {path}: this is a folder. Name a file in it.")
    if place.exists() and not os.access(place, os.W_OK):
        raise FileError(f"{option} {path}: the file is write-protected. Choose another name, or lift the protection.")
    require_writable_folder(option, place.parent)


def require_writable_folder(option: str, folder: Path) -> None:
    """Refuse a folder that is not there, or in which no file can be made; asked by making one."""
    if not folder.is_dir():
        raise FileError(f"{option}: there is no folder {folder}. Make it first, or choose another place.")
    probe = folder / f".{secrets.token_hex(8)}.partsong"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except OSError as error:
        raise FileError(
            f"{option}: nothing can be written to the folder {folder} ({error.strerror}). Choose another place."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def require_distinct(paths: Mapping[str, Path | None]) -> None:
    """Refuse two uses of one file, such as a model that would overwrite the data."""
    seen: dict[str, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        place = os.path.realpath(place_of(path))
        if place in seen:
            raise typer.BadParameter(f"{seen[place]} is the same file: {path}. Choose another.", param_hint=option)
        seen[place] = option
