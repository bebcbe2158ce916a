"""What others can work out from what was sent: attacks on a recorded run, for its owner to try first.

    rounds = list(Sequential(record=True).run(program, shards, schedule, reduction=InTheOpen()))
    for finding in attack([done.traffic for done in rounds], program, Layout.of(shards, schedule.seed)):
        print(finding.told)

Everything is computed from messages, the program and the shared seed: what an honest-but-curious server has. That an
attack finds nothing shows that this attack finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from partsong.core import Layout, Message, Program, Reducible
from partsong.evaluate.leakage_findings import Finding, Observer, cosine_error, matched_error, span_error
from partsong.evaluate.leakage_from_sketches import from_raw_sketches, from_sketches
from partsong.evaluate.leakage_history import clearest_span, last_addend, row_from_play, signed
from partsong.evaluate.leakage_replay import misfit
from partsong.evaluate.leakage_scene import Scene, judged
from partsong.evaluate.leakage_statistics import row_from_statistics, row_span, rows_from_statistics
from partsong.evaluate.leakage_transcript import Traffic, numbers, transcript

MOST_ROWS_TO_TURN = 4
"""Rotations of more rows than these are not searched."""
SUPPOSED = ", if it has only one (its number of rows is not sent)"
UNCLEAR = 0.1
"""Beyond such a doubt a party of which the number of rows is not known is taken to have more than one."""
MEMBERSHIP = "by which a record that somebody brings along is known to be among them, or not to be"
SAME = 1e-6
"""Numbers that agree to this share are taken for the same."""


def attack(
    traffic: Iterable[Traffic],
    program: Program,
    layout: Layout,
    *,
    truth: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
) -> list[Finding]:
    """Every attack that the arrays of these uploads allow, on every party, as far as it gets.

    `traffic` is that of all rounds from the first one on (`Round.traffic`, or `read_traffic` of a run folder); `truth`
    are rows by party, with which findings have an error, and `asynchronous` says which engine ran.
    """
    exchanges = transcript(traffic, program, layout, asynchronous=asynchronous)
    if not exchanges:
        return [_nothing_readable(layout)]
    scene = Scene(exchanges, program, layout, {name: numbers(rows) for name, rows in (truth or {}).items()})
    found = [finding for party in layout.parties for each in ATTACKS for finding in each(scene, party)]
    return [*found, *_from_sums(scene), *_by_subtraction(scene)]


def _from_statistics(scene: Scene, party: str) -> list[Finding]:
    """One row exactly; up to k rows by turning them; the span of more."""
    seen = scene.seen(party, "gram", "cross")
    if not seen:
        return []
    is_told = "totals" in seen[0][1].arrays
    n, k = round(float(seen[0][1]["totals"][0])) if is_told else 1, len(numbers(seen[0][1]["gram"]))
    pairs = [(numbers(upload["gram"]), numbers(upload["cross"])) for _, upload in seen]
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


def _from_factors(scene: Scene, party: str) -> list[Finding]:
    """What the row spaces of a small party's H_p share."""
    seen = [(model, upload) for model, upload in scene.seen(party, "H") if "place" not in upload.arrays]
    if hasattr(scene.program, "inner"):  # H_p moves little between the exchanges of one round
        seen = [(model, upload) for model, upload in seen if int(model["turn"][1]) == scene.program.inner]
    factors = [numbers(upload["H"]) for _, upload in seen]
    n = round(seen[0][1].weight) if seen else 0
    if not seen or n < 1 or not np.isfinite(seen[0][1].weight):
        return []
    is_told = any(upload.weight != 1 for exchange in scene.exchanges for upload in exchange.uploads.values())
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


def _is_clear(span: tuple[np.ndarray, float] | None) -> bool:
    return span is not None and span[1] <= UNCLEAR


def _from_play(scene: Scene, party: str) -> list[Finding]:
    """The row of a party with one row, from what it does to columns."""
    seen = scene.seen(party, "H", "place", "totals")
    if not seen or not hasattr(scene.program, "game") or getattr(scene.program, "repeats", 1) != 1:
        return []
    x, doubt = row_from_play(seen, scene.program.game)
    if not doubt < SAME:
        return []
    told = "its only row, number by number, from how the columns that it played have moved in the first sweep"
    return judged(scene, Finding("columns before and after", party, "X_p", x[None], told, doubt), matched_error)


ATTACKS: tuple[Callable[[Scene, str], list[Finding]], ...] = (
    _from_statistics,
    from_sketches,
    _from_factors,
    _from_play,
    from_raw_sketches,
)


def _from_sums(scene: Scene) -> list[Finding]:
    """The span of everybody's rows, from sums alone: masks leave these as they are."""
    complete = [e.uploads for e in scene.exchanges if len(e.uploads) == len(scene.layout.parties) > 1]
    uploads = [
        each for each in complete if all({"cross", "totals"} <= upload.arrays.keys() for upload in each.values())
    ]
    if not uploads:
        return []
    n = round(sum(float(upload["totals"][0]) for upload in uploads[0].values()))
    crosses = [np.sum([numbers(upload["cross"]) for upload in each.values()], axis=0) for each in uploads]
    span = row_span(crosses, n) if n < scene.layout.n_features else None
    if span is None or span[1] >= SAME:
        return []
    everybody = ", ".join(scene.layout.parties)
    told = f"the span of the {n} rows of all parties together, {MEMBERSHIP}; sums are enough for it, and masks no help"
    rows = [scene.truth[party] for party in scene.layout.parties if party in scene.truth]
    error = span_error(span[0], np.vstack(rows)) if len(rows) == len(scene.layout.parties) else None
    return [Finding("span of all rows", everybody, "span of X", span[0], told, span[1], error, Observer.SUMS)]


def _by_subtraction(scene: Scene) -> list[Finding]:
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


def _nothing_readable(layout: Layout) -> Finding:
    told = (
        "nothing from single uploads, which are not the program's own arrays: they are masked, and look random. The "
        "sum is known to the server, and all parties but one can subtract their own addends from it"
    )
    return Finding("masked uploads", ", ".join(layout.parties), "nothing", None, told)
