"""What sketches give away: a matrix from enough of them, and how many are not enough."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partsong import kernels
from partsong.core.interfaces import Array
from partsong.errors import ParameterError, ShapeError
from partsong.sketch.operator import Operator


def recover_from_sketches(sketches: Sequence[Array], operators: Sequence[Operator]) -> np.ndarray:
    """M = Y S⁺ from Y_t = M S_t (r × d_t), side by side, as whoever knows the seed can: an attack, not a tool.

    Exact once [S_1 … S_T] has rank `size`, which for Gaussian sketches is as soon as Σ d_t ≥ size (Qian et al., 2020,
    Thm. 3); before that, the projection of M on what has been seen. Both from float64 sketches up to rounding.
    """
    seen = [np.asarray(kernels.of(sketch).to_numpy(sketch), np.float64) for sketch in sketches]
    _require_fitting(seen, operators)
    S = np.hstack([operator.rows(0, operator.size) for operator in operators])
    return np.linalg.lstsq(S.T, np.hstack(seen).T, rcond=None)[0].T


def most_sketches(size: int, dimension: int) -> int:
    """⌊(size − 1)/dimension⌋: with so many sketches of one matrix, other matrices still have the same ones.

    That is all it says. Of every row an observer then knows Σ d of `size` coordinates in a random basis; what is else
    known of the matrix (it is non-negative, sparse) can settle the rest. A subsampling sketch publishes d
    columns as they are, from the first one on; a count sketch those that are alone in their place.
    """
    if size < 1 or dimension < 1:
        raise ParameterError(f"size and dimension must be at least 1; got size={size}, dimension={dimension}.")
    return (size - 1) // dimension


def _require_fitting(sketches: Sequence[np.ndarray], operators: Sequence[Operator]) -> None:
    if not operators or len(sketches) != len(operators):
        raise ShapeError(
            f"Every sketch needs the operator it was made with, and there must be one; "
            f"got {len(sketches)} sketches and {len(operators)} operators."
        )
    sizes = sorted({operator.size for operator in operators})
    if len(sizes) > 1:
        raise ShapeError(f"Sketches of one matrix are of one size; these are of sizes {sizes}.")
    for number, (sketch, operator) in enumerate(zip(sketches, operators, strict=True)):
        if sketch.shape != (len(sketches[0]), operator.dimension):
            raise ShapeError(
                f"Sketch {number} has shape {sketch.shape}, but its operator and the first sketch make it "
                f"{(len(sketches[0]), operator.dimension)}. Give sketches and operators in the same order."
            )
