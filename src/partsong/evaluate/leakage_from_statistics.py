"""Attacks on programs that send gram W_pᵀW_p and cross W_pᵀX_p."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from partsong.core import Message
from partsong.evaluate.leakage_findings import MEMBERSHIP, SAME, SUPPOSED, UNCLEAR, Finding, matched_error, span_error
from partsong.evaluate.leakage_replay import misfit
from partsong.evaluate.leakage_scene import Scene, judged
from partsong.evaluate.leakage_statistics import row_from_statistics, row_span, rows_from_statistics
from partsong.evaluate.leakage_transcript import numbers

MOST_ROWS_TO_TURN = 4
"""Rotations of more rows than these are not searched."""


def from_statistics(scene: Scene, party: str) -> list[Finding]:
    """One row exactly; up to k rows by turning them; the span of more."""
    seen = scene.seen(party, "gram", "cross")
    if not seen:
        return []
    is_told = "totals" in seen[0][1].arrays
    n, k = round(float(seen[0][1]["totals"][0])) if is_told else 1, len(numbers(seen[0][1]["gram"]))
    pairs = [in_units(scene.program, upload) for _, upload in seen]
    if n == 1:
        w, x = row_from_statistics(*pairs[0])
        doubt = float(np.linalg.norm(np.outer(w, x) - pairs[0][1]) / max(float(np.linalg.norm(pairs[0][1])), 1e-300))
        if not is_told and doubt > UNCLEAR:
            return []
        told = f"its only row, number by number, from one upload of WᵀW and WᵀX{'' if is_told else SUPPOSED}"
        return judged(scene, Finding("statistics of one row", party, "X_p", x[None], told, doubt), matched_error)
    findings = []
    if n <= min(k, MOST_ROWS_TO_TURN):
        step = partial(misfit, scene.program, scene.layout, party, seen)
        turned = rows_from_statistics(pairs, n, step)
        if turned is not None:
            told = f"its {n} rows: WᵀW and WᵀX leave a rotation open, and signs and the known step of W settle it"
            finding = Finding("statistics of few rows", party, "X_p", turned[0], told, turned[1])
            findings += judged(scene, finding, matched_error)
    span = row_span([cross for _, cross in pairs], n) if n < scene.layout.n_features else None
    if span is not None and span[1] < SAME:
        told = f"the span of its {n} rows, {MEMBERSHIP}"
        finding = Finding("span of the rows", party, "span of X_p", span[0], told, span[1])
        findings += judged(scene, finding, span_error)
    return findings


def in_units(program: Any, upload: Message) -> tuple[np.ndarray, np.ndarray]:
    """Gram and cross as real numbers, also of a program with noise, which sends whole numbers of public units."""
    gram, cross = numbers(upload["gram"]), numbers(upload["cross"])
    if not hasattr(program, "noise"):
        return gram, cross
    bounds = program.noise(cross.shape[1]).bounds
    return gram * bounds.weight_unit**2, cross * (bounds.weight_unit * bounds.row_unit)
