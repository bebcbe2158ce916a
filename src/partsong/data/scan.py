"""Scan matrices block by block, without densifying: tiles, extremes, zero rows and columns, invalid cells, and names.

Arrays may be mapped from files larger than memory: pages are released after they have been read.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from partsong.errors import FeatureError, first_few, format_count

_MISSING = ("None", "nan", "NaT", "<NA>")
TILE_BYTES = 2 << 20
MAPPED_TILE_BYTES = 4 << 20
FEWEST_TILE_ROWS = 64
"""Products of tiles with fewer rows are slow."""
BLOCK_HEIGHT = 256
MOST_SUMMED = 1024
"""Maximum number of rows whose products are summed in the type of the data."""


def even_ranges(start: int, stop: int, longest: int) -> list[tuple[int, int]]:
    """Split start…stop into the fewest ranges of similar length, none longer than `longest`."""
    count = -(-(stop - start) // longest)
    cuts = [start + (stop - start) * i // max(1, count) for i in range(count + 1)]
    return list(pairwise(cuts))


@dataclass(frozen=True, slots=True)
class Tiles:
    """An array in tiles that fit the cache, converted to a number type.

    Pages of a mapped file are released after each tile.
    """

    X: np.ndarray
    dtype: np.dtype

    @property
    def are_low(self) -> bool:
        """Whether only few rows fit a tile; arrays in memory may exceed it somewhat."""
        return FEWEST_TILE_ROWS * self._row_bytes > self._bytes * (1 if self._is_mapped else 4)

    @property
    def block_width(self) -> int:
        """Columns of a block of the usual height."""
        return max(1, self._bytes // self.dtype.itemsize // BLOCK_HEIGHT)

    @property
    def narrow_width(self) -> int:
        """Columns of a block of maximum height; for mapped files wide enough to use whole pages."""
        return self.block_width if self._is_mapped else max(1, self.block_width * BLOCK_HEIGHT // MOST_SUMMED)

    def of_rows(self, start: int, stop: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield tiles of whole rows: start, stop, and the rows between them."""
        mapped = file_mapping(self.X)
        height = max(1 if self.are_low else FEWEST_TILE_ROWS, self._bytes // self._row_bytes)
        is_by_row = self.X.flags.c_contiguous
        for a, b in even_ranges(start, stop, height):
            yield a, b, np.asarray(self.X[a:b], self.dtype)
            if mapped is not None:
                release_pages(mapped, self.X, *((a, b) if is_by_row else (0, self.X.shape[1])))

    def blocks(
        self, rows: tuple[int, int], columns: tuple[int, int]
    ) -> Iterator[tuple[int, int, int, int, np.ndarray]]:
        """Yield blocks a…b × c…d; with all columns if enough rows fit."""
        mapped = file_mapping(self.X)
        width = max(1, min(columns[1] - columns[0], self.block_width))
        height = min(MOST_SUMMED, max(1, self._bytes // self.dtype.itemsize // width))
        for a in range(*rows, height):
            b = min(a + height, rows[1])
            for c in range(*columns, width):
                d = min(c + width, columns[1])
                yield a, b, c, d, np.asarray(self.X[a:b, c:d], self.dtype)
                if mapped is not None:
                    release_block(mapped, self.X, (a, b), (c, d))

    @property
    def _is_mapped(self) -> bool:
        return file_mapping(self.X) is not None

    @property
    def _bytes(self) -> int:
        return MAPPED_TILE_BYTES if self._is_mapped else TILE_BYTES

    @property
    def _row_bytes(self) -> int:
        return max(1, self.X.shape[1] * self.dtype.itemsize)


def file_mapping(X: np.ndarray) -> mmap.mmap | None:
    """Return the mmap behind a contiguous np.memmap whose pages can be reread from the file; else None.

    A copy-on-write map (mode "c") holds changes that are not in the file, so its pages must stay.
    """
    found = getattr(X, "_mmap", None) if getattr(X, "mode", None) in ("r", "r+") else None
    return found if found is not None and (X.flags.c_contiguous or X.flags.f_contiguous) else None


def release_pages(mapped: mmap.mmap, X: np.ndarray, start: int, stop: int) -> None:
    """Release the pages of rows (C order) or columns (F order) start…stop of a mapped file.

    The data stay in the file; the memory of the process does not grow with the data read.
    """
    stride = max(X.strides)
    _release(mapped, X, [(start * stride, stop * stride)])


def release_block(mapped: mmap.mmap, X: np.ndarray, rows: tuple[int, int], columns: tuple[int, int]) -> None:
    """The same for a block: the part of each row (C order), or whole columns (F order)."""
    if not X.flags.c_contiguous:
        release_pages(mapped, X, *columns)
    elif columns == (0, X.shape[1]):
        release_pages(mapped, X, *rows)
    else:
        first, last = (column * X.itemsize for column in columns)
        starts = range(rows[0] * X.strides[0], rows[1] * X.strides[0], X.strides[0])
        _release(mapped, X, [(start + first, start + last) for start in starts])


def _release(mapped: mmap.mmap, X: np.ndarray, spans: list[tuple[int, int]]) -> None:
    """Release the pages of byte spans of X, including the page in which a span starts."""
    if not hasattr(mapped, "madvise"):
        return
    offset = X.__array_interface__["data"][0] - np.frombuffer(mapped, np.uint8, 1).__array_interface__["data"][0]
    for start, stop in spans:
        first = (offset + start) // mmap.PAGESIZE * mmap.PAGESIZE
        length = (offset + stop - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0:
            mapped.madvise(mmap.MADV_DONTNEED, first, length)


BLOCK_BYTES = 8 * 2**20
Indices = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]
SHOWN = 5


@dataclass(frozen=True, slots=True)
class MarkedCells:
    """Rows and columns with at least one marked cell, and the number of marked cells."""

    rows: Indices
    columns: Indices
    count: int


@dataclass(frozen=True, slots=True)
class ZeroScan:
    """All-zero rows and columns, and constant nonzero columns."""

    zero_rows: Indices
    zero_columns: Indices
    constant_columns: Indices


def is_sparse(X: Any) -> bool:
    """Whether X is a SciPy sparse container; does not import SciPy."""
    return hasattr(X, "tocsr")


def extremes(X: Any) -> tuple[float, float]:
    """Return the smallest and largest stored value; both are NaN if there is a NaN."""
    if is_sparse(X):
        return (float(X.data.min()), float(X.data.max())) if X.data.size else (0.0, 0.0)
    low, high = np.inf, -np.inf
    for _, _, block in _blocks(X):
        low, high = np.minimum(low, block.min()), np.maximum(high, block.max())
    return float(low), float(high)


def find_cells(X: Any, is_marked: Callable[[npt.NDArray[Any]], Flags]) -> MarkedCells:
    """Find the cells for which `is_marked` holds; used only for matrices with invalid values."""
    bad_rows, bad_columns = np.zeros(X.shape[0], dtype=bool), np.zeros(X.shape[1], dtype=bool)
    if is_sparse(X):
        at = np.flatnonzero(is_marked(X.data))
        major = np.searchsorted(X.indptr, at, side="right") - 1
        rows, columns = (major, X.indices[at]) if X.format == "csr" else (X.indices[at], major)
        bad_rows[rows], bad_columns[columns] = True, True
        return MarkedCells(np.flatnonzero(bad_rows), np.flatnonzero(bad_columns), int(at.size))
    count = 0
    for rows, columns, block in _blocks(X):
        marked = is_marked(block)
        count += int(np.count_nonzero(marked))
        bad_rows[rows] |= marked.any(axis=1)
        bad_columns[columns] |= marked.any(axis=0)
    return MarkedCells(np.flatnonzero(bad_rows), np.flatnonzero(bad_columns), count)


def scan_zeros(X: Any) -> ZeroScan:
    """Find zero rows, zero columns and constant columns."""
    return _sparse_blanks(X) if is_sparse(X) else _dense_blanks(X)


def _dense_blanks(X: npt.NDArray[Any]) -> ZeroScan:
    row_has_value = np.zeros(X.shape[0], dtype=bool)
    lowest, highest = X[0].copy(), X[0].copy()
    for rows, columns, block in _blocks(X):
        has_value = block.max(axis=1) != 0
        doubtful = np.flatnonzero(~has_value)
        has_value[doubtful] = block[doubtful].any(axis=1)
        row_has_value[rows] |= has_value
        lowest[columns] = np.minimum(lowest[columns], block.min(axis=0))
        highest[columns] = np.maximum(highest[columns], block.max(axis=0))
    return _blanks(row_has_value, (lowest != 0) | (highest != 0), np.flatnonzero(lowest == highest))


def _sparse_blanks(X: Any) -> ZeroScan:
    """Only columns with a value in every row can be constant and nonzero, so few columns are compared."""
    n_rows, n_columns = X.shape
    zeros_at = np.flatnonzero(X.data == 0)  # explicitly stored zeros: few or none
    majors_of_zeros = np.searchsorted(X.indptr, zeros_at, side="right") - 1
    by_major = np.diff(X.indptr) - np.bincount(majors_of_zeros, minlength=X.indptr.size - 1)
    minor_size = n_columns if X.format == "csr" else n_rows
    by_minor = -np.bincount(X.indices[zeros_at], minlength=minor_size)
    for start in range(0, X.indices.size, BLOCK_BYTES // 8):
        by_minor += np.bincount(X.indices[start : start + BLOCK_BYTES // 8], minlength=minor_size)
    in_rows, in_columns = (by_major, by_minor) if X.format == "csr" else (by_minor, by_major)
    full = np.flatnonzero(in_columns == n_rows)
    constant = full
    if full.size:
        picked = X[:, full]
        ends = [np.asarray(end.todense()).ravel() for end in (picked.min(axis=0), picked.max(axis=0))]
        constant = full[ends[0] == ends[1]]
    return _blanks(in_rows > 0, in_columns > 0, constant)


def _blanks(row_has_value: Flags, column_has_value: Flags, constant: Indices) -> ZeroScan:
    constant = constant[column_has_value[constant]] if row_has_value.size > 1 else constant[:0]
    return ZeroScan(np.flatnonzero(~row_has_value), np.flatnonzero(~column_has_value), constant)


def _blocks(X: npt.NDArray[Any]) -> Iterator[tuple[slice, slice, npt.NDArray[Any]]]:
    """Views of about 8 MB in memory order; pages of mapped files are released."""
    is_by_column = X.flags.f_contiguous and not X.flags.c_contiguous
    long, short = X.shape[::-1] if is_by_column else X.shape
    mapped = file_mapping(X)
    step = max(1, BLOCK_BYTES // max(1, short * X.itemsize))
    for start in range(0, long, step):
        part, every = slice(start, min(start + step, long)), slice(0, short)
        yield (every, part, X[:, part]) if is_by_column else (part, every, X[part])
        if mapped is not None:
            release_pages(mapped, X, part.start, part.stop)


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding about a matrix. Errors prevent a factorization; notes do not.

    `rows` and `columns` are the first few affected, counted from 0; `count` is the total number of cells, rows, columns
    or names that the message is about.
    """

    kind: str
    severity: Literal["error", "note"]
    message: str
    remedy: str
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    count: int = 0


def label_positions(indices: Indices, names: Sequence[str] | None) -> list[str]:
    """Format the first few indices, with their names if known."""
    shown = first_indices(indices)
    if names is None or any(index >= len(names) for index in shown):
        return [str(index) for index in shown]
    return [f"{index} ({str(names[index])!r})" for index in shown]


def first_indices(indices: Indices) -> tuple[int, ...]:
    """The first few indices, as Python integers."""
    return tuple(int(index) for index in indices[:SHOWN])


def column_labels(X: Any) -> list[Any] | None:
    """Return the column labels of a data frame; None for anything else."""
    if hasattr(X, "iloc") and hasattr(X, "columns"):
        return list(X.columns)
    return list(X.__dataframe__().column_names()) if hasattr(X, "__dataframe__") else None


def column_names(X: Any) -> tuple[str, ...] | None:
    """Return the checked column names of a data frame; None if no label is text (numbers are not names).

    Labels must be unique in either case.
    """
    labels = column_labels(X) or []
    has_names = any(isinstance(label, str) for label in labels)
    for finding in name_errors(labels, len(labels)):
        if has_names or finding.kind == "duplicate-names":
            raise FeatureError(f"{finding.message} {finding.remedy}")
    return tuple(labels) if has_names else None


def repeated(names: Sequence[str]) -> list[str]:
    """Return names that occur more than once, in order of first occurrence."""
    return [name for name, count in Counter(names).items() if count > 1]


def require_names(feature_names: Sequence[str], source: str) -> None:
    """Raise FeatureError for names that are empty, duplicated, or not text."""
    for finding in name_errors(feature_names, len(feature_names)):
        raise FeatureError(f"{source}: {finding.message} {finding.remedy}")


def name_errors(names: Sequence[str], n_columns: int) -> Iterator[Finding]:
    """Yield findings on a wrong number of names, duplicates, empty names, and names that are not text."""
    if len(names) != n_columns:
        message = f"{format_count(len(names), 'feature name')} for {format_count(n_columns, 'column')}."
        yield Finding("name-count", "error", message, "Pass one name per column, or none.", count=len(names))
    empty = [position for position, name in enumerate(names) if _is_missing(name)]
    twice = [name for name in repeated(names) if not _is_missing(name)]
    if twice:
        at = {name: [place for place, other in enumerate(names) if other == name] for name in twice[:SHOWN]}
        shown = [f"{name!r} ({first_few(found[:SHOWN], len(found), 'column')})" for name, found in at.items()]
        message = f"Feature names must differ; used more than once: {first_few(shown, len(twice), 'name')}."
        remedy = "Columns are counted from 0. Rename the columns, or merge those with the same meaning."
        columns = tuple(sorted(place for found in at.values() for place in found)[:SHOWN])
        yield Finding("duplicate-names", "error", message, remedy, columns=columns, count=len(twice))
    if empty:
        message = f"Columns without a name: {first_few(empty[:SHOWN], len(empty), 'column')}, counted from 0."
        remedy = "Name them, or remove them."
        yield Finding("missing-names", "error", message, remedy, columns=tuple(empty[:SHOWN]), count=len(empty))
    others = [place for place, name in enumerate(names) if not isinstance(name, str) and place not in set(empty)]
    if others:
        shown = [f"{place} ({names[place]!r})" for place in others[:SHOWN]]
        message = f"Feature names must be text; they are not text in {first_few(shown, len(others), 'column')}."
        remedy = "Convert them with X.columns = X.columns.astype(str)."
        yield Finding("name-type", "error", message, remedy, columns=tuple(others[:SHOWN]), count=len(others))


def _is_missing(name: Any) -> bool:
    return not name.strip() if isinstance(name, str) else str(name) in _MISSING
