"""Local-only, federated and pooled side by side: what a simulation can show and a real federation cannot."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from partsong import threads
from partsong.core import Array, Message, Outcome, Round, Schedule, Shard, State
from partsong.engines.parallel import Parallel
from partsong.errors import PartsongError
from partsong.evaluate.at_party import AtParty, at_party, is_finite, own_parts, with_own
from partsong.evaluate.findings import Curve, MethodFindings, Sent
from partsong.finished import Finished
from partsong.fitting import Task, conclude, pursue
from partsong.interrupts import Interrupts
from partsong.running import HistoryRow, Run, Stop
from partsong.simulation import conclude_aloud, party_components, simulation_by_name

Watch = Callable[[Round, HistoryRow], None]
Signature = tuple[tuple[str, tuple[int, ...], str], ...]

MEANINGS = {
    "gram": "WᵀW: how a party's weights vary together, summed over its rows",
    "cross": "WᵀX: the party's rows summed up by weight, one line per component",
    "totals": "number of rows, ‖X‖² and ΣW",
    "H": "the party's own components",
    "counts": "which of the shared components the party has a partner for",
}

FEW_ROWS = 64
"""Rows of a party on which compiled code is tried before the clock starts."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A method of a comparison: a program, how long it may run, how its parties start, and one sentence about it."""

    name: str
    description: str
    program: Any
    rounds: int
    start: str = "common"
    is_oracle: bool = False


@dataclass(slots=True)
class Witness:
    """What a run lets be seen on its way: how often parties sent which kind of upload, by the signature of its arrays,
    and the parties' H_p after the first and the best round.
    """

    sent: dict[Signature, list[Sent]] = field(default_factory=dict)
    alone: dict[str, Array] = field(default_factory=dict)
    own: dict[str, Array] = field(default_factory=dict)
    server: State = None
    least: float = math.inf

    def see(self, done: Round, row: HistoryRow) -> None:
        """Note a round; of equally good ones the later is the best, as in `running.Follower`."""
        if not self.sent and done.traffic:
            self.alone = party_components(done.checkpoint)
        for _, _, upload in done.traffic:
            known = self.sent.get(upload.signature) or _arrays_of(upload)
            self.sent[upload.signature] = [replace(one, times=one.times + 1) for one in known]
        if row.objective <= self.least:
            self.least, self.server, self.own = row.objective, done.checkpoint.server, party_components(done.checkpoint)

    def sent_by_each(self, parties: int) -> tuple[Sent, ...]:
        """How often a party sent what, in the mean over so many of them: not all wait for each other."""
        every = itertools.chain.from_iterable(self.sent.values())
        return tuple(replace(one, times=max(1, round(one.times / parties))) for one in every)


def warm_up(programs: Iterable[Any], shards: Sequence[Shard]) -> None:
    """Two rounds of every program on a few rows, so that compiling and importing are no part of anybody's seconds."""
    few = [replace(s, matrix=s.matrix.rows(np.arange(min(FEW_ROWS, s.matrix.shape[0])))) for s in shards[:2]]
    for program in programs:
        brief = replace(program, steps=1) if hasattr(program, "steps") else program
        task = Task(brief, few, Schedule(2), Stop(tol=0.0), Parallel())
        with suppress(PartsongError):  # what is wrong with the data is told by the run itself
            own = Witness()
            run = pursue(task, watch=own.see)
            if run.outcome is Outcome.INTERRUPTED:
                raise KeyboardInterrupt
            at_parties(brief, few, conclude(task, run), own)


