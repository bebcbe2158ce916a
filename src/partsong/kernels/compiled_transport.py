"""Numba kernel of entropic transport: the scaling iteration on a kernel that was made in the log domain."""

from __future__ import annotations

import numpy as np

from partsong.kernels.compiling import compiled

SMALLEST, LARGEST = 1e-50, 1e50
"""Factors beyond these go back to the log domain before they underflow."""
NOTHING = 1e-150
"""Entries of a kernel below this add nothing, whatever the factors; as numbers without full precision they are slow."""


@compiled()
def scale(K, rows, columns, u, v, iterations, tolerance):  # type: ignore[no-untyped-def]
    """u_a ← rows_a / (K v)_a, v_b ← columns_b / (Kᵀ u)_b, until the row sums of u K v are right to `tolerance`.

    Returns how many iterations were done, and whether the sums are right; it ends early where factors become extreme.
    """
    k, l = K.shape
    sums, back = np.empty(k), np.empty(l)
    for a in range(k):
        total = 0.0
        for b in range(l):
            total += K[a, b] * v[b]
        sums[a] = total
    for done in range(1, iterations + 1):
        for b in range(l):
            back[b] = 0.0
        for a in range(k):
            if not SMALLEST < sums[a] < LARGEST:
                return done - 1, False
            u[a] = rows[a] / sums[a]
            for b in range(l):
                back[b] += K[a, b] * u[a]
        for b in range(l):
            if not SMALLEST < back[b] < LARGEST:
                return done - 1, False
        for b in range(l):
            v[b] = columns[b] / back[b]
        error = 0.0
        for a in range(k):
            total = 0.0
            for b in range(l):
                total += K[a, b] * v[b]
            sums[a] = total
            error += abs(u[a] * total - rows[a])
        if error <= tolerance:
            return done, True
    return iterations, False
