"""`partsong.fit_distributed`: one matrix over the processes that mpiexec or torchrun has started."""

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
from partsong.core.renamed import refuse_old_names
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
from partsong.solvers.squared_error import solver_of
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
NO_KNOWN_CELL = "No cell is known: all are blank, NaN or not stored. Give at least one number."
MARKED_BYTES = 1 << 16
"""Bytes at either end of a file by which ranks see that theirs are the same."""


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

    The machines belong to one owner: ranks see sums of each other's rows in the open. For rows that nobody else may see
    there are `FederatedNMF` and federations between sites.

    Parameters
    ----------
    X : path, or the rows of this rank
        A file that all ranks can read, of which each reads its own block of rows; or the rows that this rank has
        already (an array or a sparse matrix): rows of rank 0 come first, then those of rank 1, and so on. None at a
        server, which has no rows (rank 0 of asynchronous methods).
    n_components : int or None
        Rank k of the model; None is min(n, m, 20).
    method : name
        "exact" (accelerated HALS), "hals", "mu" and "bpp" give the model of one process, whatever the number of ranks;
        "dsanls" exchanges sketches and needs a file; with "syn-sd", "syn-ssd-u", "syn-ssd-v" and "syn-ssd-uv" ranks
        are parties; "asyn-sd" and "asyn-ssd-v" are asynchronous, with a server at rank 0; "game" plays single cells.
    engine : {"mpi", "torch"} or None
        What moves numbers between ranks; None asks the launcher. "torch" takes the process group that there is.
    reduce : {"all-reduce", "in-order"}
        "in-order" adds at rank 0 in rank order: the same bits in every run with as many ranks.
    max_iter, tol, time_budget, alpha_W, alpha_H, l1_ratio, missing, dtype, verbose :
        As in `NMF`; "missing" is for "game". An iteration of an asynchronous method is one arrival at the server.
    method_options : mapping of names to values, or None
        Further options of the method, such as {"sketch_ratio": 0.2}; names and values as in the reference of methods.
    random_state : int, RandomState or None
        That of rank 0 counts. The start is random.
    n_threads : int
        Threads of each rank.
    model, weights, run_folder : paths or None
        Written once all ranks are done: the model (rank 0), a file of rows of W for each rank with a list of them, and
        settings, history, bytes and result of the run. A folder that holds a run is refused, unless `overwrite`.

    Returns
    -------
    DistributedFit
        `H` (k × m) and `relative_error` are those of all ranks, `W` holds the `rows` of this one.

    An error at one rank is raised at all of them; where the others are in the middle of a sum and cannot hear of it, it
    ends the job. The first Ctrl-C, at whatever rank, makes the iteration under way the last; the model is kept.
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
    look: Callable[[Table], None] = lambda table: None,
    note: str = "",
) -> DistributedFit:
    """`fit_distributed` over ranks that are connected already; `asked` are its other arguments by name.

    `reading` says how a file is read. The first rank with rows has a `look` at its own; `note` is shown at Ctrl-C.
    """
    rank, ranks = communicator.rank, communicator.size
    settings = run_on_all(communicator, lambda: settings_of(asked, engine, ranks))
    places = run_on_all(communicator, lambda: _writable(files, rank, ranks))
    _require_same(communicator, {**asdict(settings), **places})
    seed = all_gather_values(communicator, run_on_all(communicator, lambda: whole_seed(random_state)))[0]
    settings = replace(settings, seed=seed)
    folder = None if files["run_folder"] is None else RunFolder(Path(files["run_folder"]))
    with limit_threads(settings.n_threads):
        data, settings = _read(X, settings, communicator, reading, look)

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
    """How these ranks can meet, whatever was asked for: as their launcher says; alone, as was asked."""
    by_mpi = (launched_ranks() or 1) > 1
    if by_mpi or is_launched():
        return "mpi" if by_mpi else "torch"
    return engine if engine in ENGINES else "mpi"


