"""Run `partsong.NMF` iteration by iteration, to measure each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Checkpoint, Round, Schedule, Shard
from partsong.engines.local import Sequential
from partsong.methods.exact import SharedSums
from partsong.solvers.initialization import InitialFactors
from partsong.solvers.squared_error import RowState, SquaredError

PARTY = "all"


def iterate(
    matrix: Any, rank: int, solver: SquaredError, start: InitialFactors, threads: int, most: int
) -> Iterator[Round]:
    """The loop that `NMF.fit` runs between initialization and finish."""
    program = SharedSums(rank, solver)
    server, model = program.start_from(start.Ht)
    begin = Checkpoint(0, {PARTY: RowState(start.W)}, server, model)
    schedule = Schedule(most, kernel_threads=threads)
    return Sequential().run(program, [Shard(PARTY, matrix)], schedule, reduction=PlainReduction(), resume=begin)


def factors(done: Round) -> tuple[Any, Any]:
    """W and H whose error the round reports: W as far as it was extrapolated, and the new H."""
    rows = done.checkpoint.parties[PARTY]
    return (rows.W if rows.point is None else rows.point), done.checkpoint.server.Ht.T
