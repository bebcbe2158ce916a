"""Array operations of descent and critics for NumPy; `torch_backend` has the same for tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from partsong.kernels import csr_products, topics


def times(batch: Any, B: np.ndarray) -> np.ndarray:
    """X_S B (b × c), for B (V × c)."""
    out = np.empty((len(batch), B.shape[1]), B.dtype)
    csr_products.gather_rows(batch.starts, batch.words, batch.counts, B, batch.first, out)
    return out


def add_transposed(batch: Any, F: np.ndarray, scale: float, out: np.ndarray) -> None:
    """out += scale · X_SᵀF, for F (b × c) and out (V × c)."""
    F, scale = np.ascontiguousarray(F), F.dtype.type(scale)
    topics.add_transposed(batch.starts, batch.words, batch.counts, F, batch.first, scale, out)


def product(A: np.ndarray, B: np.ndarray, out: np.ndarray) -> np.ndarray:
    """A B, in `out`."""
    return np.matmul(A, B, out=out)


def rectify(Z: np.ndarray) -> np.ndarray:
    """Z ← max(0, Z), in place."""
    topics.rectify(Z)
    return Z


def mask(D: np.ndarray, A: np.ndarray) -> np.ndarray:
    """D ← D ∘ [A > 0], in place."""
    topics.mask(D, A)
    return D


def pair_up(U: np.ndarray, V: np.ndarray) -> np.ndarray:
    """max(0, U_i + V_j) for all pairs, as rows i·b + j."""
    out = np.empty((len(U) * len(V), U.shape[1]), U.dtype)
    topics.pair_up(U, V, out)
    return out


def rectify_and_weigh(Z: np.ndarray, shift: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Z ← max(0, Z + shift), in place; returns Z · last."""
    scores = np.empty(len(Z), Z.dtype)
    topics.rectify_and_weigh(Z, shift, last, scores)
    return scores


def spread(Z: np.ndarray, slopes: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Z ← (slopes ⊗ last) ∘ [Z > 0], in place; returns Zᵀ slopes of Z before, and Σ_p Z_p after."""
    d_last, d_shift = np.empty_like(last), np.empty_like(last)
    topics.spread(Z, slopes, last, d_last, d_shift)
    return d_last, d_shift


def fold(D: np.ndarray, A: np.ndarray, b: int) -> tuple[np.ndarray, np.ndarray]:
    """D ∘ [A > 0] of b·b pairs, summed over the second of each pair, and over the first."""
    d_U, d_V = np.empty((b, D.shape[1]), D.dtype), np.empty((b, D.shape[1]), D.dtype)
    topics.fold(D, A, d_U, d_V)
    return d_U, d_V


def exp(Z: np.ndarray) -> np.ndarray:
    """e^Z."""
    return np.exp(Z)


def log(Z: np.ndarray) -> np.ndarray:
    """log Z."""
    return np.log(Z)


def unit(size: int, like: np.ndarray) -> np.ndarray:
    """The identity, in the type of `like`."""
    return np.eye(size, dtype=like.dtype)


def places(order: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Convert positions to an index for arrays of this kind."""
    return order
