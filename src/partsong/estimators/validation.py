"""What callers of estimators give, checked: data, factors, ranks, solvers, precision."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import numpy as np

from partsong import kernels, methods
from partsong.core import runtime
from partsong.core.interfaces import Matrix
from partsong.core.parameters import real_number, whole_number
from partsong.core.renamed import hint
from partsong.core.streams import fresh_seed
from partsong.data.conversion import array_errors, as_matrix, to_array
from partsong.data.observed import ObservedMatrix, observed
from partsong.data.scan import SHOWN, column_labels, column_names
from partsong.data.table import Table
from partsong.data.validation import cell_errors, error_from, require_factorizable, require_transformable
from partsong.errors import (
    DataError,
    DataTypeError,
    FeatureError,
    ParameterError,
    ShapeError,
    UnreadableError,
    first_few,
)
from partsong.solvers.initialization import InitialFactors
from partsong.solvers.observed import ObservedRows
from partsong.solvers.squared_error import SquaredError, solver_of
from partsong.training import centralized
from partsong.training.loop import StoppingRule


def matrix_of(estimator: Any, X: Any, dtype: Any, *, reset: bool) -> Matrix:
    """X as a matrix that can be factorized (`reset`) or transformed; with missing="ignore" its known cells.

    Names and width are remembered or compared; `dtype` is the precision to compute in where it is not that of X.
    """
    if estimator.missing == "ignore":
        return _known_cells(estimator, X, dtype, reset=reset)
    rows = numbers_of(X)
    agree_on_columns(estimator, X, reset=reset)
    require = require_factorizable if reset else require_transformable
    require(rows, column_names(X), dtype)
    return as_matrix(rows, dtype)


def _known_cells(estimator: Any, X: Any, dtype: Any, *, reset: bool) -> ObservedMatrix:
    """The known cells of X; columns of which nothing is known are told of in a fit."""
    rows = numbers_with_gaps(X)
    agree_on_columns(estimator, X, reset=reset)
    cells = observed(rows, dtype)
    if not cells.stored and reset:
        raise DataError("No cell of X is known. Give at least one number; NaN and what is not stored are unknown.")
    if reset and len(cells.empty_columns):
        so = "it is" if len(cells.empty_columns) == 1 else "they are"
        warn_of_unknown(cells.empty_columns, f"{so} zero in every component", stacklevel=6)
    return cells


def warn_of_unknown(columns: np.ndarray, consequence: str, *, stacklevel: int) -> None:
    """Warn of columns without a known cell, and of what follows from that."""
    shown = first_few(columns[:SHOWN].tolist(), len(columns), "column")
    warnings.warn(f"Nothing is known of {shown} (counted from 0): {consequence}.", UserWarning, stacklevel=stacklevel)


def numbers_with_gaps(X: Any) -> Any:
    """`numbers_of`, with NaN also where a masked array hides something."""
    if not isinstance(X, np.ma.MaskedArray):
        return numbers_of(X)
    kind = X.dtype if X.dtype.kind not in "biu" else np.dtype(np.float64)
    held: Any = X.astype(kind, copy=False)
    return numbers_of(held.filled(np.nan))


def numbers_of(X: Any) -> Any:
    """Whatever holds a matrix of numbers as an array, a memory map, CSR or CSC; the values are not looked at."""
    if isinstance(X, Table):
        raise DataTypeError("This is a Table; its numbers are in .X and its names beside them: fit(table.X).")
    if isinstance(X, str | os.PathLike):
        raise UnreadableError(f"{X!r} is text, not a matrix. Read a file first: partsong.read(path).X.")
    from sklearn.utils.validation import check_array  # takes half a second, which commands need not wait for

    names = column_names(X)
    held = X if column_labels(X) is not None else to_array(X)
    for finding in cell_errors(held, names):
        raise error_from(finding)
    try:
        rows = check_array(
            held,
            accept_sparse=("csr", "csc"),
            dtype="numeric",
            ensure_2d=False,
            allow_nd=True,
            ensure_all_finite=False,
            ensure_min_samples=0,
            ensure_min_features=0,
        )
    except (TypeError, ValueError) as error:
        raise UnreadableError(f"{error} Convert the data to a NumPy array of numbers first.") from error
    for finding in array_errors(rows):
        raise error_from(finding)
    return held if isinstance(held, np.memmap) else rows  # scikit-learn makes a map a plain view; maps give pages back


def columns_of(X: Any) -> dict[str, Any]:
    """The number of columns, and their names where they have some, as scikit-learn's estimators remember them."""
    from sklearn.base import BaseEstimator

    scratch = BaseEstimator()
    agree_on_columns(scratch, X, reset=True)
    return vars(scratch)


