"""Distributed fits over MPI or torch ranks: the rows of one matrix are split over the ranks, which write the results.

    with open_engine("mpi") as (engine, communicator):
        fit = fit_over_ranks(data, settings, engine, communicator)      # RankData, and DistributedSettings
        fit.save(communicator, model="m.safetensors", weights="W.npy")

Every function that takes the communicator is collective: all ranks call it, and if it fails at one it fails at all.
`partsong.fit_distributed` checks the settings, reads the rows and does all of this in one call.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from partsong import kernels, methods
from partsong.core import runtime
from partsong.core.interfaces import Array, Engine, Matrix, Message, Outcome, Program, Round, Schedule, Shard, Traits
from partsong.core.runtime import InterruptCounter, graceful_interrupt
from partsong.core.streams import key
from partsong.engines.collective import (
    Communicator,
    all_gather_values,
    broadcasting_errors,
    raising_remote_errors,
    run_on_all,
    run_on_rank_0,
)
from partsong.engines.mpi import Mpi, launched_ranks, require_launched_together
from partsong.engines.mpi_async import AsynchronousMpi
from partsong.engines.torch_distributed import TorchDistributed, is_launched, process_group
from partsong.errors import CompositionError
from partsong.io.model_file import Model, machine_versions, now, package_versions, save_model
from partsong.io.weights import listing_path, shard_path, write_weights
from partsong.io.write import atomic_write, write_json
from partsong.methods.exact import SharedSums
from partsong.methods.registry import Problem
from partsong.solvers.game import compose_game
from partsong.solvers.squared_error import build_solver
from partsong.training.asynchronous import AsyncFollower, Reporting, train_by_arrivals
from partsong.training.checkpoint import Sent
from partsong.training.loop import HistoryRow, Measures, StoppingRule, Training, Watch, progress, run
from partsong.training.result import FinalizationTimer, FitResult, Reducer, complete, scale_is_free
from partsong.training.run_folder import MODEL, RESULT, RunFolder
from partsong.training.simulation import FederatedFit

Result = TypeVar("Result")

GAME = "game"
GAME_OPTIONS = ("order", "step", "step_decay", "self_play", "shrink", "leader")
GAME_SETTINGS = ("play", *GAME_OPTIONS[1:], "missing")
"""Names of a game's settings in model files, where its order is called "play"."""
SKETCH_OPTIONS = ("sketch", "sketch_ratio")


@contextmanager
def open_engine(engine: str, reduce: str = "all-reduce") -> Iterator[tuple[Engine, Communicator]]:
    """Yield the engine ("mpi" or "torch") and its communicator; a process that was started alone is the only rank."""
    adding = reduce.replace("in-order", "in order")
    _require_launcher(engine)
    if engine == "mpi":
        ranks = Mpi(reduce=adding)
        communicator = ranks.communicator()
        require_launched_together(communicator)
        yield ranks, communicator
        return
    with process_group():
        others = TorchDistributed(reduce=adding)
        yield others, others.communicator()


def _require_launcher(engine: str) -> None:
    """Refuse ranks started by the other launcher: each would be alone and do all of the work."""
    by_mpi, by_torch = (launched_ranks() or 1) > 1, is_launched() and int(os.environ["WORLD_SIZE"]) > 1
    if engine == "torch" and by_mpi and not by_torch:
        raise CompositionError(
            'mpiexec started these ranks, but engine="torch" needs torchrun. Use engine="mpi".', parameter="engine"
        )
    if engine == "mpi" and by_torch and not by_mpi:
        raise CompositionError(
            'torchrun started these ranks, but engine="mpi" needs mpiexec. Use engine="torch".', parameter="engine"
        )


def first_difference(communicator: Communicator, own: Mapping[str, Any]) -> tuple[str, int, Any, Any] | None:
    """Return the first value that differs between ranks: its name, the rank, rank 0's value, and that rank's."""
    every = all_gather_values(communicator, own)
    different = ((name, rank) for name in own for rank in range(len(every)) if every[rank].get(name) != every[0][name])
    return next(((name, rank, every[0][name], every[rank].get(name)) for name, rank in different), None)


