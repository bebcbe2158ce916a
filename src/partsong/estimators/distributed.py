"""`partsong.fit_distributed`: one matrix over the processes that mpiexec or torchrun has started."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from partsong import methods
from partsong.core.interfaces import Engine, Outcome
from partsong.core.parameters import nearest, whole_number
from partsong.core.runtime import using_threads
from partsong.data.conversion import as_matrix, float_type
from partsong.data.observed import observed
from partsong.data.scan import extremes
from partsong.data.table import Table
from partsong.data.validation import require_transformable
from partsong.engines.collective import Communicator, failing_together, heard, share, together
from partsong.engines.mpi import launched_ranks
from partsong.engines.torch_distributed import is_launched
from partsong.errors import DivergenceWarning, FeatureError, ParameterError, PartsongError, ShapeError, reworded
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
from partsong.io.opening import Wanted
from partsong.io.weights import require_weight_ending, shard_path
from partsong.io.write import require_writable_file
from partsong.methods.registry import Problem
from partsong.solvers.game import compose_game
from partsong.solvers.squared_error import solver_of
from partsong.training.distributed import (
    DistributedFit,
    RankData,
    common_seed,
    first_difference,
    fit_over_ranks,
    open_engine,
    open_on_all_ranks,
    read_rows,
    require_enough,
    require_sketchable,
    require_usable,
)
from partsong.training.distributed_settings import (
    IGNORE,
    RANK_SOLVERS,
    DistributedSettings,
    traits_by_name,
)
from partsong.training.result import warn_if_ill_posed, warn_if_model_is_zero
from partsong.training.run_folder import RunFolder, make_usable

ENGINES = ("mpi", "torch")
SUMS = ("all-reduce", "in-order")
METHODS = tuple(dict.fromkeys((*RANK_SOLVERS, *methods.names(methods.RANKS))))
GAME = "game"
OWN_SETTINGS = {"order": "play"} | {name: name for name in ("step", "step_decay", "self_play", "shrink", "leader")}
"""Options of a game -> what the settings of a fit call them."""
SKETCH_OPTIONS = ("sketch", "sketch_ratio")


def fit_distributed(
    X: Any,
    n_components: int | None = None,
    *,
    method: str = "exact",
    engine: str | None = None,
    sums: str = "all-reduce",
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
    sums : {"all-reduce", "in-order"}
        "in-order" adds at rank 0 in rank order: the same bits in every run with as many ranks.
    max_iter, tol, time_budget, alpha_W, alpha_H, l1_ratio, missing, dtype, verbose :
        As in `NMF`; "missing" is for "game". An iteration of an asynchronous method is one arrival at the server.
    method_options : mapping of names to values, or None
        Further options of the method, such as {"sketch_ratio": 0.2}; names and values as in docs/methods.md.
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
        "n_threads": n_threads, "method_options": method_options, "verbose": verbose, "engine": engine, "sums": sums,
    }  # fmt: skip
    files, name = {"model": model, "weights": weights, "run_folder": run_folder}, _engine_of_launcher(engine)
    with (
        open_engine(name, sums if sums in SUMS else SUMS[0]) as (network, communicator),
        failing_together(communicator),
    ):
        known: dict[str, Any] = {"random_state": random_state, "overwrite": overwrite}
        return fit_on_ranks(name, network, communicator, X, asked, files, **known)


def fit_on_ranks(
    engine: str,
    network: Engine,
    communicator: Communicator,
    X: Any,
    asked: Mapping[str, Any],
    files: Mapping[str, Any],
    *,
    random_state: Any = None,
    overwrite: bool = False,
    reading: Wanted = Wanted(),
    look: Callable[[Table], None] = lambda table: None,
    note: str = "",
) -> DistributedFit:
    """`fit_distributed` over ranks that are connected already; `asked` are its other arguments by name.

    `reading` says how a file is read. The first rank with rows has a `look` at its own; `note` is shown at Ctrl-C.
    """
    ranks = communicator.size
    arguments = together(communicator, lambda: Arguments.of(engine, ranks, asked, files))
    _require_same(communicator, arguments)
    together(communicator, lambda: _require_writable(files, communicator.rank, ranks))
    seed = common_seed(communicator, together(communicator, lambda: whole_seed(random_state)))
    folder = None if files["run_folder"] is None else RunFolder(Path(files["run_folder"]))
    with using_threads(arguments.n_threads):
        if _is_path(X, communicator):
            data, settings = _from_file(X, arguments, seed, communicator, reading, look)
        else:
            data, settings = _from_rows(X, arguments, seed, communicator)
        together(communicator, lambda: _make_usable(folder, overwrite, communicator))
        kept: dict[str, Any] = {"folder": folder, "verbose": asked["verbose"], "note": note}
        kept["asked"] = {key: getattr(reading, key) for key in ("label", "transpose", "key", "header")}
        fit = fit_over_ranks(data, settings, network, communicator, **kept)
        fit.save(communicator, model=files["model"], weights=files["weights"], folder=folder)
    together(communicator, lambda: _warn(fit))
    return fit


def _engine_of_launcher(engine: str | None) -> str:
    """How these ranks can meet, whatever was asked for: as their launcher says; alone, as was asked."""
    by_mpi = (launched_ranks() or 1) > 1
    if by_mpi or is_launched():
        return "mpi" if by_mpi else "torch"
    return engine if engine in ENGINES else "mpi"


def _require_writable(files: Mapping[str, Any], rank: int, ranks: int) -> None:
    """Refuse files that this rank could not write after the fit."""
    model, weights = files["model"], files["weights"]
    if weights is not None:
        require_weight_ending(weights)
        require_writable_file("weights", shard_path(Path(weights), rank, ranks))
    if model is not None and rank == 0:
        require_writable_file("model", Path(model))


@dataclass(frozen=True, slots=True)
class Arguments:
    """What every rank was given, checked and as plain data, before any data are looked at."""

    engine: str
    sums: str
    ranks: int
    method: str
    n_components: int | None
    max_iter: int
    tol: float
    time_budget: float | None
    alpha_W: float
    alpha_H: float
    l1_ratio: float
    missing: str
    dtype: str | None
    n_threads: int
    options: Mapping[str, Any]
    files: Mapping[str, str | None]

    @staticmethod
    def of(engine: str, ranks: int, asked: Mapping[str, Any], files: Mapping[str, Any]) -> Arguments:
        """Refuse all that can be refused now."""
        if asked["engine"] is not None and one_of("engine", asked["engine"], ENGINES) != engine:
            launcher = "mpiexec" if engine == "mpi" else "torchrun"
            raise ParameterError(
                f"engine={asked['engine']!r}, but {launcher} has started these ranks. Leave it out.", parameter="engine"
            )
        for name, place in files.items():
            if not isinstance(place, str | os.PathLike | None):
                raise ParameterError(f"{name} must be a path, or None; got {place!r}.", parameter=name)
        method, options = asked["method"], asked["method_options"] or {}
        if method not in METHODS:
            known = f"{', '.join(METHODS)}.{nearest(str(method), METHODS)}"
            raise ParameterError(f"method={method!r} is not one of {known}", parameter="method")
        if not isinstance(options, Mapping):
            raise ParameterError(
                f"method_options must be a mapping of names to values; got {options!r}.",
                parameter="method_options",
            )
        if one_of("missing", asked["missing"], MISSING) == IGNORE and method != GAME:
            raise ParameterError(
                f'missing="ignore" is for method="game"; the method is {method!r}. Fill the gaps.', parameter="missing"
            )
        _require_ranks(method, engine, ranks)
        require_verbosity(asked["verbose"])
        stop, precision = stop_of(asked["tol"], asked["time_budget"]), precision_of(asked["dtype"])
        solver_of("cd", asked["alpha_W"], asked["alpha_H"], asked["l1_ratio"])
        alpha_W, alpha_H = asked["alpha_W"], asked["alpha_H"]
        if method == GAME and (alpha_W or alpha_H not in (0, "same")):
            raise ParameterError("A game has no penalties. Leave alpha_W and alpha_H out.", parameter="alpha_W")
        return Arguments(
            engine,
            one_of("sums", asked["sums"], SUMS),
            ranks,
            method,
            None if asked["n_components"] is None else whole_number("n_components", asked["n_components"]),
            whole_number("max_iter", asked["max_iter"]),
            stop.tol,
            stop.time_budget,
            float(alpha_W),
            float(alpha_W if isinstance(alpha_H, str) else alpha_H),
            float(asked["l1_ratio"]),
            asked["missing"],
            None if precision is None else str(precision),
            whole_number("n_threads", asked["n_threads"]),
            _plain_options(method, options),
            {name: None if place is None else os.fspath(place) for name, place in files.items()},
        )

    def settings(self, shape: tuple[int, int], dtype: Any, seed: int) -> DistributedSettings:
        """The settings of the fit, once the shape and the number type of X are known."""
        traits, rank = traits_by_name(self.method), rank_of(self.n_components, shape)
        require_sketchable(rank, shape, self.method)
        method = None if self.method in RANK_SOLVERS else methods.method(self.method)
        named = {ours: option for option, ours in OWN_SETTINGS.items()} if self.method == GAME else {}
        named |= {name: name for name in SKETCH_OPTIONS}
        known = {ours: None if method is None else method.value(name, self.options) for ours, name in named.items()}
        if method is not None and self.method == GAME:
            known |= compose_game(**method.parse(self.options)).settings()
        rest = {name: value for name, value in self.options.items() if name not in named.values()}
        return DistributedSettings(
            method=self.method,
            n_components=rank,
            init="random",
            alpha_w=self.alpha_W,
            alpha_h=self.alpha_H,
            l1_ratio=self.l1_ratio,
            seed=seed,
            dtype=self.dtype or str(float_type(dtype)),
            tol=self.tol,
            max_iter=self.max_iter,
            time_budget=self.time_budget,
            threads=self.n_threads,
            engine=self.engine,
            sums=None if traits.asynchronous else self.sums,
            ranks=self.ranks,
            missing=self.missing if self.method == GAME else None,
            method_options=rest,
            **known,
        )


def _require_ranks(method: str, engine: str, ranks: int) -> None:
    """Asynchronous methods need a server and a worker, and a transport by which the server waits for any of them."""
    if not traits_by_name(method).asynchronous:
        return
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


def _plain_options(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the method as plain data; exact sums have none over ranks."""
    if method in RANK_SOLVERS and given:
        raise ParameterError(
            f"method={method!r} over ranks has no options. Leave {', '.join(map(str, given))} out.",
            parameter="method_options",
        )
    if not given:
        return {}
    found = methods.method(method)
    found.build(Problem(2, rounds=1), given)
    return {name: found.value(name, given) for name in given}