def agree_on_columns(estimator: Any, X: Any, *, reset: bool) -> None:
    """Remember the names and the number of columns of X (`reset`), or compare them with those of the fit."""
    from sklearn.utils.validation import validate_data

    try:
        validate_data(estimator, X, reset=reset, skip_check_array=True)
    except ValueError as error:
        if "feature names" not in str(error).lower():
            raise ShapeError(str(error) if reset else f"{error} {_way_to_width(estimator)}") from error
        raise FeatureError(f"{error}\n{_way_to_names(estimator, X)}") from error


def _way_to_width(estimator: Any) -> str:
    """What to do about another number of columns, where names cannot tell which of them are meant."""
    names = getattr(estimator, "feature_names_in_", ())
    known = f": {first_few(map(repr, names[:SHOWN]), len(names), 'column')}" if len(names) else ""
    return f"Give X the columns of the fit, in the same order{known}."


def _way_to_names(estimator: Any, X: Any) -> str:
    """What to do about names that are not those of the fit, or not in their order."""
    known, here = set(getattr(estimator, "feature_names_in_", ())), set(column_labels(X) or ())
    order = "X[list(model.feature_names_in_)]"
    if known - here:
        return f"Add the missing columns (zeros, if they were not measured), then take {order}."
    if here - known:
        return f"Leave out the columns that the fit did not have: {order}."
    return f"Put the columns in the order of the fit: {order}. An array without names is taken as it is."


def whole_seed(random_state: Any) -> int:
    """An integer seed from what scikit-learn calls random_state."""
    if random_state is None:
        return fresh_seed()
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31 - 1))
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**63 - 1))
    if isinstance(random_state, int | np.integer) and not isinstance(random_state, bool) and random_state >= 0:
        return int(random_state)
    raise ParameterError(
        f"random_state must be None, a whole number ≥ 0, or a NumPy generator; got {random_state!r}.",
        parameter="random_state",
    )


def non_negative_tags(tags: Any, *, allow_nan: bool) -> Any:
    """scikit-learn's tags of a transformer that takes rows without negative numbers, dense or sparse, and keeps their
    type.
    """
    tags.input_tags.positive_only = True
    tags.input_tags.sparse = True
    tags.input_tags.allow_nan = allow_nan
    tags.transformer_tags.preserves_dtype = ["float64", "float32"]
    return tags


_SIDES = {"H": "row per component and one column per feature", "W": "row per sample and one column per component"}


def check_init_factors(matrix: Matrix, rank: int, W: Any, H: Any, *, is_cast: bool = False) -> InitialFactors:
    """The factors of init='custom', checked; where X is cast to another type they are as well."""
    if H is None:
        raise ParameterError("init='custom' needs H (and optionally W): fit(X, W=…, H=…).", parameter="init")
    n, m = matrix.shape
    dtype = None if is_cast else matrix.dtype
    columns = check_factor("H", H, (rank, m), dtype)
    rows = None if W is None else check_factor("W", W, (n, rank), dtype)
    start = matrix.native(np.ascontiguousarray(columns.T))
    return InitialFactors(
        kernels.of(start).rows_of(start.T), None if rows is None else matrix.native(rows.copy(order="C"))
    )


def check_factor(name: str, factor: Any, shape: tuple[int, int], dtype: Any, *, is_start: bool = True) -> np.ndarray:
    """W or H as a caller gives it: of that shape and type, finite, non-negative; a start is not all zeros."""
    values = numeric(name, factor)
    if values.shape != shape:
        which = "second" if values.ndim == 2 and values.shape[0] == shape[0] else "first"
        raise ShapeError(
            f"Array with wrong {which} dimension passed to NMF (input {name}): {name} must have shape {shape}; got "
            f"{values.shape}. Give one {_SIDES[name]}."
        )
    wanted = str(dtype or values.dtype).removeprefix("torch.")
    if getattr(factor, "dtype", None) in (np.float32, np.float64) and values.dtype != np.dtype(wanted):
        raise DataTypeError(
            f"{name} should have the same dtype as X, {wanted}; got {values.dtype}. Pass {name}.astype('{wanted}')."
        )
    _require_none(name, values, ~np.isfinite(values), "finite", "Replace them, for example by small positive numbers.")
    if (values < 0).any():
        told = _at_positions(values, values < 0)
        raise ParameterError(
            f"Negative values in data passed to NMF (input {name}): {name} must be non-negative, and is not at {told}. "
            f"Clip them: {name}.clip(0)."
        )
    if is_start and not values.any():
        raise ParameterError(
            f"Array passed to NMF (input {name}) is full of zeros, which update rules cannot leave. "
            "Give some positive numbers."
        )
    return values


