"""Distributed fits over MPI or torch ranks: programs, rounds, asynchronous arrivals, and the final model."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from partsong import kernels, methods
from partsong.core import runtime
from partsong.core.interfaces import (
    Aggregation,
    Array,
    ArraySpec,
    Checkpoint,
    Layout,
    Message,
    Outcome,
    Program,
    ProgramBase,
    Round,
    RowSolver,
    Shard,
    State,
    Turn,
)
from partsong.core.runtime import Interrupts
from partsong.core.states import state
from partsong.data.blocks import block_range
from partsong.engines.collective import Communicator, at_the_server, heard, share, together
from partsong.errors import DivergenceError
from partsong.methods.averaging import Consensus, ConsensusParty
from partsong.methods.exact import SharedSums
from partsong.methods.registry import Problem
from partsong.solvers.squared_error import solver_of
from partsong.training.loop import (
    PERFECT,
    WINDOW,
    Progress,
    StoppingRule,
    Training,
    Watch,
    measured,
    run,
    train,
    yardstick,
)
from partsong.training.result import FinalizationTimer, FitResult, complete
from partsong.training.settings import RANK_SOLVERS, RankSettings
from partsong.training.simulation import FederatedFit

# ---- ranks reports ----------------------------------------------------------------------------------------------
#
# An asynchronous program whose parties also say how well the model fits: else no rank could tell when to stop.

ERROR = "reported_error"
"""The metric that the server makes of reports; it is not the error of one moment."""


@state("reporting.party")
@dataclass(frozen=True, slots=True)
class ReportingParty:
    """A party, which place it has in the list of all, and how many there are."""

    party: ConsensusParty
    place: int
    parties: int


@state("reporting.server")
@dataclass(frozen=True, slots=True)
class ReportedServer:
    """A server, and the latest report of each party (2 × parties): ‖X_p − W_p H‖², ‖X_p‖²; zero before the first."""

    server: State
    reports: np.ndarray


@dataclass(frozen=True, slots=True)
class Reporting(ProgramBase):
    """A `Consensus` with two more numbers in each upload: ‖X_p − W_p H‖² for the H that was sent, and ‖X_p‖².

    W_p is that of the party's work before, so that a first report is of an empty model. Who reports is told by the
    place of these numbers among zeros (2 × parties). The error is that of everybody's latest report together: each is
    of the moment at which that party was last answered. Never sent: X_p, W_p.
    """

    program: Consensus

    @property
    def rank(self) -> int:
        """Of the program."""
        return self.program.rank

    @property
    def solver(self) -> RowSolver:
        """Of the program."""
        return self.program.solver

    @property
    def aggregation(self) -> Aggregation:
        """Of the program; with one upload at a time it is that upload."""
        return self.program.aggregation

    def start_party(self, shard: Shard, layout: Layout) -> ReportingParty:
        """The program's, with its place."""
        place = layout.parties.index(shard.name)
        return ReportingParty(self.program.start_party(shard, layout), place, len(layout.parties))

    def start_server(self, layout: Layout) -> tuple[ReportedServer, Message]:
        """The program's, without reports."""
        server, model = self.program.start_server(layout)
        return ReportedServer(server, np.zeros((2, len(layout.parties)))), model

    def local(self, shard: Shard, party: ReportingParty, model: Message) -> tuple[ReportingParty, Message]:
        """A look at the model, then the program's work."""
        reports = np.zeros((2, party.parties))
        reports[:, party.place] = _squares(shard, party.party.W, model)
        after, upload = self.program.local(shard, party.party, model)
        sent = Message({**upload.arrays, "reports": reports}, upload.weight)
        return ReportingParty(after, party.place, party.parties), sent

    def finish(self, server: ReportedServer, aggregate: Message) -> tuple[ReportedServer, Message]:
        """The program's, and the report of the one who has come."""
        arrays = dict(aggregate.arrays)
        new = np.asarray(arrays.pop("reports"))
        after, model = self.program.finish(server.server, Message(arrays, aggregate.weight))
        return ReportedServer(after, np.where(new.any(axis=0), new, server.reports)), model

    def components(self, server: ReportedServer) -> Array:
        """H (k × m) as it stands."""
        return self.program.components(server.server)

    def metrics(self, server: ReportedServer) -> Mapping[str, float]:
        """√(Σ_p ‖X_p − W_p H‖² / Σ_p ‖X_p‖²) over those who have reported."""
        distance, energy = server.reports.sum(axis=1)
        return {ERROR: math.sqrt(max(0.0, distance) / energy) if energy > 0 else 0.0}

    def upload_spec(self, layout: Layout) -> tuple[Mapping[str, ArraySpec], ...]:
        """Of the program, and reports."""
        reports = ArraySpec((2, len(layout.parties)), non_negative=True)
        return tuple({**kind, "reports": reports} for kind in self.program.upload_spec(layout))

    def turn(self, model: Message) -> Turn:
        """Of the program; every exchange is worth a look."""
        return replace(self.program.turn(model), ends_round=True)