def traits_by_name(method: str) -> Traits:
    """Return the traits of the program of a method over ranks."""
    return methods.method("exact" if method in methods.RANK_SOLVERS else method).traits


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedSettings:
    """Settings of a fit over ranks: the arguments of `fit_distributed` as plain data.

    `n_components` and `dtype` may be None, and the seed is 0, until the ranks agree on them.
    """

    method: str
    n_components: int | None
    alpha_W: float
    alpha_H: float
    l1_ratio: float
    seed: int = 0
    dtype: str | None
    tol: float
    max_iter: int
    time_budget: float | None
    n_threads: int
    engine: str
    reduce: str
    ranks: int
    missing: str
    method_options: Mapping[str, Any]

    @property
    def has_gaps(self) -> bool:
        """Whether cells may be unknown."""
        return self.missing == "ignore"

    @property
    def workers(self) -> range:
        """The ranks that hold rows; rank 0 of an asynchronous method is a server without rows."""
        return range(int(traits_by_name(self.method).asynchronous), self.ranks)

    def game(self) -> dict[str, Any]:
        """Return the settings of the game; all None for other methods."""
        if self.method != GAME:
            return dict.fromkeys(GAME_SETTINGS)
        given = {name: value for name, value in self.method_options.items() if name in GAME_OPTIONS}
        return {**compose_game(**methods.method(GAME).parse(given)).settings(), "missing": self.missing}

    def to_dict(self) -> dict[str, Any]:
        """Return the settings for model files and run folders: options of games and sketches by name, others nested."""
        options = self.method_options
        sketch: dict[str, Any] = dict.fromkeys(SKETCH_OPTIONS)
        if self.method not in methods.RANK_SOLVERS:
            sketch = {name: methods.method(self.method).value(name, options) for name in SKETCH_OPTIONS}
        named = {*SKETCH_OPTIONS, *(GAME_OPTIONS if self.method == GAME else ())}
        rest = {name: value for name, value in options.items() if name not in named}
        return {
            **self.game(),
            "method": self.method,
            "n_components": self.n_components,
            "init": "random",
            "alpha_w": self.alpha_W,
            "alpha_h": self.alpha_H,
            "l1_ratio": self.l1_ratio,
            **sketch,
            "seed": self.seed,
            "dtype": self.dtype,
            "tol": self.tol,
            "max_iter": self.max_iter,
            "time_budget": self.time_budget,
            "threads": self.n_threads,
            "engine": self.engine,
            "reduce": None if self.workers.start else self.reduce,  # uploads to a server come one at a time
            "ranks": self.ranks,
            **({"method_options": rest} if rest else {}),
        }


@dataclass(frozen=True, slots=True)
class RankData:
    """The part of X (n × m) that one rank holds, the row ranges of all ranks (start, stop), and names if known.

    `matrix` is None at a server, which has no rows. If a method needs columns of all rows, the matrix has these as
    well. `known` counts the known cells of each column over all ranks, if cells may be unknown.
    """

    shape: tuple[int, int]
    spans: tuple[tuple[int, int], ...]
    matrix: Matrix | None
    feature_names: tuple[str, ...] | None = None
    sample_names: tuple[str, ...] | None = None
    known: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class RankReducer(Reducer):
    """Ranks that complete a model together. Sent: sums (k × k, and two numbers), as rank 0 computes them."""

    communicator: Communicator

    def run_on_all(self, work: Callable[[], Result]) -> Result:
        return run_on_all(self.communicator, work)

    def sum(self, array: np.ndarray) -> np.ndarray:
        """Return the sum over the ranks as rank 0 has it, so that all ranks sort alike."""
        return np.asarray(self.broadcast(self.communicator.sum(np.ascontiguousarray(array))))

    def broadcast(self, array: Array | None) -> Any:
        """Return rank 0's array at every rank."""
        with raising_remote_errors():
            messages, _ = run_on_rank_0(self.communicator, lambda: ({"": Message({"": array})}, None))
        return messages[""][""]


def finish_over_ranks(fit: FederatedFit, training: Training, communicator: Communicator) -> FitResult:
    """Scale and sort rank 0's best H, solve for the own rows of W exactly, and add up the errors.

    If no exchange was completed, use the initial H.
    """
    ranks, H = RankReducer(communicator), None
    if communicator.rank == 0:
        H = fit.components(fit.server_at_start() if training.best is None else training.best)
    H = ranks.broadcast(H)
    return complete(fit.solver, fit.shards, kernels.of(H).rows_of(H), scale_is_free(fit.solver), ranks)


