"""Distributed fits: one matrix over the ranks that mpiexec or torchrun has started, from their rows to their files.

    with open_engine("mpi") as (engine, communicator):
        source = open_on_all_ranks("X.npy", communicator)
        settings = DistributedSettings(…)                                      # the same at every rank
        data = read_rows(source, settings, communicator)                # this rank's rows, and columns if need be
        fit = fit_over_ranks(data, settings, engine, communicator)
        fit.save(communicator, model="m.safetensors", weights="W.npy")

Every function that takes the communicator is collective: all ranks call it, and where it fails at one it fails at all.
`partsong.fit_distributed` is all of this in one call.
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from partsong import kernels, methods
from partsong.core import runtime
from partsong.core.interfaces import Array, Engine, Layout, Matrix, Message, Outcome, Program, Round, Schedule, Shard
from partsong.core.runtime import Interrupts, held
from partsong.core.streams import fresh_seed, key
from partsong.data.blocks import TwoSided, block_range
from partsong.data.conversion import as_matrix
from partsong.data.observed import ObservedMatrix, known_cells, observed
from partsong.data.scan import extremes
from partsong.data.table import Table
from partsong.data.validation import require_factorizable
from partsong.engines.collective import Communicator, at_the_server, failing_together, heard, share, together
from partsong.engines.mpi import Mpi, launched_ranks, require_launched_together
from partsong.engines.mpi_async import AsynchronousMpi
from partsong.engines.torch_distributed import TorchDistributed, is_launched, process_group
from partsong.errors import CompositionError, DataError, FileError, ParameterError, PartsongError, reworded
from partsong.io.blocks import Source, open_source, require_sound
from partsong.io.model_file import Model, machine_versions, now, package_versions, save_model
from partsong.io.opening import Wanted
from partsong.io.weights import listing_path, shard_path, write_weights
from partsong.io.write import replacing, write_json
from partsong.methods.exact import SharedSums
from partsong.methods.registry import Problem
from partsong.solvers.squared_error import solver_of
from partsong.training.asynchronous import AsyncFollower, Reporting, train_by_arrivals
from partsong.training.checkpoint import Sent
from partsong.training.distributed_settings import RANK_SOLVERS, DistributedSettings, traits_by_name
from partsong.training.loop import HistoryRow, StoppingRule, Training, Watch, progress, run
from partsong.training.result import FinalizationTimer, FitResult, complete
from partsong.training.run_folder import MODEL, RESULT, RunFolder
from partsong.training.simulation import FederatedFit

Result = TypeVar("Result")

NOTHING_KNOWN = "No cell is known: all are blank, NaN or not stored. Give at least one number."
MARKED_BYTES = 1 << 16
"""Bytes at either end of a file by which ranks see that theirs are the same."""


@contextmanager
def open_engine(engine: str, sums: str = "all-reduce") -> Iterator[tuple[Engine, Communicator]]:
    """The engine ("mpi" or "torch") and the way to all ranks; a process that was started alone is the only rank."""
    adding = sums.replace("in-order", "in order")
    _require_launcher(engine)
    if engine == "mpi":
        ranks = Mpi(sums=adding)
        communicator = ranks.communicator()
        require_launched_together(communicator)
        yield ranks, communicator
        return
    with process_group():
        others = TorchDistributed(sums=adding)
        yield others, others.communicator()


def _require_launcher(engine: str) -> None:
    """Refuse ranks that a launcher of the other kind has started: each would be alone, and do all of the work."""
    by_mpi, by_torch = (launched_ranks() or 1) > 1, is_launched() and int(os.environ["WORLD_SIZE"]) > 1
    if engine == "torch" and by_mpi and not by_torch:
        raise CompositionError(
            'mpiexec has started these ranks, and the engine "torch" needs torchrun. Take "mpi".', parameter="engine"
        )
    if engine == "mpi" and by_torch and not by_mpi:
        raise CompositionError(
            'torchrun has started these ranks, and the engine "mpi" needs mpiexec. Take "torch".', parameter="engine"
        )


def first_difference(communicator: Communicator, own: Mapping[str, Any]) -> tuple[str, int, Any, Any] | None:
    """The first value that is not the same at all ranks: its name, the rank, rank 0's value, and that rank's."""
    with heard():
        every = [json.loads(text) for text in share(communicator, json.dumps(own))]
    for name in own:
        for rank, other in enumerate(every):
            if other.get(name) != every[0][name]:
                return name, rank, every[0][name], other.get(name)
    return None


def common_seed(communicator: Communicator, seed: int | None) -> int:
    """Rank 0's seed, or one that it draws."""
    with heard():
        seeds = share(communicator, str(fresh_seed() >> 32 if seed is None else seed))
    return int(seeds[0])


