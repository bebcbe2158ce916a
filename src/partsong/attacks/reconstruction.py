"""Attacks on repeatedly sent factors H_p, on columns before and after a game, and on sketches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import linprog

from partsong.aggregation.linear import block_span
from partsong.attacks.findings import (
    MEMBERSHIP,
    SAME,
    SUPPOSED,
    UNCLEAR,
    Finding,
    cosine_error,
    matched_error,
    span_error,
)
from partsong.attacks.transcript import AttackContext, to_float64, with_error
from partsong.core.interfaces import Message
from partsong.errors import format_count
from partsong.methods.game import FederatedGame
from partsong.sketch.kinds import ChosenCoordinates
from partsong.sketch.operator import Operator
from partsong.sketch.recovery import recover_from_sketches
from partsong.solvers.game import balancing_scale, mean_squared_norm

ROUNDING = 1e-10
"""Singular values below this share of the largest count as rounding."""

HELD_OUT = 0.03
"""Share of equations held out to check the solution of the others."""
MOST_COLUMNS = 64
"""Number of columns solved for, if each is a linear program."""


def last_addend(total: Message, others: Sequence[Message]) -> Message:
    """Return the remaining party's addend, given the sum and all other addends."""
    arrays = {name: to_float64(array) for name, array in total.arrays.items()}
    for other in others:
        arrays = {name: array - to_float64(other[name]) for name, array in arrays.items()}
    return Message(arrays, total.weight - sum(other.weight for other in others))


def common_span(factors: Sequence[np.ndarray], n_rows: int) -> tuple[np.ndarray, float] | None:
    """Return an orthonormal basis (n × m) of what the row spaces of all H_p share, and its doubt; None if empty.

    A party with n < k rows fits them (nearly) exactly, X_p = W_p H_p, with another H_p in every round. Its rows lie in
    each span, and two generic spans of k dimensions share nothing else. The basis holds the n leading eigenvectors of
    the mean projection, with eigenvalues λ. The doubt is √((1 − λ_n) / (1 − λ_n+1)): 0 if the spans share exactly n
    dimensions, 1 if these cannot be identified.
    """
    rank, m = factors[0].shape
    if len(factors) < 2 or n_rows >= rank or 2 * rank - n_rows > m:
        return None
    bases = [row_basis(factor) for factor in factors]
    _, values, basis = np.linalg.svd(np.vstack(bases), full_matrices=False)
    apart = np.maximum(0.0, 1 - values**2 / len(factors))
    if len(apart) <= n_rows or apart[n_rows] <= ROUNDING:
        return None
    return basis[:n_rows], float(np.sqrt(apart[n_rows - 1] / apart[n_rows]))


def clearest_span(factors: Sequence[np.ndarray], n_rows: int) -> tuple[np.ndarray, float] | None:
    """Return the `common_span` of the first 2, 3, 5 or all rounds with the least doubt: fits differ in quality."""
    counts = sorted({count for count in (2, 3, 5, len(factors)) if count <= len(factors)})
    found = [span for span in (common_span(factors[:count], n_rows) for count in counts) if span is not None]
    return min(found, key=lambda span: span[1], default=None)


def signed(row: np.ndarray) -> np.ndarray:
    """Return a row known up to its scale as a non-negative row of norm one."""
    turned = row if row.sum() >= 0 else -row
    size = float(np.linalg.norm(np.maximum(turned, 0)))
    return np.maximum(turned, 0) / (size or 1.0)


def row_from_play(exchanges: Sequence[tuple[Message, Message]], game: Any) -> tuple[np.ndarray, float]:
    """Return the row of a single-row party from the first sweep of a game (models and uploads), and the error in ‖x‖.

    Its weights start at w = c·1, and the totals of its first exchange determine c: ‖x‖² − ‖x − w H‖² = c² ‖1ᵀH‖². From
    then on column player j moves by η e w along a known w, which gives e, x_j = e + w·h_j, and the next w. The second
    number compares ‖x‖ with the norm that the party sent: it is not near 0 for several rows, or for orders that are not
    column by column.
    """
    m = int(to_float64(exchanges[0][0]["H"]).shape[1])
    x, w, sent_norm = np.full(m, np.nan), np.empty(0), 0.0
    for model, upload in exchanges:
        sweep, _, blocks = (int(value) for value in model["turn"])
        if sweep > 0:
            break
        H, sent, totals = to_float64(model["H"]), to_float64(upload["H"]), to_float64(upload["totals"])
        if not w.size:
            column_sums, sent_norm = H.sum(axis=0), float(totals[2])
            fitted = max(0.0, sent_norm - float(totals[3])) / max(float(column_sums @ column_sums), 1e-300)
            w = np.full(len(H), np.sqrt(fitted))
        pace, row_size = (float(value) for value in model["pace"])
        sizes = row_size or mean_squared_norm(w[None]), mean_squared_norm(H.T)
        scale = balancing_scale(*sizes) if game.step.is_balanced else 1.0
        step = game.step.pair_step(sweep, pace, sizes[0] * scale**2 + sizes[1] / scale**2)
        first, last = block_span(int(upload["place"][0]), blocks, m)
        w, x[first:last] = _met(w * scale, H[:, first:last] / scale, sent[:, : last - first] / scale, step)
        w = w / scale
    size = float(x @ x)
    return x, abs(np.sqrt(size) - np.sqrt(sent_norm)) / np.sqrt(sent_norm) if np.isfinite(
        size
    ) and sent_norm > 0 else float("inf")


