"""One fit over ranks, start to end: all look at everything first, each reads its block, all compute, rank 0 tells."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import typer

from partsong import threads
from partsong.cli.choices import IGNORE
from partsong.cli.fit_report import warn_of_empty_model
from partsong.cli.fit_settings import FitOptions
from partsong.cli.fit_tasks import using_threads
from partsong.cli.gaps import NOTHING_KNOWN, warn_of_unknown_columns, with_known_cells
from partsong.cli.holdings import (
    header_notes,
    require_meaningful,
    warn_of,
    warn_of_identifiers,
)
from partsong.cli.ranks_arrivals import Attention, pursued_by_arrivals
from partsong.cli.ranks_company import agreed_code, company, heard, part, with_one_voice
from partsong.cli.ranks_files import require_outputs
from partsong.cli.ranks_finish import Ranks, completed
from partsong.cli.ranks_outputs import RankResult, Sent
from partsong.cli.ranks_programs import program_for
from partsong.cli.ranks_rounds import Unison, pursued
from partsong.cli.ranks_settings import (
    RankSettings,
    common_seed,
    require_enough,
    require_fitting,
    require_same_file,
    require_same_options,
    settle,
)
from partsong.cli.run_folder import RunFolder
from partsong.cli.termination import exit_code
from partsong.core import Engine, Matrix, Outcome, Round, Schedule, Shard
from partsong.data.check import require_factorizable
from partsong.data.matrix import as_matrix
from partsong.data.observed import ObservedMatrix, observed
from partsong.data.scan import extremes
from partsong.data.table import Table
from partsong.data.two_sided import TwoSided, block_range
from partsong.engines.agreement import share, together
from partsong.engines.asynchronous_mpi import AsynchronousMpi
from partsong.engines.communicator import Communicator
from partsong.errors import DataError
from partsong.fitting import Task
from partsong.interrupts import Interrupts, held
from partsong.io import provenance
from partsong.io.blocks import Source, open_source, require_sound
from partsong.io.opening import Wanted, place_of
from partsong.progress import progress
from partsong.running import HistoryRow, Run, Stop
from partsong.streams import key

FINISHING_ALL = (
    "Interrupted: all ranks end after this iteration, and the model is saved. A second Ctrl-C gives up, and nothing is."
)


@dataclass(frozen=True, slots=True)
class Seat:
    """All that one rank knows before the first iteration."""

    options: FitOptions
    settings: RankSettings
    source: Source
    engine: Engine
    communicator: Communicator
    matrix: Matrix | None
    rows: tuple[int, int]

    @property
    def shards(self) -> list[Shard]:
        """The party that this rank is, unless it holds no rows."""
        name = f"rank-{self.communicator.rank:06d}"
        return [] if self.matrix is None else [Shard(name, self.matrix, key(self.settings.seed, "secret", name))]

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.communicator.rank == 0


def run_over_ranks(options: FitOptions, given: Collection[str]) -> None:
    """Fit, save and tell; exit codes are those of a fit in one process, the same at all ranks."""
    with company(options.engine, options.sums) as (engine, communicator):
        work = partial(_run, options, given, engine, communicator)
        result, code = with_one_voice(communicator, options.as_json, work)
        if result is not None and communicator.rank == 0:
            result.report()
        if result is not None and result.run.outcome is Outcome.INTERRUPTED:
            code, _ = agreed_code(communicator, exit_code())
            part(communicator)
    if code:
        raise typer.Exit(code)


def _run(options: FitOptions, given: Collection[str], engine: Engine, communicator: Communicator) -> RankResult:
    wanted = Wanted(options.label, options.transpose, options.key, options.header)
    together(communicator, lambda: _require_usage(options, given, wanted, communicator.size))
    require_same_options(communicator, options)
    together(communicator, lambda: require_outputs(options, communicator.rank, communicator.size))
    readable = replace(wanted, gaps=options.missing == IGNORE)
    source = together(communicator, lambda: open_source(options.data, readable))
    require_same_file(communicator, source)
    require_enough(source, options.method, communicator.size)
    seed = common_seed(communicator, options)
    settings = together(communicator, partial(settle, options, source, seed, communicator.size))
    rows = settings.rows_at(communicator.rank, source.shape[0])
    engine = AsynchronousMpi() if settings.is_asynchronous else engine
    with using_threads(settings.threads):
        matrix = _read(settings, source, communicator, rows, wanted)
        source = source.after_reading(rows)
        return _fit(Seat(options, settings, source, engine, communicator, matrix, rows))


def _require_usage(options: FitOptions, given: Collection[str], wanted: Wanted, ranks: int) -> None:
    require_fitting(options, given, ranks)
    require_meaningful(options.data, wanted)


def _read(
    settings: RankSettings, source: Source, communicator: Communicator, rows: tuple[int, int], wanted: Wanted
) -> Matrix | None:
    """This rank's rows, and its columns where the method needs them; refused at all ranks where one has bad values."""

    def read() -> tuple[Matrix | None, float]:
        if communicator.rank not in settings.workers:
            return None, 0.0
        X = source.block(rows)
        table = with_known_cells(Table(X, source.feature_names, source=str(source.path)), settings.missing)
        require_sound(table.X, source, rows[0], dtype=settings.dtype)
        if communicator.rank == settings.workers.start:
            warn_of(table, header_notes(replace(table, X=X), wanted))
            warn_of_identifiers([table])
        if settings.knows_some:
            return observed(table.X, settings.dtype), extremes(table.X)[1]
        matrix = as_matrix(X, settings.dtype)
        if settings.is_sketched:
            columns = block_range(source.shape[1], communicator.size, communicator.rank)
            below = as_matrix(source.block(columns=columns), settings.dtype)
            return TwoSided(matrix, below, rows[0], columns[0], source.shape[0]), extremes(X)[1]
        return matrix, extremes(X)[1]

    matrix, high = together(communicator, read)
    with heard():
        highest = max(float(text) for text in share(communicator, repr(high)))
    if isinstance(matrix, ObservedMatrix):
        counts = Ranks(communicator).total(np.bincount(matrix.by_row.indices, minlength=matrix.shape[1]) + 0.0)
        if not counts.any():
            raise DataError(f"{source.path}: {NOTHING_KNOWN}")
        if communicator.rank == 0:
            warn_of_unknown_columns(counts, source.feature_names, is_random=True)
    try:
        require_factorizable(np.full((1, 1), highest), None, settings.dtype)
    except DataError as error:
        raise DataError(f"{source.path}: {error}") from error
    return matrix