def open_on_all_ranks(path: str | os.PathLike[str], communicator: Communicator, wanted: Wanted = Wanted()) -> Source:
    """Open a file at every rank; refuse files that differ in shape, number type, size, or first and last bytes."""
    source = together(communicator, lambda: open_source(path, wanted))
    with heard():
        seen = share(communicator, f"{source.shape[0]} × {source.shape[1]}, {source.dtype}, {_mark_of(source)}")
    for rank, other in enumerate(seen):
        if other != seen[0]:
            raise FileError(
                f"{source.path}: holds {seen[0]} at rank 0 and {other} at rank {rank}. Give all ranks the same file."
            )
    return source


def _mark_of(source: Source) -> str:
    """The size of a file and a checksum of its first and last bytes: enough to tell other data, and quickly read."""
    with source.path.open("rb") as file:
        checksum = zlib.crc32(file.read(MARKED_BYTES))
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MARKED_BYTES))
        return f"{size} bytes, checksum {zlib.crc32(file.read(MARKED_BYTES), checksum):08x}"


def require_enough(name: str, shape: tuple[int, int], method: str, ranks: int) -> None:
    """Each rank that works needs a row, and where both factors are distributed a column."""
    traits = traits_by_name(method)
    nouns, servers = ("rows", "columns") if traits.needs_columns else ("rows",), int(traits.asynchronous)
    over = f"{ranks - servers} workers" if servers else f"{ranks} ranks"
    for noun, size in zip(nouns, shape, strict=False):
        if size < ranks - servers:
            raise ParameterError(
                f"{name}: {size} {noun} cannot be split over {over}: each needs at least one. "
                f"Start at most {size + servers} ranks{', of which the first is the server' if servers else ''}."
            )


def require_sketchable(n_components: int, shape: tuple[int, int], method: str) -> None:
    """Sketches need at least one row and one column for each component."""
    if traits_by_name(method).needs_columns and n_components > min(shape):
        raise ParameterError(
            f"n_components={n_components}: a sketch of {shape[0]} rows or {shape[1]} columns has no more columns than "
            f"that, and needs one for each component. Choose at most {min(shape)}, or another method.",
            parameter="n_components",
        )


@dataclass(frozen=True, slots=True)
class RankData:
    """What one rank holds of X (n × m), which rows every rank has (from, to before), and names as far as known.

    `matrix` is None at a server, which has no rows; where a method needs columns of all rows it has these as well.
    `known` counts the known cells of each column over all ranks, where cells may be unknown.
    """

    shape: tuple[int, int]
    spans: tuple[tuple[int, int], ...]
    matrix: Matrix | None
    feature_names: tuple[str, ...] | None = None
    sample_names: tuple[str, ...] | None = None
    known: np.ndarray | None = None


def rows_at(settings: DistributedSettings, rank: int, n_rows: int) -> tuple[int, int]:
    """The rows of a rank, from the first to before the last; none at a server."""
    if rank not in settings.workers:
        return 0, 0
    return block_range(n_rows, len(settings.workers), rank - settings.workers.start)


def read_rows(
    source: Source,
    settings: DistributedSettings,
    communicator: Communicator,
    look: Callable[[Table], None] = lambda table: None,
) -> RankData:
    """Read this rank's rows of a file, and its columns where the method needs them; bad values are refused everywhere.

    The first rank with rows has a `look` at its own.
    """
    spans = tuple(rows_at(settings, rank, source.shape[0]) for rank in range(communicator.size))
    rows = spans[communicator.rank]

    def read() -> tuple[Matrix | None, float]:
        if communicator.rank not in settings.workers:
            return None, 0.0
        X = source.block(rows)
        held = _known(X, source) if settings.knows_some else X
        require_sound(held, source, rows[0], dtype=settings.dtype)
        if communicator.rank == settings.workers.start:
            look(Table(X, source.feature_names, source=str(source.path)))
        if settings.knows_some:
            return observed(held, settings.dtype), extremes(held)[1]
        matrix = as_matrix(X, settings.dtype)
        if settings.is_sketched:
            columns = block_range(source.shape[1], communicator.size, communicator.rank)
            below = as_matrix(source.block(columns=columns), settings.dtype)
            return TwoSided(matrix, below, rows[0], columns[0], source.shape[0]), extremes(X)[1]
        return matrix, extremes(X)[1]

    matrix, high = together(communicator, read)
    known = require_usable(str(source.path), matrix, high, settings, communicator)
    read_whole = source.after_reading(rows)
    names = together(communicator, lambda: read_whole.sample_names(rows) if matrix is not None else None)
    return RankData(source.shape, spans, matrix, source.feature_names, names, known)


def _known(X: Any, source: Source) -> Any:
    try:
        return known_cells(X)
    except PartsongError as error:
        raise reworded(error, f"{source.path}: {error}") from error