def _met(
    w: np.ndarray, before: np.ndarray, after: np.ndarray, step: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Return w after it has played these columns, and x in them: pull = η e follows from entries that were not clipped.

    A column that was clipped to zero is assumed to have x = 0.
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
    """Return an orthonormal basis of the row space, without directions at rounding level."""
    _, values, rows = np.linalg.svd(factor, full_matrices=False)
    return np.asarray(rows[values > ROUNDING * max(values[0], 1e-300)])


def attack_factors(context: AttackContext, party: str) -> list[Finding]:
    """Attack repeated H_p of a small party: the intersection of their row spaces."""
    seen = [(model, upload) for model, upload in context.seen(party, "H") if "place" not in upload.arrays]
    if hasattr(context.program, "inner"):  # H_p changes little between the exchanges of one round
        seen = [(model, upload) for model, upload in seen if int(model["turn"][1]) == context.program.inner]
    factors = [to_float64(upload["H"]) for _, upload in seen]
    n = round(seen[0][1].weight) if seen else 0
    if not seen or n < 1 or not np.isfinite(seen[0][1].weight):
        return []
    is_row_count_sent = any(
        upload.weight != 1 for exchange in context.exchanges for upload in exchange.uploads.values()
    )
    if len(factors) == 1 and is_row_count_sent:
        return _from_one_factor(context, party, factors[0], n)
    span = clearest_span(factors, n)
    if span is None or (not is_row_count_sent and (span[1] > UNCLEAR or _is_clear(clearest_span(factors, 2)))):
        return []
    if n == 1:
        row = signed(span[0][0])[None]
        what = "its only row up to a factor, from the intersection of the row spaces of all H_p that it sent"
        what += "" if is_row_count_sent else SUPPOSED
        return with_error(
            context, Finding("history of H_p", party, "X_p up to a factor", row, what, span[1]), cosine_error
        )
    what = f"the span of its {format_count(n, 'row')}, from the intersection of the row spaces of all H_p that it sent"
    return with_error(context, Finding("history of H_p", party, "span of X_p", span[0], what, span[1]), span_error)


def _from_one_factor(context: AttackContext, party: str, H: np.ndarray, n: int) -> list[Finding]:
    """X_p = W_p H_p (nearly) if there are no more rows than components; k − 1 numbers per row stay unknown."""
    if n > len(H) or len(H) >= H.shape[1]:
        return []
    what = (
        f"a span of {len(H)} dimensions that contains its {format_count(n, 'row')}, as far as H_p fits them, "
        f"{MEMBERSHIP}"
    )
    return with_error(context, Finding("one H_p", party, "row space of H_p", row_basis(H), what), span_error)


def _is_clear(span: tuple[np.ndarray, float] | None) -> bool:
    return span is not None and span[1] <= UNCLEAR


def attack_game(context: AttackContext, party: str) -> list[Finding]:
    """Attack a game: recover the row of a single-row party from the change of its columns."""
    seen = context.seen(party, "H", "place", "totals")
    if not (seen and isinstance(context.program, FederatedGame) and context.program.repeats == 1):
        return []
    x, doubt = row_from_play(seen, context.program.game)
    if not doubt < SAME:
        return []
    what = "its only row, number by number, from the change of the columns that it played in the first sweep"
    return with_error(context, Finding("columns before and after", party, "X_p", x[None], what, doubt), matched_error)


def linear_rows(sketches: Sequence[np.ndarray], operators: Sequence[Operator], n_rows: int) -> np.ndarray:
    """Return X_p (n × m) from X_pᵀS_t (m × d) alone: exact once T·d ≥ n (Qian et al., 2020, Thm. 3)."""
    return recover_from_sketches(sketches, operators).T[:n_rows]


def sparse_rows(S: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Return X (n × m) ≥ 0 with Sᵀ X = seen (T·d × m) and least sum: one linear program per column.

    For Gaussian S, columns with few entries are the unique solution well before T·d reaches n (Donoho and Tanner,
    2005). If the program fails for a column, that column is the least squares solution, clipped at zero.
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
    """Return S (n × T·d), concatenated, and SᵀX (T·d × m)."""
    return np.hstack([operator.rows(0, n_rows) for operator in operators]), np.hstack(list(sketches)).T


def held_out_error(S: np.ndarray, seen: np.ndarray) -> float:
    """Return the relative error of `sparse_rows` on held-out equations: 0 is a full recovery.

    It needs no truth. If other X fit as well, the solution is one of them and misses held-out equations.
    """
    kept = len(seen) - max(1, int(HELD_OUT * len(seen)))
    size = float(np.linalg.norm(seen[kept:]))
    if kept < 1 or size == 0:
        return float("nan")
    return float(np.linalg.norm(S[:, kept:].T @ sparse_rows(S[:, :kept], seen[:kept]) - seen[kept:])) / size


def raw_coordinates(sketch: np.ndarray, operator: Operator) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the columns of A in a subsampling sketch A S (r × d), indices first; None for other sketches."""
    pattern = operator.pattern
    if not isinstance(pattern, ChosenCoordinates):
        return None
    return pattern.chosen, sketch * (operator.dimension / operator.size) ** 0.5


def attack_sketches(context: AttackContext, party: str) -> list[Finding]:
    """Attack sketches of X: by linear algebra (Theorem 3), or for sparse X ≥ 0 by linear programs."""
    seen, counted = context.seen(party, "data", "weights"), context.seen(party, "rows")
    if not seen or not counted:
        return []
    n = round(float(counted[0][1]["rows"][0]))
    turns = [int(model["turn"][0]) for model, _ in seen]
    operators = [context.program.operator(context.layout.seed, party, n, turn) for turn in turns]
    sketches = [to_float64(upload["data"]) for _, upload in seen]
    share = sum(operator.dimension for operator in operators) / n
    if share >= 1:
        X = linear_rows(sketches, operators, n)
        what = f"its {format_count(n, 'row')} by linear algebra, from T·d/n = {share:.2f} of the equations needed"
        S, data = equations(sketches, operators, n)
        doubt = float(np.linalg.norm(S.T @ X - data) / max(float(np.linalg.norm(data)), 1e-300))
        return with_error(context, Finding("sketches, linear", party, "X_p", X, what, doubt), matched_error)
    S, data = equations(sketches, operators, n)
    data = data[:, :MOST_COLUMNS]
    what = (
        f"its {format_count(n, 'row')}, if they are sparse, from T·d/n = {share:.2f} of the equations that "
        "linear algebra needs"
    )
    columns = f"X_p[:, :{data.shape[1]}]"

    def measure(found: np.ndarray, rows: np.ndarray) -> float:
        return matched_error(found, rows[:, : found.shape[1]])

    X, doubt = sparse_rows(S, data), held_out_error(S, data)
    return with_error(context, Finding("sketches, non-negative and sparse", party, columns, X, what, doubt), measure)


def attack_raw_sketches(context: AttackContext, party: str) -> list[Finding]:
    """Attack subsampling sketches: they contain columns of H_p, or rows of W, unchanged."""
    program, layout, findings = context.program, context.layout, list[Finding]()
    shared: Any = getattr(program, "columns_sketch", None)
    columns: dict[int, np.ndarray] = {}
    for model, upload in context.seen(party, "sketch") if shared is not None else ():
        outer, turn = (int(value) for value in model["turn"])
        S = shared.draw(layout.n_features, program.rank, layout.seed, "S2", outer * program.inner + turn)
        columns |= _raw(to_float64(upload["sketch"]), S)
    if columns:
        what = f"{len(columns)} of the {layout.n_features} columns of its H_p, unchanged, from subsampling sketches"
        found = np.array([columns[j] for j in sorted(columns)]).T
        findings.append(Finding("raw coordinates", party, "columns of H_p", found, what, 0.0))
    rows: dict[int, np.ndarray] = {}
    for model, upload in context.seen(party, "sketched_W") if getattr(program, "n_rows", None) else ():
        S = program.sketch.draw(program.n_rows, program.rank, layout.seed, "H", int(model["turn"][0]) // 2)
        rows |= {i: w for i, w in _raw(to_float64(upload["sketched_W"]), S).items() if w.any()}
    if rows:
        what = f"{len(rows)} rows of its W, of {program.n_rows} of all nodes, as they were when sampled"
        found = np.array([rows[i] for i in sorted(rows)])
        findings.append(Finding("raw coordinates", party, "rows of W_p", found, what, 0.0))
    return findings


def _raw(sketch: np.ndarray, operator: Operator) -> dict[int, np.ndarray]:
    raw = raw_coordinates(sketch, operator)
    return {} if raw is None else dict(zip(raw[0].tolist(), raw[1].T, strict=True))