def _require_none(name: str, values: np.ndarray, wrong: np.ndarray, wanted: str, way_out: str) -> None:
    """Refuse values by their positions, counted from 0."""
    if wrong.any():
        raise ParameterError(f"{name} must be {wanted}, and is not at {_at_positions(values, wrong)}. {way_out}")


def _at_positions(values: np.ndarray, wrong: np.ndarray) -> str:
    places = [tuple(map(int, place)) for place in np.argwhere(wrong)]
    told = [f"({', '.join(map(str, place))}): {values[place]}" for place in places[:SHOWN]]
    return first_few(told, len(places), "position")


def check_weights(W: Any, rank: int) -> np.ndarray:
    """Weights (n × k), or those of one row (k), for `inverse_transform`."""
    weights = numeric("W", W)
    if weights.ndim not in (1, 2) or weights.shape[-1] != rank:
        raise ShapeError(
            f"inverse_transform takes weights with {rank} columns, one per component; "
            f"got an array of shape {weights.shape}."
        )
    _require_none("W", weights, ~np.isfinite(weights), "finite", "Leave out, or fill, the rows with gaps.")
    return weights


def numeric(name: str, values: Any) -> np.ndarray:
    """A dense array of numbers."""
    held = to_array(values.toarray() if hasattr(values, "tocsr") else values)
    for finding in cell_errors(held):
        raise UnreadableError(f"{name}: {finding.message} {finding.remedy}")
    if held.dtype.kind not in "biuf":
        raise UnreadableError(
            f"{name} must hold numbers; its type is {held.dtype}. Convert it with {name}.astype(float)."
        )
    return np.asarray(held)


INITS = (*centralized.INITS, "custom")
"""Where `NMF` may start."""

MISSING = ("refuse", "ignore")
"""What NaN, and what a sparse matrix does not store, may mean: an error and zero, or nothing at all."""

DEFAULT_RANK = 20
GENEROUS_RANK = 1000
"""Ranks up to this are never called absurd, however small the matrix."""


def rank_of(wanted: Any, shape: tuple[int, int]) -> int:
    """The rank asked for, or min(n, m, 20); refused where X (n × m) or this machine's memory has no use for it."""
    n, m = shape
    if wanted is None:
        return min(n, m, DEFAULT_RANK)
    if not isinstance(wanted, Integral) or isinstance(wanted, bool) or wanted < 1:
        raise ParameterError(
            f"n_components must be a whole number of at least 1; got {wanted!r}.", parameter="n_components"
        )
    rank, memory = int(wanted), physical_memory()
    if rank > GENEROUS_RANK and rank > 10 * min(n, m):
        raise ParameterError(
            f"n_components={rank} is far more than this {n} × {m} matrix can use: its rank is at most {min(n, m)}. "
            "Choose a number of components of that order.",
            parameter="n_components",
        )
    needed = 4 * (n + m) * rank
    if memory is not None and needed > memory:
        raise ParameterError(
            f"n_components={rank} asks for factors of {(n + m) * rank:.3g} numbers, {needed / 2**30:.3g} GiB even "
            f"in float32, and this machine has {memory / 2**30:.3g} GiB of memory. Choose fewer components.",
            parameter="n_components",
        )
    return rank


