"""Rows of a party from its own gram W_pᵀW_p (k × k) and cross W_pᵀX_p (k × m)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import expm
from scipy.optimize import least_squares

from partsong.evaluate.leakage_findings import matched_error
from partsong.streams import stream

STARTS = 24
"""Random turns from which rows without negative numbers are looked for."""
POLISHED = 4
"""So many different ones are held against the step that the party is known to have made."""
DIFFERENT, AS_GOOD = 1e-3, 1e-6
"""From which relative distance on rows are others, and up to which misfit they explain what was seen."""
FREE = 1e-5
"""A turn that changes the misfit by less than this share of its angle is open."""
NOTHING = 1e-9
"""Singular values below this share of the largest are rounding."""

Misfit = Callable[[np.ndarray], np.ndarray]
"""How far the uploads that rows (n × m) would have led to are from those that were seen."""


def row_from_statistics(gram: np.ndarray, cross: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(w, x) of a party with one row, exactly: gram = w wᵀ, so w_l = √gram_ll, and x = wᵀ cross / ‖w‖²."""
    w = np.sqrt(np.maximum(0.0, np.diag(gram)))
    size = float(w @ w)
    return w, w @ cross / size if size > 0 else np.zeros(cross.shape[1])


def up_to_rotation(gram: np.ndarray, cross: np.ndarray, n_rows: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(R, Z) with W = O R and X = O Z for one unknown orthogonal O (n × n); None unless W has rank n.

    With gram = V Λ Vᵀ it is R = Λ^½ Vᵀ (n × k) and Z = Λ^−½ Vᵀ cross (n × m).
    """
    if not 1 <= n_rows <= len(gram):
        return None
    values, vectors = np.linalg.eigh((gram + gram.T) / 2)
    values, vectors = values[::-1][:n_rows], vectors[:, ::-1][:, :n_rows]
    if values[-1] <= NOTHING * values[0]:
        return None
    roots = np.sqrt(values)
    return roots[:, None] * vectors.T, vectors.T @ cross / roots[:, None]


def in_one_frame(statistics: Sequence[tuple[np.ndarray, np.ndarray]], n_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Z of the first round, and [Z R_1 R_2 …] scaled and turned so that one O makes all of it non-negative.

    Rounds differ by known rotations: Z_1 = (O_1ᵀO_t) Z_t, so O_1ᵀO_t = Z_1 Z_t⁺ where X has rank n.
    """
    known = [found for found in (up_to_rotation(*pair, n_rows) for pair in statistics) if found is not None]
    if not known:
        return np.empty((0, 0)), np.empty((0, 0))
    first = known[0][1]
    values = np.linalg.svd(first, compute_uv=False)
    usable = known if len(values) == n_rows and values[-1] > NOTHING * values[0] else known[:1]
    turned = [R if Z is first else first @ np.linalg.pinv(Z) @ R for R, Z in usable]
    return first, np.hstack([part / np.linalg.norm(part) for part in (first, *turned)])


def rows_from_statistics(
    statistics: Sequence[tuple[np.ndarray, np.ndarray]], n_rows: int, misfit: Misfit | None = None
) -> tuple[np.ndarray, float] | None:
    """Rows (n × m), in any order, of a party with 1 < n ≤ k rows, and how doubtful they are; None without rank n.

    X = O Z for an orthogonal O, which is looked for twice: such that neither X nor any W = O R has negative
    numbers, and such that the party's step, which everybody knows (`misfit`), leads from these X to these uploads.

    The doubt is what is left unexplained, or how far other rows are that explain as much, if that is more; 1
    where a turn is open. As long as no weight is cut off at zero steps are linear in a row, and all turns that keep
    signs explain the same.
    """
    Z, frame = in_one_frame(statistics, n_rows)
    if not Z.size:
        return None

    def negative(turn: np.ndarray, start: np.ndarray) -> np.ndarray:
        return np.minimum(_turned(turn, start) @ frame, 0.0).ravel()

    def unexplained(turn: np.ndarray, start: np.ndarray) -> np.ndarray:
        assert misfit is not None
        rows = _turned(turn, start) @ Z
        return np.concatenate([np.minimum(rows, 0.0).ravel() / np.linalg.norm(Z), misfit(np.maximum(rows, 0.0))])

    draw, zero = stream(0, "leakage", "turns"), np.zeros(n_rows * (n_rows - 1) // 2)
    found = []
    for _ in range(STARTS):
        start = np.linalg.qr(draw.standard_normal((n_rows, n_rows)))[0]
        settled = least_squares(negative, zero, args=(start,), max_nfev=100)
        found.append(_guess(settled, start, Z))
    kept = _different(sorted(found, key=lambda each: each.left))
    if misfit is not None:
        kept = [
            _guess(least_squares(unexplained, zero, args=(each.O,), xtol=1e-15, max_nfev=60), each.O, Z)
            for each in kept
        ]
    best = min(kept, key=lambda each: each.left)
    rivals = [matched_error(each.rows, best.rows) for each in kept if each.left <= AS_GOOD + 10 * best.left]
    return best.rows, 1.0 if best.hold < FREE else max(best.left, *rivals)


@dataclass(frozen=True, slots=True)
class Guess:
    """Rows, the turn that leads to them, what they leave unexplained, and how firmly that holds the turn."""

    rows: np.ndarray
    O: np.ndarray
    left: float
    hold: float


def _guess(settled: Any, start: np.ndarray, Z: np.ndarray) -> Guess:
    """`hold` is the least singular value of the derivative: near 0 there is a turn that changes nothing."""
    O = _turned(settled.x, start)
    return Guess(O @ Z, O, float(np.sqrt(2 * settled.cost)), float(np.linalg.svd(settled.jac, compute_uv=False)[-1]))


def _different(found: list[Guess]) -> list[Guess]:
    """The best, and then the best of those that are other rows than all before, up to a few."""
    kept = found[:1]
    for each in found[1:]:
        if len(kept) < POLISHED and all(matched_error(each.rows, other.rows) > DIFFERENT for other in kept):
            kept.append(each)
    return kept


def row_span(crosses: Sequence[np.ndarray], n_rows: int) -> tuple[np.ndarray, float] | None:
    """An orthonormal basis (n × m) of all that X_p's rows can be, and how far it is from being seen; None if too few.

    Each row of W_tᵀX_p is a combination of rows of X_p: T rounds show T·k of them, which span all once T·k ≥ n. The
    second number is 0 for combinations of n rows exactly, and near 1 where the span is lost in rounding.
    """
    stacked = np.vstack([cross / max(np.linalg.norm(cross), 1e-300) for cross in crosses])
    if n_rows > min(stacked.shape):
        return None
    _, values, basis = np.linalg.svd(stacked, full_matrices=False)
    rounding = np.finfo(np.float64).eps * values[0]
    beyond = max(values[n_rows], rounding) if len(values) > n_rows else rounding
    return basis[:n_rows], float(beyond / values[n_rows - 1]) if values[n_rows - 1] > 0 else 1.0


def _turned(turn: np.ndarray, start: np.ndarray) -> np.ndarray:
    """exp(A) start, for the skew A with these numbers above its diagonal."""
    n = len(start)
    A = np.zeros((n, n))
    A[np.triu_indices(n, 1)] = turn
    return np.asarray(expm(A - A.T)) @ start
