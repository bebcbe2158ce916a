"""Membership inference from the sums of a party, and the largest share of one row in a sum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.attacks.exact_sums import SVD_SECONDS
from partsong.attacks.second_moment import moments_of
from partsong.attacks.transcript import AttackContext, to_float64
from partsong.core.interfaces import Message, Shard
from partsong.data.conversion import as_matrix


@dataclass(frozen=True, slots=True)
class MembershipTest:
    """How well a test separates members from other rows; `auc` (½: not at all) is None without the truth."""

    test: str
    auc: float | None
    members: int | None
    candidates: int


def membership(context: AttackContext, party: str, candidates: np.ndarray) -> list[MembershipTest]:
    """Test whether candidates (c × m) are among a party's rows, from its sums.

    residual   ‖x − x BᵀB‖ / ‖x‖, B the span of all sent rows of WᵀX: small for a member
    signs      how far WᵀX − w(x) xᵀ falls below zero, w(x) the weights that x would have: zero for a member
    """
    seen = context.seen(party, "gram", "cross")
    if not seen or not len(candidates):
        return []
    truth = context.truth.get(party)
    rows, is_member = candidates, None
    if truth is not None:
        used = {np.ascontiguousarray(row).tobytes() for row in truth}
        strangers = np.array([np.ascontiguousarray(row).tobytes() not in used for row in candidates])
        rows = np.vstack([truth, candidates[strangers]])
        is_member = np.arange(len(rows)) < len(truth)
    scores = {"residual": -_residuals(context, party, rows), "signs": -_sign_slack(context, party, rows)}
    n_members = None if truth is None else len(truth)
    return [
        MembershipTest(name, None if is_member is None else auc_of(score, is_member), n_members, len(candidates))
        for name, score in scores.items()
    ]


def auc_of(scores: np.ndarray, is_member: np.ndarray) -> float | None:
    """Return the probability that a member scores higher than a non-member, ties counted half; None without both."""
    members, strangers = scores[is_member], np.sort(scores[~is_member])
    if not len(members) or not len(strangers) or np.isnan(scores).any():
        return None
    below, upto = np.searchsorted(strangers, members, "left"), np.searchsorted(strangers, members, "right")
    return float((below + upto).mean() / (2 * len(strangers)))


def _residuals(context: AttackContext, party: str, rows: np.ndarray) -> np.ndarray:
    crosses = [
        to_float64(upload["cross"]) for one in (context, *context.others) for _, upload in one.seen(party, "cross")
    ]
    crosses += [M for one in (context, *context.others) for M in moments_of(one, party)]
    height, m = sum(len(cross) for cross in crosses), crosses[0].shape[1]
    if not context.clock.has(min(height, m) ** 2 * max(height, m) * SVD_SECONDS):
        return np.full(len(rows), np.nan)
    stacked = np.vstack([cross / max(float(np.linalg.norm(cross)), 1e-300) for cross in crosses])
    _, values, basis = np.linalg.svd(stacked, full_matrices=False)
    floor = context.unit(crosses[0]) * values[0] * np.sqrt(max(stacked.shape))
    kept = basis[values > floor]
    sizes = np.maximum(np.linalg.norm(rows, axis=1), 1e-300)
    return np.asarray(np.linalg.norm(rows - rows @ kept.T @ kept, axis=1) / sizes)


def _sign_slack(context: AttackContext, party: str, rows: np.ndarray) -> np.ndarray:
    """Σ_t ‖min(0, C_t − w_t(x) xᵀ)‖² / ‖w_t(x) xᵀ‖² of each candidate, whose local steps are replayed."""
    slack = np.zeros(len(rows))
    for upload, W in _replayed_weights(context, party, rows):
        if upload is None:
            return np.full(len(rows), np.nan)
        C = to_float64(upload["cross"])
        for i, (w, x) in enumerate(zip(W, rows, strict=True)):
            own = np.outer(w, x)
            slack[i] += float((np.minimum(0.0, C - own) ** 2).sum()) / max(float((own**2).sum()), 1e-300)
    for M in moments_of(context, party):
        for i, x in enumerate(rows):
            if context.clock.is_over():
                return np.full(len(rows), np.nan)
            own = np.outer(x, x)
            slack[i] += float((np.minimum(0.0, M - own) ** 2).sum()) / max(float((own**2).sum()), 1e-300)
    return slack


def _current_stage(state: Any) -> Any:
    """The state of the current stage of a program of several stages."""
    for name in ("inner", "later"):
        state = getattr(state, name, state)
    return state


def largest_share(context: AttackContext, party: str) -> float | None:
    """Return the largest share of one row in a sent row of WᵀX, ‖w_il x_i‖ / ‖Σ_i w_il x_i‖; None without the truth.

    Near one, the upload shows that row.
    """
    rows, has_noise = context.truth.get(party), context.program.traits.release is not None
    if rows is None or has_noise or not context.seen(party, "gram", "cross"):
        return None
    sizes, largest = np.linalg.norm(rows, axis=1)[:, None], -1.0
    for upload, W in _replayed_weights(context, party, rows):
        if upload is None:
            return None
        totals = np.maximum(np.linalg.norm(to_float64(upload["cross"]), axis=1), 1e-300)
        largest = max(largest, float((W * sizes / totals).max(initial=0.0)))
    return None if largest < 0 else min(1.0, largest)


def _replayed_weights(
    context: AttackContext, party: str, rows: np.ndarray
) -> Iterator[tuple[Message | None, np.ndarray]]:
    """Yield each upload of WᵀX with the W that these rows would have; None as the upload when time is up."""
    shard = Shard(party, as_matrix(np.ascontiguousarray(rows, context.layout.dtype)), 0)
    state = context.program.start_party(shard, context.layout)
    for exchange in context.exchanges:
        model, upload = exchange.models.get(party), exchange.uploads.get(party)
        if model is None:
            continue
        if context.clock.is_over():
            yield None, np.empty(0)
            return
        state, _ = context.program.local(shard, state, model)
        W: Any = getattr(_current_stage(state), "W", None)
        if upload is not None and "cross" in upload.arrays and W is not None:
            yield upload, to_float64(W)
