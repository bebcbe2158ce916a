"""Read a table from a file of any supported format, chosen by the file name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from partsong.data.table import Table
from partsong.errors import FileError, FormatError, ParameterError
from partsong.io.arrays import read_npy, read_npz
from partsong.io.columnar import read_h5ad, read_parquet
from partsong.io.delimited import read_delimited
from partsong.io.matrix_market import read_matrix_market
from partsong.io.opening import ReadOptions, parse_errors, resolve_path


@dataclass(frozen=True, slots=True)
class Reader:
    """A file format: its reader, the options it takes, and whether labels are in one of its columns."""

    read: Callable[[Path, ReadOptions], Table]
    takes: frozenset[str] = frozenset()
    has_columns_of_labels: bool = False


_TEXT = Reader(read_delimited, frozenset({"label", "header"}), has_columns_of_labels=True)
_MATRIX_MARKET = Reader(read_matrix_market)

READERS = {
    ".npy": Reader(read_npy),
    ".npz": Reader(read_npz, frozenset({"label", "key"})),
    ".csv": _TEXT,
    ".csv.gz": _TEXT,
    ".tsv": _TEXT,
    ".tsv.gz": _TEXT,
    ".mtx": _MATRIX_MARKET,
    ".mtx.gz": _MATRIX_MARKET,
    ".parquet": Reader(read_parquet, frozenset({"label"}), has_columns_of_labels=True),
    ".h5ad": Reader(read_h5ad, frozenset({"label", "key"}), has_columns_of_labels=True),
}


def read(
    path: str | os.PathLike[str],
    *,
    label: str | None = None,
    transpose: bool = False,
    key: str | None = None,
    header: bool | None = None,
) -> Table:
    """Read a table by its file name extension; a folder with matrix.mtx[.gz] is read in the format of 10x Genomics.

    `label`: the column (or array) of labels to take out. `transpose`: the file has features in rows. `key`: an array of
    an .npz or a layer of an .h5ad. `header`: whether the first line of a .csv or .tsv names its columns (None: detect;
    names that are numbers, such as years, need True). Values are not checked; see `data.validation`.
    """
    return read_wanted(path, ReadOptions(label, transpose, key, header))


def read_wanted(path: str | os.PathLike[str], wanted: ReadOptions) -> Table:
    """Read a table by its file name extension."""
    place = data_file(resolve_path(path))
    reader = reader_for(place)
    if reader is None:
        raise FormatError(
            f"{place}: the extension {''.join(place.suffixes[-2:]) or '(none)'} is not one of {', '.join(READERS)}. "
            "Rename the file if it has one of these formats, or export it as one."
        )
    for setting, why in conflicts(reader, wanted):
        raise ParameterError(f"{place}: {setting}={getattr(wanted, setting)!r} {why}", parameter=setting)
    return reader.read(place, wanted)


def reader_for(path: Path) -> Reader | None:
    """Return the reader for a file name; a folder is read as Matrix Market."""
    name = path.name.lower()
    found = (reader for ending, reader in READERS.items() if name.endswith(ending))
    return _MATRIX_MARKET if path.is_dir() else next(found, None)


def conflicts(reader: Reader, wanted: ReadOptions) -> Iterator[tuple[str, str]]:
    """Yield options that do not apply to this format, each with a reason and advice."""
    for setting in ("label", "key", "header"):
        if getattr(wanted, setting) is not None and setting not in reader.takes:
            kinds = ", ".join(ending for ending, other in READERS.items() if setting in other.takes)
            yield setting, f"does not apply to this format. Remove it; it is for {kinds}."
    if wanted.label is not None and wanted.transpose and reader.has_columns_of_labels:
        reason = "is a column with one value per sample, but transposed data have samples in columns."
        yield "label", f"{reason} Remove label or transpose."
    if wanted.label is not None and wanted.header is False:
        yield "label", "needs a header line, but header is False. Remove one of them."


def data_file(path: Path) -> Path:
    """Return the file to read: this one, or the matrix.mtx of a folder."""
    with parse_errors(path, "a file"):
        path.stat()
        if path.is_file():
            with path.open("rb"):
                return path
        if not path.is_dir():
            raise FileError(f"{path}: not a file or folder, but a device or a pipe. Copy its contents to a file.")
        held = sorted(entry.name for entry in path.iterdir())
    for name in ("matrix.mtx", "matrix.mtx.gz"):
        if name in held:
            return path / name
    shown = ", ".join(held[:5]) or "nothing"
    raise FileError(
        f"{path}: a folder must contain matrix.mtx or matrix.mtx.gz; it contains {shown}"
        f"{f' (and {len(held) - 5} more)' if len(held) > 5 else ''}. Pass the file to read."
    )
