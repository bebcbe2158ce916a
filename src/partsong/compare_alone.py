"""The two ends of a comparison: every party on its own, and all rows in one place."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from partsong import threads
from partsong.comparison import Contestant, outcome_of
from partsong.core import Outcome, Schedule, Shard
from partsong.data.form import is_tensor
from partsong.data.matrix import as_matrix
from partsong.data.sparse import SparseMatrix
from partsong.engines.parallel import side_by_side
from partsong.evaluate.at_party import AtParty, OwnParts, at_party, overall_error
from partsong.evaluate.findings import Curve, MethodFindings
from partsong.fitting import Task, conclude, pursue
from partsong.interrupts import Interrupts
from partsong.running import HistoryRow, Run, Stop
from partsong.streams import key

WORST_FIRST = (Outcome.INTERRUPTED, Outcome.DIVERGED, Outcome.TIME_SPENT, Outcome.MAX_ROUNDS, Outcome.CONVERGED)


def contest_alone(
    contestant: Contestant, shards: Sequence[Shard], seed: int, interrupts: Interrupts | None = None
) -> MethodFindings:
    """Every party factorizes its own rows with the program as its only party, and keeps the model to itself.

    The curve is as long as the shortest of the parties'; the outcome is the worst of theirs.
    """
    began = time.perf_counter()
    by_name = {shard.name: shard for shard in shards}

    def work(name: str) -> tuple[Task, Run]:
        task = Task(contestant.program, [by_name[name]], Schedule(contestant.rounds, seed), Stop(tol=0.0))
        return task, pursue(task, began=began, interrupts=interrupts)

    runs = side_by_side(work, list(by_name), threads.available())
    seconds = time.perf_counter() - began
    parties = tuple(_alone(by_name[name], task, run) for name, (task, run) in runs.items())
    outcomes = {outcome_of(run, contestant.rounds) for _, run in runs.values()}
    error = overall_error(parties)
    return MethodFindings(
        name=contestant.name,
        description=contestant.description,
        relative_error=error,
        explained_variance=1.0 - error**2,
        bytes_up_per_party=0.0,
        bytes_down_per_party=0.0,
        rounds=0,
        seconds=seconds,
        outcome=str(min(outcomes, key=WORST_FIRST.index)),
        curve=_curve_alone(contestant.name, [run.history for _, run in runs.values()], parties, seconds),
        components=np.zeros((0, shards[0].matrix.shape[1])),
        shares=(),
        sent=(),
        start=contestant.start,
        parties=parties,
    )


def pooled(shards: Sequence[Shard]) -> Shard:
    """All rows in one place, in the order of the parties; sparse where one of them is."""
    matrices: list[Any] = [shard.matrix for shard in shards]
    dtype = None if is_tensor(matrices[0].X if hasattr(matrices[0], "X") else None) else matrices[0].dtype
    if any(isinstance(matrix, SparseMatrix) for matrix in matrices):
        from scipy.sparse import csr_array, vstack

        stacked: Any = vstack([m.by_row if isinstance(m, SparseMatrix) else csr_array(m.X) for m in matrices], "csr")
    elif dtype is None:
        import torch

        stacked = torch.cat([matrix.X for matrix in matrices])
    else:
        stacked = np.concatenate([matrix.X for matrix in matrices])
    return Shard("everyone", as_matrix(stacked, dtype), key(0, "secret", "everyone"))


def _curve_alone(
    label: str, histories: Sequence[Sequence[HistoryRow]], parties: Sequence[AtParty], seconds: float
) -> Curve:
    """The error over all rows by iteration; the time is spread evenly, as parties take turns on the cores."""
    squares = [[row.relative_error**2 for row in rows] for rows in histories]
    count = min(map(len, squares))
    sums = [sum(s[i] * party.squared_norm for s, party in zip(squares, parties, strict=True)) for i in range(count)]
    norm = sum(party.squared_norm for party in parties) or 1.0
    times = tuple(seconds * (i + 1) / count for i in range(count))
    return Curve(label, tuple(range(1, count + 1)), times, tuple(math.sqrt(max(0.0, value) / norm) for value in sums))


def _alone(shard: Shard, task: Task, run: Run) -> AtParty:
    finished = conclude(task, run)
    with threads.kernels_on(threads.available()):
        party = at_party(shard, finished.H, task.program.solver, finished.W)
    own = OwnParts(finished.H, tuple(range(len(finished.H))), (True,) * len(finished.H))
    return replace(party, own_error=party.relative_error, own=own)
