"""Read the one table that a command is about."""

from __future__ import annotations

from pathlib import Path

import typer

from partsong.console.output import option
from partsong.data.table import Table
from partsong.errors import FileError
from partsong.io.opening import ReadOptions, resolve_path
from partsong.io.party_folder import LISTING, is_parts_folder
from partsong.io.read import conflicts, read_wanted, reader_for


def read_table(path: Path, wanted: ReadOptions, label_option: str = "--label") -> Table:
    """`partsong.read`, with a word on folders of parts where one table is meant."""
    place = resolve_path(path)
    if is_parts_folder(place):
        raise FileError(f"{path} holds the parts of several parties. Name one of them, such as {path}/party-01.npz.")
    if path.name == LISTING:
        raise FileError(f"{path} lists the parts of several parties. Name its folder instead.")
    require_meaningful(path, wanted, label_option)
    return read_wanted(place, wanted)


def require_meaningful(path: Path, wanted: ReadOptions, label_option: str = "--label") -> None:
    """Options that mean nothing for a file of this name are a usage error, whatever it holds."""
    reader = reader_for(resolve_path(path))
    for setting, why in conflicts(reader, wanted) if reader is not None else ():
        hint = label_option if setting == "label" else option(setting)
        raise typer.BadParameter(f"{path}: {hint} {why}", param_hint=hint)
