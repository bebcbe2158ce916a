"""Read delimited text without pandas: .csv and .tsv, also gzipped.

NumPy's reader does the work (100 MB in about a second). A file that it refuses is read cell by cell, to report which
cells are wrong, or to read unusual but valid text such as line breaks within quotes.
"""

from __future__ import annotations

import csv
import math
import re
from array import array
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from partsong.data.scan import SHOWN, require_names
from partsong.data.table import Table
from partsong.errors import FeatureError, FormatError, first_few
from partsong.io.opening import ReadOptions, is_gzipped, open_bytes, open_text, parse_errors

DELIMITER_NAMES = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars", " ": "blanks"}
ENDINGS = {",": ".csv", "\t": ".tsv"}
DECIMAL_COMMA = re.compile(r"(?<![\w.])[+-]?\d+,\d+(?![\w.])")
MISSING = frozenset({"", "na", "n/a", "#n/a", "null", "none", "missing", "?", "-", "."})
LOOK_AHEAD = 100
"""Number of rows used to decide whether a column has names or numbers."""
SAMPLE_TITLE = "sample"
FEWEST_COUNTED = 4  # fewer numbers in a row may be data
CUT_DECIMAL_COMMAS = re.compile(r"\d+[;|\t][+-]?\d+")
"""A cell of 1,5;2,5 after splitting at commas."""
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def read_delimited(path: Path, wanted: ReadOptions) -> Table:
    """Read a table of numbers with an optional header line, column of sample names, and column of labels.

    The first column has sample names if it is not numeric, has no title, or has the title "sample". `transpose` is for
    files with one feature per line.
    """
    with parse_errors(path, "delimited text"):
        try:
            layout = detect_layout(path, delimiter_of(path), wanted)
            values, texts = _read_fast(path, layout) or read_with_diagnostics(path, layout)
        except UnicodeDecodeError as error:
            raise FormatError(_encoding_message(path)) from error
        columns = dict(zip(layout.text_at, texts, strict=True))
        samples = tuple(columns[layout.names_at]) if layout.names_at is not None else None
        labels = _as_labels(columns[layout.label_at]) if layout.label_at is not None else None
        if wanted.transpose:
            return Table(np.ascontiguousarray(values.T), samples, layout.feature_names, None, str(path))
        return Table(values, layout.feature_names, samples, labels, str(path))


def _read_fast(path: Path, layout: Layout) -> tuple[npt.NDArray[Any], tuple[list[str], ...]] | None:
    """Values and text columns by NumPy's reader; None if the file is unusual or invalid."""
    texts: tuple[list[str], ...] = tuple([] for _ in layout.text_at)
    lines = _lines_of_numbers(path, layout, texts)
    try:
        values = np.loadtxt(lines, delimiter=layout.delimiter, comments=None, quotechar='"', ndmin=2)
    except UnicodeDecodeError:
        raise
    except ValueError:
        return None
    finally:
        lines.close()
    complete = all(len(cells) == len(values) for cells in texts)
    return (values, texts) if complete and values.shape[1] == len(layout.values_at) else None


def _lines_of_numbers(path: Path, layout: Layout, texts: tuple[list[str], ...]) -> Generator[str, None, None]:
    """Yield the values of each line of data; names and labels go to `texts`."""
    values_at, text_at = layout.values_at, layout.text_at
    has_names_alone = text_at == (0,) and layout.is_whole
    with open_text(path) as stream:
        for _ in range(layout.n_header_lines):
            next(stream, None)
        if not texts and layout.is_whole:
            yield from stream
            return
        for line in stream:
            if line.isspace():
                continue
            if has_names_alone and '"' not in line:
                name, _, rest = line.partition(layout.delimiter)
                texts[0].append(name.strip())
                yield rest
                continue
            cells = next(csv.reader([line], delimiter=layout.delimiter))
            if len(cells) != layout.width:
                raise ValueError("a line with another number of fields")
            if layout.keeps(cells):
                for column, at in zip(texts, text_at, strict=True):
                    column.append(cells[at].strip())
                yield layout.delimiter.join([cells[at] for at in values_at])
        if layout.kept_names is not None and not any(texts):
            raise ValueError("no line was kept")


