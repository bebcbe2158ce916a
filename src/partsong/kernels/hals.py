"""Numba kernels on tiles of rows: coordinate descent, multiplicative and gradient steps, sums.

A tile of 128 rows is held transposed, so that SIMD lanes are rows and the loop over components is unrolled by eight;
several sweeps are done while the tile is in cache. Rows are transposed in squares of 16, which compilers turn into
shuffles. All kernels are serial and release the GIL.
"""

from __future__ import annotations

import numpy as np

from partsong.kernels.compiling import FAST, compiled

LANES = 128
SQUARE = 16
VANISHING = 2.0**24
"""Numbers below this many times the smallest normal one become zero: processors take long over those that are not."""


@compiled(fastmath=FAST, inline="always")
def _load(F, f, start, rows):  # type: ignore[no-untyped-def]
    """f ← rows of F transposed, with zeros in the lanes that are left over."""
    k = F.shape[1]
    whole = rows // SQUARE * SQUARE
    for first in range(0, whole, SQUARE):
        for j in range(k):
            for r in range(SQUARE):
                f[j, first + r] = F[start + first + r, j]
    for j in range(k):
        for r in range(whole, rows):
            f[j, r] = F[start + r, j]
        for r in range(rows, LANES):
            f[j, r] = 0


@compiled(fastmath=FAST, inline="always")
def _store(f, out, start, rows):  # type: ignore[no-untyped-def]
    """Rows of out ← f transposed."""
    k = f.shape[0]
    whole = k // SQUARE * SQUARE
    for first in range(0, whole, SQUARE):
        for r in range(rows):
            for j in range(SQUARE):
                out[start + r, first + j] = f[first + j, r]
    for r in range(rows):
        for j in range(whole, k):
            out[start + r, j] = f[j, r]


@compiled(fastmath=FAST, inline="always")
def _sweep_tile(f, c, gram, inverse, residual):  # type: ignore[no-untyped-def]
    """One pass over the components of a tile."""
    k = f.shape[0]
    zero = f.dtype.type(0)
    for j in range(k):
        if inverse[j] == zero:
            continue
        for r in range(LANES):
            residual[r] = c[j, r]
        l = 0
        while l + 8 <= k:
            g0, g1, g2, g3 = gram[j, l], gram[j, l + 1], gram[j, l + 2], gram[j, l + 3]
            g4, g5, g6, g7 = gram[j, l + 4], gram[j, l + 5], gram[j, l + 6], gram[j, l + 7]
            for r in range(LANES):
                residual[r] -= (
                    g0 * f[l, r]
                    + g1 * f[l + 1, r]
                    + g2 * f[l + 2, r]
                    + g3 * f[l + 3, r]
                    + g4 * f[l + 4, r]
                    + g5 * f[l + 5, r]
                    + g6 * f[l + 6, r]
                    + g7 * f[l + 7, r]
                )
            l += 8
        while l < k:
            g0 = gram[j, l]
            for r in range(LANES):
                residual[r] -= g0 * f[l, r]
            l += 1
        step = inverse[j]
        for r in range(LANES):
            f[j, r] = max(zero, f[j, r] + residual[r] * step)


@compiled(fastmath=FAST)
def sweep_rows(F, gram, inverse, cross, out, sweeps):  # type: ignore[no-untyped-def]
    """`sweeps` passes over the components of each tile."""
    n, k = F.shape
    f = np.empty((k, LANES), F.dtype)
    c = np.empty((k, LANES), F.dtype)
    residual = np.empty(LANES, F.dtype)
    for start in range(0, n, LANES):
        rows = min(LANES, n - start)
        _load(F, f, start, rows)
        _load(cross, c, start, rows)
        for _ in range(sweeps):
            _sweep_tile(f, c, gram, inverse, residual)
        _store(f, out, start, rows)


@compiled(fastmath=FAST)
def multiply_rows(F, product, cross, floor, out):  # type: ignore[no-untyped-def]
    """out = F ∘ max(cross, 0) / max(product, floor), and zero where that vanishes."""
    zero, least = F.dtype.type(0), F.dtype.type(VANISHING * np.finfo(F.dtype).tiny)
    for i in range(F.shape[0]):
        for j in range(F.shape[1]):
            moved = F[i, j] * max(cross[i, j], zero) / max(product[i, j], floor)
            out[i, j] = moved if moved >= least else zero


@compiled(fastmath=FAST)
def descend_rows(F, product, cross, step, out):  # type: ignore[no-untyped-def]
    """out = max(0, F − step (product − cross)), and zero where that vanishes."""
    zero, least = F.dtype.type(0), F.dtype.type(VANISHING * np.finfo(F.dtype).tiny)
    for i in range(F.shape[0]):
        for j in range(F.shape[1]):
            moved = F[i, j] - step * (product[i, j] - cross[i, j])
            out[i, j] = moved if moved >= least else zero


@compiled(fastmath=FAST)
def extrapolate_rows(new, old, amount, out):  # type: ignore[no-untyped-def]
    """out = max(0, new + amount (new − old))."""
    zero = new.dtype.type(0)
    for i in range(new.shape[0]):
        for j in range(new.shape[1]):
            out[i, j] = max(zero, new[i, j] + amount * (new[i, j] - old[i, j]))


@compiled(fastmath=FAST)
def inner_rows(A, B):  # type: ignore[no-untyped-def]
    """⟨A, B⟩ summed in float64."""
    total = 0.0
    for i in range(A.shape[0]):
        for j in range(A.shape[1]):
            total += np.float64(A[i, j]) * np.float64(B[i, j])
    return total
