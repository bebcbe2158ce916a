"""Attacks on sums: by the server of a masked run, and by all parties but one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain, combinations, islice
from typing import Any

import numpy as np

from partsong.aggregation.linear import Sum, add, block_span
from partsong.attacks.exact_sums import attack_differences, attack_exact_sums
from partsong.attacks.findings import Finding, Observer
from partsong.attacks.reconstruction import last_addend
from partsong.attacks.second_moment import attack_second_moment
from partsong.attacks.transcript import AttackContext, Exchange, to_float64
from partsong.core.interfaces import Layout, Message, Program, Reducible, Reduction, ReductionContext, Shard, State
from partsong.errors import ParameterError
from partsong.training.traffic import Traffic

ROWS, MOMENT = frozenset({"gram", "cross", "rows"}), frozenset({"moment"})
"""Arrays whose sum over parties equals the upload of one party with all their rows."""
TOGETHER = "{what}. These are the {n}rows of all parties together, without their owners; masks do not prevent this"

Uploads = Mapping[str, Mapping[int, Message]]
"""Known uploads by party and exchange number."""
BROKEN = (ArithmeticError, AssertionError, KeyError, IndexError, TypeError, ValueError, RuntimeError)
MOST_TRIED = 1 << 14
"""Number of candidate cohorts tried for one sum."""


def attack_complete_sums(context: AttackContext) -> list[Finding]:
    """Attack the sums over all parties like the sums of one party with all rows."""
    together = as_one_party(context)
    if together is None:
        return []
    all_parties = together.layout.parties[0]
    counts = [round(float(upload["rows"])) for _, upload in together.seen(all_parties, "rows")]
    n = counts[0] if counts else None
    found = [
        *attack_second_moment(together, all_parties),
        *attack_exact_sums(together, all_parties),
        *attack_differences(together, all_parties),
    ]
    return [_for_all_parties(each, n) for each in found]


def as_one_party(context: AttackContext) -> AttackContext | None:
    """Return sums over all parties as uploads of one party with all rows; None if there are none."""
    all_parties = ", ".join(context.layout.parties)
    together = [Exchange({all_parties: model}, {all_parties: total}) for model, total in complete_sums(context)]
    if not together:
        return None
    rows = [context.truth[party] for party in context.layout.parties if party in context.truth]
    truth = {all_parties: np.vstack(rows)} if len(rows) == len(context.layout.parties) else {}
    renamed = (as_one_party(other) for other in context.others)
    others = tuple(_rename_party(one, all_parties) for one in renamed if one is not None)
    layout = replace(context.layout, parties=(all_parties,))
    return replace(context, exchanges=together, layout=layout, truth=truth, others=others)


def _rename_party(context: AttackContext, name: str) -> AttackContext:
    """Rename the only party: the parties may differ between two runs."""
    (old,) = context.layout.parties
    exchanges = [Exchange({name: one.models[old]}, {name: one.uploads[old]}) for one in context.exchanges]
    truth = dict(zip((name,), context.truth.values(), strict=False))
    return replace(context, exchanges=exchanges, layout=replace(context.layout, parties=(name,)), truth=truth)


def _for_all_parties(finding: Finding, n: int | None) -> Finding:
    attack = "span of all rows" if finding.attack == "span of the rows" else finding.attack
    what = TOGETHER.format(what=finding.what.replace(" its ", " ").replace("X_p", "X"), n="" if n is None else f"{n} ")
    return replace(finding, attack=attack, array=finding.array.replace("X_p", "X"), what=what, observer=Observer.SUMS)


def complete_sums(context: AttackContext) -> list[tuple[Message, Message]]:
    """Return (model, sum) of the exchanges with these arrays in which all of several parties took part."""
    found = []
    for exchange in context.exchanges:
        if not len(exchange.models) == len(context.layout.parties) > 1:
            continue
        addends = list(exchange.uploads.values()) if exchange.total is None else [exchange.total]
        names = next((kind for kind in (ROWS, MOMENT) if all(one.arrays.keys() >= kind for one in addends)), None)
        if names is not None:
            arrays = {name: np.sum([to_float64(addend[name]) for addend in addends], axis=0) for name in sorted(names)}
            found.append((exchange.models[min(exchange.models)], Message(arrays)))
    return found


def reconstruct_sums(traffic: Iterable[Traffic], program: Any, layout: Layout, reduction: Reduction) -> list[Exchange]:
    """Return the exchanges of a masked run as its server sees them: the sum and its participants.

    The server's steps are replayed from the recorded messages; its start comes from the shared seed.
    """
    server, model = program.start_server(layout)
    standing, exchanges = None, []
    for index, sent in enumerate(traffic):
        try:
            phase, state, context = _first_phase(sent, reduction, standing, ReductionContext(index, (), layout, model))
            for later in range(phase + 1, reduction.phases):
                inbox = {party: message for party, at, message in sent if at == later}
                state, _ = reduction.server_step(later, inbox, state, context)
            standing, total, included = reduction.result(state, Sum(), context)
            dropouts = tuple(name for name in context.participants if name not in included)
            exchanges.append(Exchange(dict.fromkeys(included, model), {}, total, dropouts))
            server, model = program.finish(server, program.aggregation.lower(total))
        except BROKEN as error:
            raise ParameterError(
                f"The masked messages of round {index + 1} do not match this program: {error} Pass all rounds of one "
                "run from the first on, with its program, layout and reduction."
            ) from error
    return exchanges


def _first_phase(
    sent: Traffic, reduction: Reduction, standing: State, asked: ReductionContext
) -> tuple[int, State, ReductionContext]:
    """Return the first phase of a sum, the server's state after it, and the context with the selected cohort.

    Parties that were selected but never answered left nothing in the traffic. The signatures of the others cover the
    whole cohort, so the first phase can be verified for one cohort only.
    """
    phase, senders = min(at for _, at, _ in sent), {party for party, _, _ in sent}
    inbox = {party: message for party, at, message in sent if at == phase}
    trouble: Exception | None = None
    for names in islice(_candidate_cohorts(senders, asked.layout.parties), MOST_TRIED):
        context = replace(asked, participants=names)
        try:
            if reduction.first_phase(standing, context) == phase:
                return phase, reduction.server_step(phase, inbox, standing, context)[0], context
        except BROKEN as error:
            trouble = trouble or error
    raise trouble or ValueError(f"no sum starts with phase {phase} here.")


def _candidate_cohorts(senders: set[str], parties: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield cohorts, in name order, that contain all senders: senders only, all parties, then those in between."""
    silent = [name for name in sorted(parties) if name not in senders]
    counts = [0, *([len(silent)] if silent else []), *range(1, len(silent))]
    for more in chain.from_iterable(combinations(silent, count) for count in counts):
        yield tuple(sorted({*senders, *more}))


