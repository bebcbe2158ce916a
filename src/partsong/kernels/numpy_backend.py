"""Kernels for NumPy arrays: numba loops and BLAS products over row ranges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from partsong.core import runtime
from partsong.kernels import nnls as compiled
from partsong.kernels.nnls import solve_rows

Floats = np.ndarray

GRAM_ROWS = 1024
"""Number of rows whose products are summed together."""


def capabilities(F: Floats) -> frozenset[str]:
    """Loops compiled by numba, including fused local steps."""
    return frozenset({"compiled"})


def sweep(F: Floats, gram: Floats, cross: Floats, sweeps: int, out: Floats | None = None) -> Floats:
    """Coordinate descent on ½‖A − F B‖²: F_j ← max(0, F_j + (cross_j − F gram_j) / gram_jj), `sweeps` times over j.

    Components with gram_jj = 0 do not enter the problem and do not change. The result is written to `out` if given.
    """
    gram = np.ascontiguousarray(gram, F.dtype)
    diagonal = np.diagonal(gram)
    # The reciprocal of a subnormal number may be infinite.
    inverse = np.divide(1, diagonal, out=np.zeros_like(diagonal), where=diagonal > np.finfo(F.dtype).tiny * 4)
    cross = np.ascontiguousarray(cross, F.dtype)
    result = np.empty(F.shape, F.dtype) if out is None else out
    runtime.map_ranges(
        _pieces(F, sweeps * F.shape[1]),
        lambda a, b: compiled.sweep_rows(F[a:b], gram, inverse, cross[a:b], result[a:b], sweeps),
    )
    return result


def multiply(F: Floats, gram: Floats, cross: Floats) -> Floats:
    """F ∘ cross / (F gram), the multiplicative step."""
    out = np.empty(F.shape, F.dtype)
    floor = np.finfo(F.dtype).tiny
    gram, cross = gram.astype(F.dtype, copy=False), cross.astype(F.dtype, copy=False)
    runtime.map_ranges(
        _pieces(F, F.shape[1]), lambda a, b: compiled.multiply_rows(F[a:b], F[a:b] @ gram, cross[a:b], floor, out[a:b])
    )
    return out


def descend(F: Floats, gram: Floats, cross: Floats, step: Any) -> Floats:
    """max(0, F − step (F gram − cross)), the projected gradient step; `step` is a number or a 0-d array."""
    out = np.empty(F.shape, F.dtype)
    gram, cross, size = gram.astype(F.dtype, copy=False), cross.astype(F.dtype, copy=False), F.dtype.type(step)
    runtime.map_ranges(
        _pieces(F, F.shape[1]), lambda a, b: compiled.descend_rows(F[a:b], F[a:b] @ gram, cross[a:b], size, out[a:b])
    )
    return out


def extrapolate(new: Floats, old: Floats, amount: Any) -> Floats:
    """max(0, new + amount (new − old))."""
    out = np.empty(new.shape, new.dtype)
    scale = new.dtype.type(amount)
    runtime.map_ranges(_pieces(new, 4), lambda a, b: compiled.extrapolate_rows(new[a:b], old[a:b], scale, out[a:b]))
    return out


def solve_exactly(F: Floats, gram: Floats, cross: Floats) -> Floats:
    """argmin over F ≥ 0 of ½ tr(F gram Fᵀ) − ⟨F, cross⟩, starting from F; see kernels.nnls.

    Components are first scaled to a length near one by powers of two, which is exact. Everything is in float64, so that
    one compiled kernel serves every type.
    """
    diagonal = np.diagonal(gram).astype(np.float64)
    scale = np.where(diagonal > 0, np.ldexp(1.0, -(np.frexp(diagonal)[1] // 2)), 0.0)
    scaled = scale[:, None] * np.asarray(gram, np.float64) * scale
    start, cross = np.ascontiguousarray(F, np.float64), np.ascontiguousarray(cross, np.float64)
    flat = 16 * float(np.finfo(F.dtype).eps)
    out = np.empty(F.shape)
    runtime.map_ranges(
        _pieces(F, F.shape[1] ** 2), lambda a, b: solve_rows(scaled, scale, cross[a:b], start[a:b], flat, out[a:b])
    )
    return out.astype(F.dtype, copy=False)


def gram(F: Floats, exactly: bool = True) -> Floats:
    """Fᵀ F in float64, which the trace formula for errors needs.

    Without `exactly`, products of row blocks are in the type of F, and only their sums in float64.
    """
    kind = np.float64 if exactly else F.dtype

    def work(start: int, stop: int) -> Floats:
        total = np.zeros((F.shape[1], F.shape[1]))
        for a in range(start, stop, GRAM_ROWS):
            block = F[a : min(a + GRAM_ROWS, stop)].astype(kind, copy=False)
            total += block.T @ block
        return total

    parts = runtime.map_ranges(_pieces(F, F.shape[1]), work)
    return sum(parts[1:], parts[0])


def inner(A: Floats, B: Floats) -> Floats:
    """⟨A, B⟩ in float64, as a 0-d array."""
    return np.asarray(
        sum(runtime.map_ranges(_pieces(A, 2), lambda a, b: compiled.inner_rows(A[a:b], B[a:b]))), np.float64
    )


def total(F: Floats) -> Floats:
    """ΣF in float64, as a 0-d array."""
    return np.asarray(F.sum(dtype=np.float64))


def largest_eigenvalue(gram: Floats) -> Floats:
    """‖gram‖₂ of a symmetric positive semi-definite matrix, as a 0-d array; infinite if an entry is not finite."""
    values = np.asarray(gram, np.float64)
    return np.asarray(np.linalg.eigvalsh(values)[-1] if np.isfinite(values).all() else np.inf)


def plus_diagonal(gram: Floats, amount: Any) -> Floats:
    """gram + amount·I, for a number or a 0-d array."""
    return gram + gram.dtype.type(amount) * np.eye(len(gram), dtype=gram.dtype)


def scalar(value: Any, like: Floats) -> Floats:
    """A number, or a 0-d array of any kind, as a 0-d array in float64."""
    return np.asarray(value, np.float64)


def where(condition: Any, one: Any, other: Any) -> Any:
    """Select one of two values by a 0-d condition; the result is an array even for plain numbers."""
    return np.asarray(one if condition else other)


def choose(condition: Any, one: Callable[[], Any], other: Callable[[], Any]) -> Any:
    """The same for values that are computed only if needed."""
    return one() if condition else other()


def is_known_false(condition: Any) -> bool:
    """Whether a 0-d condition is known to be false without waiting for a device."""
    return not condition


def cast(values: Any, example: Any) -> Floats:
    """Convert an array or tensor to the type and device of `example`, without a copy if possible."""
    array = values.detach().cpu() if hasattr(values, "detach") else values
    return np.asarray(array).astype(example.dtype, copy=False)


def empty(shape: tuple[int, ...], like: Floats) -> Floats:
    """Uninitialized memory of a given shape, with the type and device of `like`."""
    return np.empty(shape, like.dtype)


def tile(F: Floats, columns: int) -> Floats:
    """The vector F repeated as `columns` equal columns."""
    return np.repeat(F[:, None], columns, axis=1)


def rows_of(H: Floats) -> Floats:
    """Hᵀ as contiguous rows; no copy if H is a transposed view of such rows."""
    return np.ascontiguousarray(H.T)


def to_numpy(F: Floats) -> np.ndarray:
    """As a NumPy array."""
    return F


def _pieces(F: Floats, per_entry: float) -> list[tuple[int, int]]:
    return runtime.split_range(F.shape[0], 2.0 * F.shape[0] * F.shape[1] * per_entry)