def _require_same(communicator: Communicator, arguments: Arguments) -> None:
    found = first_difference(communicator, asdict(arguments))
    if found is not None:
        name, rank, first, other = found
        raise ParameterError(
            f"{name} is {first!r} at rank 0 and {other!r} at rank {rank}. Pass the same arguments at every rank.",
            parameter=name,
        )


def _is_path(X: Any, communicator: Communicator) -> bool:
    """Whether X is a file, at every rank or at none."""
    with heard():
        given = share(communicator, "path" if isinstance(X, str | os.PathLike) else "rows")
    if len(set(given)) > 1:
        raise ParameterError(f"X is a {given[0]} at rank 0, but not at all others. Pass the same kind at every rank.")
    return given[0] == "path"


def _from_file(
    path: str | os.PathLike[str],
    arguments: Arguments,
    seed: int,
    communicator: Communicator,
    reading: Wanted,
    look: Callable[[Table], None],
) -> tuple[RankData, DistributedSettings]:
    """This rank's block of rows of a file, and the settings of all."""
    source = open_on_all_ranks(path, communicator, replace(reading, gaps=arguments.missing == IGNORE))
    require_enough(str(source.path), source.shape, arguments.method, communicator.size)
    settings = together(communicator, lambda: arguments.settings(source.shape, source.dtype, seed))
    return read_rows(source, settings, communicator, look), settings