def recompute_uploads(
    exchanges: Sequence[Exchange], program: Program, layout: Layout, shards: Sequence[Shard]
) -> Uploads:
    """Recompute the uploads of parties from their rows and secrets."""
    known: dict[str, dict[int, Message]] = {}
    for shard in shards:
        state, known[shard.name] = program.start_party(shard, layout), {}
        for index, exchange in enumerate(exchanges):
            is_in_sum = shard.name in exchange.models
            if is_in_sum or shard.name in exchange.dropouts:
                state, upload = program.local(shard, state, next(iter(exchange.models.values())))
                known[shard.name].update({index: upload} if is_in_sum else {})
    return known


def plaintext_uploads(exchanges: Sequence[Exchange]) -> Uploads:
    """Return uploads by party from a run without masks."""
    names = sorted({name for exchange in exchanges for name in exchange.uploads})
    return {
        name: {i: exchange.uploads[name] for i, exchange in enumerate(exchanges) if name in exchange.uploads}
        for name in names
    }


def subtract_other_parties(
    exchanges: Sequence[Exchange], program: Program, party: str, known: Uploads
) -> list[Exchange]:
    """Compute one party's uploads as all others can: lower(total − Σ lift(upload)) over the others.

    The others' uploads are included as the sum shows them: weights that are not summed are lost. Only exchanges count
    in which at least two uploads are summed and those of all others are known.
    """
    found = []
    for index, exchange in enumerate(exchanges):
        others = [name for name in exchange.models if name != party]
        if party not in exchange.models or not others or any(index not in known.get(name, ()) for name in others):
            continue
        behind = underlying_sum(program.aggregation, known[others[0]][index])
        if behind is None:
            continue
        lifted = {name: behind.lift(known[name][index]) for name in others}
        total = exchange.total or reduce(add, map(behind.lift, exchange.uploads.values()))
        addends = {**lifted, party: last_addend(total, list(lifted.values()))}
        found.append(Exchange(exchange.models, {name: as_sent(behind.lower(each)) for name, each in addends.items()}))
    return found


def underlying_sum(aggregation: Any, upload: Message) -> Reducible | None:
    """Return the linear aggregation behind this one for uploads like this; None if it needs single uploads."""
    if isinstance(aggregation, Reducible):
        return aggregation
    second: Any = getattr(aggregation, "second", None)
    return second if isinstance(second, Reducible) and "gram" in upload.arrays else None


def as_sent(message: Message) -> Message:
    """Convert an upload lifted by `DisjointBlocks.lift` back to its block of columns."""
    if "arrived" not in message.arrays:
        return message
    H, blocks = to_float64(message["H"]), len(message["arrived"])
    block = int(np.argmax(to_float64(message["arrived"])))
    first, last = block_span(block, blocks, H.shape[1])
    place = np.array([block, blocks, H.shape[1]])
    return Message({"H": H[:, first:last], "place": place, "totals": message["totals"]}, message.weight)
