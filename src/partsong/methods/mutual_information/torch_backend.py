"""Array operations of descent and critics for torch tensors, on their own device; same formulas as `numpy_backend`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from partsong.methods.mutual_information.padded_batch import PaddedBatch


def times(batch: Any, B: Tensor) -> Tensor:
    """X_S B (b × c), for B (V × c)."""
    words, counts, starts = _entries(batch)
    return embedding_bag(words, B, starts, mode="sum", per_sample_weights=counts)[: len(batch)]


def add_transposed(batch: Any, F: Tensor, scale: float, out: Tensor) -> None:
    """out += scale · X_SᵀF, for F (b × c) and out (V × c)."""
    words, counts, _ = _entries(batch)
    out.index_add_(0, words, F[_owners(batch)] * counts[:, None], alpha=scale)


def _entries(batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Words and counts of a batch, and the start of each document."""
    if isinstance(batch, PaddedBatch):
        return batch.words, batch.counts, batch.starts
    begin, end = int(batch.starts[batch.first]), int(batch.starts[batch.last])
    return batch.words[begin:end], batch.counts[begin:end], batch.documents.offsets[batch.first : batch.last] - begin


def _owners(batch: Any) -> Tensor:
    """The document of each entry, within the batch."""
    if isinstance(batch, PaddedBatch):
        return batch.owners
    return batch.documents.owners[int(batch.starts[batch.first]) : int(batch.starts[batch.last])] - batch.first


def product(A: Tensor, B: Tensor, out: Tensor) -> Tensor:
    """A B, in `out`."""
    return torch.matmul(A, B, out=out)


def rectify(Z: Tensor) -> Tensor:
    """Z ← max(0, Z), in place."""
    return Z.clamp_(min=0)


def mask(D: Tensor, A: Tensor) -> Tensor:
    """D ← D ∘ [A > 0], in place."""
    return D.masked_fill_(A <= 0, 0)


def pair_up(U: Tensor, V: Tensor) -> Tensor:
    """max(0, U_i + V_j) for all pairs, as rows i·b + j."""
    return (U[:, None] + V[None]).clamp_(min=0).reshape(-1, U.shape[1])


def rectify_and_weigh(Z: Tensor, shift: Tensor, last: Tensor) -> Tensor:
    """Z ← max(0, Z + shift), in place; returns Z · last."""
    return Z.add_(shift).clamp_(min=0) @ last


def spread(Z: Tensor, slopes: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Z ← (slopes ⊗ last) ∘ [Z > 0], in place; returns Zᵀ slopes of Z before, and Σ_p Z_p after."""
    d_last, is_dead = Z.T @ slopes, Z <= 0
    torch.mul(slopes[:, None], last, out=Z).masked_fill_(is_dead, 0)
    return d_last, Z.sum(0)


def fold(D: Tensor, A: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """D ∘ [A > 0] of b·b pairs, summed over the second of each pair, and over the first."""
    cube = mask(D, A).reshape(b, b, -1)
    return cube.sum(1), cube.sum(0)


def exp(Z: Tensor) -> Tensor:
    """e^Z."""
    return torch.exp(Z)


def log(Z: Tensor) -> Tensor:
    """log Z."""
    return torch.log(Z)


def unit(size: int, like: Tensor) -> Tensor:
    """The identity, with the type and device of `like`."""
    return torch.eye(size, dtype=like.dtype, device=like.device)


def places(order: np.ndarray, like: Tensor) -> Tensor:
    """Convert positions to an index for arrays of this kind."""
    return torch.from_numpy(order).to(like.device)
