"""Attacks on uploads of WᵀW and WᵀX: rows, their span, XᵀX, lone columns, rows changed between two runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from scipy.linalg import expm
from scipy.optimize import least_squares

from partsong.attacks.findings import (
    MEMBERSHIP,
    SUPPOSED,
    UNCLEAR,
    Finding,
    matched_error,
    moment_error,
    rows_error,
    span_error,
)
from partsong.attacks.moment import Moment, row_span, rows_by_rotation, second_moment
from partsong.attacks.sparse_rows import lone_columns, rows_by_dictionary
from partsong.attacks.transcript import AttackContext, Exchange, misfit, to_float64, with_error
from partsong.core.interfaces import Message
from partsong.core.streams import stream
from partsong.errors import format_count

Pair = tuple[np.ndarray, np.ndarray]
"""gram WᵀW (k × k) and cross WᵀX (k × m) of one upload."""
MAX_ROWS_BY_STEPS = 4
"""Up to this many rows, the known step of W resolves what signs leave open."""
MAX_ROWS_ROTATED = 100
"""Up to this many rows, a rotation is searched; beyond, the search takes too long."""
MAX_ROWS_SOLVED = 400
"""Up to this many rows, XᵀX is solved for."""
MAX_ROWS_IN_DICTIONARY = 200
"""Up to this many rows, weights are searched as a dictionary."""
DICTIONARY_FROM = 0.25
"""Fewest directions per row with which dictionary search has ever succeeded."""
LEAST_ANGLE, ROUNDINGS = 1e-9, 64
"""Columns have the same direction within this angle, or within this many roundings of the uploads."""
SVD_SECONDS = 2e-9
"""Estimated seconds per operation of a singular value decomposition."""
LEAST_COLUMNS = 2
"""Fewest lone columns that identify a row."""

INIT_MODES = 24
"""Random rotations from which the search for non-negative rows starts."""
POLISHED = 4
"""Number of distinct candidates compared with the known step of the party."""
DIFFERENT, AS_GOOD = 1e-3, 1e-6
"""Relative distance above which rows are different, and misfit below which they explain the uploads."""
FREE = 1e-5
"""A rotation is undetermined if it changes the misfit by less than this share of its angle."""
NOTHING = 1e-9
"""Singular values below this share of the largest count as zero."""

Misfit = Callable[[np.ndarray], np.ndarray]
"""Distance between the uploads that rows (n × m) would have produced and the recorded ones."""


def attack_exact_sums(context: AttackContext, party: str) -> list[Finding]:
    """Attack the sums of a party: a single row is recovered exactly, several rows as far as the search succeeds.

    Uploads of all recorded runs over the same number of rows are combined. If they are not of the same rows, the search
    on one run alone finds more.
    """
    found: list[Finding] = []
    runs = [one for one in (context, *context.others) if one.seen(party, "gram", "cross")]
    for run in runs:
        alone = replace(run, others=(), clock=context.clock)
        one = replace(alone, others=tuple(other for other in runs if other is not run))
        if run is runs[0]:
            found = _of_sums(one, party)
        if not one.others or any(each.array.startswith("X") for each in found) or context.clock.is_over():
            break
        found = max(found, _of_sums(alone, party), key=len)
    return found


def _of_sums(context: AttackContext, party: str) -> list[Finding]:
    seen = context.seen(party, "gram", "cross")
    is_row_count_sent = "rows" in seen[0][1].arrays
    n = round(float(seen[0][1]["rows"])) if is_row_count_sent else 1
    pairs = _pairs(context, party, n, is_row_count_sent)
    if n == 1:
        return _one_row(context, party, pairs[0], is_row_count_sent)
    findings = _by_steps(context, party, seen, pairs, n) if n <= min(len(pairs[0][0]), MAX_ROWS_BY_STEPS) else []
    by_moment, n_found = _by_moment(context, party, pairs, n)
    findings += by_moment
    is_enough = DICTIONARY_FROM * n <= sum(len(gram) for gram, _ in pairs)
    if n_found < n and is_enough and n <= MAX_ROWS_IN_DICTIONARY and not context.clock.is_over():
        findings += _by_dictionary(context, party, pairs, n)
    return findings + ([] if n_found == n else _by_lone_columns(context, party, pairs))


def _pairs(context: AttackContext, party: str, n: int, is_row_count_sent: bool) -> list[Pair]:
    """Gram and cross of all uploads, including those of other runs over the same number of rows."""
    found = []
    for one in (context, *context.others):
        for _, upload in one.seen(party, "gram", "cross"):
            is_same = not is_row_count_sent or ("rows" in upload.arrays and round(float(upload["rows"])) == n)
            if is_same:
                found.append(in_units(one.program, upload))
    return found


def _one_row(context: AttackContext, party: str, pair: Pair, is_row_count_sent: bool) -> list[Finding]:
    w, x = row_from_statistics(*pair)
    doubt = float(np.linalg.norm(np.outer(w, x) - pair[1]) / max(float(np.linalg.norm(pair[1])), 1e-300))
    if not is_row_count_sent and doubt > UNCLEAR:
        return []
    what = f"its only row, number by number, from one upload of WᵀW and WᵀX{'' if is_row_count_sent else SUPPOSED}"
    return with_error(context, Finding("statistics of one row", party, "X_p", x[None], what, doubt), matched_error)


def _by_steps(context: AttackContext, party: str, seen: Any, pairs: Sequence[Pair], n: int) -> list[Finding]:
    """Rows of a party with n ≤ k, from the signs of X and W and the known step of W."""
    turned = rows_from_statistics(pairs, n, partial(misfit, context.program, context.layout, party, seen))
    if turned is None:
        return []
    what = (
        f"its {format_count(n, 'row')}: WᵀW and WᵀX leave a rotation open; signs and the known step of W determine it"
    )
    return with_error(
        context, Finding("statistics of few rows", party, "X_p", turned[0], what, turned[1]), matched_error
    )


def _by_moment(context: AttackContext, party: str, pairs: Sequence[Pair], n: int) -> tuple[list[Finding], int]:
    """The span of the rows if T·k ≥ n, XᵀX if T·k(k + 1) ≥ n(n + 1), then rows by their signs; number of rows found."""
    every = max(1, sum(len(gram) for gram, _ in pairs) // (2 * n + 50))
    m, few = pairs[0][1].shape[1], pairs[::every]  # evenly spaced, and enough for the span of n rows
    unit, height = context.unit(pairs[0][1]), sum(len(gram) for gram, _ in few)
    if n >= m or not context.clock.has(height**2 * m * SVD_SECONDS):
        return [], 0
    span = row_span([cross for _, cross in few], n, unit)
    if span is None:
        return [], 0
    r = span.rank
    rest = "" if r == n else f" ({n - r} of them are zero or combinations of others)"
    what = f"the span of its {format_count(n, 'row')}{rest}, {MEMBERSHIP}"
    findings = with_error(
        context, Finding("span of the rows", party, "span of X_p", span.basis, what, unit), span_error
    )
    n_equations = sum(len(gram) * (len(gram) + 1) for gram, _ in pairs)
    if r > MAX_ROWS_SOLVED or n_equations < r * (r + 1) or context.clock.is_over():
        return findings, 0
    moment = second_moment(pairs, span, unit, context.clock.deadline)
    if moment is None or not moment.is_recovered:
        context.clock.is_over()
        return findings, 0
    what = (
        f"X_pᵀX_p of its {format_count(n, 'row')}, by a linear solve from {len(pairs)} uploads: rows up to "
        "one common rotation"
    )
    solved = Finding("second moment", party, "second moment of X_p", _half(moment), what, moment.doubt)
    findings += with_error(context, solved, moment_error)
    if r > MAX_ROWS_ROTATED or context.clock.is_over():
        return findings, 0
    turned = rows_by_rotation(moment, pairs, deadline=context.clock.deadline)
    context.clock.is_over()
    if turned is None:
        return findings, 0
    rows, count = turned.rows[turned.is_found], turned.n_found
    what = (
        f"{count} of its {format_count(n, 'row')}: X_pᵀX_p leaves a rotation open; the signs of rows and "
        "weights determine it"
    )
    if not count:  # what was found is one of several solutions
        found = Finding("rows by their signs", party, "X_p", turned.rows, what, None)
    else:
        found = Finding("rows by their signs", party, "X_p", rows, what, turned.negative_share)
    return findings + with_error(context, found, rows_error), count if r == n else min(count, n - 1)


def _half(moment: Moment) -> np.ndarray:
    """Z (n × m) with ZᵀZ = XᵀX."""
    values, vectors = np.linalg.eigh(moment.Q)
    return np.asarray((vectors / np.sqrt(np.maximum(values, 1e-300))).T @ moment.basis)


def _by_dictionary(context: AttackContext, party: str, pairs: Sequence[Pair], n: int) -> list[Finding]:
    """Rows of sparse data, with far fewer equations than the counting bound: columns combine few weight vectors."""
    found = rows_by_dictionary(pairs, n, deadline=context.clock.deadline)
    context.clock.is_over()
    if found is None or not len(found.rows):
        return []
    array = "X_p" if found.is_scaled else "X_p up to a factor"
    what = (
        f"{len(found.rows)} of its {format_count(n, 'row')}: each column is a combination of few weight "
        "vectors, which a search finds"
    )
    doubt = found.gram_misfit if found.is_scaled else None  # in all experiments, rows whose grams do not fit were wrong
    finding = Finding("dictionary of sparse rows", party, array, found.rows, what, doubt)
    return with_error(context, finding, partial(rows_error, is_scaled=found.is_scaled))


def _by_lone_columns(context: AttackContext, party: str, pairs: Sequence[Pair]) -> list[Finding]:
    """Lone columns (with a single non-zero row) reveal its weights, from one upload on and for any number of rows.

    Columns that several rows share in proportion look the same, so nothing is claimed without the truth.
    """
    crosses = [cross for _, cross in pairs if len(cross) >= LEAST_COLUMNS]
    if not crosses:
        return []
    found = lone_columns(crosses, max(LEAST_ANGLE, ROUNDINGS * context.unit(crosses[0])))
    if not found.groups:
        return []
    count = sum(len(group) for group in found.groups)
    what = (
        f"{count} values of {len(found.groups)} rows up to one factor per row, if columns with the same direction in "
        "WᵀX belong to a single row, and not to several rows in proportion"
    )
    values = np.zeros((len(found.groups), pairs[0][1].shape[1]))
    for row, (group, entries) in enumerate(zip(found.groups, found.values, strict=True)):
        values[row, group] = entries
    return with_error(context, Finding("lone columns", party, "entries of X_p", values, what, None), lone_error)


def lone_error(found: np.ndarray, rows: np.ndarray) -> float:
    """Return the share of column groups that are not, up to a factor, the entries of one row of X (n × m)."""
    wrong = 0
    for values in found:
        columns = np.flatnonzero(values)
        part = rows[:, columns]
        i = int(np.argmax((part**2).sum(axis=1)))
        fit = float(part[i] @ values[columns]) * values[columns]
        others = float(np.delete(part, i, axis=0).sum())
        wrong += bool(np.linalg.norm(fit - part[i]) > 0.01 * np.linalg.norm(part[i]) or others > 0)
    return wrong / len(found)


def in_units(program: Any, upload: Message) -> Pair:
    """Return gram and cross as real numbers; programs with noise send integers in public units."""
    gram, cross = to_float64(upload["gram"]), to_float64(upload["cross"])
    program = getattr(program, "later", None) or program  # of the rounds after a moment
    if not hasattr(program, "noise"):
        return gram, cross
    bounds = program.noise(cross.shape[1]).bounds
    return gram * bounds.weight_unit**2, cross * (bounds.weight_unit * bounds.row_unit)


def attack_differences(context: AttackContext, party: str) -> list[Finding]:
    """Attack rows that a party added or removed between two runs in which it received the same model.

    The two uploads differ by the sums of these rows, which are attacked like the sums of a small party.
    """
    findings = []
    for other in context.others:
        difference = _difference(context, other, party)
        if difference is None:
            continue
        model, changed = difference
        n = round(float(changed["rows"]))
        alone = replace(context, exchanges=(Exchange({party: model}, {party: changed}),), others=(), truth={})
        wanted = _changed_rows(context, other, party)
        for each in attack_exact_sums(alone, party):
            what = f"of {n} rows that were added or removed between two runs with the same first model: {each.what}"
            found = replace(each, attack="difference of two runs", what=what)
            if wanted is not None and found.array.startswith("X") and found.recovered is not None:
                found = replace(found, error=rows_error(found.recovered, wanted), truth=wanted)
            findings.append(found)
    return findings


def _difference(context: AttackContext, other: AttackContext, party: str) -> tuple[Message, Message] | None:
    """A model received in both runs, and the larger upload minus the smaller; None if there is none."""
    for model, upload in context.seen(party, "gram", "cross", "rows"):
        for model_before, before in other.seen(party, "gram", "cross", "rows"):
            if not _is_same(model, model_before):
                continue
            sign = np.sign(round(float(upload["rows"]) - float(before["rows"])))
            if sign:
                names = ("gram", "cross", "rows")
                arrays = {name: sign * (to_float64(upload[name]) - to_float64(before[name])) for name in names}
                return model, Message(arrays)
    return None


def _is_same(model: Message, other: Message) -> bool:
    """Whether both models have the same H, ignoring other arrays."""
    H, K = (to_float64(one["H"]).astype(np.float32) if "H" in one.arrays else None for one in (model, other))
    return H is not None and K is not None and np.array_equal(H, K)


def _changed_rows(context: AttackContext, other: AttackContext, party: str) -> np.ndarray | None:
    """Rows of one run that the other lacks, if both are known."""
    if party not in context.truth or party not in other.truth:
        return None
    ours, theirs = context.truth[party], other.truth[party]
    larger, smaller = (ours, theirs) if len(ours) >= len(theirs) else (theirs, ours)
    known = {row.tobytes() for row in np.ascontiguousarray(smaller)}
    return np.array([row for row in larger if np.ascontiguousarray(row).tobytes() not in known]).reshape(
        -1, larger.shape[1]
    )


def row_from_statistics(gram: np.ndarray, cross: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (w, x) of a party with one row, exactly: gram = w wᵀ, so w_l = √gram_ll, and x = wᵀ cross / ‖w‖²."""
    w = np.sqrt(np.maximum(0.0, np.diag(gram)))
    size = float(w @ w)
    return w, w @ cross / size if size > 0 else np.zeros(cross.shape[1])


