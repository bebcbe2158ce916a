"""Block principal pivoting for many non-negative least squares problems with one matrix (Kim & Park, 2011).

Rows whose passive sets agree share one Cholesky factorization. A full exchange of all infeasible variables is
tried while it shrinks their number, and three times more; after that only the last infeasible one is exchanged
(Murty's rule), which ends for every positive definite matrix.
"""

from __future__ import annotations

import numpy as np
from numba import njit

PATIENCE = 3
TILE = 512


@njit(nogil=True, cache=True)
def _factorize(gram, members, count, L):  # type: ignore[no-untyped-def]
    """Cholesky of gram[members, members]; a dependent variable gets a zero row and later a zero value."""
    largest = 0.0
    for a in range(count):
        largest = max(largest, gram[members[a], members[a]])
    for a in range(count):
        for b in range(a + 1):
            total = gram[members[a], members[b]]
            for c in range(b):
                total -= L[a, c] * L[b, c]
            if a > b:
                L[a, b] = total / L[b, b] if L[b, b] > 0 else 0.0
            else:
                L[a, a] = np.sqrt(total) if total > 1e-13 * largest else 0.0


@njit(nogil=True, cache=True)
def _solve(L, count, right):  # type: ignore[no-untyped-def]
    for a in range(count):
        total = right[a]
        for c in range(a):
            total -= L[a, c] * right[c]
        right[a] = total / L[a, a] if L[a, a] > 0 else 0.0
    for a in range(count - 1, -1, -1):
        total = right[a]
        for c in range(a + 1, count):
            total -= L[c, a] * right[c]
        right[a] = total / L[a, a] if L[a, a] > 0 else 0.0


@njit(nogil=True, cache=True)
def _same(passive, a, b):  # type: ignore[no-untyped-def]
    for j in range(passive.shape[1]):
        if passive[a, j] != passive[b, j]:
            return False
    return True


@njit(nogil=True, cache=True)
def _solve_groups(gram, cross, passive, active_rows, x, y):  # type: ignore[no-untyped-def]
    """Least squares on the passive set of each listed row, gradients elsewhere; equal sets share a factorization."""
    k = gram.shape[0]
    count_rows = active_rows.shape[0]
    keys = np.empty(count_rows, np.uint64)
    for i in range(count_rows):
        code = np.uint64(1469598103934665603)
        for j in range(k):
            code = (code ^ np.uint64(passive[active_rows[i], j])) * np.uint64(1099511628211)
        keys[i] = code
    order = np.argsort(keys)
    L = np.zeros((k, k))
    members = np.empty(k, np.int64)
    right = np.empty(k)
    leader = -1
    count = 0
    for position in range(count_rows):
        row = active_rows[order[position]]
        if leader < 0 or not _same(passive, leader, row):
            leader = row
            count = 0
            for j in range(k):
                if passive[row, j]:
                    members[count] = j
                    count += 1
            _factorize(gram, members, count, L)
        for a in range(count):
            right[a] = cross[row, members[a]]
        _solve(L, count, right)
        for j in range(k):
            x[row, j] = 0.0
            y[row, j] = -cross[row, j]
        for a in range(count):
            value = right[a]
            x[row, members[a]] = value
            for j in range(k):
                y[row, j] += gram[members[a], j] * value
        for a in range(count):
            y[row, members[a]] = 0.0


@njit(nogil=True, cache=True)
def _pivot_tile(gram, cross, passive, x):  # type: ignore[no-untyped-def]
    n, k = cross.shape
    y = np.empty((n, k))
    patience = np.full(n, PATIENCE)
    fewest = np.full(n, k + 1)
    diagonal = 1e-300
    for j in range(k):
        diagonal = max(diagonal, gram[j, j])
    rows = np.arange(n)
    for _ in range(5 * k + 20):
        _solve_groups(gram, cross, passive, rows, x, y)
        unsolved = 0
        for row in rows:
            size = 0.0
            for j in range(k):
                size = max(size, abs(cross[row, j]))
            infeasible = 0
            last = -1
            for j in range(k):
                if (passive[row, j] and x[row, j] < -1e-13 * size / diagonal) or (
                    not passive[row, j] and y[row, j] < -1e-12 * size
                ):
                    infeasible += 1
                    last = j
            if infeasible == 0:
                continue
            rows[unsolved] = row
            unsolved += 1
            if infeasible < fewest[row]:
                fewest[row] = infeasible
                patience[row] = PATIENCE
            else:
                patience[row] -= 1
            if patience[row] < 0:
                passive[row, last] = not passive[row, last]
                continue
            for j in range(k):
                if (passive[row, j] and x[row, j] < -1e-13 * size / diagonal) or (
                    not passive[row, j] and y[row, j] < -1e-12 * size
                ):
                    passive[row, j] = not passive[row, j]
        rows = rows[:unsolved]
        if unsolved == 0:
            break
    _polish(gram, cross, rows, x)
    for row in range(n):
        for j in range(k):
            x[row, j] = max(x[row, j], 0.0)


@njit(nogil=True, cache=True)
def _polish(gram, cross, rows, x):  # type: ignore[no-untyped-def]
    """Rows that pivoting left open (dependent columns can make it cycle) are finished by coordinate descent."""
    k = gram.shape[0]
    for row in rows:
        for j in range(k):
            x[row, j] = max(x[row, j], 0.0)
        for _ in range(2000):
            moved = 0.0
            for j in range(k):
                if gram[j, j] > 0:
                    slope = cross[row, j]
                    for c in range(k):
                        slope -= gram[j, c] * x[row, c]
                    value = max(0.0, x[row, j] + slope / gram[j, j])
                    moved = max(moved, abs(value - x[row, j]))
                    x[row, j] = value
            if moved == 0.0:
                break


@njit(nogil=True, cache=True)
def pivot_rows(gram, cross, support, out):  # type: ignore[no-untyped-def]
    """Solve every row of cross, in tiles, from the given support."""
    for start in range(0, cross.shape[0], TILE):
        stop = min(start + TILE, cross.shape[0])
        _pivot_tile(gram, cross[start:stop], support[start:stop].copy(), out[start:stop])
