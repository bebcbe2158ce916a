"""Validation of estimator inputs: data, factors, ranks, solvers, number types."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np

from partsong import kernels, methods
from partsong.core import runtime
from partsong.core.interfaces import Matrix
from partsong.core.parameters import real_number, whole_number
from partsong.core.renamed import PARAMETERS, hint
from partsong.core.runtime import physical_memory
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
    format_count,
)
from partsong.solvers.initialization import InitialFactors
from partsong.solvers.observed import ObservedRowSolver
from partsong.solvers.squared_error import SquaredError, build_solver
from partsong.training import centralized
from partsong.training.loop import StoppingRule

Function = TypeVar("Function", bound=Callable[..., Any])


def matrix_of(estimator: Any, X: Any, dtype: Any, *, reset: bool) -> Matrix:
    """Convert X to a matrix to be factorized (`reset`) or transformed; with missing="ignore", to its known cells.

    Column names and width are stored (`reset`) or compared. `dtype`: number type to compute in, None for that of X.
    """
    if estimator.missing == "ignore":
        return _known_cells(estimator, X, dtype, reset=reset)
    rows = numbers_of(X)
    agree_on_columns(estimator, X, reset=reset)
    require = require_factorizable if reset else require_transformable
    require(rows, column_names(X), dtype)
    return as_matrix(rows, dtype)


def _known_cells(estimator: Any, X: Any, dtype: Any, *, reset: bool) -> ObservedMatrix:
    """The known cells of X; a fit warns of columns without any."""
    rows = numbers_with_gaps(X)
    agree_on_columns(estimator, X, reset=reset)
    cells = observed(rows, dtype)
    if not cells.stored and reset:
        raise DataError(
            "X has no known cell: NaN and entries that are not stored are unknown. Provide at least one number."
        )
    if reset and len(cells.empty_columns):
        so = "it is" if len(cells.empty_columns) == 1 else "they are"
        warn_of_unknown(cells.empty_columns, f"{so} zero in every component", stacklevel=6)
    return cells


def warn_of_unknown(columns: np.ndarray, consequence: str, *, stacklevel: int) -> None:
    """Warn of columns without a known cell, and of the consequence."""
    shown = first_few(columns[:SHOWN].tolist(), len(columns), "column")
    warnings.warn(f"No cell is known in {shown} (counted from 0): {consequence}.", UserWarning, stacklevel=stacklevel)


def numbers_with_gaps(X: Any) -> Any:
    """Like `numbers_of`, with masked array entries as NaN."""
    if not isinstance(X, np.ma.MaskedArray):
        return numbers_of(X)
    kind = X.dtype if X.dtype.kind not in "biu" else np.dtype(np.float64)
    held: Any = X.astype(kind, copy=False)
    return numbers_of(held.filled(np.nan))


def numbers_of(X: Any) -> Any:
    """Convert X to an array, memory map, CSR or CSC matrix of numbers, without checking values."""
    if isinstance(X, Table):
        raise DataTypeError("X is a Table. Pass its matrix: fit(table.X).")
    if isinstance(X, str | os.PathLike):
        raise UnreadableError(f"{X!r} is text, not a matrix. Read a file first: partsong.read(path).X.")
    from sklearn.utils.validation import check_array  # importing takes half a second; commands avoid it

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
    return (
        held if isinstance(held, np.memmap) else rows
    )  # check_array would return a plain view; a memmap releases its pages


def columns_of(X: Any) -> dict[str, Any]:
    """Return the number of columns and their names, if any, as attributes of scikit-learn estimators."""
    from sklearn.base import BaseEstimator

    scratch = BaseEstimator()
    agree_on_columns(scratch, X, reset=True)
    return vars(scratch)


def agree_on_columns(estimator: Any, X: Any, *, reset: bool) -> None:
    """Store the column names and number of columns of X (`reset`), or compare them with those of the fit."""
    from sklearn.utils.validation import validate_data

    try:
        validate_data(estimator, X, reset=reset, skip_check_array=True)
    except ValueError as error:
        if "feature names" not in str(error).lower():
            raise ShapeError(str(error) if reset else f"{error} {_way_to_width(estimator)}") from error
        raise FeatureError(f"{error}\n{_way_to_names(estimator, X)}") from error


def _way_to_width(estimator: Any) -> str:
    """Advice for a wrong number of columns without names."""
    names = getattr(estimator, "feature_names_in_", ())
    known = f": {first_few(map(repr, names[:SHOWN]), len(names), 'column')}" if len(names) else ""
    return f"Pass X with the columns of the fit, in the same order{known}."


def _way_to_names(estimator: Any, X: Any) -> str:
    """Advice for column names that differ from those of the fit, or are in another order."""
    known, here = set(getattr(estimator, "feature_names_in_", ())), set(column_labels(X) or ())
    order = "X[list(model.feature_names_in_)]"
    if known - here:
        return f"Add the missing columns (zeros if not measured), then use {order}."
    if here - known:
        return f"Remove the columns that the fit did not have: {order}."
    return f"Reorder the columns: {order}. An array without names is used in its order."


def whole_seed(random_state: Any) -> int:
    """Return an integer seed from random_state."""
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
    """Set scikit-learn tags: non-negative, dense or sparse input, number type preserved."""
    tags.input_tags.positive_only = True
    tags.input_tags.sparse = True
    tags.input_tags.allow_nan = allow_nan
    tags.transformer_tags.preserves_dtype = ["float64", "float32"]
    return tags


_SIDES = {"H": "row per component and one column per feature", "W": "row per sample and one column per component"}


def check_init_factors(matrix: Matrix, rank: int, W: Any, H: Any, *, is_cast: bool = False) -> InitialFactors:
    """Validate W and H of init='custom'; if X is cast to another type, so are they."""
    if H is None:
        raise ParameterError("init='custom' needs H (and optionally W). Pass them: fit(X, W=…, H=…).", parameter="init")
    n, m = matrix.shape
    dtype = None if is_cast else matrix.dtype
    columns = check_factor("H", H, (rank, m), dtype)
    rows = None if W is None else check_factor("W", W, (n, rank), dtype)
    start = matrix.native(np.ascontiguousarray(columns.T))
    return InitialFactors(
        kernels.of(start).rows_of(start.T), None if rows is None else matrix.native(rows.copy(order="C"))
    )


def check_factor(name: str, factor: Any, shape: tuple[int, int], dtype: Any, *, is_start: bool = True) -> np.ndarray:
    """Validate W or H: shape, type, finite, non-negative; as a start not all zeros."""
    values = numeric(name, factor)
    if values.shape != shape:
        which = "second" if values.ndim == 2 and values.shape[0] == shape[0] else "first"
        raise ShapeError(
            f"Array with wrong {which} dimension passed to NMF (input {name}): {name} must have shape {shape}; got "
            f"{values.shape}. Pass one {_SIDES[name]}."
        )
    wanted = str(dtype or values.dtype).removeprefix("torch.")
    if getattr(factor, "dtype", None) in (np.float32, np.float64) and values.dtype != np.dtype(wanted):
        raise DataTypeError(
            f"{name} should have the same dtype as X, {wanted}; got {values.dtype}. Pass {name}.astype('{wanted}')."
        )
    _require_none(name, values, ~np.isfinite(values), "finite", "Replace them, for example by small positive numbers.")
    if (values < 0).any():
        shown_positions = _at_positions(values, values < 0)
        raise ParameterError(
            f"Negative values in data passed to NMF (input {name}): {name} must be non-negative, but is not at "
            f"{shown_positions}. Clip them: {name}.clip(0)."
        )
    if is_start and not values.any():
        raise ParameterError(
            f"Array passed to NMF (input {name}) is full of zeros, where update rules are stuck. "
            "Pass some positive numbers."
        )
    return values


def _require_none(name: str, values: np.ndarray, wrong: np.ndarray, wanted: str, way_out: str) -> None:
    """Raise an error that names the positions of wrong values, counted from 0."""
    if wrong.any():
        raise ParameterError(f"{name} must be {wanted}, but is not at {_at_positions(values, wrong)}. {way_out}")


def _at_positions(values: np.ndarray, wrong: np.ndarray) -> str:
    places = [tuple(map(int, place)) for place in np.argwhere(wrong)]
    shown_positions = [f"({', '.join(map(str, place))}): {values[place]}" for place in places[:SHOWN]]
    return first_few(shown_positions, len(places), "position")


def check_weights(W: Any, rank: int) -> np.ndarray:
    """Validate weights (n × k), or those of one row (k), for `inverse_transform`."""
    weights = numeric("W", W)
    if weights.ndim not in (1, 2) or weights.shape[-1] != rank:
        raise ShapeError(
            f"inverse_transform takes weights with {format_count(rank, 'column')}, one per component; "
            f"got an array of shape {weights.shape}."
        )
    _require_none("W", weights, ~np.isfinite(weights), "finite", "Remove the rows with gaps, or impute them.")
    return weights


def numeric(name: str, values: Any) -> np.ndarray:
    """Convert to a dense array of numbers."""
    held = to_array(values.toarray() if hasattr(values, "tocsr") else values)
    for finding in cell_errors(held):
        raise UnreadableError(f"{name}: {finding.message} {finding.remedy}")
    if held.dtype.kind not in "biuf":
        raise UnreadableError(
            f"{name} must hold numbers; its type is {held.dtype}. Convert it with {name}.astype(float)."
        )
    return np.asarray(held)


INITS = (*centralized.INITS, "custom")
"""Values of `init`."""

MISSING = ("refuse", "ignore")
"""Values of `missing`: NaN is an error and unstored entries are zero, or both are unknown."""

DEFAULT_RANK = 20
GENEROUS_RANK = 1000
"""Ranks up to this are accepted for any matrix."""


def rank_of(wanted: Any, shape: tuple[int, int]) -> int:
    """Return the requested rank, or min(n, m, 20); refuse ranks far beyond X (n × m) or this machine's memory."""
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
            f"n_components={rank} is far too large for this {n} × {m} matrix, whose rank is at most {min(n, m)}. "
            "Use fewer components.",
            parameter="n_components",
        )
    needed = 4 * (n + m) * rank
    if memory is not None and needed > memory:
        raise ParameterError(
            f"n_components={rank} needs factors of {(n + m) * rank:.3g} numbers, {needed / 2**30:.3g} GiB even "
            f"in float32, but this machine has {memory / 2**30:.3g} GiB of memory. Use fewer components.",
            parameter="n_components",
        )
    return rank


