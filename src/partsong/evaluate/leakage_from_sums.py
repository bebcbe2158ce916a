"""Attacks on sums: what masks leave as it is, and what all parties but one can subtract."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from partsong.core import Message, Reducible
from partsong.evaluate.leakage_findings import MEMBERSHIP, Finding, Observer
from partsong.evaluate.leakage_from_statistics import from_statistics
from partsong.evaluate.leakage_history import last_addend
from partsong.evaluate.leakage_scene import Scene
from partsong.evaluate.leakage_transcript import Exchange, numbers

ROWS = frozenset({"gram", "cross", "totals"})
"""Arrays whose sum over parties is that of one party with all their rows."""
FEW = "the {n} rows of all parties together, though not whose they are; sums are enough for it, and masks no help"
SPAN = f"the span of the {{n}} rows of all parties together, {MEMBERSHIP}; sums are enough for it, and masks no help"


def from_sums(scene: Scene) -> list[Finding]:
    """What the sum over all parties tells of all rows together: few rows themselves, and the span of more."""
    everybody = ", ".join(scene.layout.parties)
    together = [Exchange({everybody: model}, {everybody: total}) for model, total in complete_sums(scene)]
    if not together:
        return []
    rows = [scene.truth[party] for party in scene.layout.parties if party in scene.truth]
    truth = {everybody: np.vstack(rows)} if len(rows) == len(scene.layout.parties) else {}
    n = round(float(together[0].uploads[everybody]["totals"][0]))
    found = from_statistics(replace(scene, exchanges=together, truth=truth), everybody)
    turned = [each for each in found if each.array == "X_p"]
    spans = [each for each in found if each.array == "span of X_p"]
    return [
        *(replace(each, array="X", what=FEW.format(n=n), observer=Observer.SUMS) for each in turned),
        *(
            replace(each, attack="span of all rows", array="span of X", what=SPAN.format(n=n), observer=Observer.SUMS)
            for each in spans
        ),
    ]


def complete_sums(scene: Scene) -> list[tuple[Message, Message]]:
    """(model, sum) of the exchanges with such arrays in which all parties took part, if there are several."""
    found = []
    for exchange in scene.exchanges:
        if not len(exchange.models) == len(scene.layout.parties) > 1:
            continue
        addends = list(exchange.uploads.values()) if exchange.total is None else [exchange.total]
        if all(addend.arrays.keys() >= ROWS for addend in addends):
            arrays = {name: np.sum([numbers(addend[name]) for addend in addends], axis=0) for name in sorted(ROWS)}
            found.append((exchange.models[min(exchange.models)], Message(arrays)))
    return found


def by_subtraction(scene: Scene) -> list[Finding]:
    """One party's addend to the last sum, for all others together."""
    aggregation, uploads = scene.program.aggregation, scene.exchanges[-1].uploads
    if not isinstance(aggregation, Reducible) or len(uploads) < 2:
        return []
    lifted = {party: aggregation.lift(upload) for party, upload in uploads.items()}
    victim = min(uploads, key=lambda party: (uploads[party].weight, party))
    total = Message(
        {name: sum(numbers(message[name]) for message in lifted.values()) for name in lifted[victim].arrays},
        sum(message.weight for message in lifted.values()),
    )
    last = last_addend(total, [message for party, message in lifted.items() if party != victim])
    recovered, wanted = (
        np.concatenate([np.ravel(numbers(message[name])) for name in sorted(last.arrays)])
        for message in (last, lifted[victim])
    )
    error = float(np.linalg.norm(recovered - wanted) / max(float(np.linalg.norm(wanted)), 1e-300))
    array = ", ".join(sorted(last.arrays))
    told = f"what it added to the sum of the last round ({array}): the sum less all other addends, whatever masks it"
    return [Finding("subtraction", victim, array, recovered, told, error, error, Observer.OTHERS)]
