"""Numba kernels for plays on single cells: a row player w_i and a column player h_j meet over x_ij.

Factors are W (n × k) and Hᵀ (m × k), changed in place. All kernels are serial, release the GIL, and play their cells in
a stated order; they return the sum of e² as the players saw it. Threads may play blocks that share no player.

A meeting, with e = x − w·h and s = ‖w‖² + ‖h‖²:

    w ← [w + η e h]₊,  h ← [h + η e w]₊          both from the old pair
    η = `eta` where `relaxation` is 0, else relaxation / (s + |e| + `eta`), where eta holds all steps back alike

With `leader` 1 (the row) or 2 (the column) that player moves first, and the other responds to where it has moved.
"""

from __future__ import annotations

import math

import numpy as np

from partsong.kernels.compiling import compiled
from partsong.kernels.hals import FAST, solve_rows

# ---- compiled game ----------------------------------------------------------------------------------------------

TOGETHER, ROW_LEADS, COLUMN_LEADS = 0, 1, 2


@compiled(fastmath=FAST, inline="always")
def _miss(W, i, Ht, j, x):  # type: ignore[no-untyped-def]
    """x − w·h."""
    dot = W.dtype.type(0)
    for p in range(W.shape[1]):
        dot += W[i, p] * Ht[j, p]
    return x - dot


@compiled(fastmath=FAST, inline="always")
def _size(W, i, Ht, j):  # type: ignore[no-untyped-def]
    """‖w‖² + ‖h‖²."""
    size = W.dtype.type(0)
    for p in range(W.shape[1]):
        size += W[i, p] * W[i, p] + Ht[j, p] * Ht[j, p]
    return size


@compiled(fastmath=FAST, inline="always")
def _safe_pull(W, i, Ht, j, e, eta, relaxation):  # type: ignore[no-untyped-def]
    """η e; a pair that misses nothing does not move."""
    whole = _size(W, i, Ht, j) + abs(e) + eta
    return relaxation * (e / whole) if whole > 0 else e


@compiled(fastmath=FAST, inline="always")
def _move_both(W, i, Ht, j, pull):  # type: ignore[no-untyped-def]
    """Both players from the old pair."""
    zero = W.dtype.type(0)
    for p in range(W.shape[1]):
        a, b = W[i, p], Ht[j, p]
        W[i, p] = max(zero, a + pull * b)
        Ht[j, p] = max(zero, b + pull * a)


@compiled(fastmath=FAST, inline="always")
def _move(first, i, second, j, pull):  # type: ignore[no-untyped-def]
    """first_i ← [first_i + pull · second_j]₊."""
    zero = first.dtype.type(0)
    for p in range(first.shape[1]):
        first[i, p] = max(zero, first[i, p] + pull * second[j, p])


@compiled(fastmath=FAST, inline="always")
def _in_turn(F, f, S, s, x, eta, relaxation):  # type: ignore[no-untyped-def]
    """The first player moves, and the second responds to where it has moved; returns the first e."""
    e = _miss(F, f, S, s, x)
    _move(F, f, S, s, eta * e if relaxation <= 0 else _safe_pull(F, f, S, s, e, eta, relaxation))
    later = _miss(F, f, S, s, x)
    _move(S, s, F, f, eta * later if relaxation <= 0 else _safe_pull(F, f, S, s, later, eta, relaxation))
    return e


@compiled(fastmath=FAST)
def _play_run(i, columns, values, start, stop, W, Ht, eta, relaxation, leader):  # type: ignore[no-untyped-def]
    """Row player i against columns[start:stop] over values[start:stop], one after the other."""
    kind = W.dtype.type
    seen = 0.0
    if leader == ROW_LEADS:
        for q in range(start, stop):
            e = _in_turn(W, i, Ht, columns[q], kind(values[q]), eta, relaxation)
            seen += np.float64(e) * np.float64(e)
    elif leader == COLUMN_LEADS:
        for q in range(start, stop):
            e = _in_turn(Ht, columns[q], W, i, kind(values[q]), eta, relaxation)
            seen += np.float64(e) * np.float64(e)
    elif relaxation <= 0:
        for q in range(start, stop):
            j = columns[q]
            e = _miss(W, i, Ht, j, kind(values[q]))
            _move_both(W, i, Ht, j, eta * e)
            seen += np.float64(e) * np.float64(e)
    else:
        for q in range(start, stop):
            j = columns[q]
            e = _miss(W, i, Ht, j, kind(values[q]))
            _move_both(W, i, Ht, j, _safe_pull(W, i, Ht, j, e, eta, relaxation))
            seen += np.float64(e) * np.float64(e)
    return seen


