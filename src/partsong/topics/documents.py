"""Read documents from files and lists. Errors show rows, lines, bytes and columns, never words of a text."""

from __future__ import annotations

import codecs
import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from itertools import repeat
from pathlib import Path
from typing import IO, Any

from partsong.errors import DataError, DataTypeError, FileError, FormatError, ParameterError
from partsong.io.delimited import DELIMITER_NAMES, delimiter_of
from partsong.io.opening import is_gzipped, open_bytes, open_text, resolve_path

CHUNK = 1 << 20
OF_TEXTS = (
    "Save it as UTF-8, or pass its encoding: for example cp1252 or latin-1 for files of Western Windows programs, or "
    "utf-16."
)
OF_LISTS = "Save it as UTF-8: word lists must be UTF-8, whatever the encoding of the texts."
"""Advice in errors of encoding."""

KINDS = ".csv, .tsv, .jsonl or .txt (each also as .gz), or a folder of .txt files"


def codec_named(encoding: str) -> str:
    """Return the codec of a name; UTF-8 accepts a byte order mark."""
    try:
        io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        name = codecs.lookup(encoding).name
    except (LookupError, TypeError, ValueError):
        raise ParameterError(
            f"Unknown text encoding {encoding!r}. Use a Python codec name such as utf-8, latin-1, cp1252 or utf-16.",
            parameter="encoding",
        ) from None
    return "utf-8-sig" if name == "utf-8" else name


def encoding_fault(place: Path, encoding: str, way_out: str) -> str:
    """Return the message for a file that does not have the encoding, with the first invalid position."""
    decoder, start = codecs.getincrementaldecoder(encoding)(), 0
    at, name = 0, "utf-8" if encoding == "utf-8-sig" else encoding
    with open_bytes(place) as stream:
        while True:
            chunk = stream.read(CHUNK)
            waiting = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeError as error:
                at = start - waiting + int(getattr(error, "start", 0))
                break
            if not chunk:
                break
            start += len(chunk)
    return f"{place}: not {name} text; invalid at byte position {at}. {way_out}"


def read_documents(path: str | os.PathLike[str], *, column: str = "text", encoding: str = "utf-8") -> list[str]:
    """Read one document per row (.csv, .tsv: `column`), line (.jsonl: field `column`; .txt) or file of a folder.

    Rows without text are kept as empty documents; so are blank lines of a table with one column, except at the end.
    Files of a folder are read in order of their names. UTF-8 may start with a byte order mark.
    """
    return _read(resolve_path(path), codec_named(encoding), column, OF_TEXTS)


def read_word_list(path: str | os.PathLike[str]) -> list[str]:
    """Read a list of words from any file that `read_documents` reads; always UTF-8."""
    return _read(resolve_path(path), codec_named("utf-8"), "text", OF_LISTS)


def _read(place: Path, known: str, column: str, way_out: str) -> list[str]:
    if place.is_dir():
        return _some([_whole(file, known, way_out) for file in _files_in(place)], place)
    read = _READERS.get(_ending(place))
    if read is None:
        raise FormatError(f"{place}: documents can be read from {KINDS}. Convert the file, or pass a list of texts.")
    found: list[str] = []
    trouble = _attempt(place, known, lambda stream: found.extend(read(place, stream, column)), way_out)
    if trouble is not None:
        raise trouble
    return _some(found, place)


def as_documents(texts: Iterable[Any]) -> list[str]:
    """Return a list of texts from an ordered collection; None, NaN and pandas' NA become empty documents."""
    is_table = len(getattr(texts, "shape", (0,))) != 1
    if isinstance(texts, str | bytes | Mapping | Set) or is_table or not isinstance(texts, Iterable):
        raise DataTypeError(
            f"Documents must be a list of texts, not {type(texts).__name__}. Pass a list, one column of a table, or "
            "the result of read_documents."
        )
    documents = [_as_document(position, text) for position, text in enumerate(texts)]
    if not documents:
        raise DataError("There are no documents: the list is empty. Pass at least one text.")
    return documents


def _as_document(position: int, text: Any) -> str:
    if isinstance(text, str):
        return str(text)
    if _is_missing(text):
        return ""
    raise DataTypeError(
        f"Document {position} (counted from 0) is {type(text).__name__}, not text. Pass str; decode bytes first."
    )


def _is_missing(text: Any) -> bool:
    """Whether a cell is a missing text: None, NaN, or pandas' NA (tested without importing pandas)."""
    return text is None or (isinstance(text, float) and math.isnan(text)) or type(text).__name__ == "NAType"


