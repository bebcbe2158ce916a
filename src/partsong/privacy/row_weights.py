"""Weights w of rows, each from its own row and the public H alone, to the last bit: what Theorem 6 assumes."""

from __future__ import annotations

from typing import Any

import numpy as np

from partsong import kernels
from partsong.core import Array
from partsong.errors import PartyError, ShapeError

MODEL_UNIT = 2.0**-24
"""Parties round H to it: products of whole numbers of units have no rounding error, whatever rows are beside them."""
BLOCK = 1 << 13


def row_weights(rows: Any, H: Any, row_unit: float, sweeps: int) -> Any:
    """W (n × k) by sweeps from c·1, c = Σ_j cross_j / Σ gram; each row from itself and H alone, to the last bit.

    `rows` and H are whole numbers (of row_unit and MODEL_UNIT), so that products are exact however they are blocked;
    what follows is one operation at a time on all rows, without sums across or orders that depend on them.
    """
    gram = (H @ H.T) * MODEL_UNIT**2
    total, k = float(gram.sum()), H.shape[0]
    W = np.empty((rows.shape[0], k))
    for start in range(0, rows.shape[0], BLOCK):
        cross = np.ascontiguousarray((rows[start : start + BLOCK] @ H.T).T) * (row_unit * MODEL_UNIT)
        scale = np.zeros(cross.shape[1])
        for part in cross:
            scale += part
        block = np.tile(scale / total if total > 0 else scale * 0, (k, 1))
        for j in (j for _ in range(sweeps) for j in range(k) if gram[j, j] > 0):
            rest = cross[j].copy()
            for other in (other for other in range(k) if other != j and gram[other, j] > 0):
                rest -= gram[other, j] * block[other]
            block[j] = np.maximum(0.0, rest / gram[j, j])
        W[start : start + BLOCK] = block.T
    return W


def whole_model(party: str, values: Array, shape: tuple[int, int]) -> Any:
    """H in whole units; a party does not take the server's word for its size."""
    return np.rint(sound_model(party, values, shape) / MODEL_UNIT)


def sound_model(party: str, values: Array, shape: tuple[int, int]) -> Any:
    """H in float64, if it is what a private program broadcasts: a model that lets some data fail would ask about them.

    Nothing of the party's data is looked at, so that a refusal tells nothing of them.
    """
    H = np.asarray(kernels.of(values).to_numpy(values), np.float64)
    if H.shape != shape:
        raise ShapeError(f"Party {party!r} was sent an H of shape {H.shape}, not {shape}; nothing was computed.")
    with np.errstate(over="ignore", invalid="ignore"):
        is_sound = bool((H >= 0).all() and (np.square(H).sum(axis=1) <= 1.01).all())
    if not is_sound:
        raise PartyError(
            f"Party {party!r} was sent an H that is not non-negative with rows of unit norm; nothing was computed. "
            "Check the server, or the checkpoint that the run goes on from."
        )
    return H
