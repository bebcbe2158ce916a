"""How a delimited file is laid out, from its first two lines: header or not, where names, labels and numbers are."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from partsong.data.finding import SHOWN
from partsong.data.names import require_names
from partsong.data.table import Table
from partsong.errors import FeatureError, FormatError, first_few
from partsong.io.delimiters import require_right_delimiter
from partsong.io.opening import Wanted, open_text

MISSING = frozenset({"", "na", "n/a", "#n/a", "null", "none", "missing", "?", "-", "."})
LOOK_AHEAD = 100
"""Rows that are looked at to tell a column of names from one of numbers."""
SAMPLE_TITLE = "sample"
FEWEST_COUNTED = 4  # fewer numbers in a row may well be data


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things are in each line of data; `header` names every field, `n_header_lines` are to be skipped.

    Fields at `dropped_at` are skipped unread, and so are lines whose name is not among `kept_names`. `asked_for` are
    the names of the features that will be looked for in the end, where they are known. With `has_gaps` cells may be
    blank.
    """

    delimiter: str
    header: tuple[str, ...] | None
    n_header_lines: int
    width: int
    names_at: int | None
    label_at: int | None
    dropped_at: frozenset[int] = frozenset()
    kept_names: frozenset[str] | None = None
    asked_for: frozenset[str] = frozenset()
    has_gaps: bool = False

    @property
    def text_at(self) -> tuple[int, ...]:
        """Fields of names and labels, in order."""
        return tuple(sorted(at for at in (self.names_at, self.label_at) if at is not None))

    @property
    def values_at(self) -> tuple[int, ...]:
        """Fields that are values, in order."""
        others = self.dropped_at.union(self.text_at)
        return tuple(at for at in range(self.width) if at not in others)

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """The names of the fields that are values."""
        return None if self.header is None else tuple(self.header[at] for at in self.values_at)

    @property
    def is_whole(self) -> bool:
        """Whether every field of every line is read."""
        return not self.dropped_at and self.kept_names is None

    def keeps(self, row: Sequence[str]) -> bool:
        """Whether a line of data is read."""
        return self.kept_names is None or self.names_at is None or row[self.names_at].strip() in self.kept_names

    def column_name(self, at: int) -> str:
        """The title of a field; nothing where there is none."""
        return "" if self.header is None else self.header[at]

    def column(self, at: int) -> str:
        """What to call a field in a message: its name, or its number counted from 1."""
        return f"column {self.column_name(at)!r}" if self.column_name(at) else f"column {at + 1}"


