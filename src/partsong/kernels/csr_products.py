"""Numba kernels for X B and Xᵀ A with X in CSR form; serial, GIL released, never dense.

In float32, many small terms added to one large sum are each rounded in the same direction. Sums are therefore computed
in short pieces, which are then added.
"""

from __future__ import annotations

import numpy as np

from partsong.kernels.compiling import FAST, compiled

PIECE = 32


@compiled(fastmath=FAST, inline="always")
def _add_entries(indices, data, A, first, last, row):  # type: ignore[no-untyped-def]
    for p in range(first, last):
        x = data[p]
        a = A[indices[p]]
        for j in range(row.shape[0]):
            row[j] += x * a[j]


@compiled(fastmath=FAST)
def gather_rows(indptr, indices, data, A, start, out):  # type: ignore[no-untyped-def]
    """out[i] = Σ_p data[p] A[indices[p]] over the entries of row start + i: X A, or Xᵀ A from the CSR form of Xᵀ."""
    k = A.shape[1]
    piece, total = np.empty(k, out.dtype), np.empty(k)
    for i in range(out.shape[0]):
        row = out[i]
        first, last = indptr[start + i], indptr[start + i + 1]
        for j in range(k):
            row[j] = 0
        if last - first <= PIECE:
            for p in range(first, last):
                x = data[p]
                a = A[indices[p]]
                for j in range(k):
                    row[j] += x * a[j]
            continue
        total[:] = 0
        for p in range(first, last, PIECE):
            piece[:] = 0
            _add_entries(indices, data, A, p, min(p + PIECE, last), piece)
            for j in range(k):
                total[j] += piece[j]
        for j in range(k):
            row[j] = total[j]


@compiled(fastmath=FAST)
def scatter_columns(indptr, indices, data, A, start, piece, total):  # type: ignore[no-untyped-def]
    """The same sums for columns start…start + len(total), from the CSR form of X with ascending columns.

    Sums go to `piece`, which is added to `total` (of the same shape) after every 16 entries per column.
    """
    width, k = total.shape
    piece[:] = 0
    total[:] = 0
    added = 0
    for i in range(A.shape[0]):
        first, last = indptr[i], indptr[i + 1]
        p = first + np.searchsorted(indices[first:last], start) if start > 0 else first
        a = A[i]
        while p < last and indices[p] < start + width:
            x = data[p]
            row = piece[indices[p] - start]
            for j in range(k):
                row[j] += x * a[j]
            p += 1
            added += 1
        if added >= 16 * width or i == A.shape[0] - 1:
            added = 0
            for c in range(width):
                for j in range(k):
                    total[c, j] += piece[c, j]
                    piece[c, j] = 0


@compiled(fastmath=FAST)
def inner_with_rows(indptr, indices, data, B, A, start):  # type: ignore[no-untyped-def]
    """⟨A, X B⟩ over the rows start…start + len(A), in float64."""
    total = 0.0
    for i in range(A.shape[0]):
        a = A[i]
        for p in range(indptr[start + i], indptr[start + i + 1]):
            b = B[indices[p]]
            entry = 0.0
            for j in range(a.shape[0]):
                entry += np.float64(a[j]) * np.float64(b[j])
            total += np.float64(data[p]) * entry
    return total


@compiled(fastmath=FAST)
def add_rows(indptr, indices, data, rows, weights, out):  # type: ignore[no-untyped-def]
    """out += Σ_r weights[r] · row rows[r]."""
    for r in range(rows.shape[0]):
        for p in range(indptr[rows[r]], indptr[rows[r] + 1]):
            out[indices[p]] += weights[r] * data[p]
