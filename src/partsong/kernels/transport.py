"""Numba kernels of alignment: the scaling iteration of entropic transport."""

from __future__ import annotations

import numpy as np

from partsong.kernels.compiling import compiled

SMALLEST, LARGEST = 1e-50, 1e50
"""Factors beyond these go back to the log domain before they underflow."""
NEGLIGIBLE = 1e-150
"""Entries of a kernel below this add nothing, whatever the factors; as numbers without full precision they are slow."""
PAUSE = 8
"""Iterations between leaps, at first."""
SLOWEST, FARTHEST = 0.98, 50.0
"""A leap takes no ratio above the first for granted, and changes no factor by more than e to the second."""


@compiled()
def scale(K, Kt, rows, columns, u, v, iterations, tolerance):  # type: ignore[no-untyped-def]
    """u_a ← rows_a / (K v)_a, v_b ← columns_b / (Kᵀ u)_b, until the row sums of u K v are right to `tolerance`.

    Kt is Kᵀ as rows, so that both products add up whole rows, many entries in one instruction. Every few iterations v
    leaps ahead; where that did not make the error fall, it pauses twice as long from then on. Returns how many
    iterations were done, and whether the sums are right; it ends early where factors become extreme.
    """
    k, l = K.shape
    sums, back = np.empty(k), np.empty(l)
    before, earlier = v.copy(), v.copy()
    error = at_last_leap = np.inf
    pause, next_leap = PAUSE, PAUSE
    add_rows(Kt, v, sums)
    for done in range(1, iterations + 1):
        if done == next_leap:
            pause = pause if error < at_last_leap else 2 * pause
            at_last_leap, next_leap = error, done + pause
            leap(v, before, earlier)
            add_rows(Kt, v, sums)
        for a in range(k):
            if not SMALLEST < sums[a] < LARGEST:
                return done - 1, False
            u[a] = rows[a] / sums[a]
        add_rows(K, u, back)
        for b in range(l):
            if not SMALLEST < back[b] < LARGEST:
                return done - 1, False
        for b in range(l):
            earlier[b], before[b] = before[b], v[b]
            v[b] = columns[b] / back[b]
        add_rows(Kt, v, sums)
        error = 0.0
        for a in range(k):
            error += abs(u[a] * sums[a] - rows[a])
        if error <= tolerance:
            return done, True
    return iterations, False


@compiled()
def add_rows(K, weights, total):  # type: ignore[no-untyped-def]
    """total ← Kᵀ weights, two rows at a time."""
    k, l = K.shape
    total[:] = 0.0
    for a in range(0, k - 1, 2):
        for b in range(l):
            total[b] += K[a, b] * weights[a] + K[a + 1, b] * weights[a + 1]
    if k % 2 == 1:
        for b in range(l):
            total[b] += K[k - 1, b] * weights[k - 1]


@compiled()
def leap(v, before, earlier):  # type: ignore[no-untyped-def]
    """log v ← log v + λ/(1 − λ)·Δ, with Δ its last change and λ the ratio of that to the one before (Aitken).

    Were all further changes in that ratio, they would end there.
    """
    along, square, largest = 0.0, 0.0, 0.0
    for b in range(len(v)):
        change, former = np.log(v[b] / before[b]), np.log(before[b] / earlier[b])
        along += change * former
        square += former * former
        largest = max(largest, abs(change))
    if not 0.0 < along < square:
        return
    ratio = min(along / square, SLOWEST)
    length = ratio / (1.0 - ratio)
    if length * largest > FARTHEST:
        return
    for b in range(len(v)):
        v[b] *= (v[b] / before[b]) ** length
