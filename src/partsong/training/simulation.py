"""A whole federation in one process: run a program, follow it, and finish the model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from partsong import kernels
from partsong.aggregation.plaintext import InTheOpen
from partsong.core import runtime
from partsong.core.interfaces import (
    Array,
    Checkpoint,
    Engine,
    Outcome,
    Program,
    Reduction,
    Round,
    Schedule,
    Shard,
    State,
    traits_of,
)
from partsong.core.runtime import held
from partsong.engines.asynchronous import Asynchronous
from partsong.engines.local import Parallel
from partsong.errors import CompositionError
from partsong.evaluation.metrics import drift_of, potential, relative_error
from partsong.methods.exact import SharedSums
from partsong.methods.registry import ASYNCHRONOUS
from partsong.privacy.ledger import Spending
from partsong.solvers.coupling import AlignedProximalTerm
from partsong.training.loop import (
    Pursuit,
    Task,
    Watch,
    conclude,
    error_over,
    pursue,
    warn_if_ill_posed,
    warn_of_divergence,
    warn_of_nothing,
)
from partsong.training.result import Finished
from partsong.training.stopping import HistoryRow, Run, Stop, known_error


@dataclass(frozen=True, slots=True)
class RoundReport:
    """How a federation stands after a round; `outcome` is None while there are more to come."""

    iteration: int
    row: HistoryRow
    outcome: Outcome | None
    program: Program = field(repr=False, compare=False)
    server: State = field(repr=False, compare=False)

    @property
    def components(self) -> np.ndarray:
        """A copy of H (k × m) as it stands: on the scale and in the order of the run, the same from round to round."""
        H = self.program.components(self.server)
        return np.array(kernels.of(H).to_numpy(H))


def simulate(
    program: Any,
    shards: Sequence[Shard],
    schedule: Schedule,
    *,
    stop: Stop = Stop(),
    engine: Engine = Parallel(),
    began: float | None = None,
    watch: Watch = lambda done, row: None,
    follows_potential: bool = False,
) -> tuple[Run, Finished]:
    """Run to the end and put the model on its stated scale; `follows_potential` stops on ΣΦ and not on the error."""
    task = simulation_of(program, shards, schedule, stop=stop, engine=engine)
    if follows_potential:
        task = replace(task, objective_of=potential_in_simulation(program, shards))
    with held() as interrupts:
        run = pursue(task, began=began, watch=watch, interrupts=interrupts)
        return run, conclude_aloud(task, run)


def simulation_of(
    program: Any,
    shards: Sequence[Shard],
    schedule: Schedule,
    *,
    stop: Stop = Stop(),
    engine: Engine = Parallel(),
    exchanges: int = 1,
    reduction: Reduction = InTheOpen(),
    spending: Spending | None = None,
) -> Task:
    """The task whose rounds are measured with all that only a simulation can know, and accounted if they have noise."""
    measures: Any = {"error_of": error_in_simulation(program, shards), "drift_of": drift_in_simulation(program)}
    traits = traits_of(program)
    if traits.release is not None:
        measures["spending"] = spending or Spending(traits.release, most=traits.max_releases)
    several: Any = {"threads": runtime.available(), "exchanges": exchanges, "reduction": reduction}
    return Task(program, shards, schedule, stop, engine, **several, **measures)


def simulation_by_name(
    method: Any,
    program: Any,
    shards: Sequence[Shard],
    rounds: int,
    schedule: Schedule,
    stop: Stop,
    engine: Engine,
    reduction: Reduction = InTheOpen(),
    spending: Spending | None = None,
) -> Task:
    """The task of so many rounds of a method: of several exchanges each where it says so, and over a virtual clock in
    which a party's work lasts in proportion to its rows where nobody waits for others.
    """
    if isinstance(method, str) and method in ASYNCHRONOUS:
        several = len(shards)
        clock = Asynchronous(record=getattr(engine, "record", False))
        arrivals = replace(schedule, rounds=rounds * several)
        return simulation_of(program, shards, arrivals, stop=stop, engine=clock, exchanges=several, reduction=reduction)
    counts: Any = getattr(program, "rounds_for", None)
    among: Any = getattr(program, "exchanges_among", None)
    exchanges = rounds if counts is None else counts(rounds)
    exchanges = exchanges if among is None else rounds * among(len(shards))
    schedule = replace(schedule, rounds=exchanges)
    return simulation_of(program, shards, schedule, stop=stop, engine=engine, reduction=reduction, spending=spending)


def conclude_aloud(task: Task, run: Run) -> Finished:
    """The model of a run, with a warning where it is not what was hoped for."""
    warn_of_divergence(run)
    warn_if_ill_posed(task.program.solver)
    done = conclude(task, run)
    warn_of_nothing(task, done)
    return done


def reports_of(pursuit: Pursuit) -> Iterator[RoundReport]:
    """A report after every round; exchanges within one are passed over."""
    course, rounds = pursuit.course, 0
    for row in pursuit:
        if not math.isnan(row.objective) or course.outcome is not None:
            rounds += 1
            yield RoundReport(rounds, row, course.outcome, pursuit.task.program, course.latest)


def holding_interrupts(pursuit: Pursuit, reports: Iterator[RoundReport], prepared: float) -> Iterator[RoundReport]:
    """The same reports; the first Ctrl-C within a round makes it the last, and between rounds it is the caller's.

    So is the time between rounds, and from `prepared` to the first of them: no time budget counts it.
    """
    pursuit.follower.began += time.perf_counter() - prepared
    while True:
        with held() as pursuit.follower.interrupts:
            report = next(reports, None)
        if report is None:
            return
        left = time.perf_counter()
        yield report
        pursuit.follower.away += time.perf_counter() - left


def error_in_simulation(program: Any, shards: Sequence[Shard]) -> Callable[[Round], float]:
    """The relative error of a round: what the server knows, or else one that only a simulation can compute."""
    is_exact = isinstance(program, SharedSums)
    from_sums = error_over(shards, runtime.available()) if is_exact and len(shards) > 0 else known_error

    def error_of(done: Round) -> float:
        known = from_sums(done)
        if not math.isnan(known):
            return known
        with runtime.kernels_on(runtime.available()):
            return relative_error(program.solver, shards, program.components(done.checkpoint.server))

    return error_of


def drift_in_simulation(program: Any) -> Callable[[Round], tuple[float, float]]:
    """Σ_p ‖H_p − H‖² / ‖H‖² by position and after assignment, where parties have an H of their own."""

    def drift(done: Round) -> tuple[float, float]:
        own = party_components(done.checkpoint)
        if not own:
            return math.nan, math.nan
        H = program.components(done.checkpoint.server)
        size = _energy(H) or 1.0
        with runtime.kernels_on(runtime.available()):
            if not math.isfinite(sum(map(_energy, own.values()))):
                return math.inf, math.inf
            found = drift_of(list(own.values()), H)
        return found.regular / size, found.aligned / size

    return drift


def _energy(H: Array) -> float:
    """‖H‖², by columns: most H are transposed views of these."""
    columns = kernels.of(H).rows_of(H)
    return float(kernels.of(H).inner(columns, columns))


def potential_in_simulation(program: Any, shards: Sequence[Shard]) -> Callable[[Round, float], float]:
    """ΣΦ over ½Σ‖X_p‖² after a round: the objective that the parties of a pulled Consensus minimise together."""
    if not isinstance(getattr(program, "coupling", None), AlignedProximalTerm):
        raise CompositionError(
            f"ΣΦ is the objective of parties with an aligned pull, which {type(program).__name__} does not have. "
            "Follow the error instead, or give the program AlignedProximalTerm as its coupling."
        )
    energy = sum(shard.matrix.squared_norm for shard in shards) or 1.0

    def objective_of(done: Round, error: float) -> float:
        states = done.checkpoint.parties
        here = [shard for shard in shards if getattr(states.get(shard.name), "Ht", None) is not None]
        weights, own = {n: s.W for n, s in states.items()}, party_components(done.checkpoint)
        with runtime.kernels_on(runtime.available()):
            H, pull = program.components(done.checkpoint.server), program.coupling
            found = potential(here, weights, own, H, pull.strength, pull.align)
        return 2 * found / energy

    return objective_of


def party_components(checkpoint: Checkpoint) -> dict[str, Array]:
    """The H_p (k × m) of every party that has one of its own, by name."""
    own = {name: getattr(state, "Ht", None) for name, state in checkpoint.parties.items()}
    return {name: Ht.T for name, Ht in own.items() if Ht is not None}