def _as_labels(cells: list[str]) -> npt.NDArray[Any]:
    """Labels as whole numbers if possible, else as numbers, else as text."""
    text = np.array(cells, dtype=np.str_)
    for kind in (np.int64, np.float64):
        try:
            return text.astype(kind)
        except (ValueError, OverflowError):
            continue
    return text


def _encoding_message(path: Path) -> str:
    with open_bytes(path) as stream:
        if stream.read(2) in _UTF16_MARKS:
            return f"{path}: the text is UTF-16 (byte order mark at byte position 0). Save it as UTF-8."
        stream.seek(0)
        start = 0
        for number, line in enumerate(stream, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                place, value = start + error.start, line[error.start]
                return (
                    f"{path}: byte 0x{value:02x} at position {place} (line {number}) is not UTF-8 text. "
                    "Save the file as UTF-8 (in Excel: 'CSV UTF-8')."
                )
            start += len(line)
    return f"{path}: the text is not UTF-8. Save the file as UTF-8."


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of each line of data: `header` names every field, and `n_header_lines` lines are skipped.

    Fields at `dropped_at` are not read, nor are lines whose name is not in `kept_names`. `asked_for` are the names of
    the features that will be selected, if known. With `has_gaps` cells may be blank.
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
        """Indices of the fields with names and labels, ascending."""
        return tuple(sorted(at for at in (self.names_at, self.label_at) if at is not None))

    @property
    def values_at(self) -> tuple[int, ...]:
        """Indices of the fields with values, ascending."""
        others = self.dropped_at.union(self.text_at)
        return tuple(at for at in range(self.width) if at not in others)

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """Names of the fields with values."""
        return None if self.header is None else tuple(self.header[at] for at in self.values_at)

    @property
    def is_whole(self) -> bool:
        """Whether every field of every line is read."""
        return not self.dropped_at and self.kept_names is None

    def keeps(self, row: Sequence[str]) -> bool:
        """Whether a line of data is read."""
        return self.kept_names is None or self.names_at is None or row[self.names_at].strip() in self.kept_names

    def column_name(self, at: int) -> str:
        """The title of a field, or an empty text."""
        return "" if self.header is None else self.header[at]

    def column(self, at: int) -> str:
        """A field as named in a message: its title, or its number counted from 1."""
        return f"column {self.column_name(at)!r}" if self.column_name(at) else f"column {at + 1}"


def numbered_rows(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield every non-blank row as (number of its last line, fields)."""
    with open_text(path, newline="") as stream:
        reader = csv.reader(stream, delimiter=delimiter)
        for row in reader:
            if len(row) > 1 or (row and row[0].strip()):
                yield reader.line_num, row


def number(cell: str) -> float:
    """Parse the number in a cell as np.loadtxt does: without underscores."""
    if "_" in cell:
        raise ValueError(f"not a number: {cell!r}")
    return float(cell)


def number_or_gap(cell: str) -> float:
    """The same, with NaN for a blank cell or a word for missing values."""
    return math.nan if cell.strip().lower() in MISSING else number(cell)


def detect_layout(path: Path, delimiter: str, wanted: ReadOptions) -> Layout:
    """Detect the layout of a file, or raise FormatError."""
    first_rows = list(islice(numbered_rows(path, delimiter), 1 + LOOK_AHEAD))
    if not first_rows:
        raise FormatError(f"{path}: the file is empty. Check the export; it needs a header line and rows of numbers.")
    first, second = first_rows[0][1], first_rows[min(1, len(first_rows) - 1)][1]
    require_right_delimiter(path, delimiter, first, second)
    if first[0].lstrip().startswith("#") and len(first) < len(second):
        raise FormatError(f"{path}: the first line is a comment ({first[0].strip()[:40]!r}). Remove such lines.")
    has_header = wanted.header
    if has_header is None:
        has_header = _is_header(first, second if len(first_rows) > 1 else None, wanted)
    if has_header:
        return _layout_below_header(path, delimiter, wanted, first_rows)
    if wanted.label is not None:
        raise FeatureError(
            f"{path}: label={wanted.label!r} needs a header line. Add one to the file.",
            parameter="label",
        )
    are_names = all(_is_text(row[0]) for _, row in first_rows)
    return Layout(delimiter, None, 0, len(first), 0 if are_names else None, None, has_gaps=wanted.gaps)


def _layout_below_header(
    path: Path, delimiter: str, wanted: ReadOptions, first_rows: list[tuple[int, list[str]]]
) -> Layout:
    if len(first_rows) == 1:
        raise FormatError(f"{path}: there is a header line, but no rows. Check the export.")
    (n_lines, first), (_, second) = first_rows[:2]
    header = tuple(name.strip() for name in first)
    names_come_first = len(second) == len(header) + 1  # as R writes files: the column of names has no title
    header = ("", *header) if names_come_first else header
    label_at = None if wanted.label is None else _find(path, header, wanted.label)
    are_texts = all(_is_text(row[0]) for _, row in first_rows[1:])  # a single text cell does not make a column of names
    are_names = names_come_first or header[0].lower() in ("", SAMPLE_TITLE) or are_texts
    names_at = 0 if are_names and label_at != 0 else None
    layout = Layout(
        delimiter, header, n_lines, len(header), names_at, label_at, asked_for=wanted.features, has_gaps=wanted.gaps
    )
    if wanted.kept is not None:
        layout = _without_extra(path, layout, wanted)
    if not layout.values_at:
        raise FormatError(f"{path}: there are no columns besides names and labels. Check the export.")
    require_names(layout.feature_names or (), str(path))
    return layout


def _without_extra(path: Path, layout: Layout, wanted: ReadOptions) -> Layout:
    """A layout that reads only the requested features; missing ones are refused."""
    kept = wanted.features
    if wanted.transpose:
        return replace(layout, kept_names=kept)
    names = dict.fromkeys(layout.feature_names or ())
    if not kept <= names.keys():
        nothing = np.empty((0, len(names)))
        Table(nothing, tuple(names), source=str(path)).aligned_to(sorted(kept), drop_extra=True)
    return replace(layout, dropped_at=frozenset(at for at in layout.values_at if layout.column_name(at) not in kept))


def _is_header(first: Sequence[str], second: Sequence[str] | None, wanted: ReadOptions) -> bool:
    """Whether the first line is a header.

    It is one if it has text above a number, the label, an empty corner, "sample", names 0, 1, 2, …, or the names of all
    requested features. Text above text is not enough: a line of data may have a name or a class.
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
    """Whether a line is 0, 1, 2, …, as exported from unnamed data frames, and the next line does not continue it."""
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
        problem = "is not a column" if label not in header else "is the name of several columns"
        raise FeatureError(f"{path}: label={label!r} {problem}. Columns: {shown}. Pass one of them.", parameter="label")
    return header.index(label)


@dataclass
class _CellErrors:
    """The first few errors of a kind, and their number by column."""

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


def read_with_diagnostics(path: Path, layout: Layout) -> tuple[npt.NDArray[Any], tuple[list[str], ...]]:
    """Return the same as `_read_fast`, cell by cell; FormatError lists the invalid cells."""
    values = array("d")
    texts: tuple[list[str], ...] = tuple([] for _ in layout.text_at)
    ragged, not_numbers = _CellErrors(), _CellErrors()
    at_values, n_rows, value_of = layout.values_at, 0, number_or_gap if layout.has_gaps else number
    for line, row in numbered_rows(path, layout.delimiter):
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
            f"{path}: {ragged.count} line(s) do not have {layout.width} fields like the first one: {ragged}. "
            "Check these lines for missing or extra delimiters and unclosed quotes."
        )
    if not_numbers.count:
        raise FormatError(_not_numbers_message(path, layout, not_numbers, n_rows))
    return np.array(values, dtype=np.float64).reshape(n_rows, len(at_values)), texts


def _note_cells(account: _CellErrors, layout: Layout, line: int, row: list[str]) -> None:
    for at in layout.values_at:
        try:
            (number_or_gap if layout.has_gaps else number)(row[at])
        except ValueError:
            cell = row[at].strip()
            what = "is empty" if not cell else f"reads {cell[:40]!r}"
            account.add(f"line {line}, {layout.column(at)} {what}", cell, at)


def _not_numbers_message(path: Path, layout: Layout, account: _CellErrors, n_rows: int) -> str:
    message = f"{path}: {account.count} cell(s) are not numbers: {account}."
    if any(DECIMAL_COMMA.fullmatch(cell) for cell in account.cells):
        return f"{message} They look like decimal commas or thousands separators. Export numbers as 1234.5."
    if all(cell.lower() in MISSING for cell in account.cells):
        return f"{message} They look like missing values. Fill them, for example with 0, or drop these rows."
    others = [
        d for d in DELIMITER_NAMES if d not in (layout.delimiter, " ") and any(d in cell for cell in account.cells)
    ]
    if others:
        has_decimal_commas = layout.delimiter == "," and any(map(CUT_DECIMAL_COMMAS.fullmatch, account.cells))
        way_out = conversion_advice(path, others[0], has_decimal_commas)
        return f"{message} They contain {DELIMITER_NAMES[others[0]]}. If that is the delimiter: {way_out}"
    if layout.header is None and account.count == account.in_first_row:
        return f"{message} If the first line names the columns, set header to true."
    texts_at = [at for at, count in sorted(account.by_column.items()) if count == n_rows]
    if texts_at:
        shown = ", ".join(map(layout.column, texts_at[:SHOWN]))
        is_extra = layout.asked_for and layout.asked_for.isdisjoint(map(layout.column_name, texts_at))
        ways = "Leave out extra columns (drop_extra), pass" if is_extra else "Pass"
        return (
            f"{message} Text columns: {shown}. {ways} such a column as label, encode it as numbers, or delete it. "
            "A column of sample names must come first."
        )
    if set(account.by_column) == {0}:
        return f"{message} If the first column has sample names, leave its title empty; otherwise correct these cells."
    return f"{message} Correct these cells, or drop their rows."


def delimiter_of(path: Path) -> str:
    """The delimiter by the file name."""
    return "\t" if path.name.lower().removesuffix(".gz").endswith(".tsv") else ","


def require_right_delimiter(path: Path, delimiter: str, first: Sequence[str], second: Sequence[str]) -> None:
    """Refuse a file whose first two lines have one field each and share another delimiter."""
    if len(first) > 1:
        return
    for other, name in DELIMITER_NAMES.items():
        if other != delimiter and other in first[0].strip() and other in delimiter.join(second).strip():
            has_decimal_commas = other != "," and DECIMAL_COMMA.search(delimiter.join(second)) is not None
            raise FormatError(
                f"{path}: fields seem to be separated by {name}, but the name stands for {DELIMITER_NAMES[delimiter]}. "
                f"{conversion_advice(path, other, has_decimal_commas)}"
            )


def conversion_advice(path: Path, delimiter: str, has_decimal_commas: bool = False) -> str:
    """Advice for a file with this delimiter: rename it, or export it with commas."""
    stem, gz = (path.name[:-3], path.name[-3:]) if is_gzipped(path) else (path.name, "")
    if delimiter in ENDINGS and not has_decimal_commas:
        return f"Rename it to {stem[:-4]}{ENDINGS[delimiter]}{gz}."
    how = f"{path.name!r}, sep={delimiter!r}" + (", decimal=','" if has_decimal_commas else "")
    return (
        "Export it again with commas between fields and points in numbers, or convert it: "
        f"pandas.read_csv({how}).to_csv('{stem[:-4]}-commas.csv{gz}', index=False)."
    )
