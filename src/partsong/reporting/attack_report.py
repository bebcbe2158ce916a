"""Findings of attacks on a run, as a section of a report or as a page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from partsong.attacks.findings import PartyFindings, Recovery, severity_of, verdict_of
from partsong.io.write import atomic_write
from partsong.reporting.html import UNKNOWN, Column, Markup, document, element, format_number, row, section, table

ANCHOR, TITLE = "attacks", "What attacks recover"
CAPTION = (
    "Attacks on the messages of each party, by the {attacker}, and their results. The relative error is against the "
    "rows given for this audit. The doubt is what an attacker can measure without them; it is 0 if the recovered rows "
    "explain all messages."
)
COLUMNS = (
    Column("Party", False),
    Column("Left it", False),
    Column("Tried", False),
    Column("Recovered", False),
    Column("How well", False),
    Column("Relative error"),
    Column("Rows within 1 %"),
    Column("Doubt"),
)


def attacks(found: Sequence[PartyFindings]) -> list[Markup]:
    """The verdict in a sentence, a line for each finding, and what else is to be said."""
    if not found:
        return [
            element("p", "No traffic was recorded: no attack was tried, and the exposure is unknown.", class_="verdict")
        ]
    rows = [row(COLUMNS, cells) for each in found for cells in _lines(each)]
    notes = dict.fromkeys(note for each in found for note in each.notes)
    return [
        element("p", f"Severity: {severity_of(found).severity}. {verdict_of(found)}", class_="verdict"),
        table(CAPTION.format(attacker=found[0].attacker), COLUMNS, rows),
        *(element("p", note, class_="kept") for note in notes),
    ]


def render_page(title: str, found: Sequence[PartyFindings]) -> str:
    """The section alone, as a whole page."""
    header = element("header", element("h1", title))
    return document(title, header, element("main", section(ANCHOR, TITLE, *attacks(found))))


def write_page(path: str | os.PathLike[str], title: str, found: Sequence[PartyFindings]) -> Path:
    """Write that page; a reader finds the old file or the whole new one."""
    page = render_page(title, found).encode("utf-8", "replace")
    with atomic_write(path) as partial:
        partial.write_bytes(page)
    return Path(path)


def _lines(each: PartyFindings) -> list[list[str]]:
    """Cells of a party: one line for each finding, and one without any where there is none."""
    begun = [each.party, each.left, "; ".join(each.tried) or "no attack"]
    if not each.recovered:
        return [[*begun, f"by the numbers: {each.by_law}", *[UNKNOWN] * 4]]
    again = [each.party, "", ""]
    return [[*(again if at else begun), *_cells(one)] for at, one in enumerate(each.recovered)]


def _cells(one: Recovery) -> list[str]:
    return [
        f"{one.array}: {one.what}",
        one.verdict,
        UNKNOWN if one.error is None else format_number(one.error),
        UNKNOWN if one.rows_recovered is None else f"{one.rows_recovered:,}",
        UNKNOWN if one.doubt is None else format_number(one.doubt),
    ]