def settings_of(asked: Mapping[str, Any], engine: str, ranks: int) -> DistributedSettings:
    """The arguments of `fit_distributed`, checked as far as they can be before any data are looked at."""
    if asked["engine"] is not None and one_of("engine", asked["engine"], ENGINES) != engine:
        launcher = "mpiexec" if engine == "mpi" else "torchrun"
        raise ParameterError(
            f"engine={asked['engine']!r}, but {launcher} has started these ranks. Leave it out.", parameter="engine"
        )
    method, options = one_of("method", asked["method"], methods.distributed_names()), asked["method_options"] or {}
    if not isinstance(options, Mapping):
        raise ParameterError(
            f"method_options must be a mapping of names to values; got {options!r}.", parameter="method_options"
        )
    if one_of("missing", asked["missing"], MISSING) == "ignore" and method != GAME:
        raise ParameterError(
            f'missing="ignore" is for method="game"; the method is {method!r}. Fill the gaps.', parameter="missing"
        )
    reduce = one_of("reduce", asked["reduce"], SUMS)
    if traits_by_name(method).asynchronous:
        _require_server(method, engine, reduce, ranks)
    require_verbosity(asked["verbose"])
    stop, precision = stop_of(asked["tol"], asked["time_budget"]), precision_of(asked["dtype"])
    alpha_W, alpha_H, l1_ratio = (asked[name] for name in ("alpha_W", "alpha_H", "l1_ratio"))
    solver_of("cd", alpha_W, alpha_H, l1_ratio)
    if method == GAME and (alpha_W or alpha_H not in (0, "same")):
        raise ParameterError("A game has no penalties. Leave alpha_W and alpha_H out.", parameter="alpha_W")
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
    """Asynchronous methods need a server and a worker, and a transport by which the server waits for any of them."""
    if engine != "mpi":
        raise ParameterError(
            f'method={method!r} is asynchronous and needs engine="mpi": its server waits for any rank, and torch has '
            'only exchanges of all. Start it with mpiexec, or use method="syn-sd".',
            parameter="method",
        )
    if ranks < 2:
        raise ParameterError(
            f"method={method!r} needs a server and at least one worker, but there is one rank. Start two or more.",
            parameter="method",
        )
    if reduce != SUMS[0]:
        raise ParameterError(
            f"reduce={reduce!r} is not for method={method!r}, whose server takes in one rank at a time. Leave it out.",
            parameter="reduce",
        )


