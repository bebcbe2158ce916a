"""Numba kernels of entropic transport: the Sinkhorn scaling iteration with extrapolation."""

from __future__ import annotations

import numpy as np

from partsong.kernels.compiling import compiled

SMALLEST, LARGEST = 1e-50, 1e50
"""Factors outside this range are moved to the log domain before they underflow."""
NEGLIGIBLE = 1e-150
"""Kernel entries below this are negligible for all factors; as subnormal numbers they would be slow."""
PAUSE = 8
"""Initial number of iterations between extrapolations."""
SLOWEST, FARTHEST = 0.98, 50.0
"""Limits of an extrapolation: on the convergence ratio, and on the change of a factor (as a power of e)."""


@compiled()
def scale(K, Kt, rows, columns, u, v, iterations, tolerance):  # type: ignore[no-untyped-def]
    """u_a ← rows_a / (K v)_a, v_b ← columns_b / (Kᵀ u)_b, until the row sums of u K v are right to `tolerance`.

    Kt is Kᵀ with contiguous rows, so that both products add whole rows with SIMD instructions. Every few iterations v
    is extrapolated; if the error did not fall, the interval doubles. Returns the number of iterations and whether the
    sums have converged; it ends early if factors become extreme.
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
    """Aitken extrapolation: log v ← log v + λ/(1 − λ)·Δ, with the last change Δ and its ratio λ to the previous one.

    This is the limit if all further changes had the same ratio.
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
