"""Rows that the findings of an attack are held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from partsong.cli.gaps import with_known_cells
from partsong.cli.holdings import read_table
from partsong.cli.parts_folder import is_parts_folder, read_parts
from partsong.cli.run_folder import MODEL
from partsong.errors import FileError, ShapeError
from partsong.io.opening import Wanted, place_of

if TYPE_CHECKING:
    from partsong.data.table import Table
    from partsong.evaluate.leakage_transcript import Record


@dataclass(frozen=True, slots=True)
class Truth:
    """What rows have to fit: the folder and the record of the run, the one party that is meant, and unknown cells."""

    folder: Path
    record: Record
    party: str | None
    missing: str | None


def truth_of(data: Sequence[Path], about: Truth, wanted: Wanted) -> dict[str, Table]:
    """Tables by party, with their columns in the order of the run."""
    parties = about.record.parties
    found: dict[str, Table] = {}
    for path in data:
        place = place_of(path)
        if is_parts_folder(place):
            found |= read_parts(place)
        elif about.party is None and len(parties) > 1:
            raise typer.BadParameter(f"{path}: say whose rows these are by --party.", param_hint="--data")
        else:
            found[about.party or parties[0]] = read_table(path, wanted)
    known = {name: table for name, table in found.items() if name in parties}
    if data and not known:
        raise FileError(f"{data[0]}: none of its parties ({', '.join(list(found)[:5])}) took part in this run.")
    return {name: with_known_cells(_in_order(table, about), about.missing) for name, table in known.items()}


def _in_order(table: Table, about: Truth) -> Table:
    """By name where the model of the run and the table have names; else as it is."""
    from partsong.cli.transform import matched
    from partsong.io.model_file import load_model

    place, width = about.folder / MODEL, about.record.n_features
    if place.is_file():
        return matched(table, load_model(place), drop_extra=False)
    if width is not None and table.X.shape[1] != width:
        raise ShapeError(f"{table.source}: {table.X.shape[1]} columns, but the run had {width}. Bring its own rows.")
    return table
