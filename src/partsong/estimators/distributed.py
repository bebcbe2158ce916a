"""`partsong.fit_distributed`: fit one matrix over MPI or torch ranks."""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from partsong import methods
from partsong.core.interfaces import Engine, Matrix, Outcome
from partsong.core.parameters import whole_number
from partsong.core.runtime import limit_threads
from partsong.data.blocks import TwoSided, block_range
from partsong.data.conversion import as_matrix, float_type
from partsong.data.observed import ObservedMatrix, known_cells, observed
from partsong.data.scan import extremes
from partsong.data.table import Table
from partsong.data.validation import require_factorizable, require_transformable
from partsong.engines.collective import Communicator, all_gather_values, broadcasting_errors, run_on_all
from partsong.engines.mpi import launched_ranks
from partsong.engines.torch_distributed import is_launched
from partsong.errors import (
    DataError,
    DivergenceWarning,
    FeatureError,
    FileError,
    ParameterError,
    PartsongError,
    ShapeError,
    format_count,
    with_message,
)
from partsong.estimators.validation import (
    MISSING,
    columns_of,
    numbers_of,
    numbers_with_gaps,
    one_of,
    precision_of,
    rank_of,
    refuse_old_names,
    require_verbosity,
    stop_of,
    warn_of_unknown,
    whole_seed,
)
from partsong.io.blocks import BlockSource, open_source, validate_block
from partsong.io.opening import ReadOptions
from partsong.io.weights import require_weight_ending, shard_path
from partsong.io.write import require_writable_file
from partsong.methods.registry import Problem
from partsong.solvers.squared_error import build_solver
from partsong.training.distributed import (
    GAME,
    DistributedFit,
    DistributedSettings,
    RankData,
    RankReducer,
    first_difference,
    fit_over_ranks,
    open_engine,
    traits_by_name,
)
from partsong.training.result import warn_if_ill_posed, warn_if_model_is_zero
from partsong.training.run_folder import RunFolder, prepare_folder

ENGINES = ("mpi", "torch")
SUMS = ("all-reduce", "in-order")
NO_KNOWN_CELL = "No cell is known: all are blank, NaN or not stored. Provide at least one number."
MARKED_BYTES = 1 << 16
"""Bytes at each end of a file that ranks compare to detect different files."""


