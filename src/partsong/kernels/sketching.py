"""Numba kernels for products with sketches; serial, GIL released, never densify.

An S with one entry per row is given as lists: `order` and `weights` are the coordinates and their entries of S, sorted
by place (column of S); `begins` has the start (and end) of the list of each place, `places` the non-empty places.
"""

from __future__ import annotations

import numpy as np

from partsong.kernels.compiling import FAST, compiled

LANES = 16
"""Rows that are processed together."""
IN_ORDER = {"contract"}
"""Fast-math flags for short sums, which get slower if they may be reordered for wide registers."""
SHORT = 32
"""Maximum number of terms that are summed in the type of the data."""


@compiled(fastmath=IN_ORDER)
def place_along_rows(block, order, weights, begins, places, out):  # type: ignore[no-untyped-def]
    """out[i, place] += Σ weight·block[i, coordinate], for blocks with contiguous rows."""
    total = np.empty(LANES)
    whole = block.shape[0] - block.shape[0] % LANES
    for top in range(0, whole, LANES):
        for t in range(places.shape[0]):
            total[:] = 0
            for q in range(begins[t], begins[t + 1]):
                w, j = weights[q], order[q]
                for i in range(LANES):
                    total[i] += w * block[top + i, j]
            for i in range(LANES):
                out[top + i, places[t]] += total[i]
    for i in range(whole, block.shape[0]):
        for t in range(places.shape[0]):
            rest = 0.0
            for q in range(begins[t], begins[t + 1]):
                rest += weights[q] * block[i, order[q]]
            out[i, places[t]] += rest


@compiled(fastmath=FAST)
def place_columns(block, order, weights, begins, places, out):  # type: ignore[no-untyped-def]
    """The same for blocks with contiguous columns."""
    total = np.empty(block.shape[0])
    for t in range(places.shape[0]):
        total[:] = 0
        for q in range(begins[t], begins[t + 1]):
            w, x = weights[q], block[:, order[q]]
            for i in range(x.shape[0]):
                total[i] += w * x[i]
        for i in range(total.shape[0]):
            out[i, places[t]] += total[i]


@compiled(fastmath=FAST)
def place_entries(indptr, indices, data, places, weights, start, out):  # type: ignore[no-untyped-def]
    """out[i, places[j]] += weights[j]·x for the entries x of row start + i in column j; `out` starts as zeros."""
    total = np.zeros(out.shape[1])
    for i in range(out.shape[0]):
        first, last = indptr[start + i], indptr[start + i + 1]
        row = out[i]
        if last - first <= SHORT:
            for p in range(first, last):
                j = indices[p]
                if places[j] >= 0:
                    row[places[j]] += weights[j] * data[p]
            continue
        for p in range(first, last):
            j = indices[p]
            if places[j] >= 0:
                total[places[j]] += weights[j] * data[p]
        for c in range(out.shape[1]):
            row[c] = total[c]
            total[c] = 0


@compiled(fastmath=FAST)
def place_rows(indptr, indices, data, order, weights, begins, places, out):  # type: ignore[no-untyped-def]
    """out[place] += Σ weight·(row of a CSR matrix) over the rows in the list of each place; `out` starts as zeros."""
    total = np.zeros(out.shape[1])
    for t in range(places.shape[0]):
        row = out[places[t]]
        if begins[t + 1] - begins[t] <= SHORT:
            for q in range(begins[t], begins[t + 1]):
                for p in range(indptr[order[q]], indptr[order[q] + 1]):
                    row[indices[p]] += weights[q] * data[p]
            continue
        for q in range(begins[t], begins[t + 1]):
            for p in range(indptr[order[q]], indptr[order[q] + 1]):
                total[indices[p]] += weights[q] * data[p]
        for j in range(out.shape[1]):
            row[j] = total[j]
            total[j] = 0


@compiled(inline="always")
def _is_odd(bits):  # type: ignore[no-untyped-def]
    """Whether an odd number of bits is set."""
    bits ^= bits >> 32
    bits ^= bits >> 16
    bits ^= bits >> 8
    bits ^= bits >> 4
    return (0x6996 >> (bits & 15)) & 1


@compiled()
def hadamard_entries(indices, signs, chosen, out):  # type: ignore[no-untyped-def]
    """out[q, c] = signs[q]·(−1)^|indices[q] ∧ chosen[c]|."""
    for q in range(out.shape[0]):
        for c in range(out.shape[1]):
            out[q, c] = -signs[q] if _is_odd(indices[q] & chosen[c]) else signs[q]


@compiled(inline="always")
def _transform(group):  # type: ignore[no-untyped-def]
    """The Walsh–Hadamard transform of each column, in place: two levels at a time, then the last one if any."""
    length, step = group.shape[0], 1
    while 4 * step <= length:
        for top in range(0, length, 4 * step):
            for j in range(top, top + step):
                a, b, c, d = group[j], group[j + step], group[j + 2 * step], group[j + 3 * step]
                for i in range(LANES):
                    p, q, r, s = a[i] + b[i], a[i] - b[i], c[i] + d[i], c[i] - d[i]
                    a[i], b[i], c[i], d[i] = p + r, q + s, p - r, q - s
        step *= 4
    if step < length:
        for j in range(step):
            a, b = group[j], group[j + step]
            for i in range(LANES):
                a[i], b[i] = a[i] + b[i], a[i] - b[i]


@compiled(inline="always")
def _fill(group, block, signs, top):  # type: ignore[no-untyped-def]
    """group[j, i] = signs[j]·block[top + i, j]; zero beyond the last row."""
    if top + LANES <= block.shape[0]:
        for j in range(block.shape[1]):
            for i in range(LANES):
                group[j, i] = signs[j] * block[top + i, j]
        return
    group[:] = 0
    for j in range(block.shape[1]):
        for i in range(block.shape[0] - top):
            group[j, i] = signs[j] * block[top + i, j]


@compiled()
def hadamard_rows(block, signs, start, chosen, length, out):  # type: ignore[no-untyped-def]
    """out[i, c] += Σ_j block[i, j] signs[j] (−1)^|(start + j) ∧ chosen[c]|.

    Coordinates are processed in groups of `length` (a power of two) that start at its multiples: within one, the upper
    bits give one sign for each c, and the lower bits a transform of that length.
    """
    group = np.empty((length, LANES), out.dtype)
    total = np.empty((chosen.shape[0], LANES), out.dtype)
    stop = start + block.shape[1]
    for top in range(0, block.shape[0], LANES):
        total[:] = 0
        for base in range(start - start % length, stop, length):
            first, last = max(base, start), min(base + length, stop)
            group[: first - base] = 0
            group[last - base :] = 0
            here = slice(first - start, last - start)
            _fill(group[first - base : last - base], block[:, here], signs[here], top)
            _transform(group)
            for c in range(chosen.shape[0]):
                sums, row = total[c], group[chosen[c] & (length - 1)]
                if _is_odd(base & chosen[c]):
                    for i in range(LANES):
                        sums[i] -= row[i]
                else:
                    for i in range(LANES):
                        sums[i] += row[i]
        for c in range(chosen.shape[0]):
            for i in range(min(LANES, block.shape[0] - top)):
                out[top + i, c] += total[c, i]
