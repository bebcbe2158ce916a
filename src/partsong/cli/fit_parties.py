"""The parties of a fit in which faulty ones are left out: whose part is read, who stays away, and what is told."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partsong.cli.choices import IGNORE
from partsong.cli.fit_settings import FitOptions
from partsong.cli.gaps import require_known, with_known_cells
from partsong.cli.holdings import (
    Holdings,
    require_usable,
    warn_of_identifiers,
)
from partsong.cli.parts_folder import in_one_order, read_part
from partsong.cli.parts_listing import listed
from partsong.errors import FormatError, PartsongError
from partsong.io.opening import place_of
from partsong.leaving_out import Columns, LeftOut, of_other_columns, require_somebody

if TYPE_CHECKING:
    from partsong.data.table import Table

LATE = "The run that is resumed began without it, and goes on so."


def faulty_of(options: FitOptions, given: Collection[str], context: Mapping[str, Any] | None) -> str:
    """What a faulty party leads to: as given, else as in the run that is resumed."""
    stored = {} if context is None else context["settings"]
    return options.faulty if "faulty" in given else str(stored.get("faulty", options.faulty))


def missing_of(options: FitOptions, given: Collection[str], context: Mapping[str, Any] | None) -> str:
    """What unknown cells lead to: as given, else as in the run that is resumed."""
    stored = {} if context is None else context["settings"]
    return options.missing if "missing" in given else str(stored.get("missing") or options.missing)


def read_sound_parties(
    path: Path, dtype: str | None, late: Collection[str], missing: str = "refuse"
) -> tuple[Holdings, dict[str, str]]:
    """The parties whose files can be used, and of the others why not; the list of parts itself has to be right.

    Those who are `late` are left out, whatever has become of their files: the run that is resumed began without them.
    """
    folder, faults = place_of(path), dict[str, str]()
    tables: dict[str, Table] = {}
    parts = listed(folder)
    for part in parts:
        try:
            tables[part.name] = read_part(folder, part)
        except PartsongError as error:
            faults[part.name] = str(error)
    faults |= of_other_columns({name: Columns(t.X.shape[1], t.feature_names) for name, t in tables.items()})
    for name in tables.keys() - faults.keys():
        try:
            tables[name] = with_known_cells(tables[name], missing)
            if missing == IGNORE:
                require_known([tables[name]])
            require_usable(tables[name], dtype, party=name)
        except PartsongError as error:
            faults[name] = str(error)
    faults |= {name: LATE for name in tables if name in late and name not in faults}
    faults = {part.name: faults[part.name] for part in parts if part.name in faults}
    kept = {name: table for name, table in tables.items() if name not in faults}
    require_somebody(kept, faults)
    warn_of_identifiers(kept.values())
    return Holdings(in_one_order(kept), is_federation=True), faults


def left_out_before(path: Path, context: Mapping[str, Any], rounds: int) -> list[LeftOut]:
    """Who was left out of the first rounds of a run, as its checkpoint tells; those of older versions do not."""
    try:
        found = [LeftOut(int(at), str(party), str(reason)) for at, party, reason in context.get("left_out", [])]
    except (TypeError, ValueError) as error:
        raise FormatError(f"{path}: does not tell who was left out of which round. Start the run anew.") from error
    return [entry for entry in found if entry.iteration <= rounds]


def by_party(left_out: Iterable[LeftOut]) -> dict[str, dict[str, Any]]:
    """For each party the number of rounds that it was left out of, the first of them, and the reason given there."""
    told: dict[str, dict[str, Any]] = {}
    for entry in left_out:
        known = told.setdefault(entry.party, {"rounds": 0, "first": entry.iteration, "reason": entry.reason})
        known["rounds"] += 1
    return told
