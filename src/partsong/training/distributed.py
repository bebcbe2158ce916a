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

from partsong import kernels
from partsong.core import runtime
from partsong.core.interfaces import (
    Aggregation,
    Array,
    Checkpoint,
    Form,
    Layout,
    Message,
    Outcome,
    Program,
    Round,
    RowSolver,
    Shard,
    State,
    Turn,
    turn_of,
)
from partsong.core.runtime import Interrupts
from partsong.data.blocks import block_range
from partsong.engines.collective import Communicator, at_the_server, heard, share, together
from partsong.errors import DivergenceError
from partsong.methods import recipes
from partsong.methods.averaging import Consensus, ConsensusParty
from partsong.methods.dsanls import SketchExchange
from partsong.methods.exact import SharedSums
from partsong.methods.game import PlayInStrata
from partsong.methods.registry import RANK_AVERAGES, RANK_SOLVERS
from partsong.sketch.crossing import Proportion
from partsong.training.loop import ClosingTime, Task, Watch, pursue
from partsong.training.result import Finished, complete
from partsong.training.settings import RankSettings
from partsong.training.stopping import PERFECT, WINDOW, Course, Follower, Progress, Run, Stop, yardstick

# ---- ranks reports ----------------------------------------------------------------------------------------------
#
# An asynchronous program whose parties also say how well the model fits: else no rank could tell when to stop.

ERROR = "reported_error"
"""The metric that the server makes of reports; it is not the error of one moment."""


@dataclass(frozen=True, slots=True)
class ReportingParty:
    """A party, which place it has in the list of all, and how many there are."""

    party: ConsensusParty
    place: int
    parties: int


@dataclass(frozen=True, slots=True)
class ReportedServer:
    """A server, and the latest report of each party (2 × parties): ‖X_p − W_p H‖², ‖X_p‖²; zero before the first."""

    server: State
    reports: np.ndarray


@dataclass(frozen=True, slots=True)
class Reporting:
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

    def expects(self, layout: Layout) -> tuple[Mapping[str, Form], ...]:
        """What the program expects, and reports."""
        reports = Form((2, len(layout.parties)), non_negative=True)
        return tuple({**kind, "reports": reports} for kind in self.program.expects(layout))

    def turn(self, model: Message) -> Turn:
        """Of the program; every exchange is worth a look."""
        return replace(turn_of(self.program, model), ends_round=True)


def _squares(shard: Shard, W: Array | None, model: Message) -> tuple[float, float]:
    matrix: Any = shard.matrix
    if W is None:
        return matrix.squared_norm, matrix.squared_norm
    H = matrix.native(model["H"])
    return max(0.0, matrix.squared_distance(W, kernels.of(H).rows_of(H))), matrix.squared_norm


# ---- ranks arrivals ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Settled(Stop):
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

    def follow(self, task: Task, rounds: Iterator[Round], watch: Watch) -> Run:
        """The course of the run, as rank 0 sees it; its model is the last one, unless the run has lost its way."""
        follower, course = self._follower(task, watch), Course.after()
        with closing(self.arrivals(rounds)) as noted:
            for _ in follower.attend(noted, course):
                pass
        run = course.run()
        return run if run.outcome is Outcome.DIVERGED else replace(run, best=course.latest)

    def _follower(self, task: Task, watch: Watch) -> Follower:
        return Follower(
            Settled(task.stop.tol),
            self.began,
            error_of=lambda done: done.metrics[ERROR],
            is_whole=lambda done: self.ends_turn,
            watch=watch,
            last=task.schedule.rounds,
        )


def pursued_by_arrivals(task: Task, communicator: Communicator, attention: Attention, watch: Watch) -> Run:
    """The run to its end, whose outcome is the same at all ranks; only rank 0 has its history and its model."""
    attention.closing = _closing_time(task, communicator, attention)
    rounds: Any = task.engine.run(task.program, task.shards, task.schedule, reduction=task.reduction)
    run, trouble = Run(Outcome.MAX_ROUNDS, (), None), None
    with closing(rounds):
        try:
            if communicator.rank == 0:
                run = attention.follow(task, rounds, watch)
            else:
                _work(rounds, attention.pressed)
        except DivergenceError as error:
            trouble = error
    if attention.pressed.count > 1:
        raise KeyboardInterrupt
    return _agreed(task, communicator, attention, run, trouble)