@refuse_old_names
def fit_distributed(
    X: Any,
    n_components: int | None = None,
    *,
    method: str = "exact",
    engine: str | None = None,
    reduce: str = "all-reduce",
    max_iter: int = 500,
    tol: float = 1e-4,
    time_budget: float | None = None,
    alpha_W: float = 0.0,
    alpha_H: float | str = "same",
    l1_ratio: float = 0.0,
    method_options: Mapping[str, Any] | None = None,
    missing: str = "refuse",
    random_state: Any = None,
    dtype: Any = None,
    n_threads: int = 1,
    verbose: int = 0,
    model: str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    run_folder: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> DistributedFit:
    """Fit X ≈ W H over all ranks; every rank makes this call, with the same arguments.

        # fit.py, started by: mpiexec -n 4 python -m mpi4py fit.py      (or: torchrun --nproc-per-node 4 fit.py)
        fit = partsong.fit_distributed("X.npy", 20, model="model.safetensors")
        fit.H, fit.W, fit.rows, fit.relative_error

    The machines belong to one owner: ranks see sums of each other's rows unmasked. For private rows, use `FederatedNMF`
    or a federation between sites.

    An error at one rank is raised at all ranks; if the others are inside a sum, it ends the job. The first Ctrl-C, at
    any rank, stops after the current iteration and keeps the model.

    Parameters
    ----------
    X : path, matrix or None
        A file that all ranks can read, of which each reads its own block of rows; or the rows of this rank (array or
        sparse matrix), ordered by rank. None at the server of an asynchronous method (rank 0), which has no rows.
    n_components : int or None, default=None
        Rank k of the model; None is min(n, m, 20).
    method : str, default="exact"
        "exact" (accelerated HALS), "hals", "mu" and "bpp" give the model of one process, whatever the number of ranks.
        "dsanls" exchanges sketches and needs a file. With "syn-sd", "syn-ssd-u", "syn-ssd-v" and "syn-ssd-uv" ranks
        are parties. "asyn-sd" and "asyn-ssd-v" are asynchronous, with a server at rank 0. "game" plays single cells.
    engine : {"mpi", "torch"} or None, default=None
        Communication between ranks; None detects the launcher. "torch" uses an existing process group.
    reduce : {"all-reduce", "in-order"}, default="all-reduce"
        "in-order" adds at rank 0 in rank order: bit-identical results in all runs with as many ranks.
    max_iter, tol, time_budget, alpha_W, alpha_H, l1_ratio, missing, dtype, verbose :
        As in `NMF`; `missing` is for "game". An iteration of an asynchronous method is one arrival at the server.
    method_options : mapping or None, default=None
        Further options of the method, such as {"sketch_ratio": 0.2}; see the reference of methods.
    random_state : int, RandomState, Generator or None, default=None
        Seed; that of rank 0 is used.
    n_threads : int, default=1
        Threads per rank.
    model : path or None, default=None
        Write the model here (rank 0).
    weights : path or None, default=None
        Write W here: one file of rows per rank, and an index.
    run_folder : path or None, default=None
        Write settings, history, bytes and result of the run here.
    overwrite : bool, default=False
        Replace an existing run in `run_folder`; otherwise it is refused.

    Returns
    -------
    DistributedFit
        `H` (k × m) and `relative_error` of all ranks; `W` for the `rows` of this rank.
    """
    asked = {
        "n_components": n_components, "method": method, "max_iter": max_iter, "tol": tol, "time_budget": time_budget,
        "alpha_W": alpha_W, "alpha_H": alpha_H, "l1_ratio": l1_ratio, "missing": missing, "dtype": dtype,
        "n_threads": n_threads, "method_options": method_options, "verbose": verbose, "engine": engine,
        "reduce": reduce,
    }  # fmt: skip
    files, launcher = {"model": model, "weights": weights, "run_folder": run_folder}, _engine_of_launcher(engine)
    with (
        open_engine(launcher, reduce if reduce in SUMS else SUMS[0]) as (network, communicator),
        broadcasting_errors(communicator),
    ):
        known: dict[str, Any] = {"random_state": random_state, "overwrite": overwrite}
        return fit_on_ranks(network, communicator, X, asked, files, engine=launcher, **known)


def fit_on_ranks(
    network: Engine,
    communicator: Communicator,
    X: Any,
    asked: Mapping[str, Any],
    files: Mapping[str, Any],
    *,
    engine: str,
    random_state: Any = None,
    overwrite: bool = False,
    reading: ReadOptions = ReadOptions(),
    inspect: Callable[[Table], None] = lambda table: None,
    note: str = "",
) -> DistributedFit:
    """Run `fit_distributed` over connected ranks; `asked` holds its other arguments by name.

    `reading`: how to read a file. `inspect` is called with the rows of the first rank that has any. `note` is shown at
    Ctrl-C.
    """
    rank, ranks = communicator.rank, communicator.size
    settings = run_on_all(communicator, lambda: settings_of(asked, engine, ranks))
    places = run_on_all(communicator, lambda: _writable(files, rank, ranks))
    _require_same(communicator, {**asdict(settings), **places})
    seed = all_gather_values(communicator, run_on_all(communicator, lambda: whole_seed(random_state)))[0]
    settings = replace(settings, seed=seed)
    folder = None if files["run_folder"] is None else RunFolder(Path(files["run_folder"]))
    with limit_threads(settings.n_threads):
        data, settings = _read(X, settings, communicator, reading, inspect)

        def make_folder() -> None:
            if folder is not None and rank == 0:
                prepare_folder(folder.path, overwrite)

        run_on_all(communicator, make_folder)
        kept: dict[str, Any] = {"folder": folder, "verbose": asked["verbose"], "note": note}
        kept["asked"] = {key: getattr(reading, key) for key in ("label", "transpose", "key", "header")}
        fit = fit_over_ranks(data, settings, network, communicator, **kept)
        fit.save(communicator, model=files["model"], weights=files["weights"], folder=folder)
    run_on_all(communicator, lambda: _warn(fit))
    return fit


# ---- settings ----------------------------------------------------------------------------------------------------


def _engine_of_launcher(engine: str | None) -> str:
    """Return the engine of the launcher; for a single process, the requested engine."""
    by_mpi = (launched_ranks() or 1) > 1
    if by_mpi or is_launched():
        return "mpi" if by_mpi else "torch"
    return engine if engine in ENGINES else "mpi"


def settings_of(asked: Mapping[str, Any], engine: str, ranks: int) -> DistributedSettings:
    """Validate the arguments of `fit_distributed` as far as possible without data."""
    if asked["engine"] is not None and one_of("engine", asked["engine"], ENGINES) != engine:
        launcher = "mpiexec" if engine == "mpi" else "torchrun"
        raise ParameterError(
            f"engine={asked['engine']!r}, but {launcher} has started these ranks. Remove engine.", parameter="engine"
        )
    method, options = one_of("method", asked["method"], methods.distributed_names()), asked["method_options"] or {}
    if not isinstance(options, Mapping):
        raise ParameterError(
            f"method_options must be a mapping of names to values; got {options!r}.", parameter="method_options"
        )
    if one_of("missing", asked["missing"], MISSING) == "ignore" and method != GAME:
        raise ParameterError(
            f'missing="ignore" is for method="game"; the method is {method!r}. Impute the missing values.',
            parameter="missing",
        )
    reduce = one_of("reduce", asked["reduce"], SUMS)
    if traits_by_name(method).asynchronous:
        _require_server(method, engine, reduce, ranks)
    require_verbosity(asked["verbose"])
    stop, precision = stop_of(asked["tol"], asked["time_budget"]), precision_of(asked["dtype"])
    alpha_W, alpha_H, l1_ratio = (asked[name] for name in ("alpha_W", "alpha_H", "l1_ratio"))
    build_solver("cd", alpha_W, alpha_H, l1_ratio)
    if method == GAME and (alpha_W or alpha_H not in (0, "same")):
        raise ParameterError("A game has no penalties. Remove alpha_W and alpha_H.", parameter="alpha_W")
    return DistributedSettings(
        method=method,
        n_components=None if asked["n_components"] is None else whole_number("n_components", asked["n_components"]),
        alpha_W=float(alpha_W),
        alpha_H=float(alpha_W if isinstance(alpha_H, str) else alpha_H),
        l1_ratio=float(l1_ratio),
        dtype=None if precision is None else str(precision),
        tol=stop.tol,
        max_iter=whole_number("max_iter", asked["max_iter"]),
        time_budget=stop.time_budget,
        n_threads=whole_number("n_threads", asked["n_threads"]),
        engine=engine,
        reduce=reduce,
        ranks=ranks,
        missing=asked["missing"],
        method_options=_plain_options(method, options),
    )


def _require_server(method: str, engine: str, reduce: str, ranks: int) -> None:
    """Require MPI, a server and a worker for asynchronous methods."""
    if engine != "mpi":
        raise ParameterError(
            f'method={method!r} is asynchronous and needs engine="mpi": its server waits for any rank, but torch only '
            'has collective exchanges. Start it with mpiexec, or use method="syn-sd".',
            parameter="method",
        )
    if ranks < 2:
        raise ParameterError(
            f"method={method!r} needs a server and at least one worker, but there is one rank. Start at least two "
            "ranks.",
            parameter="method",
        )
    if reduce != SUMS[0]:
        raise ParameterError(
            f"reduce={reduce!r} is not for method={method!r}, which is asynchronous and adds no sums. Remove it.",
            parameter="reduce",
        )


def _plain_options(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of the method as plain data; exact methods have none over ranks."""
    if method in methods.RANK_SOLVERS and given:
        raise ParameterError(
            f"{next(iter(given))} is not for method={method!r} over ranks, which has no options. Remove it.",
            parameter=str(next(iter(given))),
        )
    if not given:
        return {}
    found = methods.method(method)
    found.build(Problem(2, rounds=1), given)
    return {name: found.value(name, given) for name in given}


def _writable(files: Mapping[str, Any], rank: int, ranks: int) -> dict[str, str | None]:
    """Return output paths; raise now if this rank could not write them after the fit."""
    for name, place in files.items():
        if not isinstance(place, str | os.PathLike | None):
            raise ParameterError(f"{name} must be a path, or None; got {place!r}.", parameter=name)
    model, weights = files["model"], files["weights"]
    if weights is not None:
        require_weight_ending(weights)
        require_writable_file("weights", shard_path(Path(weights), rank, ranks))
    if model is not None and rank == 0:
        require_writable_file("model", Path(model))
    return {name: None if place is None else os.fspath(place) for name, place in files.items()}


def _require_same(communicator: Communicator, arguments: Mapping[str, Any]) -> None:
    found = first_difference(communicator, arguments)
    if found is not None:
        name, rank, first, other = found
        raise ParameterError(
            f"{name} is {first!r} at rank 0 and {other!r} at rank {rank}. Pass the same arguments at every rank.",
            parameter=name,
        )


# ---- data --------------------------------------------------------------------------------------------------------


def _read(
    X: Any,
    settings: DistributedSettings,
    communicator: Communicator,
    reading: ReadOptions,
    inspect: Callable[[Table], None],
) -> tuple[RankData, DistributedSettings]:
    """Read this rank's part of X; return it with the completed settings."""
    given = all_gather_values(communicator, "path" if isinstance(X, str | os.PathLike) else "rows")
    if len(set(given)) > 1:
        raise ParameterError(
            f"X is a {given[0]} at rank 0, but not at all other ranks. Pass the same kind at every rank."
        )
    if given[0] == "rows":
        return _from_rows(X, settings, communicator)
    source = open_on_all_ranks(X, communicator, replace(reading, gaps=settings.has_gaps))
    _require_enough(str(source.path), source.shape, settings)
    settings = run_on_all(communicator, lambda: _completed(settings, source.shape, source.dtype))
    return read_rows(source, settings, communicator, inspect), settings


def _completed(settings: DistributedSettings, shape: tuple[int, int], dtype: Any) -> DistributedSettings:
    """Complete the settings with the shape and number type of X."""
    rank = rank_of(settings.n_components, shape)
    if traits_by_name(settings.method).needs_columns and rank > min(shape):
        raise ParameterError(
            f"n_components={rank}: sketches of {shape[0]} rows and {shape[1]} columns have at most that many columns, "
            f"but need one per component. Use at most {min(shape)}, or another method.",
            parameter="n_components",
        )
    return replace(settings, n_components=rank, dtype=settings.dtype or str(float_type(dtype)))


def open_on_all_ranks(
    path: str | os.PathLike[str], communicator: Communicator, wanted: ReadOptions = ReadOptions()
) -> BlockSource:
    """Open a file at every rank; refuse files that differ in shape, number type, size, or first and last bytes."""
    source = run_on_all(communicator, lambda: open_source(path, wanted))
    own = f"{source.shape[0]} × {source.shape[1]}, {source.dtype}, {_mark_of(source)}"
    seen = all_gather_values(communicator, own)
    for rank, other in enumerate(seen):
        if other != seen[0]:
            raise FileError(
                f"{source.path}: holds {seen[0]} at rank 0 and {other} at rank {rank}. Use the same file at all ranks."
            )
    return source


def _mark_of(source: BlockSource) -> str:
    """The size of a file and a checksum of its first and last bytes: a quick test for different data."""
    with source.path.open("rb") as file:
        checksum = zlib.crc32(file.read(MARKED_BYTES))
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MARKED_BYTES))
        return f"{size} bytes, checksum {zlib.crc32(file.read(MARKED_BYTES), checksum):08x}"


