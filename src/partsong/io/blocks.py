"""Read a block of rows or columns of a file without the rest, as one of many ranks needs it.

.npy files are mapped and copied in slabs; of SciPy's .npz (CSR or CSC) only the entries of the block are kept. Other
files are read as a whole and sliced: every rank then temporarily needs the memory of the whole table.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from partsong.data.scan import BLOCK_BYTES, Finding, file_mapping, find_cells, first_indices, is_sparse, release_block
from partsong.data.table import Table
from partsong.data.validation import inspect, require_transformable
from partsong.errors import DataError, PartsongError, ShapeError, first_few, with_message
from partsong.io.arrays import FEATURE_KEYS, SAMPLE_KEYS, Header, member_headers, names_in, open_npy, require_numbers
from partsong.io.opening import ReadOptions, parse_errors, require_plausible, resolve_path
from partsong.io.read import data_file, read_wanted
from partsong.io.sparse_archive import ArchivedArray, ArchivedMatrix, Span

COMPRESSED = {"csr", "csc"}

Names = tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class BlockSource:
    """A file to read blocks from; rows are samples, after a transpose if requested.

    `is_loaded`: the whole file was read into memory.
    """

    path: Path
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    feature_names: Names
    names_of_samples: Callable[[], Names]
    cut: Callable[[Span, Span], Any]
    is_loaded: bool = False
    named_from: int = 0

    def block(self, rows: Span | None = None, columns: Span | None = None) -> Any:
        """Read rows a … b − 1 and columns c … d − 1 (None: all) as an array or CSR in memory."""
        spans = rows or (0, self.shape[0]), columns or (0, self.shape[1])
        for what, (start, stop), size in zip(("rows", "columns"), spans, self.shape, strict=True):
            if not 0 <= start < stop <= size:
                raise ShapeError(f"{self.path}: has no {what} {start} to {stop - 1}; there are {size}, counted from 0.")
        with parse_errors(self.path, "a matrix"):
            return self.cut(*spans)

    def sample_names(self, rows: Span) -> Names:
        """Names of some rows, if known."""
        names = self.names_of_samples()
        return None if names is None else names[rows[0] - self.named_from : rows[1] - self.named_from]

    def released(self, rows: Span) -> BlockSource:
        """Release a table that was read as a whole, and keep the sample names of some rows."""
        if not self.is_loaded:
            return self
        names = self.sample_names(rows)
        return replace(self, names_of_samples=lambda: names, cut=_released, named_from=rows[0])


def open_source(path: str | os.PathLike[str], wanted: ReadOptions = ReadOptions()) -> BlockSource:
    """Open a file by its file name extension; of .npy and SciPy's .npz only headers are read."""
    place = data_file(resolve_path(path))
    name = place.name.lower()
    if name.endswith(".npy"):
        return _array(place, wanted)
    if name.endswith(".npz"):
        found = _compressed(place, wanted)
        if found is not None:
            return found
    return _whole(read_wanted(place, wanted), place)


def validate_block(
    block: Any, source: BlockSource, first_row: int = 0, first_column: int = 0, dtype: Any = None
) -> None:
    """Refuse NaN, infinite and negative values; the message has the file, and rows and columns of the whole matrix.

    Small values are accepted: whether squares underflow depends on the whole matrix.
    """
    try:
        require_transformable(block, None, dtype)
    except PartsongError as error:
        message = str(error)
        if isinstance(error, DataError):
            findings = (finding for finding in inspect(block) if finding.kind in _MARKS)
            message = next((_globally(finding, block, first_row, first_column) for finding in findings), message)
        message = f"{source.path}: {message} Run `partsong check` for all problems of a file."
        raise with_message(error, message) from error


