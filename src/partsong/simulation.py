"""A whole federation in one process: run a program, follow it, and finish the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from partsong import threads
from partsong.core import Engine, Round, Schedule, Shard
from partsong.engines.parallel import Parallel
from partsong.evaluate.metrics import relative_error
from partsong.finished import Finished
from partsong.fitting import Task, Watch, conclude, pursue, warn_of_divergence
from partsong.interrupts import held
from partsong.running import Run, Stop, known_error


def simulate(
    program: Any,
    shards: Sequence[Shard],
    schedule: Schedule,
    *,
    stop: Stop = Stop(),
    engine: Engine = Parallel(),
    began: float | None = None,
    watch: Watch = lambda done, row: None,
) -> tuple[Run, Finished]:
    """Run to the end and put the model on its stated scale."""
    error_of = error_in_simulation(program, shards)
    task = Task(program, shards, schedule, stop, engine, threads=threads.available(), error_of=error_of)
    with held() as interrupts:
        run = pursue(task, began=began, watch=watch, interrupts=interrupts)
        warn_of_divergence(run)
        return run, conclude(task, run)


def error_in_simulation(program: Any, shards: Sequence[Shard]) -> Callable[[Round], float]:
    """The relative error of a round: what the server knows, or else one that only a simulation can compute."""

    def error_of(done: Round) -> float:
        known = known_error(done)
        if not math.isnan(known):
            return known
        with threads.kernels_on(threads.available()):
            return relative_error(program.solver, shards, program.components(done.checkpoint.server))

    return error_of