def _plain_options(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the method as plain data; exact sums have none over ranks."""
    if method in methods.RANK_SOLVERS and given:
        raise ParameterError(
            f"{next(iter(given))} is not for method={method!r} over ranks, which has no options. Leave it out.",
            parameter=str(next(iter(given))),
        )
    if not given:
        return {}
    found = methods.method(method)
    found.build(Problem(2, rounds=1), given)
    return {name: found.value(name, given) for name in given}


def _writable(files: Mapping[str, Any], rank: int, ranks: int) -> dict[str, str | None]:
    """Where files go; those that this rank could not write after the fit are refused."""
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
    look: Callable[[Table], None],
) -> tuple[RankData, DistributedSettings]:
    """What this rank holds of X, and the settings with what the data decide."""
    given = all_gather_values(communicator, "path" if isinstance(X, str | os.PathLike) else "rows")
    if len(set(given)) > 1:
        raise ParameterError(f"X is a {given[0]} at rank 0, but not at all others. Pass the same kind at every rank.")
    if given[0] == "rows":
        return _from_rows(X, settings, communicator)
    source = open_on_all_ranks(X, communicator, replace(reading, gaps=settings.has_gaps))
    _require_enough(str(source.path), source.shape, settings)
    settings = run_on_all(communicator, lambda: _completed(settings, source.shape, source.dtype))
    return read_rows(source, settings, communicator, look), settings


def _completed(settings: DistributedSettings, shape: tuple[int, int], dtype: Any) -> DistributedSettings:
    """The settings, once the shape and the number type of X are known."""
    rank = rank_of(settings.n_components, shape)
    if traits_by_name(settings.method).needs_columns and rank > min(shape):
        raise ParameterError(
            f"n_components={rank}: a sketch of {shape[0]} rows or {shape[1]} columns has no more columns than that, "
            f"and needs one for each component. Choose at most {min(shape)}, or another method.",
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
                f"{source.path}: holds {seen[0]} at rank 0 and {other} at rank {rank}. Give all ranks the same file."
            )
    return source


def _mark_of(source: BlockSource) -> str:
    """The size of a file and a checksum of its first and last bytes: enough to tell other data, and quickly read."""
    with source.path.open("rb") as file:
        checksum = zlib.crc32(file.read(MARKED_BYTES))
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MARKED_BYTES))
        return f"{size} bytes, checksum {zlib.crc32(file.read(MARKED_BYTES), checksum):08x}"


def _require_enough(name: str, shape: tuple[int, int], settings: DistributedSettings) -> None:
    """Each rank that works needs a row, and where both factors are distributed a column."""
    traits, ranks = traits_by_name(settings.method), settings.ranks
    nouns, servers = ("rows", "columns") if traits.needs_columns else ("rows",), int(traits.asynchronous)
    over = f"{ranks - servers} workers" if servers else f"{ranks} ranks"
    for noun, size in zip(nouns, shape, strict=False):
        if size < ranks - servers:
            raise ParameterError(
                f"{name}: {size} {noun} cannot be split over {over}: each needs at least one. "
                f"Start at most {size + servers} ranks{', of which the first is the server' if servers else ''}."
            )


def _rows_at(settings: DistributedSettings, rank: int, n_rows: int) -> tuple[int, int]:
    """The rows of a rank, from the first to before the last; none at a server."""
    if rank not in settings.workers:
        return 0, 0
    return block_range(n_rows, len(settings.workers), rank - settings.workers.start)


def read_rows(
    source: BlockSource,
    settings: DistributedSettings,
    communicator: Communicator,
    look: Callable[[Table], None] = lambda table: None,
) -> RankData:
    """Read this rank's rows of a file, and its columns where the method needs them; bad values are refused everywhere.

    The first rank with rows has a `look` at its own.
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
            look(Table(X, source.feature_names, source=str(source.path)))
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
    """Refuse a matrix that is zero or too large, over all ranks; return how many cells of each column are known."""
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
    """Rows that this rank has already: those of lower ranks come before them."""
    rows, names = run_on_all(communicator, lambda: _own_rows(X, settings, communicator.rank))
    size = (0, 0) if rows is None else (int(rows.shape[0]), int(rows.shape[1]))
    own = [*size, "" if rows is None else str(float_type(rows.dtype)), names]
    every = all_gather_values(communicator, own)
    holders = [one for one in every if one[0]]
    if len({one[1] for one in holders}) != 1:
        widths = ", ".join(f"{width} at rank {rank}" for rank, (n, width, *_) in enumerate(every) if n)
        raise ShapeError(f"Ranks hold different numbers of columns: {widths}. Bring them to one list of columns.")
    if any(one[3] != holders[0][3] for one in holders):
        raise FeatureError("The names of the columns, or their order, differ between ranks. Agree on one list.")
    stops = [int(stop) for stop in np.cumsum([0, *(one[0] for one in every)])]
    spans, shape = tuple(pairwise(stops)), (stops[-1], holders[0][1])
    dtype = max((one[2] for one in holders), key=lambda name: np.dtype(name).itemsize)
    completed = run_on_all(communicator, lambda: _completed(settings, shape, dtype))

    def made() -> tuple[Any, float]:
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

    matrix, high = run_on_all(communicator, made)
    known = _require_usable("X", matrix, high, completed, communicator)
    return RankData(
        shape, spans, matrix, None if holders[0][3] is None else tuple(holders[0][3]), None, known
    ), completed


def _own_rows(X: Any, settings: DistributedSettings, rank: int) -> tuple[Any, list[str] | None]:
    """A rank's own rows as numbers, and the names of their columns; None and None at a server."""
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
    """Where the model is not what was hoped for; rank 0 speaks for all."""
    if fit.rank > 0:
        return
    if fit.outcome is Outcome.DIVERGED:
        words = f"The fit diverged and was stopped. The best model so far is kept. {fit.training.error_text}".rstrip()
        warnings.warn(words, DivergenceWarning, stacklevel=3)
    if fit.data.known is not None and (unknown := np.flatnonzero(fit.data.known == 0)).size:
        warn_of_unknown(unknown, "what the model says of them means nothing", stacklevel=5)
    warn_if_ill_posed(fit.solver)
    warn_if_model_is_zero(fit.solver, fit.result)