def rows_of(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Every line that is not blank, as (number of its last line, fields)."""
    with open_text(path, newline="") as stream:
        reader = csv.reader(stream, delimiter=delimiter)
        for row in reader:
            if len(row) > 1 or (row and row[0].strip()):
                yield reader.line_num, row


def number(cell: str) -> float:
    """The number in a cell, read as np.loadtxt does: no underscores."""
    if "_" in cell:
        raise ValueError(f"not a number: {cell!r}")
    return float(cell)


def number_or_gap(cell: str) -> float:
    """The same, with NaN for a cell that is blank or says that it is missing."""
    return math.nan if cell.strip().lower() in MISSING else number(cell)


def layout_of(path: Path, delimiter: str, wanted: Wanted) -> Layout:
    """Decide on the layout, or say what stands against every layout."""
    first_rows = list(islice(rows_of(path, delimiter), 1 + LOOK_AHEAD))
    if not first_rows:
        raise FormatError(
            f"{path}: the file is empty. Check the export; it should hold a header line and rows of numbers."
        )
    first, second = first_rows[0][1], first_rows[min(1, len(first_rows) - 1)][1]
    require_right_delimiter(path, delimiter, first, second)
    if first[0].lstrip().startswith("#") and len(first) < len(second):
        raise FormatError(f"{path}: the first line is a comment ({first[0].strip()[:40]!r}). Delete such lines.")
    has_header = wanted.header
    if has_header is None:
        has_header = _is_header(first, second if len(first_rows) > 1 else None, wanted)
    if has_header:
        return _layout_below_header(path, delimiter, wanted, first_rows)
    if wanted.label is not None:
        raise FeatureError(f"{path}: label={wanted.label!r} needs a header line to be found in. Add one to the file.")
    are_names = all(_is_text(row[0]) for _, row in first_rows)
    return Layout(delimiter, None, 0, len(first), 0 if are_names else None, None, has_gaps=wanted.gaps)


def _layout_below_header(path: Path, delimiter: str, wanted: Wanted, first_rows: list[tuple[int, list[str]]]) -> Layout:
    if len(first_rows) == 1:
        raise FormatError(f"{path}: there is a header line, but no rows. Check the export.")
    (n_lines, first), (_, second) = first_rows[:2]
    header = tuple(name.strip() for name in first)
    names_come_first = len(second) == len(header) + 1  # as R writes it: the column of names has no title
    header = ("", *header) if names_come_first else header
    label_at = None if wanted.label is None else _find(path, header, wanted.label)
    are_texts = all(_is_text(row[0]) for _, row in first_rows[1:])  # one odd cell does not make a column of names
    are_names = names_come_first or header[0].lower() in ("", SAMPLE_TITLE) or are_texts
    names_at = 0 if are_names and label_at != 0 else None
    layout = Layout(
        delimiter, header, n_lines, len(header), names_at, label_at, asked_for=wanted.features, has_gaps=wanted.gaps
    )
    if wanted.kept is not None:
        layout = _without_extra(path, layout, wanted)
    if not layout.values_at:
        raise FormatError(f"{path}: no columns are left besides names and labels. Check the export.")
    require_names(layout.feature_names or (), str(path))
    return layout


def _without_extra(path: Path, layout: Layout, wanted: Wanted) -> Layout:
    """The layout that skips all features but those asked for; refuses columns among which some are missing."""
    kept = wanted.features
    if wanted.transpose:
        return replace(layout, kept_names=kept)
    names = dict.fromkeys(layout.feature_names or ())
    if not kept <= names.keys():
        nothing = np.empty((0, len(names)))
        Table(nothing, tuple(names), source=str(path)).aligned_to(sorted(kept), drop_extra=True)
    return replace(layout, dropped_at=frozenset(at for at in layout.values_at if layout.column_name(at) not in kept))


def _is_header(first: Sequence[str], second: Sequence[str] | None, wanted: Wanted) -> bool:
    """Text above a number makes a header; so do a label found there, a missing corner, "sample", and names 0, 1, 2, …

    So do the names of all features that will be asked for. Text above text does not: a line of data may hold a name or
    a class.
    """
    cells = {cell.strip() for cell in first}
    if wanted.label in cells or (wanted.features and not wanted.transpose and wanted.features <= cells):
        return True
    if second is None:
        return any(_is_text(cell) for cell in first[1:]) or (len(first) == 1 and _is_text(first[0]))
    if all(_is_text(cell) for cell in first):
        return True
    above = zip(first, second, strict=False)
    if any(_is_text(name) and not _is_text(value) for name, value in above):
        return True
    if first[0].strip().lower() == SAMPLE_TITLE or _is_counted(first, second):
        return True
    corner_is_open = not first[0].strip() and bool(second[0].strip())
    counted = [cell.strip() for cell in first[1:]]
    return corner_is_open or any(
        len(counted) >= FEWEST_COUNTED
        and counted == [str(start + at) for at in range(len(counted))]
        and _is_text(first[0])
        for start in (0, 1)
    )


def _is_counted(first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether a line is 0, 1, 2, …, as data frames without names are exported; numbers that go on below are data."""
    counted = [cell.strip() for cell in first] == [str(at) for at in range(len(first))]
    return len(first) >= FEWEST_COUNTED and counted and second[0].strip() != str(len(first))


def _is_text(cell: str) -> bool:
    if cell.strip().lower() in MISSING:
        return False
    try:
        number(cell)
    except ValueError:
        return True
    return False


def _find(path: Path, header: tuple[str, ...], label: str) -> int:
    if header.count(label) != 1:
        shown = first_few(map(repr, header[:SHOWN]), len(header), "column")
        problem = "is not a column" if label not in header else "names several columns"
        raise FeatureError(f"{path}: label={label!r} {problem}. The header has the {shown}. Pass one of them.")
    return header.index(label)
