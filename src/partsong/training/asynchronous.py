"""Asynchronous fits over ranks: workers report the error of the model, and rank 0 stops the run by these reports."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from partsong import kernels
from partsong.core.interfaces import (
    Aggregation,
    Array,
    ArraySpec,
    Checkpoint,
    Layout,
    Message,
    Outcome,
    ProgramBase,
    Round,
    RowSolver,
    Shard,
    State,
    Turn,
)
from partsong.core.runtime import InterruptCounter
from partsong.core.states import state
from partsong.engines.collective import Communicator, all_gather_values, run_on_all
from partsong.errors import DivergenceError
from partsong.methods.averaging import AveragingPartyState, LocalAveraging
from partsong.training.loop import (
    PERFECT,
    WINDOW,
    Measures,
    Progress,
    StoppingRule,
    Training,
    Watch,
    exhaust,
    measure,
    train,
    yardstick,
)
from partsong.training.result import FinalizationTimer
from partsong.training.simulation import FederatedFit

ERROR = "reported_error"
"""The server's metric of the reports, which are of different moments."""


@state("reporting.party")
@dataclass(frozen=True, slots=True)
class ReportingPartyState:
    """A party's state, its index in the list of parties, and their number."""

    party: AveragingPartyState
    party_index: int
    parties: int


@state("reporting.server")
@dataclass(frozen=True, slots=True)
class ReportingServerState:
    """The server's state and the latest report of each party (2 × parties): ‖X_p − W_p H‖², ‖X_p‖²; zero at first."""

    server: State
    reports: np.ndarray


@dataclass(frozen=True, slots=True)
class Reporting(ProgramBase):
    """`LocalAveraging` with two more numbers in each upload: ‖X_p − W_p H‖² for the H that was sent, and ‖X_p‖².

    W_p is that of the party's previous work, so the first report is of an empty model. The position of the numbers
    among zeros (2 × parties) identifies the party. The error combines the latest reports of all parties; each is of the
    moment at which that party was last answered. Never sent: X_p, W_p.
    """

    program: LocalAveraging

    @property
    def rank(self) -> int:
        return self.program.rank

    @property
    def solver(self) -> RowSolver:
        return self.program.solver

    @property
    def aggregation(self) -> Aggregation:
        return self.program.aggregation

    def start_party(self, shard: Shard, layout: Layout) -> ReportingPartyState:
        """Return the program's state with the party's index."""
        party_index = layout.parties.index(shard.name)
        return ReportingPartyState(self.program.start_party(shard, layout), party_index, len(layout.parties))

    def start_server(self, layout: Layout) -> tuple[ReportingServerState, Message]:
        """Return the program's state and model, without reports."""
        server, model = self.program.start_server(layout)
        return ReportingServerState(server, np.zeros((2, len(layout.parties)))), model

    def local(self, shard: Shard, party: ReportingPartyState, model: Message) -> tuple[ReportingPartyState, Message]:
        """Measure the model's error, then do the program's work."""
        reports = np.zeros((2, party.parties))
        reports[:, party.party_index] = _squares(shard, party.party.W, model)
        after, upload = self.program.local(shard, party.party, model)
        sent = Message({**upload.arrays, "reports": reports}, upload.weight)
        return ReportingPartyState(after, party.party_index, party.parties), sent

    def finish(self, server: ReportingServerState, aggregate: Message) -> tuple[ReportingServerState, Message]:
        """Return the program's result, with the report of the sender."""
        arrays = dict(aggregate.arrays)
        new = np.asarray(arrays.pop("reports"))
        after, model = self.program.finish(server.server, Message(arrays, aggregate.weight))
        return ReportingServerState(after, np.where(new.any(axis=0), new, server.reports)), model

    def components(self, server: ReportingServerState) -> Array:
        """Return the current H (k × m)."""
        return self.program.components(server.server)

    def metrics(self, server: ReportingServerState) -> Mapping[str, float]:
        """Return √(Σ_p ‖X_p − W_p H‖² / Σ_p ‖X_p‖²) over the parties that have reported."""
        distance, energy = server.reports.sum(axis=1)
        return {ERROR: math.sqrt(max(0.0, distance) / energy) if energy > 0 else 0.0}

    def upload_spec(self, layout: Layout) -> tuple[Mapping[str, ArraySpec], ...]:
        reports = ArraySpec((2, len(layout.parties)), non_negative=True)
        return tuple({**kind, "reports": reports} for kind in self.program.upload_spec(layout))

    def turn(self, model: Message) -> Turn:
        """Return the program's turn; every exchange is measured."""
        return replace(self.program.turn(model), ends_round=True)


def _squares(shard: Shard, W: Array | None, model: Message) -> tuple[float, float]:
    matrix: Any = shard.matrix
    if W is None:
        return matrix.squared_norm, matrix.squared_norm
    H = matrix.native(model["H"])
    return max(0.0, matrix.squared_distance(W, kernels.of(H).rows_of(H))), matrix.squared_norm


@dataclass(frozen=True, slots=True)
class AsyncStoppingRule(StoppingRule):
    """Converged once the reported squared error changes by less than `tol` of its `yardstick` per turn, over `WINDOW`.

    Changes count in both directions. A report is of the model that its party has just updated, which at first is far
    from those of the others. Such errors start too low and rise to the common one, so their minimum is meaningless.
    """

    def outcome(self, progress: Progress, seconds: float) -> Outcome | None:
        """Return why to stop now, or None to continue."""
        if progress.has_diverged():
            return Outcome.DIVERGED
        if self.tol == 0 or progress.count <= WINDOW:
            return None
        least, most = min(progress.values), max(progress.values)
        return Outcome.CONVERGED if most - least <= WINDOW * self.tol * yardstick(least) or most < PERFECT else None


