"""Settings and data to a task that can be run, and its end to a model that can be saved."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

from partsong.aggregate.reduction import InTheOpen
from partsong.cli.choices import engine_named, game_named, program_named
from partsong.cli.fit_settings import FederationSettings, RowSettings, Settings
from partsong.cli.game_settings import FOR_GAMES
from partsong.cli.holdings import ALONE, Holdings
from partsong.cli.privacy_settings import FOR_NOISE, FOR_PRIVACY, promise_of
from partsong.core import Matrix, Schedule, Shard
from partsong.data.matrix import as_matrix
from partsong.data.observed import observed
from partsong.data.table import Table
from partsong.finished import Finished
from partsong.fitting import RowFit, Task, rows_task
from partsong.io import provenance
from partsong.io.model_file import Model
from partsong.promises import masks_for, privacy_told
from partsong.running import Stop
from partsong.settings import row_solver_of, sketch_of
from partsong.simulation import simulation_by_name
from partsong.spending import Spending, without_names
from partsong.streams import key

THREADS = "PARTSONG_NUM_THREADS"
HARDWARE = {"threads", "engine", "time_budget"}
"""Settings that say nothing about a model."""


def task_of(settings: Settings, holdings: Holdings, *, record: bool) -> Task:
    """The task; its start is computed when it is pursued."""
    if isinstance(settings, RowSettings):
        return rows_task(matrix_of(holdings.tables[ALONE], settings), _row_fit(settings))
    return _federation(settings, holdings, record)


def matrix_of(table: Table, settings: Settings) -> Matrix:
    """The rows in the precision of the fit; what is not known is not in it."""
    return observed(table.X, settings.dtype) if settings.knows_some else as_matrix(table.X, settings.dtype)


def _row_fit(settings: RowSettings) -> RowFit:
    return RowFit(
        rank=settings.n_components,
        solver=row_solver_of(settings.solver, settings.alpha_w, settings.alpha_h, settings.l1_ratio),
        init=settings.init,
        seed=settings.seed,
        max_iter=settings.max_iter,
        stop=Stop(settings.tol, settings.time_budget),
        threads=settings.threads,
        sketch=sketch_of(settings.solver, settings.sketch, settings.sketch_ratio),
        game=game_named(settings) if settings.is_game else None,
    )


def _federation(settings: FederationSettings, holdings: Holdings, record: bool) -> Task:
    """The same parties, secrets and streams as FederatedNMF makes of a list of matrices."""
    shards = [
        Shard(name, matrix_of(table, settings), key(settings.seed, "secret", name))
        for name, table in holdings.tables.items()
    ]
    program, privacy, spending = program_named(settings), promise_of(settings), None
    if privacy is not None:
        noisy = privacy.program(program, settings.rounds, len(shards), settings.masked is not None)
        program, spending = noisy, Spending(noisy.release, privacy.delta, most=noisy.most)
    masks = None if settings.masked is None else masks_for(privacy, len(shards), settings.masked)
    reduction = InTheOpen() if masks is None else masks
    schedule = Schedule(settings.rounds, settings.seed, faulty=settings.faulty)
    stop, engine = Stop(settings.tol, settings.time_budget), engine_named(settings.engine, settings.threads, record)
    task = simulation_by_name(
        settings.method, program, shards, settings.rounds, schedule, stop, engine, reduction, spending
    )
    return replace(task, threads=settings.threads)


def model_of(
    settings: Settings, holdings: Holdings, done: Finished, iterations: int, spending: Spending | None = None
) -> Model:
    """The model: H, names of features, settings, iterations made; nothing about single samples, and no paths.

    With noise it holds nothing that is not a function of what was released: no error, shares or number of rows.
    """
    told = {
        name: value
        for name, value in asdict(settings).items()
        if name not in HARDWARE and name != "seed" and not (value is None and name in FOR_GAMES | FOR_PRIVACY)
    }
    n_samples, _ = holdings.shape
    if spending is None:
        told["n_samples"] = n_samples
    else:
        told = {name: value for name, value in told.items() if name not in FOR_NOISE} | {
            "privacy": privacy_told(promise_of(settings)),  # type: ignore[arg-type]
            "privacy_spent": without_names(spending.told()),
            "dtype": str(done.H.dtype),
        }
    if getattr(settings, "unit", None) == "row":
        del told["local_steps"]
    told |= {"masked": True} if told.pop("masked", None) is not None else {}
    return Model(
        components=done.H,
        feature_names=holdings.feature_names,
        settings={**told, "parties": len(holdings.tables), "iterations": iterations},
        seed=settings.seed,
        relative_error=None if spending is not None else done.relative_error,
        shares=None if spending is not None else done.shares,
        created=provenance.now(),
        versions=provenance.package_versions(),
    )


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Within this block all of partsong goes by this number of threads."""
    before = os.environ.get(THREADS)
    os.environ[THREADS] = str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ[THREADS]
        else:
            os.environ[THREADS] = before
