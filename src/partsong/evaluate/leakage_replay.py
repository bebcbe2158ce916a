"""A party's work done again by somebody else, on rows that are only supposed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partsong.core import Layout, Message, Program, Shard
from partsong.data.matrix import as_matrix
from partsong.evaluate.leakage_transcript import numbers

ROUNDS = 2
"""So many rounds are done again."""


def replayed(
    program: Program, layout: Layout, party: str, models: Sequence[Message], rows: np.ndarray, secret: int = 0
) -> list[Message]:
    """What a party with these rows (n × m) would have answered to these models, from its start on."""
    shard = Shard(party, as_matrix(np.ascontiguousarray(rows, layout.dtype)), secret)
    state, uploads = program.start_party(shard, layout), []
    for model in models:
        state, upload = program.local(shard, state, model)
        uploads.append(upload)
    return uploads


def misfit(
    program: Program, layout: Layout, party: str, seen: Sequence[tuple[Message, Message]], rows: np.ndarray
) -> np.ndarray:
    """How far the uploads that these rows lead to are from those that were seen, array by array, relative to them."""
    models = [model for model, _ in seen[:ROUNDS]]
    again = replayed(program, layout, party, models, rows)
    parts = []
    for (_, upload), answer in zip(seen[:ROUNDS], again, strict=True):
        for name, array in sorted(upload.arrays.items()):
            wanted = numbers(array)
            parts.append((numbers(answer[name]) - wanted).ravel() / max(float(np.linalg.norm(wanted)), 1e-300))
    return np.concatenate(parts)
