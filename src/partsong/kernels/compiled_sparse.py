"""Numba kernels for rows in CSR form; serial, GIL released, never densify."""

from __future__ import annotations

from partsong.kernels.compiled_sweeps import FAST
from partsong.kernels.compiling import compiled


@compiled(fastmath=FAST)
def add_rows(indptr, indices, data, rows, weights, out):  # type: ignore[no-untyped-def]
    """out += Σ_r weights[r] · row rows[r]."""
    for r in range(rows.shape[0]):
        for p in range(indptr[rows[r]], indptr[rows[r] + 1]):
            out[indices[p]] += weights[r] * data[p]
