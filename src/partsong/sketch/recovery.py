"""Recover a matrix from its sketches, and count how many sketches leave it undetermined."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partsong import kernels
from partsong.core.interfaces import Array
from partsong.errors import ParameterError, ShapeError
from partsong.sketch.operator import Operator


def recover_from_sketches(sketches: Sequence[Array], operators: Sequence[Operator]) -> np.ndarray:
    """Return M = Y S⁺ from the concatenated Y_t = M S_t (r × d_t): an attack by anyone who knows the seed.

    Exact once [S_1 … S_T] has rank `size`, which for Gaussian sketches is as soon as Σ d_t ≥ size (Qian et al., 2020,
    Thm. 3); before that, the projection of M on the observed directions. Both up to rounding of float64 sketches.
    """
    seen = [np.asarray(kernels.of(sketch).to_numpy(sketch), np.float64) for sketch in sketches]
    _require_fitting(seen, operators)
    S = np.hstack([operator.rows(0, operator.size) for operator in operators])
    return np.linalg.lstsq(S.T, np.hstack(seen).T, rcond=None)[0].T


def most_sketches(size: int, dimension: int) -> int:
    """Return ⌊(size − 1)/dimension⌋: with this many sketches of a matrix, other matrices have the same sketches.

    This is not a privacy guarantee. An observer then knows Σ d of `size` coordinates of each row in a random basis, and
    side information (the matrix is non-negative, sparse) may determine the rest. A subsampling sketch publishes d
    columns from the first one on; a count sketch publishes columns that are alone in their place.
    """
    if size < 1 or dimension < 1:
        raise ParameterError(f"size and dimension must be at least 1; got size={size}, dimension={dimension}.")
    return (size - 1) // dimension


def _require_fitting(sketches: Sequence[np.ndarray], operators: Sequence[Operator]) -> None:
    if not operators or len(sketches) != len(operators):
        raise ShapeError(
            f"Pass at least one sketch, and the operator of each sketch; got {len(sketches)} sketches and "
            f"{len(operators)} operators."
        )
    sizes = sorted({operator.size for operator in operators})
    if len(sizes) > 1:
        raise ShapeError(f"Sketches of one matrix must have one size; got sizes {sizes}.")
    for number, (sketch, operator) in enumerate(zip(sketches, operators, strict=True)):
        if sketch.shape != (len(sketches[0]), operator.dimension):
            raise ShapeError(
                f"Sketch {number} has shape {sketch.shape}, but must have {(len(sketches[0]), operator.dimension)} by "
                "its operator and the first sketch. Pass sketches and operators in the same order."
            )