def program_for(settings: DistributedSettings, n_rows: int) -> tuple[Program, int]:
    """Return the program and its number of exchanges; for an asynchronous program these are arrivals."""
    name, rank = settings.method, settings.n_components
    penalties = (settings.alpha_W, settings.alpha_H, settings.l1_ratio)
    assert rank is not None
    if name in methods.RANK_SOLVERS:
        return SharedSums(rank, build_solver(methods.RANK_SOLVERS[name], *penalties)), settings.max_iter
    problem = Problem(rank, None, settings.max_iter, n_rows)
    program: Any = methods.method(name).build(problem, settings.method_options)
    if name != GAME:
        given = build_solver("cd", *penalties)
        solver = replace(program.solver, penalty_W=given.penalty_W, penalty_H=given.penalty_H)
        program = replace(program, solver=solver)
    if program.traits.asynchronous:
        return Reporting(program), settings.max_iter
    return program, program.exchanges(settings.max_iter, settings.ranks)


@dataclass(slots=True)
class AgreedStopping(Measures):
    """Metrics and stopping that all ranks agree on after a whole round.

    Rank 0 sends its error, objective and clock; every rank sends whether it was interrupted. `ending` is set after a
    Ctrl-C or SIGTERM at any rank, or when rank 0's time budget is used up.
    """

    fit: FederatedFit
    communicator: Communicator
    interrupts: InterruptCounter
    began: float
    budget: float | None
    timer: FinalizationTimer = field(init=False)
    ending: InterruptCounter = field(default_factory=InterruptCounter)
    is_late: bool = False
    is_interrupted: bool = False
    latest_objective: float = math.nan
    latest: float = 0.0

    def __post_init__(self) -> None:
        self.timer = FinalizationTimer(self.fit)

    def error(self, done: Round) -> float:
        """Return rank 0's error of this round at every rank; if its server knows none, the error over all rows.

        Sent: six numbers.
        """
        with broadcasting_errors(self.communicator):
            own = [*(done.metrics.get(name, math.nan) for name in ("relative_error", "objective"))]
            squares = self._squares(done) if math.isnan(own[0]) else (math.nan, math.nan)
            own_values = [*own, self._is_late(done), self.interrupts.count, *squares]
        every = all_gather_values(self.communicator, own_values)
        error, self.latest_objective, self.is_late = every[0][:3]
        if math.isnan(error):
            distance, energy = (sum(one[at] for one in every) for at in (4, 5))
            error = math.sqrt(max(0.0, distance) / energy) if energy else 0.0
            self.latest_objective = error**2
        self.is_interrupted = any(one[3] for one in every)
        self.ending.count = int(self.is_late or self.is_interrupted)
        return float(error)

    def objective(self, done: Round, error: float) -> float:
        """Return rank 0's objective, which was sent with its error."""
        return self.latest_objective

    def _squares(self, done: Round) -> tuple[float, float]:
        """Return ‖X_r − W_r H‖² and ‖X_r‖² of this rank's rows."""
        (shard,) = self.fit.shards
        matrix: Any = shard.matrix
        W = getattr(done.checkpoint.parties[shard.name], "W", None)
        if W is None:
            return matrix.squared_norm, matrix.squared_norm
        H = matrix.native(self.fit.components(done.checkpoint.server))
        with runtime.limit_kernel_threads(self.fit.threads):
            return matrix.squared_distance(W, kernels.of(H).rows_of(H)), matrix.squared_norm

    def _is_late(self, done: Round) -> bool:
        """Whether one more round like this one and the end of the fit would exceed the budget; rank 0 decides."""
        if self.budget is None or self.communicator.rank > 0:
            return False
        spent = time.perf_counter() - self.began
        ahead = spent - self.latest + self.timer.reserve(done, spent)
        self.latest = time.perf_counter() - self.began
        return spent + ahead >= self.budget

    def train(self, watch: Watch) -> Training:
        """Run the rounds to their end, which is the same at all ranks; a second Ctrl-C aborts at once."""
        training = run(replace(self.fit, measures=self), began=self.began, watch=watch, interrupts=self.ending)
        if self.interrupts.count > 1:
            raise KeyboardInterrupt
        if training.outcome is Outcome.INTERRUPTED and self.is_late and not self.is_interrupted:
            training.ended = Outcome.TIME_LIMIT
        return training