def up_to_rotation(gram: np.ndarray, cross: np.ndarray, n_rows: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (R, Z) with W = O R and X = O Z for an unknown orthogonal O (n × n); None unless W has rank n.

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
    """Return Z of the first round, and [Z R_1 R_2 …] scaled and rotated so that one O makes all of it non-negative.

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
    """Return rows (n × m), in any order, of a party with 1 < n ≤ k rows, and their doubt; None without rank n.

    X = O Z for an orthogonal O. The first search makes X and all W = O R non-negative. The second also requires that
    the party's step, which is public (`misfit`), maps X to the recorded uploads.

    The doubt is the unexplained part, or the distance to other rows that explain as much, whichever is larger; 1 if a
    rotation is undetermined. While no weight is clipped at zero, steps are linear in a row, and all rotations that keep
    signs explain the uploads equally well.
    """
    Z, frame = in_one_frame(statistics, n_rows)
    if not Z.size:
        return None

    def negative(turn: np.ndarray, start: np.ndarray) -> np.ndarray:
        return np.minimum(_rotated(turn, start) @ frame, 0.0).ravel()

    def unexplained(turn: np.ndarray, start: np.ndarray) -> np.ndarray:
        assert misfit is not None
        rows = _rotated(turn, start) @ Z
        return np.concatenate([np.minimum(rows, 0.0).ravel() / np.linalg.norm(Z), misfit(np.maximum(rows, 0.0))])

    draw, zero = stream(0, "leakage", "turns"), np.zeros(n_rows * (n_rows - 1) // 2)
    found = []
    for _ in range(INIT_MODES):
        start = np.linalg.qr(draw.standard_normal((n_rows, n_rows)))[0]
        settled = least_squares(negative, zero, args=(start,), max_nfev=100)
        found.append(_fit_of(settled, start, Z))
    kept = _different(sorted(found, key=lambda each: each.left))
    if misfit is not None:
        kept = [
            _fit_of(least_squares(unexplained, zero, args=(each.O,), xtol=1e-15, max_nfev=60), each.O, Z)
            for each in kept
        ]
    best = min(kept, key=lambda each: each.left)
    rivals = [matched_error(each.rows, best.rows) for each in kept if each.left <= AS_GOOD + 10 * best.left]
    return best.rows, 1.0 if best.hold < FREE else max(best.left, *rivals)


@dataclass(frozen=True, slots=True)
class RotationFit:
    """Rows, their rotation, the unexplained part, and how well the data determine the rotation."""

    rows: np.ndarray
    O: np.ndarray
    left: float
    hold: float


def _fit_of(settled: Any, start: np.ndarray, Z: np.ndarray) -> RotationFit:
    """`hold` is the smallest singular value of the derivative: near 0, some rotation changes nothing."""
    O = _rotated(settled.x, start)
    return RotationFit(
        O @ Z, O, float(np.sqrt(2 * settled.cost)), float(np.linalg.svd(settled.jac, compute_uv=False)[-1])
    )


def _different(found: list[RotationFit]) -> list[RotationFit]:
    """The best candidates with different rows, up to a few."""
    kept = found[:1]
    for each in found[1:]:
        if len(kept) < POLISHED and all(matched_error(each.rows, other.rows) > DIFFERENT for other in kept):
            kept.append(each)
    return kept


def _rotated(turn: np.ndarray, start: np.ndarray) -> np.ndarray:
    """exp(A) start, for the skew A with these numbers above its diagonal."""
    n = len(start)
    A = np.zeros((n, n))
    A[np.triu_indices(n, 1)] = turn
    return np.asarray(expm(A - A.T)) @ start
