"""What factors H_p that a party sends again and again, or the blocks that it plays, tell of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from partsong.aggregate.disjoint import span_of
from partsong.core import Message
from partsong.evaluate.leakage_transcript import numbers
from partsong.local.game import even_scale, mean_size

NOTHING = 1e-10
"""Singular values below this share of the largest are rounding."""


def last_addend(total: Message, others: Sequence[Message]) -> Message:
    """What the last party added to a sum, for those who know the sum and added all the rest of it themselves."""
    arrays = {name: numbers(array) for name, array in total.arrays.items()}
    for other in others:
        arrays = {name: array - numbers(other[name]) for name, array in arrays.items()}
    return Message(arrays, total.weight - sum(other.weight for other in others))


def common_span(factors: Sequence[np.ndarray], n_rows: int) -> tuple[np.ndarray, float] | None:
    """An orthonormal basis (n × m) of what the row spaces of all H_p share, and how unclear it is; None if nothing is.

    A party with n < k rows fits them (nearly) exactly, X_p = W_p H_p, in every round with another H_p: its rows lie in
    each span, and two spans of k dimensions in general share no more than they must. The basis are the n leading
    eigenvectors of the mean projection, with eigenvalues λ; the second number is √((1 − λ_n) / (1 − λ_n+1)), 0 where
    the spans share n dimensions and no more, and 1 where nothing tells which n they are.
    """
    rank, m = factors[0].shape
    if len(factors) < 2 or n_rows >= rank or 2 * rank - n_rows > m:
        return None
    bases = [row_basis(factor) for factor in factors]
    _, values, basis = np.linalg.svd(np.vstack(bases), full_matrices=False)
    apart = np.maximum(0.0, 1 - values**2 / len(factors))
    if len(apart) <= n_rows or apart[n_rows] <= NOTHING:
        return None
    return basis[:n_rows], float(np.sqrt(apart[n_rows - 1] / apart[n_rows]))


def clearest_span(factors: Sequence[np.ndarray], n_rows: int) -> tuple[np.ndarray, float] | None:
    """`common_span` of the first 2, 3, 5 or all rounds, whichever is clearest: fits are not equally good in all."""
    counts = sorted({count for count in (2, 3, 5, len(factors)) if count <= len(factors)})
    found = [span for span in (common_span(factors[:count], n_rows) for count in counts) if span is not None]
    return min(found, key=lambda span: span[1], default=None)


def signed(row: np.ndarray) -> np.ndarray:
    """A row that is known up to its scale, of norm one and not negative."""
    turned = row if row.sum() >= 0 else -row
    size = float(np.linalg.norm(np.maximum(turned, 0)))
    return np.maximum(turned, 0) / (size or 1.0)


def row_from_play(exchanges: Sequence[tuple[Message, Message]], game: Any) -> tuple[np.ndarray, float]:
    """The row of a party with one row from the first sweep of a game (models and uploads), and how far ‖x‖ is off.

    Its weights begin with w = c·1, and the totals of its first exchange tell c: ‖x‖² − ‖x − w H‖² = c² ‖1ᵀH‖². From
    then on column player j moves by η e w, along a w that is known, which gives e, x_j = e + w·h_j, and the next w. The
    second number compares ‖x‖ with the one that the party told: for several rows, and for orders that are not
    column by column, it is not near 0.
    """
    m = int(numbers(exchanges[0][0]["H"]).shape[1])
    x, w, told = np.full(m, np.nan), np.empty(0), 0.0
    for model, upload in exchanges:
        sweep, _, blocks = (int(value) for value in model["turn"])
        if sweep > 0:
            break
        H, sent, totals = numbers(model["H"]), numbers(upload["H"]), numbers(upload["totals"])
        if not w.size:
            column_sums, told = H.sum(axis=0), float(totals[2])
            fitted = max(0.0, told - float(totals[3])) / max(float(column_sums @ column_sums), 1e-300)
            w = np.full(len(H), np.sqrt(fitted))
        pace, row_size = (float(value) for value in model["pace"])
        sizes = row_size or mean_size(w[None]), mean_size(H.T)
        scale = even_scale(*sizes) if game.step.is_balanced else 1.0
        step = game.step.meeting(sweep, pace, sizes[0] * scale**2 + sizes[1] / scale**2)
        first, last = span_of(int(upload["place"][0]), blocks, m)
        w, x[first:last] = _met(w * scale, H[:, first:last] / scale, sent[:, : last - first] / scale, step)
        w = w / scale
    size = float(x @ x)
    return x, abs(np.sqrt(size) - np.sqrt(told)) / np.sqrt(told) if np.isfinite(size) and told > 0 else float("inf")


def _met(
    w: np.ndarray, before: np.ndarray, after: np.ndarray, step: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """w after it has met these columns, and x in them: pull = η e is read off entries that were not cut off.

    A column that was cut off to nothing is taken to have met x = 0.
    """
    eta, relaxation = step
    x = np.full(before.shape[1], np.nan)
    for j, (h, moved) in enumerate(zip(before.T, after.T, strict=True)):
        is_free = (moved > 0) & (w > 0)
        size = float(w @ w + h @ h + eta)
        if is_free.any():
            pull = float((moved - h)[is_free] @ w[is_free]) / float(w[is_free] @ w[is_free])
            if 0 < relaxation <= abs(pull):
                break
            e = pull / eta if relaxation <= 0 else pull * size / (relaxation - abs(pull))
        else:
            e = -float(w @ h)
            pull = eta * e if relaxation <= 0 else relaxation * e / max(size + abs(e), 1e-300)
        x[j] = e + float(w @ h)
        w = np.maximum(0.0, w + pull * h)
    return w, x


def row_basis(factor: np.ndarray) -> np.ndarray:
    """An orthonormal basis of the row space, without what is rounding."""
    _, values, rows = np.linalg.svd(factor, full_matrices=False)
    return np.asarray(rows[values > NOTHING * max(values[0], 1e-300)])
