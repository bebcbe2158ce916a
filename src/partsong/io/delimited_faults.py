"""The careful reading of a delimited file: every cell by itself, and an exact account of what is wrong where."""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from partsong.data.finding import SHOWN
from partsong.errors import FormatError
from partsong.io.delimited_layout import MISSING, Layout, number, number_or_gap, rows_of
from partsong.io.delimiters import DECIMAL_COMMA, DELIMITER_NAMES, way_to

CUT_DECIMAL_COMMAS = re.compile(r"\d+[;|\t][+-]?\d+")
"""What is left between the commas of 1,5;2,5."""


@dataclass
class _Account:
    """The first few of a kind of fault, and how many there were, by column."""

    shown: list[str] = field(default_factory=list)
    cells: list[str] = field(default_factory=list)
    by_column: dict[int, int] = field(default_factory=dict)
    count: int = 0
    in_first_row: int = 0

    def add(self, description: str, cell: str = "", column: int = -1) -> None:
        self.count += 1
        self.by_column[column] = self.by_column.get(column, 0) + 1
        if len(self.shown) < SHOWN:
            self.shown.append(description)
            self.cells.append(cell)

    def __str__(self) -> str:
        rest = self.count - len(self.shown)
        return "; ".join(self.shown) + (f" (and {rest} more)" if rest else "")


def read_carefully(path: Path, layout: Layout) -> tuple[npt.NDArray[Any], tuple[list[str], ...]]:
    """Values and text columns, as the quick reading gives them; raises FormatError with places if that cannot be."""
    values = array("d")
    texts: tuple[list[str], ...] = tuple([] for _ in layout.text_at)
    ragged, not_numbers = _Account(), _Account()
    at_values, n_rows, value_of = layout.values_at, 0, number_or_gap if layout.has_gaps else number
    for line, row in rows_of(path, layout.delimiter):
        if line <= layout.n_header_lines:
            continue
        if len(row) != layout.width:
            ragged.add(f"line {line} has {len(row)}")
            continue
        if not layout.keeps(row):
            continue
        n_rows += 1
        for cells, at in zip(texts, layout.text_at, strict=True):
            cells.append(row[at].strip())
        try:
            values.extend([value_of(row[at]) for at in at_values])
        except ValueError:
            _note_cells(not_numbers, layout, line, row)
            not_numbers.in_first_row += not_numbers.count if n_rows == 1 else 0
    if ragged.count:
        raise FormatError(
            f"{path}: {ragged.count} line(s) do not have {layout.width} fields as the first one does: {ragged}. "
            "Look for missing or stray delimiters and unclosed quotes in these lines."
        )
    if not_numbers.count:
        raise FormatError(_not_numbers_message(path, layout, not_numbers, n_rows))
    return np.array(values, dtype=np.float64).reshape(n_rows, len(at_values)), texts


def _note_cells(account: _Account, layout: Layout, line: int, row: list[str]) -> None:
    for at in layout.values_at:
        try:
            (number_or_gap if layout.has_gaps else number)(row[at])
        except ValueError:
            cell = row[at].strip()
            what = "is empty" if not cell else f"reads {cell[:40]!r}"
            account.add(f"line {line}, {layout.column(at)} {what}", cell, at)


def _not_numbers_message(path: Path, layout: Layout, account: _Account, n_rows: int) -> str:
    message = f"{path}: {account.count} cell(s) are not numbers: {account}."
    if any(DECIMAL_COMMA.fullmatch(cell) for cell in account.cells):
        return f"{message} They look like decimal commas, or like thousands set apart: export numbers as 1234.5."
    if all(cell.lower() in MISSING for cell in account.cells):
        return f"{message} They look like missing values: fill them (with 0, say), or drop these rows."
    others = [
        d for d in DELIMITER_NAMES if d not in (layout.delimiter, " ") and any(d in cell for cell in account.cells)
    ]
    if others:
        has_decimal_commas = layout.delimiter == "," and any(map(CUT_DECIMAL_COMMAS.fullmatch, account.cells))
        way_out = way_to(path, others[0], has_decimal_commas)
        return f"{message} They hold {DELIMITER_NAMES[others[0]]}. If that is the delimiter: {way_out}"
    if layout.header is None and account.count == account.in_first_row:
        return f"{message} If the first line names the columns, leave header=False out, or pass header=True."
    texts_at = [at for at, count in sorted(account.by_column.items()) if count == n_rows]
    if texts_at:
        told = ", ".join(map(layout.column, texts_at[:SHOWN]))
        is_extra = layout.asked_for and layout.asked_for.isdisjoint(map(layout.column_name, texts_at))
        ways = "Leave out columns that are not asked for (drop_extra=True), take" if is_extra else "Take"
        return (
            f"{message} Text throughout: {told}. {ways} such a column out as labels (label=), encode it as numbers, or "
            "delete it; a column of sample names comes first."
        )
    if set(account.by_column) == {0}:
        return f"{message} If the first column holds sample names, leave its title empty; else correct these cells."
    return f"{message} Correct these cells, or drop their rows."
