"""A whole federation in one process: run a program, follow it, and finish the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from partsong import kernels, threads
from partsong.core import Array, Checkpoint, Engine, Round, Schedule, Shard
from partsong.engines.parallel import Parallel
from partsong.evaluate.agreement import drift_of
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
    drift = drift_in_simulation(program)
    task = Task(program, shards, schedule, stop, engine, threads=threads.available(), error_of=error_of, drift_of=drift)
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


def drift_in_simulation(program: Any) -> Callable[[Round], tuple[float, float]]:
    """Σ_p ‖H_p − H‖² / ‖H‖² by position and after assignment, where parties have an H of their own."""

    def drift(done: Round) -> tuple[float, float]:
        own = party_components(done.checkpoint)
        if not own:
            return math.nan, math.nan
        H = program.components(done.checkpoint.server)
        size = kernels.of(H).inner(H, H) or 1.0
        with threads.kernels_on(threads.available()):
            if not math.isfinite(sum(kernels.of(one).inner(one, one) for one in own.values())):
                return math.inf, math.inf
            found = drift_of(list(own.values()), H)
        return found.regular / size, found.aligned / size

    return drift


def party_components(checkpoint: Checkpoint) -> dict[str, Array]:
    """The H_p (k × m) of every party that has one of its own, by name."""
    own = {name: getattr(state, "Ht", None) for name, state in checkpoint.parties.items()}
    return {name: Ht.T for name, Ht in own.items() if Ht is not None}