def _some(documents: list[str], place: Path) -> list[str]:
    if not documents:
        raise DataError(f"{place}: contains no documents. Check the path, and that the file is complete.")
    return documents


def _ending(place: Path) -> str:
    return Path(place.name.lower().removesuffix(".gz")).suffix


def _files_in(folder: Path) -> list[Path]:
    """The .txt files of a folder by name; broken links are included and fail when read."""
    return sorted(
        (file for file in folder.iterdir() if not file.is_dir() and _ending(file) == ".txt"), key=lambda file: file.name
    )


def _whole(file: Path, encoding: str, way_out: str) -> str:
    found: list[str] = []
    trouble = _attempt(file, encoding, lambda stream: found.append(stream.read()), way_out)
    if trouble is not None:
        raise trouble
    return found[0]


def _attempt(place: Path, encoding: str, read: Callable[[IO[str]], None], way_out: str) -> Exception | None:
    """Return the error to raise, with positions only; raised by the caller, so that no traceback holds the text."""
    try:
        with open_text(place, newline="", encoding=encoding) as stream:
            read(stream)
    except FormatError as error:
        error.__context__ = None  # may contain the text that could not be parsed
        return error.with_traceback(None)
    except FileNotFoundError:
        return FileError(f"{place}: there is no such file. Check the path; relative paths start at the working folder.")
    except UnicodeError:
        return FormatError(encoding_fault(place, encoding, way_out))
    except (OSError, EOFError) as error:
        reason = "its compression is damaged or truncated" if is_gzipped(place) else type(error).__name__
        return FileError(f"{place}: cannot be read ({reason}). Check that it is complete and readable.")
    return None


def _from_delimited(place: Path, stream: IO[str], column: str) -> Iterator[str]:
    rows = csv.reader(stream, delimiter=delimiter_of(place), strict=True)
    at, width, n_blank = -1, 0, 0
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            what = "has a field of more than 131072 characters" if "limit" in str(error) else "has unbalanced quotes"
            raise FormatError(
                f"{place}: the row that ends at line {rows.line_num} {what}. Correct it, or use .jsonl."
            ) from None
        if row is None:
            break
        if at < 0:
            at, width = _place_of_column(place, row, column), len(row)
        elif not row:
            n_blank += width == 1
        elif len(row) != width:
            raise FormatError(
                f"{place}: the row that ends at line {rows.line_num} has {len(row)} fields, but the first line "
                f"has {width}. Put texts with delimiters or line breaks in double quotes."
            )
        else:
            yield from repeat("", n_blank)
            yield row[at]
            n_blank = 0
    if at < 0:
        raise FormatError(f"{place}: the file is empty. Its first line must name the columns.")


def _place_of_column(place: Path, header: list[str], column: str) -> int:
    titles = [title.strip() for title in header]
    if titles.count(column) == 1:
        return titles.index(column)
    found = "more than once" if column in titles else "not"
    apart = f" Separate columns by {DELIMITER_NAMES[delimiter_of(place)]}." if len(titles) == 1 else ""
    hint = apart if column in titles else _near_to(column, titles) or apart
    raise FormatError(
        f"{place}: the column {column!r} is {found} among the {len(titles)} titles of its first line. Pass the column "
        f"with the texts; the first line must name the columns.{hint}",
        parameter="column",
    )


def _near_to(column: str, names: Iterable[str]) -> str:
    """Hint if a name differs only in case; the name itself may be text and is not shown."""
    if all(name.casefold() != str(column).casefold() for name in names):
        return ""
    return " A name that differs only in case exists. Use the spelling of the file."


def _from_lines_of_json(place: Path, stream: IO[str], column: str) -> Iterator[str]:
    for number, line in enumerate(stream, start=1):
        if line.isspace():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            raise FormatError(f"{place}: line {number} is not JSON. Write one object per line.") from None
        if not isinstance(entry, dict) or column not in entry:
            raise FormatError(
                f"{place}: line {number} has no field {column!r}. Pass the field with the texts."
                f"{_near_to(column, entry if isinstance(entry, dict) else ())}",
                parameter="column",
            )
        text = entry[column]
        if not isinstance(text, str) and not _is_missing(text):
            raise FormatError(
                f"{place}: line {number}, field {column!r} is {type(text).__name__}, not text. Correct the file."
            )
        yield text if isinstance(text, str) else ""


def _from_lines(place: Path, stream: IO[str], column: str) -> Iterator[str]:
    for line in stream:
        yield line.rstrip("\r\n")


_READERS = {".csv": _from_delimited, ".tsv": _from_delimited, ".jsonl": _from_lines_of_json, ".txt": _from_lines}
