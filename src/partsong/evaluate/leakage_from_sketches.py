"""Attacks on programs that send sketches."""

from __future__ import annotations

from typing import Any

import numpy as np

from partsong.evaluate.leakage_findings import Finding, matched_error
from partsong.evaluate.leakage_scene import Scene, judged
from partsong.evaluate.leakage_sketches import equations, held_out_error, linear_rows, raw_coordinates, sparse_rows
from partsong.evaluate.leakage_transcript import numbers

MOST_COLUMNS = 64
"""So many columns are solved for where each is a linear program."""


def from_sketches(scene: Scene, party: str) -> list[Finding]:
    """Theorem 3, and the same with X ≥ 0 and sparse."""
    seen, counted = scene.seen(party, "data", "weights"), scene.seen(party, "rows")
    if not seen or not counted:
        return []
    n = round(float(counted[0][1]["rows"][0]))
    turns = [int(model["turn"][0]) for model, _ in seen]
    operators = [scene.program.operator(scene.layout.seed, party, n, turn) for turn in turns]
    sketches = [numbers(upload["data"]) for _, upload in seen]
    share = sum(operator.dimension for operator in operators) / n
    if share >= 1:
        X = linear_rows(sketches, operators, n)
        told = f"its {n} rows by linear algebra: T·d/n = {share:.2f} of the equations needed are there"
        S, data = equations(sketches, operators, n)
        doubt = float(np.linalg.norm(S.T @ X - data) / max(float(np.linalg.norm(data)), 1e-300))
        return judged(scene, Finding("sketches, linear", party, "X_p", X, told, doubt), matched_error)
    S, data = equations(sketches, operators, n)
    data = data[:, :MOST_COLUMNS]
    told = f"its {n} rows, if they are sparse, at T·d/n = {share:.2f} of the equations that linear algebra needs"
    columns = f"X_p[:, :{data.shape[1]}]"

    def measure(found: np.ndarray, rows: np.ndarray) -> float:
        return matched_error(found, rows[:, : found.shape[1]])

    X, doubt = sparse_rows(S, data), held_out_error(S, data)
    return judged(scene, Finding("sketches, non-negative and sparse", party, columns, X, told, doubt), measure)


def from_raw_sketches(scene: Scene, party: str) -> list[Finding]:
    """Columns of H_p, or rows of W, that a subsampling sends as they are."""
    program, layout = scene.program, scene.layout
    findings = []
    shared: Any = getattr(program, "columns_sketch", None)
    columns: dict[int, np.ndarray] = {}
    for model, upload in scene.seen(party, "sketch") if shared is not None else ():
        outer, turn = (int(value) for value in model["turn"])
        S = shared.draw(layout.n_features, program.rank, layout.seed, "S2", outer * program.inner + turn)
        raw = raw_coordinates(numbers(upload["sketch"]), S)
        columns |= {} if raw is None else dict(zip(raw[0].tolist(), raw[1].T, strict=True))
    if columns:
        told = f"{len(columns)} of the {layout.n_features} columns of its H_p as they are: a subsampling hides nothing"
        found = np.array([columns[j] for j in sorted(columns)]).T
        findings.append(Finding("raw coordinates", party, "columns of H_p", found, told, 0.0))
    rows: dict[int, np.ndarray] = {}
    for model, upload in scene.seen(party, "sketched_W") if getattr(program, "n_rows", None) else ():
        S = program.sketch.draw(program.n_rows, program.rank, layout.seed, "H", int(model["turn"][0]) // 2)
        raw = raw_coordinates(numbers(upload["sketched_W"]), S)
        rows |= {} if raw is None else {i: w for i, w in zip(raw[0].tolist(), raw[1].T, strict=True) if w.any()}
    if rows:
        told = f"{len(rows)} rows of its W, of {program.n_rows} of all nodes, as they were when they were drawn"
        found = np.array([rows[i] for i in sorted(rows)])
        findings.append(Finding("raw coordinates", party, "rows of W_p", found, told, 0.0))
    return findings