def _require_enough(name: str, shape: tuple[int, int], settings: DistributedSettings) -> None:
    """Require a row per worker and, if both factors are distributed, a column."""
    traits, ranks = traits_by_name(settings.method), settings.ranks
    nouns, servers = ("row", "column") if traits.needs_columns else ("row",), int(traits.asynchronous)
    over = format_count(ranks - servers, "worker") if servers else format_count(ranks, "rank")
    for noun, size in zip(nouns, shape, strict=False):
        if size < ranks - servers:
            raise ParameterError(
                f"{name}: {format_count(size, noun)} cannot be split over {over}: each needs at least one. "
                "Start at most "
                f"{format_count(size + servers, 'rank')}{', of which the first is the server' if servers else ''}."
            )


def _rows_at(settings: DistributedSettings, rank: int, n_rows: int) -> tuple[int, int]:
    """The row range [first, last) of a rank; empty at a server."""
    if rank not in settings.workers:
        return 0, 0
    return block_range(n_rows, len(settings.workers), rank - settings.workers.start)


def read_rows(
    source: BlockSource,
    settings: DistributedSettings,
    communicator: Communicator,
    inspect: Callable[[Table], None] = lambda table: None,
) -> RankData:
    """Read this rank's rows of a file, and its columns if needed; invalid values raise an error at all ranks.

    `inspect` is called with the rows of the first rank that has any.
    """
    spans = tuple(_rows_at(settings, rank, source.shape[0]) for rank in range(communicator.size))
    rows = spans[communicator.rank]

    def read() -> tuple[Matrix | None, float]:
        if communicator.rank not in settings.workers:
            return None, 0.0
        X = source.block(rows)
        held = _known(X, source) if settings.has_gaps else X
        validate_block(held, source, rows[0], dtype=settings.dtype)
        if communicator.rank == settings.workers.start:
            inspect(Table(X, source.feature_names, source=str(source.path)))
        if settings.has_gaps:
            return observed(held, settings.dtype), extremes(held)[1]
        matrix = as_matrix(X, settings.dtype)
        if traits_by_name(settings.method).needs_columns:
            columns = block_range(source.shape[1], communicator.size, communicator.rank)
            below = as_matrix(source.block(columns=columns), settings.dtype)
            return TwoSided(matrix, below, rows[0], columns[0], source.shape[0]), extremes(X)[1]
        return matrix, extremes(X)[1]

    matrix, high = run_on_all(communicator, read)
    known = _require_usable(str(source.path), matrix, high, settings, communicator)
    read_whole = source.released(rows)
    names = run_on_all(communicator, lambda: read_whole.sample_names(rows) if matrix is not None else None)
    return RankData(source.shape, spans, matrix, source.feature_names, names, known)