def _from_rows(
    X: Any, arguments: Arguments, seed: int, communicator: Communicator
) -> tuple[RankData, DistributedSettings]:
    """Rows that this rank has already: those of lower ranks come before them."""
    rows, names = together(communicator, lambda: _own_rows(X, arguments, communicator.rank))
    size = (0, 0) if rows is None else (int(rows.shape[0]), int(rows.shape[1]))
    own = [*size, "" if rows is None else str(float_type(rows.dtype)), names]
    with heard():
        every = [json.loads(text) for text in share(communicator, json.dumps(own))]
    holders = [one for one in every if one[0]]
    if len({one[1] for one in holders}) != 1:
        widths = ", ".join(f"{width} at rank {rank}" for rank, (n, width, *_) in enumerate(every) if n)
        raise ShapeError(f"Ranks hold different numbers of columns: {widths}. Bring them to one list of columns.")
    if any(one[3] != holders[0][3] for one in holders):
        raise FeatureError("The names of the columns, or their order, differ between ranks. Agree on one list.")
    stops = [int(stop) for stop in np.cumsum([0, *(one[0] for one in every)])]
    spans, shape = tuple(pairwise(stops)), (stops[-1], holders[0][1])
    dtype = max((one[2] for one in holders), key=lambda name: np.dtype(name).itemsize)
    settings = together(communicator, lambda: arguments.settings(shape, dtype, seed))

    def made() -> tuple[Any, float]:
        if rows is None:
            return None, 0.0
        if settings.knows_some:
            cells = observed(rows, settings.dtype)
            return cells, extremes(cells.by_row)[1]
        try:
            require_transformable(rows, names, settings.dtype)
        except PartsongError as error:
            raise reworded(error, f"Rows of rank {communicator.rank}: {error}") from error
        return as_matrix(rows, settings.dtype), extremes(rows)[1]

    matrix, high = together(communicator, made)
    known = require_usable("X", matrix, high, settings, communicator)
    return RankData(
        shape, spans, matrix, None if holders[0][3] is None else tuple(holders[0][3]), None, known
    ), settings


