"""Attacks on an upload of XᵀX: rows that have a column of their own, and all rows of a party with fewer rows than
columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from partsong.attacks.exact_sums import MAX_ROWS_ROTATED, in_units
from partsong.attacks.findings import Finding, moment_error, rows_error
from partsong.attacks.moment import DOUBTFUL, DOUBTFUL_ROUNDED, UNITS, Moment, rows_by_rotation
from partsong.attacks.transcript import AttackContext, Clock, to_float64, with_error
from partsong.core.interfaces import Message
from partsong.errors import format_count
from partsong.methods.moment import ExactMoment, MomentProgram, NoisyMoment
from partsong.privacy.second_moment import symmetric_matrix

SAME, BELOW = 1e-9, 1e-7
"""Relative differences: up to the first, two products of columns are equal; beyond the second, one is smaller."""
LEFT = 1e-3
"""A column counts as used up when less than this share of its norm is left."""
CONFIRMED = 3
"""Fewest pairs of columns that must confirm a row: with one, columns that two rows share in proportion could do."""


def moment_of(program: Any, upload: Message) -> np.ndarray | None:
    """Return the XᵀX of an upload, with noise if it has any; None if it is not the product of all columns."""
    if not isinstance(program, MomentProgram) or "moment" not in upload.arrays:
        return None
    statistic = program.statistic
    if not isinstance(statistic, ExactMoment | NoisyMoment):
        return None
    unit = statistic.moment.unit if isinstance(statistic, NoisyMoment) else 1.0
    found: np.ndarray = symmetric_matrix(to_float64(upload["moment"]), unit)
    return found


def moments_of(context: AttackContext, party: str) -> list[np.ndarray]:
    """Return the XᵀX that a party has sent."""
    found = (moment_of(context.program, upload) for _, upload in context.seen(party, "moment"))
    return [one for one in found if one is not None]


def attack_second_moment(context: AttackContext, party: str) -> list[Finding]:
    """Attack XᵀX: itself, rows that have a column of their own, and rows by their signs if they are fewer than columns.

    With noise nothing is taken as given, and no pair of columns confirms a row.
    """
    moments = moments_of(context, party)
    if not moments:
        return []
    M, has_noise = moments[0], context.program.traits.release is not None
    step = context.mask_error or 0.0
    found = [] if has_noise else _itself(context, party, M)
    found += _lone_rows(context, party, M, step)
    sizes = [round(float(upload["rows"])) for _, upload in context.seen(party, "rows")]
    n = sizes[0] if sizes else None
    if has_noise or (n is not None and n >= len(M)) or context.clock.is_over():
        return found
    return found + _by_signs(context, party, M, n, step)


def _itself(context: AttackContext, party: str, M: np.ndarray) -> list[Finding]:
    values, vectors = np.linalg.eigh(M)
    half = (vectors * np.sqrt(np.maximum(values, 0.0))).T
    what = "X_pᵀX_p, which it sent: its rows up to one common rotation"
    rounding = float(max(0.0, -values[0]) / max(values[-1], 1e-300))
    return with_error(
        context, Finding("second moment", party, "second moment of X_p", half, what, rounding), moment_error
    )


def _lone_rows(context: AttackContext, party: str, M: np.ndarray, step: float) -> list[Finding]:
    rows, doubt = rows_of_lone_columns(M, step=step, clock=context.clock)
    if not len(rows):
        return []
    what = (
        f"{format_count(len(rows), 'row')} with a value in a column that no other row uses, or none but rows found "
        "before: that column of X_pᵀX_p is the whole row"
    )
    return with_error(context, Finding("lone columns of XᵀX", party, "X_p", rows, what, doubt), rows_error)


def rows_of_lone_columns(M: np.ndarray, *, step: float = 0.0, clock: Clock | None = None) -> tuple[np.ndarray, float]:
    """Return rows x of X ≥ 0 (r × m) from M = XᵀX, for any number of rows, and the largest misfit that confirms one.

    If row x alone has a value in column j, M_j = x_j x, so x = M_j / √M_jj. Then M − x xᵀ ≥ 0, and where no other row
    has a value in both columns p and q, M_pq = x_p x_q. A column that several rows use gives a mixture of them, for
    which the first fails if the rows have different columns, and the second never holds except for columns in
    proportion to column j, which do not count. Rows found are subtracted, so that further columns have one row left.
    """
    rest = np.array(M)
    sizes = np.sqrt(np.maximum(np.diag(M), 0.0))
    found: list[np.ndarray] = []
    doubt, is_new = 0.0, True
    while is_new:
        is_new = False
        for j in np.argsort(np.diag(rest)):
            left = float(rest[j, j])
            if left <= max((LEFT * sizes[j]) ** 2, 100 * step) or (clock is not None and clock.is_over()):
                continue
            row = rest[j] / np.sqrt(left)
            used = np.flatnonzero(row > SAME * sizes + 10 * step / np.sqrt(left))
            misfit = _confirmed(rest[np.ix_(used, used)], row[used], sizes[used], step)
            if misfit is None:
                continue
            row = np.where(np.isin(np.arange(len(row)), used), row, 0.0)
            rest -= np.outer(row, row)
            found.append(row)
            doubt, is_new = max(doubt, misfit), True
    return np.array(found).reshape(len(found), len(M)), doubt


def _confirmed(M: np.ndarray, x: np.ndarray, sizes: np.ndarray, step: float) -> float | None:
    """Return the largest relative |M_pq − x_p x_q| of the pairs of columns that confirm x; None if they do not."""
    scale = np.outer(sizes, sizes)
    apart, slack = M - np.outer(x, x), 10 * step * (1 + np.max(x, initial=0.0) / max(float(x.min(initial=1.0)), 1e-300))
    if not len(x) or (apart < -BELOW * scale - slack).any():
        return None
    has_others = np.diag(apart) > LEFT**2 * np.diag(scale) + slack
    is_equal = np.triu((np.abs(apart) <= SAME * scale + slack) & np.outer(has_others, has_others), 1)
    if is_equal.sum() < CONFIRMED:
        return None
    return float((np.abs(apart) / scale)[is_equal].max())


def _by_signs(context: AttackContext, party: str, M: np.ndarray, n: int | None, step: float) -> list[Finding]:
    """All rows of a party with fewer rows than columns: XᵀX leaves a rotation open, and the signs determine it."""
    unit = max(UNITS["float64"], step / float(np.sqrt(np.mean(M**2)) or 1.0))
    values, vectors = np.linalg.eigh(M)
    is_used = values > len(M) * unit * values[-1]
    r = int(is_used.sum())
    if not 1 <= r < len(M) or r > MAX_ROWS_ROTATED or (n is not None and r > n):
        return []
    limit = DOUBTFUL if unit <= UNITS["float64"] else DOUBTFUL_ROUNDED
    moment = Moment(vectors[:, is_used].T, np.diag(1 / values[is_used]), 0.0, limit)
    pairs = [in_units(context.program, upload) for _, upload in context.seen(party, "gram", "cross")]
    turned = rows_by_rotation(moment, pairs, deadline=context.clock.deadline)
    context.clock.is_over()
    if turned is None:
        return []
    count = turned.n_found
    many = format_count(r if n is None else n, "row")
    what = f"{count} of its {many}: X_pᵀX_p leaves a rotation open; the signs of rows and weights determine it"
    if not count:  # what was found is one of several solutions
        found = Finding("rows of XᵀX by their signs", party, "X_p", turned.rows, what, None)
    else:
        rows = turned.rows[turned.is_found]
        found = Finding("rows of XᵀX by their signs", party, "X_p", rows, what, turned.negative_share)
    return with_error(context, found, rows_error)
