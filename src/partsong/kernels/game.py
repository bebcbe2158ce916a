"""Numba kernels for the game on single cells: a row player w_i and a column player h_j meet over x_ij.

Factors are W (n × k) and Hᵀ (m × k), changed in place. All kernels are serial, release the GIL, play their cells in a
fixed order, and return the sum of e² before each move. Threads may play blocks that share no player.

A meeting, with e = x − w·h and s = ‖w‖² + ‖h‖²:

    w ← [w + η e h]₊,  h ← [h + η e w]₊          both from the old pair
    η = `eta` if `relaxation` is 0, else relaxation / (s + |e| + `eta`), where eta damps all steps equally

With `leader` 1 (row) or 2 (column) that player moves first, and the other responds to the new position.
"""

from __future__ import annotations

import numpy as np

from partsong.kernels.compiling import FAST, compiled

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
    """η e; a pair without error does not move."""
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
    """The first player moves, the second responds to the new position; returns the first e."""
    e = _miss(F, f, S, s, x)
    _move(F, f, S, s, eta * e if relaxation <= 0 else _safe_pull(F, f, S, s, e, eta, relaxation))
    later = _miss(F, f, S, s, x)
    _move(S, s, F, f, eta * later if relaxation <= 0 else _safe_pull(F, f, S, s, later, eta, relaxation))
    return e


@compiled(fastmath=FAST)
def _play_run(i, columns, values, start, stop, W, Ht, eta, relaxation, leader):  # type: ignore[no-untyped-def]
    """Row player i against columns[start:stop] over values[start:stop], one at a time."""
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
    """Play these rows against these columns, row by row."""
    values, seen = np.empty(columns.shape[0], W.dtype), 0.0
    for i in rows:
        for c in range(columns.shape[0]):
            values[c] = X[i, columns[c]]
        seen += _play_run(i, columns, values, 0, columns.shape[0], W, Ht, eta, relaxation, leader)
    return seen


@compiled(fastmath=FAST)
def play_sparse(indptr, indices, data, rows, columns, W, Ht, eta, relaxation, leader):  # type: ignore[no-untyped-def]
    """Play all cells of these rows and columns, unstored ones as zeros; columns and indices ascend."""
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
    """Play the stored cells of these rows in columns first … last − 1, row by row; indices ascend within a row."""
    seen = 0.0
    for i in rows:
        start = _position(indices, indptr[i], indptr[i + 1], first)
        stop = _position(indices, start, indptr[i + 1], last)
        seen += _play_run(i, indices, data, start, stop, W, Ht, eta, relaxation, leader)
    return seen


@compiled()
def _position(indices, low, high, column):  # type: ignore[no-untyped-def]
    """Binary search in ascending indices low … high − 1: the first one that is not below `column`."""
    while low < high:
        middle = (low + high) // 2
        if indices[middle] < column:
            low = middle + 1
        else:
            high = middle
    return low


@compiled(fastmath=FAST)
def play_cells(rows, columns, values, W, Ht, eta, relaxation, leader):  # type: ignore[no-untyped-def]
    """Play cells in the given order."""
    seen = 0.0
    for c in range(rows.shape[0]):
        seen += _play_run(rows[c], columns, values, c, c + 1, W, Ht, eta, relaxation, leader)
    return seen


@compiled(fastmath=FAST)
def pull_stored(indptr, indices, data, start, stop, W, Ht, out):  # type: ignore[no-untyped-def]
    """out_i = Σ_j e_ij h_j over the stored cells of rows start … stop − 1, with all players fixed."""
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
    """w_i = c·1 with the c ≥ 0 that fits the stored cells of row i best; 0 for an empty row."""
    for i in range(W.shape[0]):
        above, below = 0.0, 0.0
        for q in range(indptr[i], indptr[i + 1]):
            total = 0.0
            for p in range(Ht.shape[1]):
                total += Ht[indices[q], p]
            above += data[q] * total
            below += total * total
        W[i, :] = above / below if below > 0 else 0.0