def _known(X: Any, source: BlockSource) -> Any:
    try:
        return known_cells(X)
    except PartsongError as error:
        raise with_message(error, f"{source.path}: {error}") from error


def _require_usable(
    name: str, matrix: Matrix | None, high: float, settings: DistributedSettings, communicator: Communicator
) -> np.ndarray | None:
    """Require a non-zero matrix in range over all ranks; return the number of known cells of each column."""
    highest = max(all_gather_values(communicator, float(high)))
    known = None
    if isinstance(matrix, ObservedMatrix):
        known = RankReducer(communicator).sum(np.bincount(matrix.by_row.indices, minlength=matrix.shape[1]) + 0.0)
        if not known.any():
            raise DataError(f"{name}: {NO_KNOWN_CELL}")
    try:
        require_factorizable(np.full((1, 1), highest), None, settings.dtype)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
    return known


def _from_rows(
    X: Any, settings: DistributedSettings, communicator: Communicator
) -> tuple[RankData, DistributedSettings]:
    """Use rows that this rank already holds; rows of lower ranks come first."""
    rows, names = run_on_all(communicator, lambda: _own_rows(X, settings, communicator.rank))
    size = (0, 0) if rows is None else (int(rows.shape[0]), int(rows.shape[1]))
    own = [*size, "" if rows is None else str(float_type(rows.dtype)), names]
    every = all_gather_values(communicator, own)
    holders = [one for one in every if one[0]]
    if len({one[1] for one in holders}) != 1:
        widths = ", ".join(f"{width} at rank {rank}" for rank, (n, width, *_) in enumerate(every) if n)
        raise ShapeError(f"Ranks hold different numbers of columns: {widths}. Use the same columns at all ranks.")
    if any(one[3] != holders[0][3] for one in holders):
        raise FeatureError(
            "Column names, or their order, differ between ranks. Use the same columns in the same order."
        )
    stops = [int(stop) for stop in np.cumsum([0, *(one[0] for one in every)])]
    spans, shape = tuple(pairwise(stops)), (stops[-1], holders[0][1])
    dtype = max((one[2] for one in holders), key=lambda name: np.dtype(name).itemsize)
    completed = run_on_all(communicator, lambda: _completed(settings, shape, dtype))

    def build() -> tuple[Any, float]:
        if rows is None:
            return None, 0.0
        if completed.has_gaps:
            cells = observed(rows, completed.dtype)
            return cells, extremes(cells.by_row)[1]
        try:
            require_transformable(rows, names, completed.dtype)
        except PartsongError as error:
            raise with_message(error, f"Rows of rank {communicator.rank}: {error}") from error
        return as_matrix(rows, completed.dtype), extremes(rows)[1]

    matrix, high = run_on_all(communicator, build)
    known = _require_usable("X", matrix, high, completed, communicator)
    return RankData(
        shape, spans, matrix, None if holders[0][3] is None else tuple(holders[0][3]), None, known
    ), completed