def physical_memory() -> int | None:
    """Bytes of memory of this machine, where the system tells."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def is_game(solver: Any) -> bool:
    """Whether a solver is a game, by its name or as a value; other solvers do not sweep over cells."""
    if isinstance(solver, str | type):
        return isinstance(solver, str) and solver == "game"
    return callable(getattr(solver, "sweep", None))


def row_solver_of(
    solver: Any, alpha_W: Any = 0.0, alpha_H: Any = "same", l1_ratio: Any = 0.0
) -> SquaredError | ObservedRows:
    """What fits rows to a model; a game has no penalties, and can do with known cells alone."""
    if not is_game(solver):
        return solver_of(solver, alpha_W, alpha_H, l1_ratio)
    plain = solver_of("cd", alpha_W, alpha_H, l1_ratio)
    if plain.penalty_W or plain.penalty_H:
        raise ParameterError(
            "A game has no penalties: alpha_W and alpha_H must be 0. Self-play shapes H instead.",
            parameter="alpha_W",
        )
    return ObservedRows(plain)


def require_missing(missing: Any, solver: Any) -> None:
    """Cells that are not known can be left out by a game only."""
    if one_of("missing", missing, MISSING) == "ignore" and not is_game(solver):
        raise ParameterError(
            f'missing="ignore" is for solver="game", in which unknown cells are not played; the solver is {solver!r}. '
            "Take that, or fill the gaps.",
            parameter="missing",
        )


def require_sketch(sketch: Any, ratio: Any) -> None:
    """A kind of sketch by name, and columns (rows) of a sketch as a share."""
    share = real_number("sketch_ratio", ratio)
    if not 0 < share <= 1:
        raise ParameterError(f"sketch_ratio must be above 0 and at most 1; got {ratio!r}.", parameter="sketch_ratio")
    one_of("sketch", sketch, methods.CHOICES["sketch"])


def solver_from_settings(settings: Mapping[str, Any]) -> SquaredError:
    """How rows are fitted to a model, from the settings in its file; penalties that are no numbers count as none.

    `l1_ratio_h` is H's own share of L1, where it differs from that of W.
    """
    alpha_W, alpha_H, l1_ratio = penalties_of(settings)
    on_W = solver_of("cd", alpha_W, alpha_H, l1_ratio)
    own_ratio = _number_from_settings(settings, "l1_ratio_h") if "l1_ratio_h" in settings else l1_ratio
    return replace(on_W, penalty_H=solver_of("cd", alpha_W, alpha_H, own_ratio).penalty_H)


def penalties_of(settings: Mapping[str, Any]) -> tuple[float, float, float]:
    """alpha_W, alpha_H and l1_ratio in the settings of a model file."""
    return (
        _number_from_settings(settings, "alpha_w"),
        _number_from_settings(settings, "alpha_h"),
        _number_from_settings(settings, "l1_ratio"),
    )


def _number_from_settings(settings: Mapping[str, Any], name: str) -> float:
    found = settings.get(name)
    return float(found) if isinstance(found, int | float) else 0.0


def count_from_settings(settings: Mapping[str, Any], name: str, least: int = 1) -> int | None:
    """A number of things, such as rows, in the settings of a model file; None where it does not tell."""
    found = settings.get(name)
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= least else None


def require_squared_error(beta_loss: Any, solver: Any) -> None:
    """Refuse losses other than "frobenius" (2)."""
    is_number = isinstance(beta_loss, Real) and not isinstance(beta_loss, bool)
    if beta_loss == "frobenius" if isinstance(beta_loss, str) else is_number and beta_loss == 2:
        return
    raise ParameterError(
        f"Invalid beta_loss parameter: solver {solver!r} does not handle beta_loss = {beta_loss!r}. Use 'frobenius', "
        "the squared error. Losses for counts, 'kullback-leibler' first, are planned.",
        parameter="beta_loss",
    )


def stop_of(tol: Any, time_budget: Any) -> StoppingRule:
    """When to stop, from numbers."""
    return StoppingRule(
        real_number("tol", tol), None if time_budget is None else real_number("time_budget", time_budget)
    )


def precision_of(dtype: Any) -> np.dtype[Any] | None:
    """float32 or float64, or None where the data decide."""
    if dtype is None:
        return None
    try:
        chosen = np.dtype(dtype)
    except TypeError:
        chosen = np.dtype(object)
    if chosen not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise ParameterError(f"dtype must be 'float32', 'float64' or None; got {dtype!r}.", parameter="dtype")
    return chosen


def threads_of(n_threads: Any) -> int:
    """The threads asked for, or all that this process may use."""
    return (
        runtime.available_threads() if n_threads is None else whole_number("n_threads", n_threads, " (None: all cores)")
    )


def require_verbosity(verbose: Any) -> None:
    """0 or False is silent, 1 or True is not."""
    if not isinstance(verbose, Integral | np.bool_) or verbose < 0:
        raise ParameterError(
            f"verbose must be 0 (silent) or 1 (progress on standard error); got {verbose!r}.", parameter="verbose"
        )


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """One of some words."""
    if not isinstance(value, str) or value not in choices:
        renamed = f" {hint(value, choices)}".rstrip() if isinstance(value, str) else ""
        raise ParameterError(f"Unknown {name} {value!r}; choose one of {', '.join(choices)}.{renamed}", parameter=name)
    return value
