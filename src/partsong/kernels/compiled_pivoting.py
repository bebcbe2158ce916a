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
    """Cholesky of gram[members, members]."""
    for a in range(count):
        for b in range(a):
            total = gram[members[a], members[b]]
            for c in range(b):
                total -= L[a, c] * L[b, c]
            L[a, b] = total / L[b, b]
        own = gram[members[a], members[a]]
        total = own
        for c in range(a):
            total -= L[a, c] * L[a, c]
        L[a, a] = np.sqrt(max(total, 1e-16 * own))


@njit(nogil=True, cache=True)
def _solve(L, count, right):  # type: ignore[no-untyped-def]
    for a in range(count):
        total = right[a]
        for c in range(a):
            total -= L[a, c] * right[c]
        right[a] = total / L[a, a]
    for a in range(count - 1, -1, -1):
        total = right[a]
        for c in range(a + 1, count):
            total -= L[c, a] * right[c]
        right[a] = total / L[a, a]


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


@njit(nogil=True, cache=True)
def _is_infeasible(passive, x, y, size, diagonal, slack):  # type: ignore[no-untyped-def]
    return x < -slack * size / diagonal if passive else y < -slack * size


@njit(nogil=True, cache=True)
def _pivot_tile(gram, cross, passive, rows, slack, x):  # type: ignore[no-untyped-def]
    """Exchange infeasible variables until no row has any; returns the rows that could not be brought to an end.

    Such rows cycle, or their passive set is so dependent that its equations were not solved.
    """
    n, k = cross.shape
    y = np.empty((n, k))
    patience = np.full(n, PATIENCE)
    fewest = np.full(n, k + 1)
    failed = np.zeros(n, np.bool_)
    for _ in range(3 * k + 20):
        _solve_groups(gram, cross, passive, rows, x, y)
        unsolved = 0
        for row in rows:
            size = 1e-300
            for j in range(k):
                size = max(size, abs(cross[row, j]))
            infeasible = 0
            last = -1
            for j in range(k):
                if passive[row, j] and abs(y[row, j]) > 1e-8 * size:
                    failed[row] = True
                if _is_infeasible(passive[row, j], x[row, j], y[row, j], size, gram[j, j], slack):
                    infeasible += 1
                    last = j
            if infeasible == 0 or failed[row]:
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
                if _is_infeasible(passive[row, j], x[row, j], y[row, j], size, gram[j, j], slack):
                    passive[row, j] = not passive[row, j]
        rows = rows[:unsolved]
        if unsolved == 0:
            break
    for row in rows:
        failed[row] = True
    return np.flatnonzero(failed)


@njit(nogil=True, cache=True)
def _polish(gram, cross, rows, x, sweeps):  # type: ignore[no-untyped-def]
    """Clip rounding below zero, then coordinate descent on the equations as given."""
    k = gram.shape[0]
    for row in rows:
        for j in range(k):
            x[row, j] = max(x[row, j], 0.0)
        for _ in range(sweeps):
            for j in range(k):
                if gram[j, j] > 0:
                    slope = cross[row, j]
                    for c in range(k):
                        slope -= gram[j, c] * x[row, c]
                    x[row, j] = max(0.0, x[row, j] + slope / gram[j, j])


@njit(nogil=True, cache=True)
def _firm(gram, ridge):  # type: ignore[no-untyped-def]
    """gram with its diagonal raised by a share of itself; components that do not occur get a 1."""
    firm = gram.copy()
    for j in range(gram.shape[0]):
        firm[j, j] = gram[j, j] * (1.0 + ridge) if gram[j, j] > 0 else 1.0
    return firm


@njit(nogil=True, cache=True)
def pivot_rows(gram, cross, support, ridge, out):  # type: ignore[no-untyped-def]
    """Solve every row of cross, in tiles, from the given support.

    A ridge of a few machine epsilons keeps factorizations going; two sweeps without it take back what it moved. Rows
    with dependent passive sets are solved again, all from nothing, with a ridge that makes their solution unique.
    """
    nearly, unique = _firm(gram, ridge), _firm(gram, max(1e-9, 64.0 * ridge))
    for start in range(0, cross.shape[0], TILE):
        stop = min(start + TILE, cross.shape[0])
        passive = support[start:stop].copy()
        every = np.arange(stop - start)
        hard = _pivot_tile(nearly, cross[start:stop], passive, every.copy(), 1e-13, out[start:stop])
        if hard.size:
            for row in hard:
                passive[row, :] = False
            left = _pivot_tile(unique, cross[start:stop], passive, hard.copy(), 1e-10, out[start:stop])
            _polish(gram, cross[start:stop], left, out[start:stop], 300)
        _polish(gram, cross[start:stop], every, out[start:stop], 2)