def fit_over_ranks(
    data: RankData,
    settings: DistributedSettings,
    engine: Engine,
    communicator: Communicator,
    *,
    folder: RunFolder | None = None,
    asked: Mapping[str, Any] | None = None,
    verbose: int = 0,
    note: str = "",
) -> DistributedFit:
    """Run the rounds, which are the same at all ranks, and solve for this rank's rows of W.

    Rank 0 writes the settings, updated by `asked`, to the `folder` before the first round, and shows progress if
    `verbose`. `note` is shown at the first Ctrl-C.
    """
    began, rank, threads = time.perf_counter(), communicator.rank, settings.n_threads
    name = f"rank-{rank:06d}"
    shards = [] if data.matrix is None else [Shard(name, data.matrix, key(settings.seed, "secret", name))]
    program, rounds = program_for(settings, data.shape[0])
    schedule = Schedule(rounds, settings.seed, kernel_threads=threads)
    stop, is_asynchronous = StoppingRule(settings.tol * program.traits.measured_every), settings.workers.start > 0
    fit = FederatedFit(
        program, shards, schedule, stop, AsynchronousMpi() if is_asynchronous else engine, threads=threads
    )
    written = {**settings.to_dict(), **(asked or {}), "started": now()}

    def begin() -> None:
        if folder is not None and rank == 0:
            folder.begin(written, machine_versions(threads))

    run_on_all(communicator, begin)
    sent: list[Sent] = []
    title = f"{data.shape[0]} × {data.shape[1]} over {settings.ranks}"
    with graceful_interrupt(note if rank == 0 else "") as interrupts:
        with progress(verbose if rank == 0 else 0, fit.last, settings.time_budget, title) as bar:

            def watch(done: Round, row: HistoryRow) -> None:
                sent.extend((done.index + 1, name, up, done.bytes_down) for name, up in sorted(done.bytes_up.items()))
                bar(done, row)

            if is_asynchronous:
                follower = AsyncFollower(interrupts, len(settings.workers), began, settings.time_budget)
                training = train_by_arrivals(fit, communicator, follower, watch)
            else:
                training = AgreedStopping(fit, communicator, interrupts, began, settings.time_budget).train(watch)
        with runtime.limit_kernel_threads(threads):
            done = finish_over_ranks(fit, training, communicator)
        return DistributedFit(rank, settings, data, training, done, program.solver, sent, time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class DistributedFit:
    """The result of a fit over ranks at one rank: the common model, and this rank's rows of W.

    `training` has the history and the outcome (for asynchronous methods, the history is only at rank 0). `result` has
    H, W, shares and error, and `sent` the bytes of each round.
    """

    rank: int
    settings: DistributedSettings
    data: RankData
    training: Training = field(repr=False)
    result: FitResult = field(repr=False)
    solver: Any = field(repr=False)
    sent: Sequence[Sent] = field(repr=False)
    seconds: float

    @property
    def H(self) -> np.ndarray:
        """The components (k × m), the same at every rank."""
        return self.result.H

    @property
    def W(self) -> np.ndarray | None:
        """The weights of this rank's rows; None at a server, which has no rows."""
        return self.result.W if self.result.weights else None

    @property
    def rows(self) -> tuple[int, int]:
        """The range of this rank's rows in X (start, stop)."""
        return self.data.spans[self.rank]

    @property
    def relative_error(self) -> float:
        """‖X − W H‖ / ‖X‖ over the rows of all ranks."""
        return self.result.relative_error

    @property
    def outcome(self) -> Outcome:
        """Why the fit ended."""
        return self.training.outcome

    @property
    def iterations(self) -> int:
        """The number of iterations; sketched ones take two exchanges, asynchronous ones are arrivals."""
        history = self.training.history
        rounds = history[-1].iteration if history else 0
        traits = traits_by_name(self.settings.method)
        if traits.asynchronous:
            return rounds
        return rounds // 2 if traits.needs_columns else self.training.rounds

    def model(self) -> Model:
        """Return the model: H, feature names, settings, and the numbers of iterations and ranks."""
        counted = {"n_samples": self.data.shape[0], "parties": 1, "iterations": self.iterations}
        left = ("threads", "time_budget", "seed")
        about = {name: value for name, value in self.settings.to_dict().items() if value is not None}
        about = {name: value for name, value in about.items() if name not in left}
        return Model(
            components=self.result.H,
            feature_names=self.data.feature_names,
            settings={**about, **counted},
            seed=self.settings.seed,
            relative_error=self.result.relative_error,
            shares=self.result.shares,
            created=now(),
            versions=package_versions(),
        )

    def summary(
        self, model: Path | None = None, weights: Path | None = None, folder: RunFolder | None = None
    ) -> dict[str, Any]:
        """Return the result and its files as plain data; bytes are means over ranks, or over workers."""
        settings, stored, history = self.settings, self.settings.to_dict(), self.training.history
        workers, down = len(settings.workers), sum(row.bytes_down for row in history)
        return {
            "model": model or (None if folder is None else folder.path / MODEL),
            "method": settings.method,
            **({"game": settings.game()} if settings.method == GAME else {}),
            "n_components": settings.n_components,
            "shape": self.data.shape,
            "parties": 1,
            **{name: stored[name] for name in ("engine", "ranks", "reduce", "dtype", "seed")},
            "outcome": str(self.training.outcome),
            "iterations": self.iterations,
            "seconds": round(self.seconds, 6),
            "relative_error": self.result.relative_error,
            "explained_variance": 1.0 - self.result.relative_error**2,
            "bytes_up_per_rank": round(sum(row.bytes_up for row in history) / workers),
            "bytes_down_per_rank": round(down / workers) if settings.workers.start else down,
            "weights": None if weights is None else listing_path(weights),
            "run_folder": None if folder is None else folder.path,
        }

    def save(
        self,
        communicator: Communicator,
        *,
        model: str | os.PathLike[str] | None = None,
        weights: str | os.PathLike[str] | None = None,
        folder: RunFolder | None = None,
    ) -> None:
        """Write the model and the run folder (rank 0), and the rows of W: one file per rank, and a list of them.

        All files are written as drafts first. Then the shards are renamed, next the list, and finally the model. A list
        of earlier shards is removed before any of them is replaced. If a file cannot be renamed at any rank, shards
        that were already renamed are removed.
        """
        is_first, kept = communicator.rank == 0, self.result.weights
        place, rows = (None if name is None else Path(name) for name in (model, weights))
        path = None if rows is None else shard_path(rows, communicator.rank, communicator.size)
        summary = self.summary(place, rows, folder)
        with ExitStack() as undone, ExitStack() as last, ExitStack() as drafts:

            def write() -> None:
                if path is not None and kept:
                    names = None if path.name.lower().endswith(".npy") else self.data.sample_names
                    write_weights(drafts.enter_context(atomic_write(path)), self.result.W, names)
                if is_first:
                    self._write_model(last, place, rows, folder)

            def name_shard() -> None:
                drafts.close()
                if path is not None and kept:
                    undone.callback(_remove, path)

            def forget_earlier() -> None:
                if is_first and rows is not None:
                    listing_path(rows).unlink(missing_ok=True)

            def conclude() -> None:
                """Give the list, the run folder and the model their names; remove them again if this fails."""
                if not is_first:
                    return
                if rows is not None:
                    undone.callback(_remove, listing_path(rows))
                if folder is not None:
                    for name in (RESULT, MODEL):
                        undone.callback(_remove, folder.path / name)
                    folder.end(self.training.history, self.sent, summary)
                last.close()

            for step in (write, forget_earlier, name_shard, conclude):
                run_on_all(communicator, step)
            undone.pop_all()

    def _write_model(self, last: ExitStack, model: Path | None, weights: Path | None, folder: RunFolder | None) -> None:
        """Write drafts of the model, and of the list of shards, which is renamed first."""
        places = [] if model is None else [model]
        places += [] if folder is None else [folder.path / MODEL]
        for place in places:
            save_model(last.enter_context(atomic_write(place)), self.model())
        if weights is not None:
            write_json(last.enter_context(atomic_write(listing_path(weights))), self._listing(weights))

    def _listing(self, weights: Path) -> dict[str, Any]:
        n, ranks = self.data.shape[0], self.settings.ranks
        shards = [
            {"rank": rank, "rows": self.data.spans[rank], "file": shard_path(weights, rank, ranks).name}
            for rank in self.settings.workers
        ]
        shape = [n, self.settings.n_components]
        return {"format": "partsong-weight-shards", "version": 1, "shape": shape, "shards": shards}


def _remove(path: Path) -> None:
    with suppress(OSError):  # the original error matters more
        path.unlink(missing_ok=True)