def is_game(solver: Any) -> bool:
    """Whether a solver is a game, given by name or as an object."""
    if isinstance(solver, str | type):
        return isinstance(solver, str) and solver == "game"
    return callable(getattr(solver, "sweep", None))


def row_solver_of(
    solver: Any, alpha_W: Any = 0.0, alpha_H: Any = "same", l1_ratio: Any = 0.0
) -> SquaredError | ObservedRowSolver:
    """Return the solver that fits rows to a model; a game has no penalties, and can fit known cells only."""
    if not is_game(solver):
        return build_solver(solver, alpha_W, alpha_H, l1_ratio)
    plain = build_solver("cd", alpha_W, alpha_H, l1_ratio)
    if plain.penalty_W or plain.penalty_H:
        raise ParameterError(
            "A game has no penalties. Set alpha_W and alpha_H to 0, or use self-play to shape H.",
            parameter="alpha_W",
        )
    return ObservedRowSolver(plain)


def require_missing(missing: Any, solver: Any) -> None:
    """Require a game for missing="ignore"."""
    if one_of("missing", missing, MISSING) == "ignore" and not is_game(solver):
        raise ParameterError(
            f'missing="ignore" needs solver="game", which fits known cells only; got solver={solver!r}. '
            'Use solver="game", or impute the missing values.',
            parameter="missing",
        )