def _work(rounds: Iterator[Round], pressed: Interrupts) -> None:
    for done in rounds:
        del done  # as large as the rows of W
        if pressed.count:
            return


def _agreed(
    task: Task, communicator: Communicator, attention: Attention, run: Run, trouble: DivergenceError | None
) -> Run:
    """The outcome that rank 0 knows of, unless somebody's signal or the clock has ended the run; sent: five facts."""
    is_full = bool(run.history) and run.history[-1].iteration >= task.schedule.rounds
    own = [str(run.outcome), is_full, run.best is not None, bool(attention.pressed.count), attention.is_late]
    with heard():
        every = [json.loads(text) for text in share(communicator, json.dumps(own))]
    told, is_full, has_model, _, is_late = every[0]
    if not has_model:
        raise trouble or KeyboardInterrupt
    outcome = Outcome(told)
    if outcome is Outcome.MAX_ROUNDS and not is_full:
        is_pressed = any(one[3] for one in every)
        outcome = Outcome.TIME_SPENT if is_late and not is_pressed else Outcome.INTERRUPTED
    return replace(run, outcome=outcome)


def _closing_time(task: Task, communicator: Communicator, attention: Attention) -> float:
    """How long the slowest worker will need for the end of the fit, tried on a few of its rows; sent: that number."""
    if attention.budget is None:
        return 0.0

    def tried() -> float:
        if not task.shards:
            return 0.0
        start = task.program.start_server(Layout.of(task.shards, task.schedule.seed))
        point = Round(0, start[1], {}, (), {}, 0, 0.0, Checkpoint(0, {}, *start))
        trial = ClosingTime(task)
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


def _best(program: Program, run: Run, shards: Sequence[Shard], seed: int) -> Array:
    """H where the objective was smallest, or where all began if not even one exchange was done."""
    server = program.start_server(Layout.of(shards, seed))[0] if run.best is None else run.best
    return program.components(server)


def completed(program: Program, run: Run, shards: Sequence[Shard], communicator: Communicator, seed: int) -> Finished:
    """Put rank 0's best H on its scale and in order, solve for the own rows of W exactly, and add up the errors."""
    solver: Any = program.solver
    ranks = Ranks(communicator)
    H = ranks.of_rank_0(_best(program, run, shards, seed) if communicator.rank == 0 else None)
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
    """The program, and its rounds for the iterations asked for."""
    if settings.method in RANK_AVERAGES:
        return _average(settings)
    if settings.is_game:
        made = PlayInStrata(settings.n_components, recipes.game_named(settings.rules()))
        return made, settings.max_iter * made.exchanges_among(settings.ranks)
    if settings.is_asynchronous:
        return _reported(settings), settings.max_iter
    if not settings.is_sketched:
        solver = recipes.solver_of(RANK_SOLVERS[settings.method], settings.alpha_w, settings.alpha_h, settings.l1_ratio)
        return SharedSums(settings.n_components, solver), settings.max_iter
    program = SketchExchange(
        settings.n_components,
        sketch=_sketch(settings),
        iterations=settings.max_iter,
        n_rows=n_rows,
    )
    return _penalised(program, settings), program.rounds_for()


def _average(settings: RankSettings) -> tuple[Program, int]:
    """A method in which each rank is a party; an iteration is one of its rounds."""
    made: Any
    if settings.method == "syn-sd":
        made = recipes.syn_sd(settings.n_components)
    else:
        variant = settings.method.removeprefix("syn-ssd-")
        made = recipes.syn_ssd(settings.n_components, variant=variant, sketch=_sketch(settings))
    counts: Any = getattr(made, "rounds_for", None)
    return _penalised(made, settings), settings.max_iter if counts is None else counts(settings.max_iter)


