"""Local-only, federated and pooled side by side: what a simulation can show and a real federation cannot."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.core import Message, Round, Schedule, Shard
from partsong.engines.parallel import Parallel
from partsong.evaluate.findings import Curve, MethodFindings, Sent
from partsong.finished import Finished
from partsong.running import HistoryRow, Run, Stop
from partsong.simulation import simulate

Watch = Callable[[Round, HistoryRow], None]

MEANINGS = {
    "gram": "WᵀW: how a party's weights vary together, summed over its rows",
    "cross": "WᵀX: the party's rows summed up by weight, one line per component",
    "totals": "number of rows, ‖X‖² and ΣW",
    "H": "the party's own components",
}


@dataclass(frozen=True, slots=True)
class Contestant:
    """A method of a comparison: a program, how long it may run, and one sentence about it."""

    name: str
    description: str
    program: Any
    rounds: int
    is_oracle: bool = False


def contest(contestant: Contestant, shards: Sequence[Shard], seed: int, stop: Stop, watch: Watch) -> MethodFindings:
    """Run one method and write down what it reached, what it cost, and what left the parties."""
    sent: list[Message] = []

    def follow(done: Round, row: HistoryRow) -> None:
        if not sent and done.traffic:
            sent.append(done.traffic[0][2])
        watch(done, row)

    began = time.perf_counter()
    schedule = Schedule(contestant.rounds, seed)
    run, finished = simulate(
        contestant.program, shards, schedule, stop=stop, engine=Parallel(record=True), began=began, watch=follow
    )
    seconds = time.perf_counter() - began
    return _findings(contestant, run, finished, len(shards), seconds, () if contestant.is_oracle else tuple(sent))


def _findings(
    contestant: Contestant, run: Run, finished: Finished, parties: int, seconds: float, sent: tuple[Message, ...]
) -> MethodFindings:
    rows, oracle = run.history, contestant.is_oracle
    return MethodFindings(
        name=contestant.name,
        description=contestant.description,
        relative_error=finished.relative_error,
        explained_variance=1.0 - finished.relative_error**2,
        bytes_up_per_party=0.0 if oracle else sum(row.bytes_up for row in rows) / parties,
        bytes_down_per_party=0.0 if oracle else float(sum(row.bytes_down for row in rows)),
        rounds=len(rows),
        seconds=seconds,
        outcome=str(run.outcome),
        curve=Curve(
            contestant.name,
            tuple(row.iteration for row in rows),
            tuple(row.seconds for row in rows),
            tuple(row.relative_error for row in rows),
        ),
        components=finished.H,
        shares=tuple(float(share) for share in finished.shares),
        sent=tuple(item for message in sent for item in _disclosures(message, len(rows))),
        is_oracle=oracle,
    )


def _disclosures(message: Message, times: int) -> list[Sent]:
    arrays = [
        Sent(name, shape, dtype, int(message[name].nbytes), times, MEANINGS.get(name, ""))
        for name, shape, dtype in message.signature
    ]
    return [*arrays, Sent("weight", (), "float64", 8, times, "the number of rows, where the aggregation uses it")]


def in_the_order_of(reference: np.ndarray, components: np.ndarray) -> np.ndarray:
    """For each reference component the index of its partner: the assignment with the largest total cosine."""
    from scipy.optimize import linear_sum_assignment

    def unit(H: np.ndarray) -> np.ndarray:
        sizes = np.linalg.norm(H, axis=1, keepdims=True)
        return H / np.where(sizes > 0, sizes, 1)

    return np.asarray(linear_sum_assignment(-unit(reference) @ unit(components).T)[1])
