"""Numba kernels over the known cells of a matrix, row by row in CSR form; serial, GIL released, sums in float64.

Every row has different known cells, so each has its own normal equations: gram = Σ_j h_j h_jᵀ and
cross = Σ_j x_ij h_j over its known cells j.
"""

from __future__ import annotations

import math

import numpy as np

from partsong.kernels.compiling import FAST, compiled
from partsong.kernels.nnls import solve_rows

SWEEPS = 20
"""Sweeps that find most of a row's support before it is solved exactly."""
STILL = 1e-13
"""A row has converged if its optimality conditions hold to this share of its largest cross term."""
FLAT = 16 * 2.0**-52
"""Pivots below this belong to components that are linearly dependent in float64."""


@compiled(fastmath=FAST, inline="always")
def _inner(a, b):  # type: ignore[no-untyped-def]
    total = 0.0
    for j in range(a.shape[0]):
        total += np.float64(a[j]) * np.float64(b[j])
    return total


@compiled(fastmath=FAST)
def squared_distance(indptr, indices, data, W, Ht, start, stop):  # type: ignore[no-untyped-def]
    """Σ (x_ij − w_i·h_j)² over the known cells of rows start…stop."""
    total = 0.0
    for i in range(start, stop):
        of_row = 0.0
        for p in range(indptr[i], indptr[i + 1]):
            error = np.float64(data[p]) - _inner(W[i], Ht[indices[p]])
            of_row += error * error
        total += of_row
    return total


@compiled(fastmath=FAST)
def residuals(indptr, indices, data, W, Ht, start, stop, out):  # type: ignore[no-untyped-def]
    """out[p] = x_ij − w_i·h_j for entry p, cell (i, j), of rows start…stop."""
    for i in range(start, stop):
        for p in range(indptr[i], indptr[i + 1]):
            out[p] = np.float64(data[p]) - _inner(W[i], Ht[indices[p]])


@compiled(fastmath=FAST)
def gains(indptr, indices, data, Ht, W, other, start, stop, out):  # type: ignore[no-untyped-def]
    """out[i] = ½ Σ_j (x_ij − w_i·h_j)² − ½ Σ_j (x_ij − v_i·h_j)² over known cells, v_i a row of `other`.

    Summed as ½ Σ_j (v_i − w_i)·h_j (2 x_ij − (v_i + w_i)·h_j), which avoids cancellation if both are nearly equal.
    """
    for i in range(start, stop):
        total = 0.0
        for p in range(indptr[i], indptr[i + 1]):
            h = Ht[indices[p]]
            before, after = _inner(W[i], h), _inner(other[i], h)
            total += (after - before) * (2.0 * np.float64(data[p]) - before - after)
        out[i] = 0.5 * total


@compiled(fastmath=FAST)
def _gather(indices, data, Ht, first, last, gram, cross):  # type: ignore[no-untyped-def]
    """gram and cross of entries first…last, four at a time per pass over gram."""
    k = cross.shape[0]
    gram[:] = 0.0
    cross[:] = 0.0
    whole = first + (last - first) // 4 * 4
    for p in range(first, whole, 4):
        h0, h1, h2, h3 = Ht[indices[p]], Ht[indices[p + 1]], Ht[indices[p + 2]], Ht[indices[p + 3]]
        x0, x1, x2, x3 = data[p], data[p + 1], data[p + 2], data[p + 3]
        for a in range(k):
            s0, s1, s2, s3 = h0[a], h1[a], h2[a], h3[a]
            cross[a] += x0 * s0 + x1 * s1 + x2 * s2 + x3 * s3
            for b in range(a + 1):
                gram[a, b] += s0 * h0[b] + s1 * h1[b] + s2 * h2[b] + s3 * h3[b]
    for p in range(whole, last):
        h, x = Ht[indices[p]], data[p]
        for a in range(k):
            cross[a] += x * h[a]
            for b in range(a + 1):
                gram[a, b] += h[a] * h[b]
    for a in range(k):
        for b in range(a):
            gram[b, a] = gram[a, b]


@compiled(fastmath=FAST)
def _sweep(gram, cross, w):  # type: ignore[no-untyped-def]
    """Coordinate descent on ½ w gram w − cross·w over w ≥ 0, until its optimality conditions hold or sweeps run out."""
    k = w.shape[0]
    size = 0.0
    for j in range(k):
        size = max(size, abs(cross[j]))
    for _ in range(SWEEPS):
        worst = 0.0
        for j in range(k):
            if gram[j, j] <= 0.0:
                w[j] = 0.0
                continue
            slope = _inner(gram[j], w) - cross[j]
            worst = max(worst, abs(slope) if w[j] > 0.0 else -slope)
            w[j] = max(0.0, w[j] - slope / gram[j, j])
        if worst <= STILL * size:
            break


@compiled()
def _solve(gram, cross, w):  # type: ignore[no-untyped-def]
    """Replace w by the exact solution; components are first scaled to near unit length by powers of two."""
    k = w.shape[0]
    scale, scaled = np.zeros(k), np.empty((k, k))
    for j in range(k):
        if gram[j, j] > 0.0:
            scale[j] = math.ldexp(1.0, -(math.frexp(gram[j, j])[1] // 2))
    for a in range(k):
        for b in range(k):
            scaled[a, b] = scale[a] * gram[a, b] * scale[b]
    start = w.copy().reshape(1, k)
    solve_rows(scaled, scale, cross.reshape(1, k), start, FLAT, w.reshape(1, k))


@compiled()
def respond(indptr, indices, data, Ht, penalties, exactly, start, stop, out):  # type: ignore[no-untyped-def]
    """out[i] = argmin over w ≥ 0 of ½ Σ_j (x_ij − w·h_j)² + c_i (l1 Σw + ½ l2 ‖w‖²) over the c_i known cells j.

    Ht is in float64, penalties = (l1, l2). A row starts from a multiple of ones; a row without known cells is 0.
    """
    k = Ht.shape[1]
    gram, cross, w = np.empty((k, k)), np.empty(k), np.empty(k)
    for i in range(start, stop):
        first, last = indptr[i], indptr[i + 1]
        if first == last:
            out[i] = 0.0
            continue
        _gather(indices, data, Ht, first, last, gram, cross)
        total = gram.sum()
        w[:] = max(0.0, cross.sum() / total) if total > 0.0 else 0.0
        for j in range(k):
            cross[j] -= penalties[0] * (last - first)
            gram[j, j] += penalties[1] * (last - first)
        _sweep(gram, cross, w)
        if exactly:
            _solve(gram, cross, w)
        for j in range(k):
            out[i, j] = w[j]
