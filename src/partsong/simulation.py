"""A whole federation in one process: run a program, follow it, and finish the model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from partsong import threads
from partsong.aggregate.reduction import InTheOpen
from partsong.core import Checkpoint, Engine, Layout, Reduction, Round, Schedule, Shard
from partsong.engines.parallel import Parallel
from partsong.evaluate.metrics import relative_error
from partsong.finished import Finished, finish
from partsong.running import Follower, HistoryRow, Run, Stop


def simulate(
    program: Any,
    shards: Sequence[Shard],
    schedule: Schedule,
    *,
    stop: Stop = Stop(),
    engine: Engine = Parallel(),
    reduction: Reduction = InTheOpen(),
    resume: Checkpoint | None = None,
    history: Sequence[HistoryRow] = (),
    began: float | None = None,
    watch: Callable[[Round, HistoryRow], None] = lambda done, row: None,
) -> tuple[Run, Finished]:
    """Run to the end and put the model on its stated scale; `resume` and `history` continue an earlier run."""
    follower = Follower(
        stop,
        time.perf_counter() if began is None else began,
        error_of=error_in_simulation(program, shards),
        watch=watch,
    )
    rounds = engine.run(program, shards, schedule, reduction=reduction, resume=resume)
    run = follower.follow(rounds, history)
    if resume is not None:
        start = program.components(resume.server)
    else:
        start = program.components(program.start_server(Layout.of(shards, schedule.seed))[0])
    with threads.kernels_on(threads.available()):
        return run, finish(program, program.solver, shards, run, start)


def error_in_simulation(program: Any, shards: Sequence[Shard]) -> Callable[[Round], float]:
    """The relative error of a round: what the server knows, or else one that only a simulation can compute."""

    def error_of(done: Round) -> float:
        known = done.metrics.get("relative_error", math.nan)
        if not math.isnan(known):
            return known
        with threads.kernels_on(threads.available()):
            return relative_error(program.solver, shards, program.components(done.checkpoint.server))

    return error_of
