"""Delimited text: .csv, .tsv, and both gzipped, without pandas.

NumPy's reader does the work (100 MB in about a second); only a file that it refuses is read cell by cell, to say
exactly which cells are wrong, or to read what is unusual but right, such as line breaks within quotes.
"""

from __future__ import annotations

import csv
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from partsong.data.table import Table
from partsong.errors import FormatError
from partsong.io.delimited_faults import read_carefully
from partsong.io.delimited_layout import Layout, layout_of
from partsong.io.delimiters import delimiter_of
from partsong.io.opening import Wanted, open_bytes, open_text, parsing

_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def read_delimited(path: Path, wanted: Wanted) -> Table:
    """Read a table of numbers with an optional header line, column of sample names, and column of labels.

    The first column holds sample names if it is not numeric, has no title, or is titled "sample". `transpose` is for
    files that hold one feature per line.
    """
    with parsing(path, "delimited text"):
        try:
            layout = layout_of(path, delimiter_of(path), wanted)
            values, texts = _read_quickly(path, layout) or read_carefully(path, layout)
        except UnicodeDecodeError as error:
            raise FormatError(_encoding_message(path)) from error
        columns = dict(zip(layout.text_at, texts, strict=True))
        samples = tuple(columns[layout.names_at]) if layout.names_at is not None else None
        labels = _as_labels(columns[layout.label_at]) if layout.label_at is not None else None
        if wanted.transpose:
            return Table(np.ascontiguousarray(values.T), samples, layout.feature_names, None, str(path))
        return Table(values, layout.feature_names, samples, labels, str(path))


def _read_quickly(path: Path, layout: Layout) -> tuple[npt.NDArray[Any], tuple[list[str], ...]] | None:
    """Values and text columns by NumPy's reader, or None if there is anything unusual about the file."""
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
    """The values in each line of data; names and labels go to `texts`."""
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
                raise ValueError("a line of another length")
            if layout.keeps(cells):
                for column, at in zip(texts, text_at, strict=True):
                    column.append(cells[at].strip())
                yield layout.delimiter.join([cells[at] for at in values_at])
        if layout.kept_names is not None and not any(texts):
            raise ValueError("not a single line")


def _as_labels(cells: list[str]) -> npt.NDArray[Any]:
    """Whole numbers if all are, else numbers, else text."""
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
                    f"{path}: byte position {place} (line {number}) holds 0x{value:02x}, which is not UTF-8 text. "
                    "Save the file as UTF-8 (in Excel: 'CSV UTF-8')."
                )
            start += len(line)
    return f"{path}: the text is not UTF-8. Save the file as UTF-8."