def contest(
    contestant: Contestant,
    shards: Sequence[Shard],
    seed: int,
    watch: Watch = lambda done, row: None,
    pooled: Shard | None = None,
    interrupts: Interrupts | None = None,
    faulty: str = "stop",
) -> MethodFindings:
    """Run one method and write down what it reached, what it cost, what left the parties, and how each of them fares.

    The oracle runs on `pooled`, and is evaluated at the parties. Seconds are those of the rounds; what a simulation
    computes only to look at them does not count. The first Ctrl-C that `interrupts` counts ends the rounds, the second
    all of it.
    """
    witness = Witness()

    def follow(done: Round, row: HistoryRow) -> None:
        witness.see(done, row)
        watch(done, row)

    schedule, at = Schedule(contestant.rounds, seed, faulty=faulty), shards if pooled is None else [pooled]
    began = time.perf_counter()
    task = simulation_by_name(
        contestant.name, contestant.program, at, contestant.rounds, schedule, Stop(tol=0.0), Parallel(record=True)
    )
    run = pursue(task, began=began, watch=follow, interrupts=interrupts)
    if interrupts is not None and interrupts.count > 1:
        raise KeyboardInterrupt
    finished = conclude_aloud(task, run)
    parties = at_parties(contestant.program, shards, finished, Witness() if contestant.is_oracle else witness)
    return findings_of(contestant, run, finished, parties, witness)


def at_parties(program: Any, shards: Sequence[Shard], finished: Finished, witness: Witness) -> tuple[AtParty, ...]:
    """How each party fares with the model, and with what it had found itself."""
    found = []
    with threads.kernels_on(threads.available()):
        for shard in shards:
            party = at_party(shard, finished.H, program.solver, finished.weights.get(shard.name))
            if shard.name in witness.own:
                models = program.components(witness.server), finished.H
                party = with_own(party, shard, witness.own[shard.name], models, program.solver)
            found.append(party)
    return tuple(found)


def findings_of(
    contestant: Contestant, run: Run, finished: Finished, parties: tuple[AtParty, ...], witness: Witness
) -> MethodFindings:
    """What a run has reached, what it cost, and what left the parties."""
    rows, oracle = run.history, contestant.is_oracle
    was_alone = contestant.start == "independent" and len(rows) > 1
    known = {name: H for name, H in witness.alone.items() if is_finite(H)} if was_alone else {}
    alone = {name: own_parts(H, finished.H) for name, H in known.items()}
    return MethodFindings(
        name=contestant.name,
        description=contestant.description,
        relative_error=finished.relative_error,
        explained_variance=1.0 - finished.relative_error**2,
        bytes_up_per_party=0.0 if oracle else sum(row.bytes_up for row in rows) / len(parties),
        bytes_down_per_party=0.0 if oracle else float(sum(row.bytes_down for row in rows)),
        rounds=run.rounds,
        seconds=rows[-1].seconds if rows else 0.0,
        outcome=str(outcome_of(run, contestant.rounds)),
        curve=_curve(contestant.name, rows, 0 if oracle else len(parties)),
        components=finished.H,
        shares=tuple(float(share) for share in finished.shares),
        sent=() if oracle else witness.sent_by_each(len(parties)),
        is_oracle=oracle,
        start=contestant.start,
        parties=parties,
        found_alone=alone,
    )


def outcome_of(run: Run, rounds: int) -> Outcome:
    """How a run ended; one that had made all its rounds when Ctrl-C was noticed lost nothing by it."""
    is_whole = run.outcome is Outcome.INTERRUPTED and run.rounds >= rounds
    return Outcome.MAX_ROUNDS if is_whole else run.outcome


def _curve(label: str, rows: Sequence[HistoryRow], senders: int) -> Curve:
    """The error along a history, and what each of the senders had sent by then."""
    sent = itertools.accumulate(row.bytes_up for row in rows)
    known = [(row, total) for row, total in zip(rows, sent, strict=True) if not math.isnan(row.objective)]
    return Curve(
        label,
        tuple(row.iteration for row, _ in known),
        tuple(row.seconds for row, _ in known),
        tuple(row.relative_error for row, _ in known),
        tuple(total / senders for _, total in known) if senders else (),
    )


def _arrays_of(upload: Message) -> list[Sent]:
    arrays = [
        Sent(name, shape, dtype, int(upload[name].nbytes), 0, MEANINGS.get(name, ""))
        for name, shape, dtype in upload.signature
    ]
    return [*arrays, Sent("weight", (), "float64", 8, 0, "the number of rows, where the aggregation uses it")]


def in_the_order_of(reference: np.ndarray, components: np.ndarray) -> tuple[int, ...]:
    """For each reference component the index of its partner: the assignment with the largest total cosine."""
    return own_parts(components, reference).places
