"""Products with an S that has at most one entry per row: coordinates are added up in places, or left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from partsong import kernels
from partsong.core import runtime
from partsong.core.interfaces import Array, Matrix
from partsong.data.csr import GATHER_COST
from partsong.data.dense import DenseMatrix
from partsong.data.scan import Tiles
from partsong.data.sparse import SparseMatrix
from partsong.data.tensor import TensorMatrix
from partsong.kernels import sketching as compiled
from partsong.sketch import operator as products
from partsong.sketch.operator import Operator, Pattern

TOGETHER = 1 << 22
"""Entries of a tensor that are processed together."""
BLOCK_BYTES = 16 << 20
"""Bytes of S in memory at a time."""


@dataclass(frozen=True, slots=True)
class Placed:
    """S[i, places[q]] = weights[q] for i = coordinates[q]; ascending, counted from the start of a block."""

    coordinates: np.ndarray
    places: np.ndarray
    weights: np.ndarray

    def by_place(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Coordinates and weights sorted by place, the start of each place, and the places."""
        order = np.argsort(self.places, kind="stable")
        places = self.places[order]
        begins = np.flatnonzero(np.diff(places, prepend=-1))
        return self.coordinates[order], self.weights[order], np.append(begins, len(order)), places[begins]

    def by_coordinate(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """The place of every coordinate (−1 if it is left out) and its weight."""
        places, weights = np.full(width, -1, np.int64), np.zeros(width)
        places[self.coordinates], weights[self.coordinates] = self.places, self.weights
        return places, weights


class Placing(Pattern, Protocol):
    """A pattern with at most one entry per row."""

    def placed(self, start: int, stop: int) -> Placed:
        """The entries of S[start:stop]."""


def entries(S: Placing, indices: np.ndarray, first: int, last: int, dtype: np.dtype) -> np.ndarray:
    """S[indices, first:last], for ascending indices."""
    out = np.zeros((len(indices), last - first), dtype)
    if len(indices):
        start = int(indices[0])
        places, weights = S.placed(start, int(indices[-1]) + 1).by_coordinate(int(indices[-1]) + 1 - start)
        places = places[indices - start]
        here = np.flatnonzero((places >= first) & (places < last))
        out[here, places[here] - first] = weights[indices[here] - start]
    return out


def times(S: Placing, matrix: Matrix, start: int) -> Array:
    """A S[start : start + c] in one pass over the used entries."""
    if isinstance(matrix, DenseMatrix):
        return _times_dense(S, matrix, start)
    placed = S.placed(start, start + matrix.shape[1])
    if isinstance(matrix, SparseMatrix):
        if matrix.by_column is not None and len(placed.coordinates) < matrix.shape[1]:
            return _add_rows(placed, matrix.by_column, S.dimension).T
        return _times_sparse(placed, matrix, S.dimension)
    if isinstance(matrix, TensorMatrix):
        return _times_tensor(placed, matrix.X, S.dimension)
    return products.times(S, matrix, start)


def transposed_times(S: Placing, matrix: Matrix, start: int) -> Array:
    """Aᵀ S[start : start + r] in one pass over the used entries."""
    if isinstance(matrix, DenseMatrix):
        return _times_dense(S, DenseMatrix(matrix.X.T, matrix.dtype), start)
    if isinstance(matrix, SparseMatrix):
        return _add_rows(S.placed(start, start + matrix.shape[0]), matrix.by_row, S.dimension).T
    if isinstance(matrix, TensorMatrix):
        return times(S, TensorMatrix(matrix.X_transposed), start)
    return products.transposed_times(S, matrix, start)


def _times_dense(S: Placing, matrix: DenseMatrix, start: int) -> np.ndarray:
    out = np.zeros((matrix.shape[0], S.dimension), matrix.dtype)
    tiles = Tiles(matrix.X, matrix.dtype)
    for c in range(0, matrix.shape[1], tiles.block_width):
        d = min(c + tiles.block_width, matrix.shape[1])
        _add_columns(S.placed(start + c, start + d), tiles, (c, d), out)
    return out


def _add_columns(placed: Placed, tiles: Tiles, columns: tuple[int, int], out: np.ndarray) -> None:
    lists = placed.by_place()

    def work(start: int, stop: int) -> None:
        for a, b, _, _, block in tiles.blocks((start, stop), columns):
            is_by_row = block.strides[0] >= block.strides[1]
            (compiled.place_along_rows if is_by_row else compiled.place_columns)(block, *lists, out[a:b])

    if len(placed.coordinates):
        runtime.map_ranges(runtime.split_range(len(out), 4.0 * len(out) * len(placed.coordinates)), work)


def _times_sparse(placed: Placed, matrix: SparseMatrix, dimension: int) -> np.ndarray:
    side = matrix.by_row
    out = np.zeros((matrix.shape[0], dimension), matrix.dtype)
    data = side.indptr, side.indices, side.data, *placed.by_coordinate(matrix.shape[1])
    effort = 2.0 * GATHER_COST * matrix.stored + out.size
    pieces = runtime.split_range(len(out), effort, side.indptr)
    runtime.map_ranges(pieces, lambda a, b: compiled.place_entries(*data, a, out[a:b]))
    return out


def _add_rows(placed: Placed, side: Any, dimension: int) -> np.ndarray:
    """Sᵀ A (d × c), for A in CSR form."""
    coordinates, weights, begins, places = placed.by_place()
    out = np.zeros((dimension, side.shape[1]), side.dtype)
    entries = np.append(0, np.cumsum(np.diff(side.indptr)[coordinates]))[begins]

    def work(start: int, stop: int) -> None:
        lists = coordinates, weights, begins[start : stop + 1], places[start:stop]
        compiled.place_rows(side.indptr, side.indices, side.data, *lists, out)

    runtime.map_ranges(runtime.split_range(len(places), 2.0 * GATHER_COST * float(entries[-1]), entries), work)
    return out


def _times_tensor(placed: Placed, X: Any, dimension: int) -> Any:
    """The same for a torch tensor, on its device."""
    import torch

    def there(values: np.ndarray, dtype: Any) -> Any:
        return torch.as_tensor(values).to(device=X.device, dtype=dtype)

    out = torch.zeros((X.shape[0], dimension), dtype=X.dtype, device=X.device)
    if X.layout is torch.strided:
        coordinates, places = there(placed.coordinates, torch.long), there(placed.places, torch.long)
        weights = there(placed.weights, X.dtype)
        height = max(1, TOGETHER // max(1, len(placed.coordinates)))
        for rows, sums in zip(X.split(height), out.split(height), strict=True):
            sums.index_add_(1, places, rows.index_select(1, coordinates) * weights)
        return out
    by_coordinate = placed.by_coordinate(X.shape[1])
    places, weights = there(by_coordinate[0], torch.long), there(by_coordinate[1], X.dtype)
    columns, counts = X.col_indices().long(), X.crow_indices().diff()
    rows = torch.repeat_interleave(torch.arange(X.shape[0], device=X.device), counts)
    kept = torch.nonzero(places[columns] >= 0)[:, 0]
    at = rows[kept] * dimension + places[columns[kept]]
    out.view(-1).index_add_(0, at, X.values()[kept] * weights[columns[kept]])
    return out


def places_of(S: Operator) -> Any:
    """The entries of an S with at most one per row; None for any other S."""
    found = getattr(S.pattern, "placed", None)
    return None if found is None else found(0, S.size)


def placed(matrix: Matrix, places: Any, B: Array) -> Array:
    """The nonzero rows of S Bᵀ."""
    return kernels.of(B).rows_of(B)[places.places] * matrix.native(places.weights[:, None])


def spread(matrix: Matrix, S: Operator, B: Array) -> Array:
    """S Bᵀ (size × k) for B (k × d), in blocks of rows of S, in the type and on the device of the matrix."""
    on = kernels.of(B)
    places = places_of(S)
    if places is not None and len(places.coordinates) == S.size:
        return placed(matrix, places, B)
    out = on.empty((S.size, B.shape[0]), B)
    if places is not None:
        out[:] = 0
        out[places.coordinates] = placed(matrix, places, B)
        return out
    height = max(1, BLOCK_BYTES // (8 * S.dimension))
    for start in range(0, S.size, height):
        stop = min(start + height, S.size)
        out[start:stop] = matrix.native(S.rows(start, stop)) @ B.T
    return out