def require_sketch(sketch: Any, ratio: Any) -> None:
    """Validate the kind of sketch and its ratio."""
    share = real_number("sketch_ratio", ratio)
    if not 0 < share <= 1:
        raise ParameterError(f"sketch_ratio must be above 0 and at most 1; got {ratio!r}.", parameter="sketch_ratio")
    one_of("sketch", sketch, methods.CHOICES["sketch"])


def solver_from_settings(settings: Mapping[str, Any]) -> SquaredError:
    """Return the solver for rows from the settings in a model file; non-numeric penalties count as zero.

    `l1_ratio_h` is the L1 share of H, if it differs from that of W.
    """
    alpha_W, alpha_H, l1_ratio = penalties_of(settings)
    on_W = build_solver("cd", alpha_W, alpha_H, l1_ratio)
    own_ratio = _number_from_settings(settings, "l1_ratio_h") if "l1_ratio_h" in settings else l1_ratio
    return replace(on_W, penalty_H=build_solver("cd", alpha_W, alpha_H, own_ratio).penalty_H)


def penalties_of(settings: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return alpha_W, alpha_H and l1_ratio from the settings of a model file."""
    return (
        _number_from_settings(settings, "alpha_w"),
        _number_from_settings(settings, "alpha_h"),
        _number_from_settings(settings, "l1_ratio"),
    )


def _number_from_settings(settings: Mapping[str, Any], name: str) -> float:
    found = settings.get(name)
    return float(found) if isinstance(found, int | float) else 0.0


def count_from_settings(settings: Mapping[str, Any], name: str, least: int = 1) -> int | None:
    """Return a count, such as rows, from the settings of a model file; None if missing."""
    found = settings.get(name)
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= least else None


def require_squared_error(beta_loss: Any, solver: Any) -> None:
    """Require beta_loss "frobenius" (2)."""
    is_number = isinstance(beta_loss, Real) and not isinstance(beta_loss, bool)
    if beta_loss == "frobenius" if isinstance(beta_loss, str) else is_number and beta_loss == 2:
        return
    raise ParameterError(
        f"Invalid beta_loss parameter: solver {solver!r} does not handle beta_loss = {beta_loss!r}. Use 'frobenius', "
        "the squared error; 'kullback-leibler' is planned.",
        parameter="beta_loss",
    )


def stop_of(tol: Any, time_budget: Any) -> StoppingRule:
    """Return the stopping rule for validated numbers."""
    return StoppingRule(
        real_number("tol", tol), None if time_budget is None else real_number("time_budget", time_budget)
    )


def precision_of(dtype: Any) -> np.dtype[Any] | None:
    """Return float32, float64, or None to keep that of the data."""
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
    """Return the requested threads, or all that this process may use."""
    return (
        runtime.available_threads() if n_threads is None else whole_number("n_threads", n_threads, " (None: all cores)")
    )


def require_verbosity(verbose: Any) -> None:
    """Validate verbose: 0 or False is silent, 1 or True shows progress."""
    if not isinstance(verbose, Integral | np.bool_) or verbose < 0:
        raise ParameterError(
            f"verbose must be 0 (silent) or 1 (progress on standard error); got {verbose!r}.", parameter="verbose"
        )


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Return value if it is one of the choices, otherwise raise an error."""
    if not isinstance(value, str) or value not in choices:
        renamed = f" {hint(value, choices)}".rstrip() if isinstance(value, str) else ""
        raise ParameterError(f"Unknown {name} {value!r}; choose one of {', '.join(choices)}.{renamed}", parameter=name)
    return value


def require_present_names(names: Iterable[str], known: Collection[str]) -> None:
    """Refuse the old name of a parameter, and name the new one."""
    for name in names:
        if name not in known and PARAMETERS.get(name) in known:
            new = PARAMETERS[name]
            raise ParameterError(f"{name}= is called {new}= since version 0.2.0. Use {new}=.", parameter=name)


def refuse_old_names(function: Function) -> Function:
    """Decorate a function so that a keyword argument by its old name is an error that names the new one."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        require_present_names(kwargs, known)
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]
