"""What sketches X S_t give away when S_t is known: of any X, and of one that is not negative and sparse."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog

from partsong.sketch.operator import Operator
from partsong.sketch.recover import recover_from_sketches
from partsong.sketch.subsampling import ChosenCoordinates

HELD_OUT = 0.03
"""The share of equations that are left aside, to see whether what was found from the others meets them."""


def linear_rows(sketches: Sequence[np.ndarray], operators: Sequence[Operator], n_rows: int) -> np.ndarray:
    """X_p (n × m) from X_pᵀS_t (m × d) alone: exact once T·d ≥ n (Qian et al., 2020, Thm. 3)."""
    return recover_from_sketches(sketches, operators).T[:n_rows]


def sparse_rows(S: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """X (n × m) with Sᵀ X = seen (T·d × m), X ≥ 0, of least sum: column by column, a linear program.

    For Gaussian S, columns with few entries are the only such X well before T·d reaches n (Donoho and Tanner, 2005).
    A column for which the program finds nothing comes out as least squares have it, cut off at zero.
    """
    found = np.maximum(0.0, np.linalg.lstsq(S.T, seen, rcond=None)[0])
    weights = np.ones(len(S))
    for j, column in enumerate(seen.T):
        size = float(np.abs(column).max())
        if size == 0:
            found[:, j] = 0.0
            continue
        solved = linprog(weights, A_eq=S.T, b_eq=column / size, bounds=(0, None), method="highs")
        if solved.status == 0:
            found[:, j] = solved.x * size
    return found


def equations(
    sketches: Sequence[np.ndarray], operators: Sequence[Operator], n_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """S (n × T·d), side by side, and what was seen, SᵀX (T·d × m)."""
    return np.hstack([operator.rows(0, n_rows) for operator in operators]), np.hstack(list(sketches)).T


def held_out_error(S: np.ndarray, seen: np.ndarray) -> float:
    """How well `sparse_rows` from all but a few equations meets these: 0 is a full recovery.

    It needs no truth. Where other X fit as well, what was found is one of them, and misses equations it has not seen.
    """
    kept = len(seen) - max(1, int(HELD_OUT * len(seen)))
    size = float(np.linalg.norm(seen[kept:]))
    if kept < 1 or size == 0:
        return float("nan")
    return float(np.linalg.norm(S[:, kept:].T @ sparse_rows(S[:, :kept], seen[:kept]) - seen[kept:])) / size


def raw_coordinates(sketch: np.ndarray, operator: Operator) -> tuple[np.ndarray, np.ndarray] | None:
    """Which columns of A a subsampling sketch A S (r × d) is made of, and these columns; None for other sketches."""
    pattern = operator.pattern
    if not isinstance(pattern, ChosenCoordinates):
        return None
    return pattern.chosen, sketch * (operator.dimension / operator.size) ** 0.5
