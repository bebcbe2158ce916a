"""Read Matrix Market files (.mtx, .mtx.gz), with the name files of 10x Genomics.

Uses NumPy instead of scipy.io.mmread, which can crash the interpreter on a damaged file.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np

from partsong.data.table import Table
from partsong.errors import FormatError, ParameterError
from partsong.io.opening import GZIP_RATIO, ReadOptions, is_gzipped, open_text, parse_errors, require_plausible

_VALUE_FIELDS = {"real": "f8", "double": "f8", "integer": "f8", "pattern": ""}
_EXPORT_AGAIN = "It is truncated, damaged or of another format. Copy or export it again."


@dataclass(frozen=True, slots=True)
class Names:
    """Names from the files next to a matrix; None if there is no such file."""

    samples: tuple[str, ...] | None
    features: tuple[str, ...] | None

    def __str__(self) -> str:
        lists = {"features": self.features, "barcodes": self.samples}
        return " and ".join(f"{len(names)} {what}" for what, names in lists.items() if names is not None)


@dataclass(frozen=True, slots=True)
class _Header:
    is_dense: bool
    is_symmetric: bool
    is_pattern: bool
    shape: tuple[int, int]
    n_entries: int


def read_matrix_market(path: Path, wanted: ReadOptions) -> Table:
    """Read a sparse (or dense) Matrix Market file as CSR with samples in rows.

    10x files have features in rows: if barcodes.tsv and features.tsv (or genes.tsv) are next to the file, their lengths
    decide and the matrix is transposed. Without name files, `transpose` decides.
    """
    with parse_errors(path, "a Matrix Market file"):
        with open_text(path, encoding="latin-1") as stream:  # comments may have any encoding
            header = _read_header(path, stream)
            matrix = _read_dense(path, stream, header) if header.is_dense else _read_entries(path, stream, header)
        names = names_beside(path)
        turned = features_in_rows(path, header.shape, names, wanted.transpose)
        X: Any = matrix.T.tocsr() if turned else matrix.tocsr()
        return Table(X, names.features, names.samples, source=str(path))


def _read_header(path: Path, stream: IO[str]) -> _Header:
    """Read the banner and the sizes, and check them against the file size before anything is allocated."""
    banner = stream.readline(1000).lower().split()
    if len(banner) != 5 or banner[:2] != ["%%matrixmarket", "matrix"] or banner[2] not in ("array", "coordinate"):
        raise FormatError(f"{path}: does not start with '%%MatrixMarket matrix coordinate …'. {_EXPORT_AGAIN}")
    if banner[3] not in _VALUE_FIELDS or banner[4] not in ("general", "symmetric"):
        raise FormatError(
            f"{path}: contains {banner[3]} {banner[4]} values. Export real numbers, general or symmetric."
        )
    line = stream.readline(100_000)
    while line.startswith("%") or line.isspace():
        line = stream.readline(100_000)
    sizes = [int(word) for word in line.split()]
    is_dense = banner[2] == "array"
    if len(sizes) != (2 if is_dense else 3) or min(sizes) < 0:
        raise FormatError(f"{path}: the line of sizes reads {line[:80]!r}. {_EXPORT_AGAIN}")
    n_entries = sizes[0] * sizes[1] if is_dense else sizes[2]
    if n_entries > path.stat().st_size * (GZIP_RATIO if is_gzipped(path) else 1):  # an entry needs at least two bytes
        raise FormatError(f"{path}: its header claims {n_entries} entries, more than it can contain. {_EXPORT_AGAIN}")
    require_plausible(path, (sizes[0], sizes[1]), n_entries)
    return _Header(is_dense, banner[4] == "symmetric", banner[3] == "pattern", (sizes[0], sizes[1]), n_entries)


def _read_entries(path: Path, stream: IO[str], header: _Header) -> Any:
    from scipy import sparse

    index = "i4" if max(header.shape) < 2**31 else "i8"
    kinds = [("row", index), ("column", index)] + ([] if header.is_pattern else [("value", "f8")])
    entries = _load(path, stream, np.dtype(kinds), header.n_entries)
    rows, columns = entries["row"] - 1, entries["column"] - 1
    outside = (rows < 0) | (rows >= header.shape[0]) | (columns < 0) | (columns >= header.shape[1])
    if outside.any():
        first = int(np.argmax(outside))
        raise FormatError(
            f"{path}: {np.count_nonzero(outside)} entries are outside the matrix ({header.shape[0]} x "
            f"{header.shape[1]}); the first is entry {first + 1}: row {rows[first] + 1}, column {columns[first] + 1}. "
            f"{_EXPORT_AGAIN}"
        )
    values = np.ones(len(rows)) if header.is_pattern else np.ascontiguousarray(entries["value"])
    matrix = sparse.coo_array((values, (rows, columns)), shape=header.shape)
    if not header.is_symmetric:
        return matrix
    below = rows != columns
    mirrored = sparse.coo_array((values[below], (columns[below], rows[below])), shape=header.shape)
    return matrix + mirrored


def _read_dense(path: Path, stream: IO[str], header: _Header) -> Any:
    from scipy import sparse

    if header.is_symmetric or header.is_pattern:
        raise FormatError(f"{path}: a dense file must contain all values. Export it as 'array real general'.")
    values = _load(path, stream, np.dtype(np.float64), header.n_entries)
    return sparse.coo_array(values.reshape(header.shape, order="F"))


def _load(path: Path, stream: IO[str], dtype: np.dtype[Any], n_entries: int) -> Any:
    """Read exactly as many lines as the header announces."""
    first = next((line for line in stream if not line.isspace()), None)
    entries = np.empty(0, dtype=dtype)
    if first is not None:
        entries = np.loadtxt(chain([first], stream), dtype=dtype, comments=None, max_rows=n_entries + 1, ndmin=1)
    if entries.shape != (n_entries,):
        held = f"{len(entries)}" if len(entries) < n_entries else "more"
        raise FormatError(f"{path}: its header announces {n_entries} entries, but {held} follow. {_EXPORT_AGAIN}")
    return entries


def names_beside(path: Path) -> Names:
    """Read the names for a matrix file with the same prefix, as in GSM1_matrix.mtx and GSM1_barcodes.tsv.

    Features are named by their symbols (the second column) if these are unique, else by their identifiers.
    """
    stem = path.name.lower().removesuffix(".gz").removesuffix(".mtx")
    prefix = path.name[: len(stem) - len("matrix")] if stem.endswith("matrix") else ""
    samples = _first_existing(path.parent, f"{prefix}barcodes.tsv")
    features = _first_existing(path.parent, f"{prefix}features.tsv", f"{prefix}genes.tsv")
    return Names(
        _columns(samples)[0] if samples is not None else None,
        _unique_names(_columns(features)) if features is not None else None,
    )


def features_in_rows(path: Path, shape: tuple[int, int], names: Names, transpose: bool) -> bool:
    """Whether features are in rows, by the lengths of the names or `transpose`; the order of 10x wins a tie."""
    if names.features is None and names.samples is None:
        return transpose
    as_10x, as_table = (
        (names.features is None or len(names.features) == n_features)
        and (names.samples is None or len(names.samples) == n_samples)
        for n_features, n_samples in (shape, shape[::-1])
    )
    if not as_10x and not as_table:
        raise FormatError(
            f"{path}: the matrix is {shape[0]} x {shape[1]}, but the name files next to it list {names}. "
            "Put only matching files into one folder."
        )
    if transpose and not as_10x:
        raise ParameterError(
            f"{path}: transpose is set, but the matrix is {shape[0]} x {shape[1]} and the name files next to it list "
            f"{names}, so samples are already in rows. Remove transpose.",
            parameter="transpose",
        )
    return as_10x


def _first_existing(folder: Path, *names: str) -> Path | None:
    candidates = (folder / f"{name}{ending}" for name in names for ending in ("", ".gz"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _columns(path: Path) -> list[tuple[str, ...]]:
    """The first two columns of a name file, or the only one."""
    with parse_errors(path, "a list of names"), open_text(path, newline="") as stream:
        rows = [row for row in csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE) if row]
    n_columns = min((len(row) for row in rows), default=1)
    return [tuple(row[at] for row in rows) for at in range(min(2, n_columns))]


def _unique_names(columns: list[tuple[str, ...]]) -> tuple[str, ...]:
    symbols = columns[-1]
    return symbols if len(set(symbols)) == len(symbols) else columns[0]
