"""Attacks on programs that send H_p, or the columns that a party has played."""

from __future__ import annotations

import numpy as np

from partsong.evaluate.leakage_findings import (
    MEMBERSHIP,
    SAME,
    SUPPOSED,
    UNCLEAR,
    Finding,
    cosine_error,
    matched_error,
    span_error,
)
from partsong.evaluate.leakage_history import clearest_span, row_basis, row_from_play, signed
from partsong.evaluate.leakage_scene import Scene, judged
from partsong.evaluate.leakage_transcript import numbers


def from_factors(scene: Scene, party: str) -> list[Finding]:
    """What the row spaces of a small party's H_p share."""
    seen = [(model, upload) for model, upload in scene.seen(party, "H") if "place" not in upload.arrays]
    if hasattr(scene.program, "inner"):  # H_p moves little between the exchanges of one round
        seen = [(model, upload) for model, upload in seen if int(model["turn"][1]) == scene.program.inner]
    factors = [numbers(upload["H"]) for _, upload in seen]
    n = round(seen[0][1].weight) if seen else 0
    if not seen or n < 1 or not np.isfinite(seen[0][1].weight):
        return []
    is_told = any(upload.weight != 1 for exchange in scene.exchanges for upload in exchange.uploads.values())
    if len(factors) == 1 and is_told:
        return _from_one_factor(scene, party, factors[0], n)
    span = clearest_span(factors, n)
    if span is None or (not is_told and (span[1] > UNCLEAR or _is_clear(clearest_span(factors, 2)))):
        return []
    if n == 1:
        row = signed(span[0][0])[None]
        told = "its only row up to a factor, as what all the H_p that it sent have in common"
        told += "" if is_told else SUPPOSED
        return judged(scene, Finding("history of H_p", party, "X_p up to a factor", row, told, span[1]), cosine_error)
    told = f"the span of its {n} rows, as what all the H_p that it sent have in common"
    return judged(scene, Finding("history of H_p", party, "span of X_p", span[0], told, span[1]), span_error)


def _from_one_factor(scene: Scene, party: str, H: np.ndarray, n: int) -> list[Finding]:
    """X_p = W_p H_p (nearly) where there are no more rows than components; k − 1 numbers of each row stay open."""
    if n > len(H) or len(H) >= H.shape[1]:
        return []
    told = f"a span of {len(H)} dimensions in which its {n} rows lie, as far as H_p fits them, {MEMBERSHIP}"
    return judged(scene, Finding("one H_p", party, "row space of H_p", row_basis(H), told), span_error)


def _is_clear(span: tuple[np.ndarray, float] | None) -> bool:
    return span is not None and span[1] <= UNCLEAR


def from_play(scene: Scene, party: str) -> list[Finding]:
    """The row of a party with one row, from what it does to columns."""
    seen = scene.seen(party, "H", "place", "totals")
    if not seen or not hasattr(scene.program, "game") or getattr(scene.program, "repeats", 1) != 1:
        return []
    x, doubt = row_from_play(seen, scene.program.game)
    if not doubt < SAME:
        return []
    told = "its only row, number by number, from how the columns that it played have moved in the first sweep"
    return judged(scene, Finding("columns before and after", party, "X_p", x[None], told, doubt), matched_error)
