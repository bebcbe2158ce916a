"""S Bᵀ for a narrow B, without all of S at once: as small as a factor, where X S may be far larger than X."""

from __future__ import annotations

from typing import Any

from partsong import kernels
from partsong.core import Array, Matrix
from partsong.sketch.operator import Operator

BLOCK_BYTES = 16 << 20
"""Entries of S that exist at a time."""


def places_of(S: Operator) -> Any:
    """The entries of an S that has at most one in each row; None of any other."""
    found = getattr(S.pattern, "placed", None)
    return None if found is None else found(0, S.size)


def placed(matrix: Matrix, places: Any, B: Array) -> Array:
    """The rows of S Bᵀ that are not zero."""
    return kernels.of(B).rows_of(B)[places.places] * matrix.native(places.weights[:, None])


def spread(matrix: Matrix, S: Operator, B: Array) -> Array:
    """S Bᵀ (size × k) for B (k × d), from some rows of S at a time, in the type and place of the matrix."""
    on = kernels.of(B)
    places = places_of(S)
    if places is not None and len(places.coordinates) == S.size:
        return placed(matrix, places, B)
    out = on.empty((S.size, B.shape[0]), B)
    if places is not None:
        out[:] = 0
        out[places.coordinates] = placed(matrix, places, B)
        return out
    height = max(1, BLOCK_BYTES // (8 * S.dimension))
    for start in range(0, S.size, height):
        stop = min(start + height, S.size)
        out[start:stop] = matrix.native(S.rows(start, stop)) @ B.T
    return out
