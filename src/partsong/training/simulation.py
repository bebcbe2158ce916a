"""Simulated federated fits in one process: program, parties and engine, with metrics that need all parties' data."""

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
from partsong.evaluation.metrics import compute_drift, relative_error
from partsong.methods.exact import SharedSums
from partsong.privacy.spending import PrivacyTracker, charge_rounds
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
    warn_about_divergence,
    warn_if_ill_posed,
    warn_if_model_is_zero,
)


@dataclass(frozen=True, slots=True)
class FederatedFit:
    """A program with everything needed to run it.

    `begin` returns the checkpoint to start from (None: the program's own start). A round has `exchanges` exchanges of
    the engine, unless the program decides. `spending` are the privacy accounts of a program with noise. The end of the
    fit may use `threads` threads.
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
    spending: PrivacyTracker | None = None

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
        first = 0 if point is None else point.index
        del point  # the start is handed over and not kept: its W is as large as the party's
        spending, names = self.spending, [shard.name for shard in self.shards]
        return measure(
            rounds if spending is None else charge_rounds(rounds, spending, names, first),
            self.measures,
            ends_round=self.ends_round,
            epsilon=(lambda done: math.nan) if spending is None else spending.record_round,
            last=self.last,
            present=frozenset(names),
        )

    def ends_round(self, done: Round) -> bool:
        """Whether a round ends with this exchange: as the program decides, and every `exchanges` exchanges."""
        return self.program.turn(done.model).ends_round and (done.index + 1) % self.exchanges == 0

    def components(self, server: State) -> Array:
        return self.program.components(server)

    def server_at_start(self) -> State:
        if self.begin is not None:
            return self.begin().server
        return self.program.start_server(Layout.of(self.shards, self.schedule.seed))[0]


@dataclass(frozen=True, slots=True)
class SimulationMeasures(Measures):
    """The server's metrics, the parties' drifts, and the error with W refitted at each party if the server knows none.

    Drift is Σ_p ‖H_p − H‖² / ‖H‖², by position and after assignment, if parties have their own H.
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
            found = compute_drift(list(own.values()), H)
        return found.regular / size, found.aligned / size


def party_components(checkpoint: Checkpoint) -> dict[str, Array]:
    """Return the H_p (k × m) of every party that has its own, by name."""
    own = {name: getattr(state, "Ht", None) for name, state in checkpoint.parties.items()}
    return {name: Ht.T for name, Ht in own.items() if Ht is not None}


def _energy(H: Array) -> float:
    """Return ‖H‖², computed by columns: most H are transposed views."""
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
    spending: PrivacyTracker | None = None,
) -> FederatedFit:
    """Return the simulated fit of this many rounds of a program, with metrics that need all parties' data.

    A round has as many exchanges as the program needs. For an asynchronous program it has as many arrivals as there are
    parties, on a virtual clock where compute time is proportional to a party's rows. Privacy noise is accounted for.
    """
    traits = program.traits
    if traits.release is not None and spending is None:
        spending = PrivacyTracker(traits)
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
    """Return the model of a run; warn if the fit diverged, is ill-posed, or ended at zero."""
    warn_about_divergence(training)
    warn_if_ill_posed(fit.solver)
    result = finish(fit, training)
    warn_if_model_is_zero(fit.solver, result)
    return result


@dataclass(frozen=True, slots=True)
class RoundReport:
    """The state of a federated fit after a round; `outcome` is None while more rounds follow.

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
        """A copy of the current H (k × m), in the run's own scale and order, which are the same in every round."""
        H = self.program.components(self.server)
        return np.array(kernels.of(H).to_numpy(H))


def iterate_rounds(fit: FederatedFit, training: Training) -> Iterator[Step]:
    """Yield the steps that end a round, when `training` is at the end of that round.

    The first Ctrl-C during a round makes it the last. Between rounds, the caller handles Ctrl-C, and the time counts
    neither in the history nor against a time budget.
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
