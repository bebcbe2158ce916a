"""Products with an S whose entries are all there; only as much of it as fits some megabytes exists at a time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from partsong import kernels, threads
from partsong.core import Array, Matrix, type_name
from partsong.data.dense import DenseMatrix
from partsong.data.sparse import SparseMatrix
from partsong.data.tiles import Tiles
from partsong.sketch.operator import Pattern

BYTES = 16 << 20
"""Entries of S that exist at a time; at least GROUP of its columns, or DRAWN_ROWS of its rows."""
GROUP = 16
DRAWN_ROWS = 512
"""Entries of a Gaussian S are drawn in blocks of these sizes, which are best not cut."""


def times(S: Pattern, matrix: Matrix, start: int) -> Array:
    """A S[start : start + c]: dense rows by blocks of rows of S, all else by groups of columns of S."""
    if isinstance(matrix, DenseMatrix):
        return _times_dense(S, matrix, start)
    if isinstance(matrix, SparseMatrix):
        return _times_sparse(S, matrix, start)
    return _by_groups(S, np.arange(start, start + matrix.shape[1]), matrix, matrix.times)


def transposed_times(S: Pattern, matrix: Matrix, start: int) -> Array:
    """Aᵀ S[start : start + r]."""
    if isinstance(matrix, DenseMatrix):
        return _times_dense(S, DenseMatrix(matrix.X.T, matrix.dtype), start)
    return _by_groups(S, np.arange(start, start + matrix.shape[0]), matrix, matrix.transposed_times)


def _times_dense(S: Pattern, matrix: DenseMatrix, start: int) -> np.ndarray:
    n, m = matrix.shape
    out = np.zeros((n, S.dimension), matrix.dtype)
    step = max(1, BYTES // (S.dimension * matrix.dtype.itemsize) // DRAWN_ROWS) * DRAWN_ROWS
    cuts = [start, *range(start - start % step + step, start + m, step), start + m]
    for first, last in pairwise(cuts):
        indices = np.arange(first, last)
        _add_columns(matrix, first - start, S.entries(indices, 0, S.dimension, matrix.dtype), out)
    return out


def _add_columns(matrix: DenseMatrix, first: int, B: np.ndarray, out: np.ndarray) -> None:
    """out += A[:, first : first + len(B)] B."""
    columns = first, first + len(B)
    tiles = Tiles(matrix.X, matrix.dtype)

    def work(start: int, stop: int) -> None:
        for a, b, c, d, block in tiles.blocks((start, stop), columns):
            out[a:b] += block @ B[c - first : d - first]

    threads.over(threads.ranges(len(out), 2.0 * out.size * len(B)), work)


def _times_sparse(S: Pattern, matrix: SparseMatrix, start: int) -> np.ndarray:
    """With only those rows of S that meet an entry, where they are few."""
    from scipy.sparse import csr_array

    side = matrix.by_row
    is_met = np.zeros(matrix.shape[1], bool)
    is_met[side.indices] = True
    met = np.flatnonzero(is_met)
    if 2 * len(met) < matrix.shape[1]:
        place = np.zeros(matrix.shape[1], side.indices.dtype)
        place[met] = np.arange(len(met))
        shape = matrix.shape[0], len(met)
        matrix = SparseMatrix(csr_array((side.data, place[side.indices], side.indptr), shape=shape))
        return _by_groups(S, start + met, matrix, matrix.times)
    return _by_groups(S, np.arange(start, start + matrix.shape[1]), matrix, matrix.times)


def _by_groups(S: Pattern, indices: np.ndarray, matrix: Matrix, multiply: Callable[[Any], Array]) -> Array:
    """`multiply` for groups of columns of S[indices], side by side."""
    dtype = np.dtype(type_name(matrix.dtype))
    width = max(1, BYTES // (max(1, len(indices)) * dtype.itemsize) // GROUP) * GROUP

    def product(first: int) -> Array:
        return multiply(matrix.native(S.entries(indices, first, min(first + width, S.dimension), dtype)))

    out = product(0)
    if width >= S.dimension:
        return out
    whole = kernels.of(out).empty((out.shape[0], S.dimension), out)
    whole[:, :width] = out
    for first in range(width, S.dimension, width):
        whole[:, first : first + width] = product(first)
    return whole