def require_usable(
    name: str, matrix: Matrix | None, high: float, settings: DistributedSettings, communicator: Communicator
) -> np.ndarray | None:
    """Refuse a matrix that is zero or too large, over all ranks; return how many cells of each column are known."""
    with heard():
        highest = max(float(text) for text in share(communicator, repr(high)))
    known = None
    if isinstance(matrix, ObservedMatrix):
        known = RankReducer(communicator).total(np.bincount(matrix.by_row.indices, minlength=matrix.shape[1]) + 0.0)
        if not known.any():
            raise DataError(f"{name}: {NOTHING_KNOWN}")
    try:
        require_factorizable(np.full((1, 1), highest), None, settings.dtype)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
    return known


@dataclass(frozen=True, slots=True)
class RankReducer:
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


def finish_over_ranks(
    program: Program, training: Training, shards: Sequence[Shard], communicator: Communicator, seed: int
) -> FitResult:
    """Put rank 0's best H on its scale and in order, solve for the own rows of W exactly, and add up the errors."""
    solver: Any = program.solver
    ranks = RankReducer(communicator)
    H = ranks.of_rank_0(_best(program, training, shards, seed) if communicator.rank == 0 else None)
    rescale = not (solver.penalty_W or solver.penalty_H)
    return complete(solver, shards, kernels.of(H).rows_of(H), rescale, ranks)


def program_for(settings: DistributedSettings, n_rows: int) -> tuple[Program, int]:
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


def _penalised(program: Any, settings: DistributedSettings) -> Any:
    given = solver_of("cd", settings.alpha_w, settings.alpha_h, settings.l1_ratio)
    return replace(program, solver=replace(program.solver, penalty_W=given.penalty_W, penalty_H=given.penalty_H))


@dataclass(slots=True)
class AgreedStopping:
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
        with failing_together(self.communicator):
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


