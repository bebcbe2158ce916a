"""Read the table that a command takes."""

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
    """Call `partsong.read`; refuse a folder of parts where one table is needed."""
    place = resolve_path(path)
    if is_parts_folder(place):
        raise FileError(
            f"{path} holds the parts of several parties. Pass one of them, for example {path}/party-01.npz."
        )
    if path.name == LISTING:
        raise FileError(f"{path} lists the parts of several parties. Pass its folder instead.")
    require_applicable_options(path, wanted, label_option)
    return read_wanted(place, wanted)


def require_applicable_options(path: Path, wanted: ReadOptions, label_option: str = "--label") -> None:
    """Refuse reading options that a file with this extension does not have."""
    reader = reader_for(resolve_path(path))
    for setting, why in conflicts(reader, wanted) if reader is not None else ():
        hint = label_option if setting == "label" else option(setting)
        raise typer.BadParameter(f"{path}: {hint} {why}", param_hint=hint)
