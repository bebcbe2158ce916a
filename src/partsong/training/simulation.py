"""Federated fits in one process: a program, its parties and an engine, with what only a simulation can measure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from partsong import kernels
from partsong.aggregation.plaintext import PlainReduction
from partsong.core import runtime
from partsong.core.interfaces import (
    Array,
    Checkpoint,
    Engine,
    Layout,
    Outcome,
    Program,
    Reduction,
    Round,
    RowSolver,
    Schedule,
    Shard,
    State,
)
from partsong.core.runtime import graceful_interrupt
from partsong.engines.local import Sequential
from partsong.engines.virtual_clock import Asynchronous
from partsong.evaluation.metrics import drift_of, relative_error
from partsong.methods.exact import SharedSums
from partsong.privacy.spending import Spending, accounted
from partsong.solvers.squared_error import RowState
from partsong.training.loop import (
    Fit,
    HistoryRow,
    Measures,
    Step,
    StoppingRule,
    Training,
    iterate_steps,
    measure,
)
from partsong.training.result import (
    FitResult,
    error_from_data,
    finish,
    is_reliable_error,
    warn_if_ill_posed,
    warn_if_model_is_zero,
    warn_of_divergence,
)


@dataclass(frozen=True, slots=True)
class FederatedFit:
    """A program with all that it takes to run it; `begin` makes its start (None: the program's own).

    A round is `exchanges` of the engine's, unless the program says when it ends. `spending` are its accounts where it
    has noise. The end of the fit may use `threads`.
    """

    program: Any
    shards: Sequence[Shard]
    schedule: Schedule
    stop: StoppingRule = StoppingRule()
    engine: Engine = Sequential()
    reduction: Reduction = PlainReduction()
    begin: Callable[[], Checkpoint] | None = None
    threads: int = 1
    measures: Measures = Measures()
    exchanges: int = 1
    spending: Spending | None = None

    @property
    def solver(self) -> RowSolver:
        solver: RowSolver = self.program.solver
        return solver

    @property
    def rank(self) -> int:
        rank: int = self.program.rank
        return rank

    @property
    def last(self) -> int:
        return self.schedule.rounds

    @property
    def is_private(self) -> bool:
        return self.program.traits.release is not None

    def steps(self, point: Checkpoint | None) -> Iterator[Step]:
        point = self.begin() if point is None and self.begin is not None else point
        rounds = self.engine.run(self.program, self.shards, self.schedule, reduction=self.reduction, resume=point)
        del point  # the start is handed over and not kept: its W is as large as the party's
        spending, names = self.spending, [shard.name for shard in self.shards]
        return measure(
            rounds if spending is None else accounted(rounds, spending, names),
            self.measures,
            ends_round=self.ends_round,
            epsilon=(lambda done: math.nan) if spending is None else spending.note,
            last=self.last,
            present=frozenset(names),
        )

    def ends_round(self, done: Round) -> bool:
        """Whether a round ends with an exchange: as the program says, and every `exchanges` of them."""
        return self.program.turn(done.model).ends_round and (done.index + 1) % self.exchanges == 0

    def components(self, server: State) -> Array:
        return self.program.components(server)

    def server_at_start(self) -> State:
        if self.begin is not None:
            return self.begin().server
        return self.program.start_server(Layout.of(self.shards, self.schedule.seed))[0]


@dataclass(frozen=True, slots=True)
class SimulationMeasures(Measures):
    """What the server knows, and where it knows no error, that of W refitted at each party; drifts of the parties.

    Drifts are Σ_p ‖H_p − H‖² / ‖H‖², by position and after assignment, where parties have an H of their own.
    """

    program: Any
    shards: Sequence[Shard]

    def error(self, done: Round) -> float:
        known, is_from_sums = Measures.error(self, done), isinstance(self.program, SharedSums) and bool(self.shards)
        if not math.isnan(known) and not (is_from_sums and not is_reliable_error(known, self.shards[0].matrix.dtype)):
            return known
        with runtime.limit_kernel_threads(runtime.available_threads()):
            if isinstance(self.program, SharedSums) and self.shards:
                parties, matrices = done.checkpoint.parties, [shard.matrix for shard in self.shards]
                states = [parties.get(shard.name, RowState()) for shard in self.shards]
                known = error_from_data(known, matrices, states, done.checkpoint.server, matrices[0].dtype)
            if not math.isnan(known):
                return known
            return relative_error(self.program.solver, self.shards, self.program.components(done.checkpoint.server))

    def drift(self, done: Round) -> tuple[float, float]:
        own = party_components(done.checkpoint)
        if not own:
            return math.nan, math.nan
        H = self.program.components(done.checkpoint.server)
        size = _energy(H) or 1.0
        with runtime.limit_kernel_threads(runtime.available_threads()):
            if not math.isfinite(sum(map(_energy, own.values()))):
                return math.inf, math.inf
            found = drift_of(list(own.values()), H)
        return found.regular / size, found.aligned / size


def party_components(checkpoint: Checkpoint) -> dict[str, Array]:
    """The H_p (k × m) of every party that has one of its own, by name."""
    own = {name: getattr(state, "Ht", None) for name, state in checkpoint.parties.items()}
    return {name: Ht.T for name, Ht in own.items() if Ht is not None}


def _energy(H: Array) -> float:
    """‖H‖², by columns: most H are transposed views of these."""
    columns = kernels.of(H).rows_of(H)
    return float(kernels.of(H).inner(columns, columns))


def simulate_rounds(
    program: Any,
    shards: Sequence[Shard],
    rounds: int,
    schedule: Schedule,
    stop: StoppingRule,
    engine: Engine,
    reduction: Reduction = PlainReduction(),
    spending: Spending | None = None,
) -> FederatedFit:
    """The fit of so many rounds of a program, measured with all that only a simulation can know.

    A round is several exchanges where the program says so, and as many arrivals as there are parties where nobody waits
    for others: over a virtual clock, on which a party's work lasts in proportion to its rows. Noise is accounted.
    """
    traits = program.traits
    if traits.release is not None and spending is None:
        spending = Spending(traits.release, most=traits.max_releases)
    return FederatedFit(
        program,
        shards,
        replace(schedule, rounds=program.exchanges(rounds, len(shards))),
        stop,
        Asynchronous(record=getattr(engine, "record", False)) if traits.asynchronous else engine,
        reduction,
        threads=runtime.available_threads(),
        measures=SimulationMeasures(program, shards),
        exchanges=len(shards) if traits.asynchronous else 1,
        spending=spending,
    )


def finish_with_warnings(fit: Fit, training: Training) -> FitResult:
    """The model of a run, with a warning where it is not what was hoped for."""
    warn_of_divergence(training)
    warn_if_ill_posed(fit.solver)
    result = finish(fit, training)
    warn_if_model_is_zero(fit.solver, result)
    return result


@dataclass(frozen=True, slots=True)
class RoundReport:
    """How a federation stands after a round; `outcome` is None while there are more to come.

    `result` fits the estimator as if the fit had ended with this round, and returns it.
    """

    iteration: int
    row: HistoryRow
    outcome: Outcome | None
    result: Callable[[], Any] = field(repr=False, compare=False)
    program: Program = field(repr=False, compare=False)
    server: State = field(repr=False, compare=False)

    @property
    def components(self) -> np.ndarray:
        """A copy of H (k × m) as it stands: on the scale and in the order of the run, the same from round to round."""
        H = self.program.components(self.server)
        return np.array(kernels.of(H).to_numpy(H))


def iterate_rounds(fit: FederatedFit, training: Training) -> Iterator[Step]:
    """Yield the steps that end a round; `training` then stands at the end of that round.

    The first Ctrl-C within a round makes it the last; between rounds, it is the caller's. So is the time between
    rounds, which counts neither in the history nor against a time budget.
    """
    steps = iterate_steps(fit, training)
    while True:
        with graceful_interrupt() as training.interrupts:
            step = next(steps, None)
        if step is None:
            return
        if step.is_whole or training.ended is not None:
            left = time.perf_counter()
            yield step
            training.paused_seconds += time.perf_counter() - left
        del step