@compiled(fastmath=FAST)
def play_dense(X, rows, columns, W, Ht, eta, relaxation, leader):  # type: ignore[no-untyped-def]
    """These rows against these columns, row by row."""
    values, seen = np.empty(columns.shape[0], W.dtype), 0.0
    for i in rows:
        for c in range(columns.shape[0]):
            values[c] = X[i, columns[c]]
        seen += _play_run(i, columns, values, 0, columns.shape[0], W, Ht, eta, relaxation, leader)
    return seen


@compiled(fastmath=FAST)
def play_sparse(indptr, indices, data, rows, columns, W, Ht, eta, relaxation, leader):  # type: ignore[no-untyped-def]
    """All cells of these rows and columns, those that are not stored as zeros; columns and indices ascend."""
    values, seen = np.empty(columns.shape[0], W.dtype), 0.0
    for i in rows:
        q, end = indptr[i], indptr[i + 1]
        for c in range(columns.shape[0]):
            while q < end and indices[q] < columns[c]:
                q += 1
            values[c] = data[q] if q < end and indices[q] == columns[c] else 0
        seen += _play_run(i, columns, values, 0, columns.shape[0], W, Ht, eta, relaxation, leader)
    return seen


@compiled(fastmath=FAST)
def play_stored(indptr, indices, data, rows, first, last, W, Ht, eta, relaxation, leader):  # type: ignore[no-untyped-def]
    """The stored cells of these rows in columns first … last − 1, row by row; indices ascend within a row."""
    seen = 0.0
    for i in rows:
        start = _position(indices, indptr[i], indptr[i + 1], first)
        stop = _position(indices, start, indptr[i + 1], last)
        seen += _play_run(i, indices, data, start, stop, W, Ht, eta, relaxation, leader)
    return seen


@compiled()
def _position(indices, low, high, column):  # type: ignore[no-untyped-def]
    """Where among the ascending indices low … high − 1 the first is that is not before a column."""
    while low < high:
        middle = (low + high) // 2
        if indices[middle] < column:
            low = middle + 1
        else:
            high = middle
    return low


@compiled(fastmath=FAST)
def play_cells(rows, columns, values, W, Ht, eta, relaxation, leader):  # type: ignore[no-untyped-def]
    """Cells in the order given."""
    seen = 0.0
    for c in range(rows.shape[0]):
        seen += _play_run(rows[c], columns, values, c, c + 1, W, Ht, eta, relaxation, leader)
    return seen


@compiled(fastmath=FAST)
def pull_stored(indptr, indices, data, start, stop, W, Ht, out):  # type: ignore[no-untyped-def]
    """out_i = Σ_j e_ij h_j over the stored cells of rows start … stop − 1, in a frozen profile."""
    zero = W.dtype.type(0)
    for i in range(start, stop):
        for p in range(W.shape[1]):
            out[i, p] = zero
        for q in range(indptr[i], indptr[i + 1]):
            j = indices[q]
            e = _miss(W, i, Ht, j, W.dtype.type(data[q]))
            for p in range(W.shape[1]):
                out[i, p] += e * Ht[j, p]


@compiled(fastmath=FAST)
def level_stored(indptr, indices, data, Ht, W):  # type: ignore[no-untyped-def]
    """w_i = c·1 with the c ≥ 0 that fits the stored cells of row i best; 0 for a row without any."""
    for i in range(W.shape[0]):
        above, below = 0.0, 0.0
        for q in range(indptr[i], indptr[i + 1]):
            total = 0.0
            for p in range(Ht.shape[1]):
                total += Ht[indices[q], p]
            above += data[q] * total
            below += total * total
        W[i, :] = above / below if below > 0 else 0.0


# ---- compiled observed ------------------------------------------------------------------------------------------
#
# Numba kernels over the known cells of a matrix, row by row in CSR form; serial, GIL released, sums in float64.
#
# A row sees only the columns it has met, so each has normal equations of its own: gram = Σ_j h_j h_jᵀ and
# cross = Σ_j x_ij h_j over its known cells j.

SWEEPS = 20
"""Sweeps that find most of a row's support before it is solved exactly."""
STILL = 1e-13
"""A row whose optimality conditions are violated by no more than this share of its largest cross term is left alone."""
FLAT = 16 * 2.0**-52
"""Pivots below this belong to components that depend on others, as far as float64 can tell."""


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

    Summed as ½ Σ_j (v_i − w_i)·h_j (2 x_ij − (v_i + w_i)·h_j), which keeps the digits where both are nearly equal.
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
    """gram and cross of entries first…last; four of them at a time share a pass over gram."""
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
    """The exact solution from w, which it replaces; components are first brought near unit length by powers of two."""
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

    Ht is in float64, penalties = (l1, l2). A row starts from its own multiple of ones; one that knows nothing is zero.
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