def _reported(settings: RankSettings) -> Reporting:
    """A method in which nobody waits; an iteration is one arrival."""
    if settings.method == "asyn-sd":
        made = recipes.asyn_sd(settings.n_components)
    else:
        made = recipes.asyn_ssd_v(settings.n_components, sketch=_sketch(settings))
    return Reporting(_penalised(made, settings))


def _sketch(settings: RankSettings) -> Proportion:
    return Proportion(recipes.sketches()[settings.sketch or ""], settings.sketch_ratio or 1.0)


def _penalised(program: Any, settings: RankSettings) -> Any:
    given = recipes.solver_of("cd", settings.alpha_w, settings.alpha_h, settings.l1_ratio)
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
    closing: ClosingTime | None = None
    ending: Interrupts = field(default_factory=Interrupts)
    is_late: bool = False
    is_pressed: bool = False
    objective: float = math.nan
    latest: float = 0.0
    measure: Callable[[Round], tuple[float, float]] = lambda done: (math.nan, math.nan)

    def error_of(self, done: Round) -> float:
        """Rank 0's error of this round, or where its server knows none that of all rows, at every rank.

        Sent: six numbers.
        """
        own = [*(done.metrics.get(name, math.nan) for name in ("relative_error", "objective"))]
        squares = self.measure(done) if math.isnan(own[0]) else (math.nan, math.nan)
        told = json.dumps([*own, self._is_late(done), self.pressed.count, *squares])
        with heard():
            every = [json.loads(text) for text in share(self.communicator, told)]
        error, self.objective, self.is_late = every[0][:3]
        if math.isnan(error):
            distance, energy = (sum(one[at] for one in every) for at in (4, 5))
            error = math.sqrt(max(0.0, distance) / energy) if energy else 0.0
            self.objective = error**2
        self.is_pressed = any(one[3] for one in every)
        self.ending.count = int(self.is_late or self.is_pressed)
        return float(error)

    def objective_of(self, done: Round, error: float) -> float:
        """Rank 0's objective, which came with its error."""
        return self.objective

    def _is_late(self, done: Round) -> bool:
        """Whether one more round like this one, and the end of the fit, would take too long; rank 0 decides."""
        if self.budget is None or self.closing is None or self.communicator.rank > 0:
            return False
        spent = time.perf_counter() - self.began
        ahead = spent - self.latest + self.closing.reserve(done, spent)
        self.latest = time.perf_counter() - self.began
        return spent + ahead >= self.budget


def squares_at(task: Task) -> Callable[[Round], tuple[float, float]]:
    """‖X_r − W_r H‖² and ‖X_r‖² of this rank's own rows and weights after a round."""

    def measure(done: Round) -> tuple[float, float]:
        (shard,) = task.shards
        matrix, W = shard.matrix, getattr(done.checkpoint.parties[shard.name], "W", None)
        if W is None:
            return matrix.squared_norm, matrix.squared_norm
        H = matrix.native(task.program.components(done.checkpoint.server))
        with runtime.kernels_on(task.threads):
            return matrix.squared_distance(W, kernels.of(H).rows_of(H)), matrix.squared_norm

    return measure


def pursued(task: Task, unison: Unison, watch: Watch) -> Run:
    """The rounds to their end, which is the same at all ranks; a second Ctrl-C breaks off at once."""
    unison.closing, unison.measure = ClosingTime(task), squares_at(task)
    agreed = replace(task, error_of=unison.error_of, objective_of=unison.objective_of)
    run = pursue(agreed, began=unison.began, watch=watch, interrupts=unison.ending)
    if unison.pressed.count > 1:
        raise KeyboardInterrupt
    is_timed = run.outcome is Outcome.INTERRUPTED and unison.is_late and not unison.is_pressed
    return replace(run, outcome=Outcome.TIME_SPENT) if is_timed else run