def train_on_all_ranks(fit: FederatedFit, stopping: AgreedStopping, watch: Watch) -> Training:
    """The rounds to their end, which is the same at all ranks; a second Ctrl-C breaks off at once."""
    stopping.closing, stopping.measure = FinalizationTimer(fit), squares_at(fit)
    training = run(replace(fit, measures=stopping), began=stopping.began, watch=watch, interrupts=stopping.ending)
    if stopping.pressed.count > 1:
        raise KeyboardInterrupt
    if training.outcome is Outcome.INTERRUPTED and stopping.is_late and not stopping.is_pressed:
        training.ended = Outcome.TIME_SPENT
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
    """Run the rounds, the same at all ranks, and solve for this rank's rows of W.

    Rank 0 writes what was `asked` for to the `folder` before the first round, and shows progress if `verbose`; `note`
    is shown at the first Ctrl-C.
    """
    began, rank = time.perf_counter(), communicator.rank
    name = f"rank-{rank:06d}"
    shards = [] if data.matrix is None else [Shard(name, data.matrix, key(settings.seed, "secret", name))]
    program, rounds = program_for(settings, data.shape[0])
    schedule = Schedule(rounds, settings.seed, kernel_threads=settings.threads)
    stop = StoppingRule(settings.tol * program.traits.measured_every)
    engine = AsynchronousMpi() if settings.is_asynchronous else engine
    fit = FederatedFit(program, shards, schedule, stop, engine, threads=settings.threads)
    told = {**settings.as_json(), **(asked or {}), "started": now()}

    def begin() -> None:
        if folder is not None and rank == 0:
            folder.begin(told, machine_versions(settings.threads), {})

    together(communicator, begin)
    sent: list[Sent] = []
    title = f"{data.shape[0]} × {data.shape[1]} over {settings.ranks}"
    with held(note if rank == 0 else "") as pressed:
        with progress(verbose if rank == 0 else 0, fit.last, settings.time_budget, title) as bar:

            def watch(done: Round, row: HistoryRow) -> None:
                sent.extend((done.index + 1, name, up, done.bytes_down) for name, up in sorted(done.bytes_up.items()))
                bar(done, row)

            if settings.is_asynchronous:
                follower = AsyncFollower(pressed, len(settings.workers), began, settings.time_budget)
                training = train_by_arrivals(fit, communicator, follower, watch)
            else:
                stopping = AgreedStopping(communicator, pressed, began, settings.time_budget)
                training = train_on_all_ranks(fit, stopping, watch)
        with runtime.kernels_on(settings.threads):
            done = finish_over_ranks(program, training, shards, communicator, settings.seed)
        return DistributedFit(rank, settings, data, training, done, program.solver, sent, time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class DistributedFit:
    """A fit over ranks that has ended, as one of them has it: the model of all, and its own rows of W.

    `training` has the history and the outcome (of asynchronous methods the history is at rank 0 only), `result` H, W,
    shares and error, `sent` the bytes of each round.
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
        """The weights of this rank's rows; None at a server, which has none."""
        return self.result.W if self.result.weights else None

    @property
    def rows(self) -> tuple[int, int]:
        """Which rows of X those are: from the first to before the last."""
        return self.data.spans[self.rank]

    @property
    def relative_error(self) -> float:
        """‖X − W H‖ / ‖X‖ over the rows of all ranks."""
        return self.result.relative_error

    @property
    def outcome(self) -> Outcome:
        """Why it ended."""
        return self.training.outcome

    @property
    def iterations(self) -> int:
        """How many were made; one of sketches takes two exchanges, and where nobody waits each arrival is one."""
        history = self.training.history
        rounds = history[-1].iteration if history else 0
        if self.settings.is_asynchronous:
            return rounds
        return rounds // 2 if self.settings.is_sketched else self.training.rounds

    def model(self) -> Model:
        """H, names of features, settings, iterations made, and how many ranks there were."""
        counted = {"n_samples": self.data.shape[0], "parties": 1, "iterations": self.iterations}
        about = {name: value for name, value in self.settings.as_json().items() if value is not None}
        for name in ("threads", "time_budget", "seed"):
            about.pop(name, None)
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
        """What came of it, as plain data, with the files it is in; bytes are the mean over ranks, or over workers."""
        settings, history = self.settings, self.training.history
        workers, down = len(settings.workers), sum(row.bytes_down for row in history)
        game = {"game": settings.rules()} if settings.is_game else {}
        return {
            "model": model or (None if folder is None else folder.path / MODEL),
            "method": settings.method,
            **game,
            "n_components": settings.n_components,
            "shape": self.data.shape,
            "parties": 1,
            "engine": settings.engine,
            "ranks": settings.ranks,
            "sums": settings.sums,
            "dtype": settings.dtype,
            "seed": settings.seed,
            "outcome": str(self.training.outcome),
            "iterations": self.iterations,
            "seconds": round(self.seconds, 6),
            "relative_error": self.result.relative_error,
            "explained_variance": 1.0 - self.result.relative_error**2,
            "bytes_up_per_rank": round(sum(row.bytes_up for row in history) / workers),
            "bytes_down_per_rank": round(down / workers) if settings.is_asynchronous else down,
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
        summary: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the model and the run folder (rank 0), and a file of rows of W for each rank with a list of them.

        All files are written as drafts first; then the shards get their names, the list of them, and at last the
        model. A list of earlier shards goes before any of these is replaced. Where a name cannot be given, at whatever
        rank, shards that have theirs are removed.
        """
        is_first, kept = communicator.rank == 0, self.result.weights
        place, rows = (None if name is None else Path(name) for name in (model, weights))
        path = None if rows is None else shard_path(rows, communicator.rank, communicator.size)
        told = summary if summary is not None else self.summary(place, rows, folder)
        with ExitStack() as undone, ExitStack() as last, ExitStack() as drafts:

            def write() -> None:
                if path is not None and kept:
                    names = None if path.name.lower().endswith(".npy") else self.data.sample_names
                    write_weights(drafts.enter_context(replacing(path)), self.result.W, names)
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
                """What is removed again if it fails was not there before."""
                if not is_first:
                    return
                if rows is not None:
                    undone.callback(_remove, listing_path(rows))
                if folder is not None:
                    for name in (RESULT, MODEL):
                        undone.callback(_remove, folder.path / name)
                    folder.end(self.training.history, self.sent, told)
                last.close()

            for step in (write, forget_earlier, name_shard, conclude):
                together(communicator, step)
            undone.pop_all()

    def _write_model(self, last: ExitStack, model: Path | None, weights: Path | None, folder: RunFolder | None) -> None:
        """Drafts of the model, and of the list of shards, which is named first."""
        places = [] if model is None else [model]
        places += [] if folder is None else [folder.path / MODEL]
        for place in places:
            save_model(last.enter_context(replacing(place)), self.model())
        if weights is not None:
            write_json(last.enter_context(replacing(listing_path(weights))), self._listing(weights))

    def _listing(self, weights: Path) -> dict[str, Any]:
        n, ranks = self.data.shape[0], self.settings.ranks
        shards = [
            {"rank": rank, "rows": self.data.spans[rank], "file": shard_path(weights, rank, ranks).name}
            for rank in self.settings.workers
        ]
        shape = [n, self.settings.n_components]
        return {"format": "partsong-weight-shards", "version": 1, "shape": shape, "shards": shards}


def _remove(path: Path) -> None:
    with suppress(OSError):  # there is an error that matters more
        path.unlink(missing_ok=True)