def _squares(shard: Shard, W: Array | None, model: Message) -> tuple[float, float]:
    matrix: Any = shard.matrix
    if W is None:
        return matrix.squared_norm, matrix.squared_norm
    H = matrix.native(model["H"])
    return max(0.0, matrix.squared_distance(W, kernels.of(H).rows_of(H))), matrix.squared_norm


# ---- ranks arrivals ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Settled(StoppingRule):
    """Converged once the reported squared error changes by less than `tol` of its `yardstick` per turn, over a few.

    Whichever way: a report is of the model as its party has just moved it, which at first is far from that of the
    others. Such errors begin too low and rise to the common one, so that the least of them says nothing.
    """

    def outcome(self, progress: Progress, seconds: float) -> Outcome | None:
        """Why to stop now, or None to go on."""
        if progress.is_lost():
            return Outcome.DIVERGED
        if self.tol == 0 or progress.count <= WINDOW:
            return None
        least, most = min(progress.values), max(progress.values)
        return Outcome.CONVERGED if most - least <= WINDOW * self.tol * yardstick(least) or most < PERFECT else None


@dataclass(slots=True)
class Attention:
    """What rank 0 goes by while uploads come in.

    A turn is over when every worker has been heard since the last one: then the reports are of one time, and `tol` is
    about the error from turn to turn. Signals and the clock are looked at after each arrival: once there is no time for
    another piece of work of the slowest and the end of the fit (`closing` seconds), no more are waited for.
    """

    pressed: Interrupts
    workers: int
    began: float
    budget: float | None = None
    closing: float = 0.0
    heard: set[str] = field(default_factory=set)
    latest: dict[str, float] = field(default_factory=dict)
    lasted: dict[str, float] = field(default_factory=dict)
    ends_turn: bool = False
    is_late: bool = False

    def arrivals(self, rounds: Iterator[Round]) -> Generator[Round]:
        """The same, until there is a reason to end."""
        for done in rounds:
            for name in done.bytes_up:
                self._note(name, time.perf_counter() - self.began)
            yield done
            del done
            if self.pressed.count or self.is_late:
                return

    def _note(self, name: str, now: float) -> None:
        self.lasted[name] = now - self.latest.get(name, 0.0)
        self.latest[name] = now
        self.heard.add(name)
        self.ends_turn = len(self.heard) == self.workers
        if self.ends_turn:
            self.heard.clear()
        if self.budget is not None:
            self.is_late = now + max(self.lasted.values()) + self.closing >= self.budget

    def follow(self, fit: FederatedFit, rounds: Iterator[Round], watch: Watch) -> Training:
        """The training as rank 0 sees it; its model is the last one, unless the run has diverged."""
        training = Training(began=self.began, watch=watch, last=fit.last)
        with closing(self.arrivals(rounds)) as arrivals:
            steps = measured(arrivals, ReportedMeasures(), ends_round=lambda done: self.ends_turn, last=fit.last)
            for _ in train(steps, Settled(fit.stop.tol), training):
                pass
        if training.outcome is not Outcome.DIVERGED:
            training.best = training.latest
        return training


@dataclass(frozen=True, slots=True)
class ReportedMeasures:
    """The error that parties have reported, and its square."""

    def error(self, done: Round) -> float:
        return done.metrics[ERROR]

    def objective(self, done: Round, error: float) -> float:
        return error**2

    def drift(self, done: Round) -> tuple[float, float]:
        return math.nan, math.nan


def pursued_by_arrivals(fit: FederatedFit, communicator: Communicator, attention: Attention, watch: Watch) -> Training:
    """The run to its end, whose outcome is the same at all ranks; only rank 0 has its history and its model."""
    attention.closing = _closing_time(fit, communicator, attention)
    rounds: Any = fit.engine.run(fit.program, fit.shards, fit.schedule, reduction=fit.reduction)
    training, trouble = Training(ended=Outcome.MAX_ROUNDS), None
    with rounds:
        try:
            if communicator.rank == 0:
                training = attention.follow(fit, rounds, watch)
            else:
                _work(rounds, attention.pressed)
        except DivergenceError as error:
            trouble = error
    if attention.pressed.count > 1:
        raise KeyboardInterrupt
    return _agreed(fit, communicator, attention, training, trouble)