def _is_negative(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    return np.asarray((values < 0) & (values > -np.inf))


_MARKS: Mapping[str, Callable[[Any], Any]] = {"nan": np.isnan, "infinite": np.isinf, "negative": _is_negative}


def _globally(finding: Finding, block: Any, first_row: int, first_column: int) -> str:
    found = find_cells(block, _MARKS[finding.kind])
    rows = first_few(first_indices(found.rows + first_row), found.rows.size, "row")
    columns = first_few(first_indices(found.columns + first_column), found.columns.size, "column")
    what = finding.message.partition(":")[0]
    return f"{what}: {found.count} cell(s) of this block, in {rows}; {columns}; counted from 0. {finding.remedy}"


def _array(path: Path, wanted: ReadOptions) -> BlockSource:
    with parse_errors(path, "a NumPy array"):
        X = open_npy(path)
        if X.ndim != 2:
            Table(X, source=str(path))  # raises the error for a wrong number of dimensions

    def cut(rows: Span, columns: Span) -> Any:
        return _slabs(X, columns, rows).T if wanted.transpose else _slabs(X, rows, columns)

    shape = (X.shape[1], X.shape[0]) if wanted.transpose else (X.shape[0], X.shape[1])
    return BlockSource(path, shape, X.dtype.newbyteorder("="), None, lambda: None, cut)


def _slabs(X: npt.NDArray[Any], rows: Span, columns: Span) -> npt.NDArray[Any]:
    """Copy a block in the memory order of X; pages of a mapped file are released slab by slab."""
    mapped, is_by_column = file_mapping(X), not X.flags.c_contiguous
    out = np.empty(
        (rows[1] - rows[0], columns[1] - columns[0]), X.dtype.newbyteorder("="), "F" if is_by_column else "C"
    )
    step = max(1, BLOCK_BYTES // max(1, out.itemsize * out.shape[0 if is_by_column else 1]))
    long = columns if is_by_column else rows
    for start in range(*long, step):
        slab = start, min(start + step, long[1])
        here = (rows, slab) if is_by_column else (slab, columns)
        into = tuple(slice(a - begin, b - begin) for (a, b), (begin, _) in zip(here, (rows, columns), strict=True))
        out[into] = X[slice(*here[0]), slice(*here[1])]
        if mapped is not None:
            release_block(mapped, X, *here)
    return out


def _compressed(path: Path, wanted: ReadOptions) -> BlockSource | None:
    """SciPy's CSR or CSC; None if the file must be read as a whole."""
    with parse_errors(path, "an .npz archive"):
        with zipfile.ZipFile(path) as archive:
            headers = dict(member_headers(path, archive))
        if not {"format", "shape", "data", "indices", "indptr"} <= headers.keys() or wanted.key or wanted.label:
            return None
        with np.load(path, allow_pickle=False) as arrays:
            form = _word(arrays["format"]) if headers["format"].n_bytes < 1000 else ""
            if form not in COMPRESSED:
                return None
            sides = [int(side) for side in arrays["shape"].ravel()[:3]]
            require_plausible(path, tuple(sides), headers["data"].shape[0] if headers["data"].shape else 0)
            shape = (sides[1], sides[0]) if wanted.transpose else (sides[0], sides[1])
            features = names_in(path, headers, arrays, FEATURE_KEYS, shape[1])
        strips = _strips(path, headers, *(sides if form == "csr" else sides[::-1]))

    def names_of_samples() -> Names:
        with np.load(path, allow_pickle=False) as arrays:
            return names_in(path, headers, arrays, SAMPLE_KEYS, shape[0])

    def cut(rows: Span, columns: Span) -> Any:
        is_by_row = (form == "csr") is not wanted.transpose
        return strips.block(rows, columns) if is_by_row else strips.block(columns, rows).T.tocsr()

    dtype = headers["data"].dtype.newbyteorder("=")
    return BlockSource(path, shape, dtype, features, names_of_samples, cut)


def _strips(path: Path, headers: Mapping[str, Header], n_major: int, n_minor: int) -> ArchivedMatrix:
    require_numbers(str(path), headers["data"].dtype)
    indptr, indices, data = (ArchivedArray(path, name, headers[name]) for name in ("indptr", "indices", "data"))
    if any(len(strip.header.shape) != 1 for strip in (indptr, indices, data)):
        raise ShapeError(
            f"{path}: indptr, indices and data of a sparse matrix must have one dimension. Export it again."
        )
    return ArchivedMatrix(path, n_major, n_minor, indptr, indices, data)


def _word(array: npt.NDArray[Any]) -> str:
    value = array.ravel()[0] if array.size else ""
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)


def _released(rows: Span, columns: Span) -> Any:
    raise ValueError("its data have been released; open it again")


def _whole(table: Table, path: Path) -> BlockSource:
    def cut(rows: Span, columns: Span) -> Any:
        part = table.X[slice(*rows), slice(*columns)]
        return part.copy() if not is_sparse(part) else part

    shape = int(table.X.shape[0]), int(table.X.shape[1])
    return BlockSource(path, shape, table.X.dtype, table.feature_names, lambda: table.sample_names, cut, is_loaded=True)