def _fit(seat: Seat) -> RankResult:
    began, options, settings = time.perf_counter(), seat.options, seat.settings
    communicator, shards = seat.communicator, seat.shards
    program, rounds = program_for(settings, seat.source.shape[0])
    schedule = Schedule(rounds, settings.seed, kernel_threads=settings.threads)
    stop = Stop(settings.tol * getattr(program, "every", 1))
    task = Task(program, shards, schedule, stop, seat.engine, threads=settings.threads)
    together(communicator, lambda: _begin(seat))
    sent: list[Sent] = []
    with held(FINISHING_ALL if seat.is_first else "") as pressed:
        run = _rounds(seat, task, pressed, began, sent)
        with threads.kernels_on(settings.threads):
            done = completed(program, run, shards, communicator, settings.seed)
        seconds = time.perf_counter() - began
        result = RankResult(options, settings, seat.source, seat.rows, run, done, sent, seconds)
        result.save(communicator)
        if seat.is_first:
            warn_of_empty_model(task, done)
        return result


def _begin(seat: Seat) -> None:
    options = seat.options
    if options.run_folder is None or not seat.is_first:
        return
    folder = RunFolder(place_of(options.run_folder))
    reading: dict[str, Any] = {name: getattr(options, name) for name in ("data", "label", "transpose", "key", "header")}
    asked = {**reading, **asdict(seat.settings), "started": provenance.now()}
    folder.begin(asked, provenance.machine_versions(seat.settings.threads), {})


def _rounds(seat: Seat, task: Task, pressed: Interrupts, began: float, sent: list[Sent]) -> Run:
    settings, (rows, columns) = seat.settings, seat.source.shape
    is_shown = seat.is_first and not seat.options.quiet and sys.stderr.isatty()
    title = f"{rows} × {columns} over {settings.ranks}"
    with progress(int(is_shown), task.schedule.rounds, settings.time_budget, title) as bar:

        def watch(done: Round, row: HistoryRow) -> None:
            sent.extend((done.index + 1, name, up, done.bytes_down) for name, up in sorted(done.bytes_up.items()))
            bar(done, row)

        if settings.is_asynchronous:
            attention = Attention(pressed, len(settings.workers), began, settings.time_budget)
            return pursued_by_arrivals(task, seat.communicator, attention, watch)
        return pursued(task, Unison(seat.communicator, pressed, began, settings.time_budget), watch)