def _own_rows(X: Any, settings: DistributedSettings, rank: int) -> tuple[Any, list[str] | None]:
    """A rank's own rows and column names; None and None at a server."""
    traits = traits_by_name(settings.method)
    if traits.needs_columns:
        raise ParameterError(
            f"method={settings.method!r} needs columns of all rows at every rank. Pass the path of a file as X, or "
            "use another method.",
            parameter="method",
        )
    if traits.asynchronous and rank == 0:
        if X is not None:
            raise ParameterError(
                f"method={settings.method!r} has a server at rank 0, without rows. Pass X=None there.",
                parameter="method",
            )
        return None, None
    if X is None:
        raise ParameterError(f"Rank {rank} has no rows. Pass its rows, or the path of a file, as X.")
    rows = numbers_with_gaps(X) if settings.has_gaps else numbers_of(X)
    names = columns_of(X).get("feature_names_in_")
    return rows, None if names is None else [str(name) for name in names]


def _warn(fit: DistributedFit) -> None:
    """Issue warnings about the model, at rank 0 only."""
    if fit.rank > 0:
        return
    if fit.outcome is Outcome.DIVERGED:
        words = f"The fit diverged and was stopped. The best model so far is kept. {fit.training.error_text}".rstrip()
        warnings.warn(words, DivergenceWarning, stacklevel=3)
    if fit.data.known is not None and (unknown := np.flatnonzero(fit.data.known == 0)).size:
        warn_of_unknown(unknown, "the model's values for them are meaningless", stacklevel=5)
    warn_if_ill_posed(fit.solver)
    warn_if_model_is_zero(fit.solver, fit.result)