def _work(rounds: Iterator[Round], pressed: Interrupts) -> None:
    for done in rounds:
        del done  # as large as the rows of W
        if pressed.count:
            return


def _agreed(
    fit: FederatedFit,
    communicator: Communicator,
    attention: Attention,
    training: Training,
    trouble: DivergenceError | None,
) -> Training:
    """The outcome that rank 0 knows of, unless somebody's signal or the clock has ended the run; sent: five facts."""
    is_full = bool(training.history) and training.history[-1].iteration >= fit.last
    own = [str(training.outcome), is_full, training.best is not None, bool(attention.pressed.count), attention.is_late]
    with heard():
        every = [json.loads(text) for text in share(communicator, json.dumps(own))]
    told, is_full, has_model, _, is_late = every[0]
    if not has_model:
        raise trouble or KeyboardInterrupt
    outcome = Outcome(told)
    if outcome is Outcome.MAX_ROUNDS and not is_full:
        is_pressed = any(one[3] for one in every)
        outcome = Outcome.TIME_SPENT if is_late and not is_pressed else Outcome.INTERRUPTED
    training.ended = outcome
    return training


def _closing_time(fit: FederatedFit, communicator: Communicator, attention: Attention) -> float:
    """How long the slowest worker will need for the end of the fit, tried on a few of its rows; sent: that number."""
    if attention.budget is None:
        return 0.0

    def tried() -> float:
        if not fit.shards:
            return 0.0
        start = fit.program.start_server(Layout.of(fit.shards, fit.schedule.seed))
        point = Round(0, start[1], {}, (), {}, 0, 0.0, Checkpoint(0, {}, *start))
        trial = FinalizationTimer(fit)
        return min(trial.reserve(point, 0.0) for _ in range(2))  # the first may have to compile

    seconds = together(communicator, tried)
    with heard():
        return max(map(float, share(communicator, repr(seconds))))


# ---- ranks finish -----------------------------------------------------------------------------------------------
#
# From the last round to a model, with the rows of W where they are: `training.result.complete` among ranks.

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks that complete a model together. Sent: sums (k × k, and two numbers), as rank 0 has them."""

    communicator: Communicator

    def jointly(self, work: Callable[[], Result]) -> Result:
        """work() at this rank, or the error of the first rank where it failed."""
        return together(self.communicator, work)

    def total(self, array: np.ndarray) -> np.ndarray:
        """Σ over the ranks, as rank 0 has it, so that orders agree."""
        return np.asarray(self.of_rank_0(self.communicator.sum(np.ascontiguousarray(array))))

    def of_rank_0(self, array: Array | None) -> Any:
        """Rank 0's array, at every rank."""
        with heard():
            messages, _ = at_the_server(self.communicator, lambda: ({"": Message({"": array})}, None))
        return messages[""][""]


def _best(program: Program, training: Training, shards: Sequence[Shard], seed: int) -> Array:
    """H where the objective was smallest, or where all began if not even one exchange was done."""
    start = training.best is None
    server = program.start_server(Layout.of(shards, seed))[0] if start else training.best
    return program.components(server)


def completed(
    program: Program, training: Training, shards: Sequence[Shard], communicator: Communicator, seed: int
) -> FitResult:
    """Put rank 0's best H on its scale and in order, solve for the own rows of W exactly, and add up the errors."""
    solver: Any = program.solver
    ranks = Ranks(communicator)
    H = ranks.of_rank_0(_best(program, training, shards, seed) if communicator.rank == 0 else None)
    rescale = not (solver.penalty_W or solver.penalty_H)
    return complete(solver, shards, kernels.of(H).rows_of(H), rescale, ranks)


# ---- ranks programs ---------------------------------------------------------------------------------------------
#
# Settings of a fit over ranks to the program that they run.


def rows_at(settings: RankSettings, rank: int, n_rows: int) -> tuple[int, int]:
    """The rows of a rank, from the first to before the last; none at a server."""
    if rank not in settings.workers:
        return 0, 0
    return block_range(n_rows, len(settings.workers), rank - settings.workers.start)