@dataclass(slots=True)
class AsyncFollower:
    """Rank 0's view of the arriving uploads, and its decision when to stop.

    A turn ends when every worker has reported since the last one. Then the reports are of about the same time, and
    `tol` compares the errors of turns. Signals and the clock are checked after each arrival: the run stops when the
    time left does not cover another work item of the slowest worker and the end of the fit (`finish_seconds`).
    """

    interrupts: InterruptCounter
    workers: int
    began: float
    budget: float | None = None
    finish_seconds: float = 0.0
    reported: set[str] = field(default_factory=set)
    latest: dict[str, float] = field(default_factory=dict)
    durations: dict[str, float] = field(default_factory=dict)
    ends_turn: bool = False
    is_late: bool = False

    def arrivals(self, rounds: Iterator[Round]) -> Generator[Round]:
        """Yield the rounds until there is a reason to stop."""
        for done in rounds:
            for name in done.bytes_up:
                self._note(name, time.perf_counter() - self.began)
            yield done
            del done
            if self.interrupts.count or self.is_late:
                return

    def _note(self, name: str, now: float) -> None:
        self.durations[name] = now - self.latest.get(name, 0.0)
        self.latest[name] = now
        self.reported.add(name)
        self.ends_turn = len(self.reported) == self.workers
        if self.ends_turn:
            self.reported.clear()
        if self.budget is not None:
            self.is_late = now + max(self.durations.values()) + self.finish_seconds >= self.budget

    def follow(self, fit: FederatedFit, rounds: Iterator[Round], watch: Watch) -> Training:
        """Return the training at rank 0; its model is the last one, unless the run diverged."""
        training = Training(began=self.began, watch=watch, last=fit.last)
        with closing(self.arrivals(rounds)) as arrivals:
            steps = measure(arrivals, ReportedMeasures(), ends_round=lambda done: self.ends_turn, last=fit.last)
            exhaust(train(steps, AsyncStoppingRule(fit.stop.tol), training))
        if training.outcome is not Outcome.DIVERGED:
            training.best = training.latest
        return training


@dataclass(frozen=True, slots=True)
class ReportedMeasures(Measures):
    """The error that parties reported, and its square."""

    def error(self, done: Round) -> float:
        return done.metrics[ERROR]

    def objective(self, done: Round, error: float) -> float:
        return error**2


def train_by_arrivals(fit: FederatedFit, communicator: Communicator, follower: AsyncFollower, watch: Watch) -> Training:
    """Run to the end. The outcome is the same at all ranks; only rank 0 has the history and the model."""
    follower.finish_seconds = _finish_seconds(fit, communicator, follower)
    rounds: Any = fit.engine.run(fit.program, fit.shards, fit.schedule, reduction=fit.reduction)
    training, error_text = Training(ended=Outcome.MAX_ROUNDS), None
    with rounds:
        try:
            if communicator.rank == 0:
                training = follower.follow(fit, rounds, watch)
            else:
                _work(rounds, follower.interrupts)
        except DivergenceError as error:
            error_text = error
    if follower.interrupts.count > 1:
        raise KeyboardInterrupt
    return _agree_on_outcome(fit, communicator, follower, training, error_text)


def _work(rounds: Iterator[Round], interrupts: InterruptCounter) -> None:
    for done in rounds:
        del done  # as large as the rows of W
        if interrupts.count:
            return


def _agree_on_outcome(
    fit: FederatedFit,
    communicator: Communicator,
    follower: AsyncFollower,
    training: Training,
    error_text: DivergenceError | None,
) -> Training:
    """Agree on the outcome: rank 0's, unless a signal at any rank or the clock ended the run. Sent: five values."""
    is_full = bool(training.history) and training.history[-1].iteration >= fit.last
    own = [str(training.outcome), is_full, training.best is not None, bool(follower.interrupts.count), follower.is_late]
    every = all_gather_values(communicator, own)
    outcome_name, is_full, has_model, _, is_late = every[0]
    if not has_model:
        raise error_text or KeyboardInterrupt
    outcome = Outcome(outcome_name)
    if outcome is Outcome.MAX_ROUNDS and not is_full:
        is_pressed = any(one[3] for one in every)
        outcome = Outcome.TIME_LIMIT if is_late and not is_pressed else Outcome.INTERRUPTED
    training.ended = outcome
    return training


def _finish_seconds(fit: FederatedFit, communicator: Communicator, follower: AsyncFollower) -> float:
    """Estimate how long the slowest worker needs for the end of the fit, from a few of its rows. Sent: that number."""
    if follower.budget is None:
        return 0.0

    def time_finish() -> float:
        if not fit.shards:
            return 0.0
        start = fit.program.start_server(Layout.of(fit.shards, fit.schedule.seed))
        point = Round(0, start[1], {}, (), {}, 0, 0.0, Checkpoint(0, {}, *start))
        trial = FinalizationTimer(fit)
        return min(trial.reserve(point, 0.0) for _ in range(2))  # the first may have to compile

    seconds = run_on_all(communicator, time_finish)
    return float(max(all_gather_values(communicator, seconds)))