def _own_rows(X: Any, arguments: Arguments, rank: int) -> tuple[Any, list[str] | None]:
    """A rank's own rows as numbers, and the names of their columns; None and None at a server."""
    traits = traits_by_name(arguments.method)
    if traits.needs_columns:
        raise ParameterError(
            f"method={arguments.method!r} needs columns of all rows at every rank. Pass the path of a file as X, or "
            "use another method.",
            parameter="method",
        )
    if traits.asynchronous and rank == 0:
        if X is not None:
            raise ParameterError(
                f"method={arguments.method!r} has a server at rank 0, without rows. Pass X=None there.",
                parameter="method",
            )
        return None, None
    if X is None:
        raise ParameterError(f"Rank {rank} has no rows. Pass its rows, or the path of a file, as X.")
    rows = numbers_with_gaps(X) if arguments.missing == IGNORE else numbers_of(X)
    names = columns_of(X).get("feature_names_in_")
    return rows, None if names is None else [str(name) for name in names]


def _make_usable(folder: RunFolder | None, overwrite: bool, communicator: Communicator) -> None:
    if folder is not None and communicator.rank == 0:
        make_usable(folder.path, overwrite)


def _warn(fit: DistributedFit) -> None:
    """Where the model is not what was hoped for; rank 0 speaks for all."""
    if fit.rank > 0:
        return
    if fit.outcome is Outcome.DIVERGED:
        words = f"The fit diverged and was stopped. The best model so far is kept. {fit.training.trouble}".rstrip()
        warnings.warn(words, DivergenceWarning, stacklevel=3)
    if fit.data.known is not None and (unknown := np.flatnonzero(fit.data.known == 0)).size:
        warn_of_unknown(unknown, "what the model says of them means nothing", stacklevel=5)
    warn_if_ill_posed(fit.solver)
    warn_if_model_is_zero(fit.solver, fit.result)