def program_for(settings: RankSettings, n_rows: int) -> tuple[Program, int]:
    """The program, and its exchanges for the iterations asked for; of an asynchronous one these are arrivals."""
    if settings.method in RANK_SOLVERS:
        solver = solver_of(RANK_SOLVERS[settings.method], settings.alpha_w, settings.alpha_h, settings.l1_ratio)
        return SharedSums(settings.n_components, solver), settings.max_iter
    method, problem = methods.method(settings.method), Problem(settings.n_components, None, settings.max_iter, n_rows)
    program: Any = method.build(problem, settings.options(method.parameters))
    program = program if settings.is_game else _penalised(program, settings)
    if settings.is_asynchronous:
        return Reporting(program), settings.max_iter
    return program, program.exchanges(settings.max_iter, settings.ranks)


def _penalised(program: Any, settings: RankSettings) -> Any:
    given = solver_of("cd", settings.alpha_w, settings.alpha_h, settings.l1_ratio)
    return replace(program, solver=replace(program.solver, penalty_W=given.penalty_W, penalty_H=given.penalty_H))


# ---- ranks rounds -----------------------------------------------------------------------------------------------
#
# The rounds of a fit over ranks: all of them see the same numbers after each, and so end after the same one.


@dataclass(slots=True)
class Unison:
    """What ranks tell each other after a whole round: rank 0 its error, objective and clock, all whether to end.

    `ending` counts the wishes of all: a Ctrl-C or SIGTERM at any rank, or the time of rank 0, which is everybody's.
    """

    communicator: Communicator
    pressed: Interrupts
    began: float
    budget: float | None
    closing: FinalizationTimer | None = None
    ending: Interrupts = field(default_factory=Interrupts)
    is_late: bool = False
    is_pressed: bool = False
    latest_objective: float = math.nan
    latest: float = 0.0
    measure: Callable[[Round], tuple[float, float]] = lambda done: (math.nan, math.nan)

    def error(self, done: Round) -> float:
        """Rank 0's error of this round, or where its server knows none that of all rows, at every rank.

        Sent: six numbers.
        """
        own = [*(done.metrics.get(name, math.nan) for name in ("relative_error", "objective"))]
        squares = self.measure(done) if math.isnan(own[0]) else (math.nan, math.nan)
        told = json.dumps([*own, self._is_late(done), self.pressed.count, *squares])
        with heard():
            every = [json.loads(text) for text in share(self.communicator, told)]
        error, self.latest_objective, self.is_late = every[0][:3]
        if math.isnan(error):
            distance, energy = (sum(one[at] for one in every) for at in (4, 5))
            error = math.sqrt(max(0.0, distance) / energy) if energy else 0.0
            self.latest_objective = error**2
        self.is_pressed = any(one[3] for one in every)
        self.ending.count = int(self.is_late or self.is_pressed)
        return float(error)

    def objective(self, done: Round, error: float) -> float:
        """Rank 0's objective, which came with its error."""
        return self.latest_objective

    def drift(self, done: Round) -> tuple[float, float]:
        return math.nan, math.nan

    def _is_late(self, done: Round) -> bool:
        """Whether one more round like this one, and the end of the fit, would take too long; rank 0 decides."""
        if self.budget is None or self.closing is None or self.communicator.rank > 0:
            return False
        spent = time.perf_counter() - self.began
        ahead = spent - self.latest + self.closing.reserve(done, spent)
        self.latest = time.perf_counter() - self.began
        return spent + ahead >= self.budget


def squares_at(fit: FederatedFit) -> Callable[[Round], tuple[float, float]]:
    """‖X_r − W_r H‖² and ‖X_r‖² of this rank's own rows and weights after a round."""

    def measure(done: Round) -> tuple[float, float]:
        (shard,) = fit.shards
        matrix, W = shard.matrix, getattr(done.checkpoint.parties[shard.name], "W", None)
        if W is None:
            return matrix.squared_norm, matrix.squared_norm
        H = matrix.native(fit.program.components(done.checkpoint.server))
        with runtime.kernels_on(fit.threads):
            return matrix.squared_distance(W, kernels.of(H).rows_of(H)), matrix.squared_norm

    return measure


def pursued(fit: FederatedFit, unison: Unison, watch: Watch) -> Training:
    """The rounds to their end, which is the same at all ranks; a second Ctrl-C breaks off at once."""
    unison.closing, unison.measure = FinalizationTimer(fit), squares_at(fit)
    training = run(replace(fit, measures=unison), began=unison.began, watch=watch, interrupts=unison.ending)
    if unison.pressed.count > 1:
        raise KeyboardInterrupt
    if training.outcome is Outcome.INTERRUPTED and unison.is_late and not unison.is_pressed:
        training.ended = Outcome.TIME_SPENT
    return training
