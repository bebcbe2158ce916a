"""What a caller may ask for: ranks, solvers, precision and the like; what makes no sense is refused by its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import numpy as np

from partsong import kernels
from partsong.core import runtime
from partsong.core.interfaces import Alignment, Matrix, Program
from partsong.core.parameters import real_number, whole_number
from partsong.data.conversion import array_of
from partsong.data.issues import SHOWN
from partsong.data.validation import cell_errors
from partsong.errors import DataTypeError, ParameterError, ShapeError, UnreadableError, first_few
from partsong.methods import recipes
from partsong.methods.privacy_request import PartyPrivacy, Privacy, RowPrivacy, reach_of
from partsong.methods.recipes import game_told, solver_of
from partsong.methods.registry import ALIGNED, ASYNCHRONOUS, COMMON_ONLY, LONG_ROUNDS, METHODS, SENDS_H, STARTS
from partsong.sketch.crossing import Proportion
from partsong.solvers.game import Game
from partsong.solvers.initialization import InitialFactors
from partsong.solvers.observed import ObservedRows
from partsong.solvers.squared_error import SquaredError
from partsong.training import loop
from partsong.training.stopping import Stop

# ---- given ------------------------------------------------------------------------------------------------------
#
# Factors that a caller gives: a start to fit from, weights to turn back into rows.

_SIDES = {"H": "row per component and one column per feature", "W": "row per sample and one column per component"}


def given_beginning(matrix: Matrix, rank: int, W: Any, H: Any, *, is_cast: bool = False) -> InitialFactors:
    """The factors of init='custom', checked; where X is cast to another type they are as well."""
    if H is None:
        raise ParameterError("init='custom' needs H (and optionally W): fit(X, W=…, H=…).")
    n, m = matrix.shape
    dtype = None if is_cast else matrix.dtype
    columns = given_factor("H", H, (rank, m), dtype)
    rows = None if W is None else given_factor("W", W, (n, rank), dtype)
    start = matrix.native(np.ascontiguousarray(columns.T))
    return InitialFactors(
        kernels.of(start).rows_of(start.T), None if rows is None else matrix.native(rows.copy(order="C"))
    )


def given_factor(name: str, factor: Any, shape: tuple[int, int], dtype: Any, *, is_start: bool = True) -> np.ndarray:
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


def given_weights(W: Any, rank: int) -> np.ndarray:
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
    held = array_of(values.toarray() if hasattr(values, "tocsr") else values)
    for finding in cell_errors(held):
        raise UnreadableError(f"{name}: {finding.message} {finding.remedy}")
    if held.dtype.kind not in "biuf":
        raise UnreadableError(
            f"{name} must hold numbers; its type is {held.dtype}. Convert it with {name}.astype(float)."
        )
    return np.asarray(held)


# ---- settings ---------------------------------------------------------------------------------------------------

PROGRAM = (
    "rank", "solver", "aggregation", "start_party", "start_server", "local", "finish", "components", "metrics",
)  # fmt: skip
"""What a Program has."""

INITS = (*loop.INITS, "custom")
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
        raise ParameterError(f"n_components must be a whole number of at least 1, or None; got {wanted!r}.")
    rank, memory = int(wanted), physical_memory()
    if rank > GENEROUS_RANK and rank > 10 * min(n, m):
        raise ParameterError(
            f"n_components={rank} is far more than this {n} × {m} matrix can use: its rank is at most {min(n, m)}. "
            "Choose a number of components of that order."
        )
    needed = 4 * (n + m) * rank
    if memory is not None and needed > memory:
        raise ParameterError(
            f"n_components={rank} asks for factors of {(n + m) * rank:.3g} numbers, {needed / 2**30:.3g} GiB even "
            f"in float32, and this machine has {memory / 2**30:.3g} GiB of memory. Choose fewer components."
        )
    return rank


def physical_memory() -> int | None:
    """Bytes of memory of this machine, where the system tells."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def game_of(solver: Any) -> Game | None:
    """The game that is meant, by its name or as a value; None for solvers that are none."""
    if isinstance(solver, Game):
        return solver
    return Game() if isinstance(solver, str) and solver == "game" else None


def row_solver_of(
    solver: Any, alpha_W: Any = 0.0, alpha_H: Any = "same", l1_ratio: Any = 0.0
) -> SquaredError | ObservedRows:
    """What fits rows to a model; a game has no penalties, and can do with known cells alone."""
    if game_of(solver) is None:
        return solver_of(solver, alpha_W, alpha_H, l1_ratio)
    plain = solver_of("cd", alpha_W, alpha_H, l1_ratio)
    if plain.penalty_W or plain.penalty_H:
        raise ParameterError(
            "A game has no penalties: alpha_W and alpha_H must be 0. Columns that play against themselves shape H "
            "instead: Game(self_play=ShrinkOthers())."
        )
    return ObservedRows(plain)


def require_missing(missing: Any, solver: Any) -> None:
    """Cells that are not known can be left out by a game only."""
    if one_of("missing", missing, MISSING) == "ignore" and game_of(solver) is None:
        raise ParameterError(
            f'missing="ignore" is for solver="game", in which unknown cells are not played; the solver is {solver!r}. '
            "Take that, or fill the gaps."
        )


def sketch_of(solver: Any, sketch: Any, ratio: Any) -> Proportion | None:
    """The sketch that "sanls" works with; None for all other solvers, which do not take one."""
    share = real_number("sketch_ratio", ratio)
    if not 0 < share <= 1:
        raise ParameterError(f"sketch_ratio must be above 0 and at most 1; got {ratio!r}.")
    kinds = recipes.sketches()
    one_of("sketch", sketch, tuple(kinds))
    is_sketched = isinstance(solver, str) and solver == "sanls"
    return Proportion(kinds[sketch], share) if is_sketched else None


def solver_told(settings: Mapping[str, Any]) -> SquaredError:
    """How rows are fitted to a model, from the settings in its file; penalties that are no numbers count as none.

    `l1_ratio_h` is H's own share of L1, where it differs from that of W.
    """
    alpha_W, alpha_H, l1_ratio = penalties_of(settings)
    on_W = solver_of("cd", alpha_W, alpha_H, l1_ratio)
    own_ratio = _number_told(settings, "l1_ratio_h") if "l1_ratio_h" in settings else l1_ratio
    return replace(on_W, penalty_H=solver_of("cd", alpha_W, alpha_H, own_ratio).penalty_H)


def penalties_of(settings: Mapping[str, Any]) -> tuple[float, float, float]:
    """alpha_W, alpha_H and l1_ratio in the settings of a model file."""
    return _number_told(settings, "alpha_w"), _number_told(settings, "alpha_h"), _number_told(settings, "l1_ratio")


def _number_told(settings: Mapping[str, Any], name: str) -> float:
    found = settings.get(name)
    return float(found) if isinstance(found, int | float) else 0.0


def fit_told(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a centralised fit in those of its model file, as far as `NMF` takes them by these names.

    Of a federated game there is whether unknown cells are left out: rows are transformed so.
    """
    if settings.get("method") == "game" and settings.get("missing") == "ignore":
        return {"solver": "game", "missing": "ignore"}
    if settings.get("method") != "centralised":
        return {}
    checks: dict[str, Callable[[Any], Any]] = {
        "solver": row_solver_of,
        "missing": lambda value: one_of("missing", value, MISSING),
        "init": lambda value: one_of("init", value, INITS),
        "tol": lambda value: stop_of(value, None),
        "sketch": lambda value: one_of("sketch", value, tuple(recipes.sketches())),
        "sketch_ratio": lambda value: sketch_of("sanls", "count", value),
        "max_iter": lambda value: whole_number("max_iter", value),
    }
    told = {name: settings[name] for name in checks.keys() & settings.keys() if _is_taken(checks[name], settings[name])}
    return {**told, "solver": game_told(settings)} if told.get("solver") == "game" else told


def _is_taken(check: Callable[[Any], Any], value: Any) -> bool:
    try:
        check(value)
    except ParameterError:
        return False
    return True


def count_told(settings: Mapping[str, Any], name: str, least: int = 1) -> int | None:
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
        "the squared error. Losses for counts, 'kullback-leibler' first, are planned."
    )


def stop_of(tol: Any, time_budget: Any) -> Stop:
    """When to stop, from numbers."""
    return Stop(real_number("tol", tol), None if time_budget is None else real_number("time_budget", time_budget))


def precision_of(dtype: Any) -> np.dtype[Any] | None:
    """float32 or float64, or None where the data decide."""
    if dtype is None:
        return None
    try:
        chosen = np.dtype(dtype)
    except TypeError:
        chosen = np.dtype(object)
    if chosen not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise ParameterError(f"dtype must be 'float32', 'float64' or None; got {dtype!r}.")
    return chosen


def threads_of(n_threads: Any) -> int:
    """The threads asked for, or all that this process may use."""
    return runtime.available() if n_threads is None else whole_number("n_threads", n_threads, " (None: all cores)")


def require_verbosity(verbose: Any) -> None:
    """0 or False is silent, 1 or True is not."""
    if not isinstance(verbose, Integral | np.bool_) or verbose < 0:
        raise ParameterError(f"verbose must be 0 (silent) or 1 (progress on standard error); got {verbose!r}.")


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """One of some words."""
    if not isinstance(value, str) or value not in choices:
        raise ParameterError(f"Unknown {name} {value!r}; choose one of {', '.join(choices)}.")
    return value


def alignment_of(align: Any) -> Alignment:
    """The alignment of this name, or the one given."""
    names = recipes.alignments()
    if isinstance(align, str) and align in names:
        return names[align]
    if isinstance(align, str | type) or not callable(getattr(align, "plan", None)):
        raise ParameterError(f"align must be one of {', '.join(names)}, or an alignment; got {align!r}.")
    chosen: Alignment = align
    return chosen


def require_method(method: Any, *, align: Any, start: Any, local_steps: Any) -> None:
    """A federated method and its settings, refused by their names; one that would be ignored is a mistake as well."""
    if isinstance(method, str):
        one_of("method", method, METHODS)
    elif isinstance(method, type) or not all(hasattr(method, name) for name in PROGRAM):
        raise ParameterError(f"method must be one of {', '.join(METHODS)}, or a Program; got {method!r}.")
    if start is not None:
        one_of("start", start, STARTS)
        if isinstance(method, str) and method in COMMON_ONLY and start == "independent":
            raise ParameterError(f'method="{method}" has one start for all parties: start must be None or "common".')
    if local_steps is not None:
        whole_number("local_steps", local_steps, " (None: as the method does)")
    if align is not None:
        alignment_of(align)
        if not isinstance(method, str) or method not in ALIGNED:
            raise ParameterError(f"align is for {' and '.join(ALIGNED)} only; the method is {method!r}. Leave it out.")
    ignored = [name for name, value in (("local_steps", local_steps), ("start", start)) if value is not None]
    if ignored and not isinstance(method, str):
        raise ParameterError(f"{' and '.join(ignored)} are part of a Program: set them there, or leave them out.")


def require_privacy(privacy: Any, masked: Any, method: Any, *, steps: Any, time_budget: Any) -> None:
    """Refuse a promise that the method cannot keep, and masks over what is no sum."""
    from partsong.secure_aggregation.protocol import MaskedSum

    if not isinstance(masked, bool | MaskedSum):
        raise ParameterError(f"masked must be True, False or a MaskedSum; got {masked!r}.")
    if masked and isinstance(method, str) and method in ASYNCHRONOUS:
        raise ParameterError(f'"{method}" hears one party at a time, and masks need several. Take "syn-sd".')
    if privacy is None:
        return
    if not isinstance(privacy, PartyPrivacy | RowPrivacy):
        raise ParameterError(f"privacy must be None, PartyPrivacy(…) or RowPrivacy(…); got {privacy!r}.")
    if time_budget is not None:
        stop_of(0.0, time_budget).blind()
    if not isinstance(method, str):
        raise ParameterError(
            "privacy is for methods by name. To a Program noise is added by partsong.methods.recipes.party_private, or "
            "take partsong.methods.recipes.row_private as the method."
        )
    _require_private_method(privacy, method, masked, steps)


def _require_private_method(privacy: Privacy, method: str, masked: Any, steps: Any) -> None:
    if isinstance(privacy, RowPrivacy):
        if method != "exact":
            raise ParameterError(
                f'Privacy of rows is for method="exact", whose messages are sums over rows; the method is "{method}". '
                "Take that, or PartyPrivacy."
            )
        if steps is not None:
            raise ParameterError("local_steps have no place in noisy sums over rows: leave them out.")
        if not isinstance(masked, bool):
            raise ParameterError("Masks over noisy sums are made for them: give masked=True.")
    elif method not in SENDS_H:
        raise ParameterError(
            f"Privacy of parties is for methods in which each sends its own H: {', '.join(SENDS_H)}; the method is "
            f"{method!r}. Take one of these, or RowPrivacy with method='exact'."
        )
    elif not isinstance(masked, bool) and masked.bound_of("H") < reach_of(privacy):
        raise ParameterError(
            f"With this noise H may reach {reach_of(privacy):.4g}, and the masks refuse numbers beyond "
            f"{masked.bound_of('H'):.4g}: whether one is refused would depend on the data. Give masked=True, or "
            f'MaskedSum(bounds={{"H": {reach_of(privacy):.4g}}}).'
        )


def program_of(method: str, rank: int, *, steps: int, align: Alignment, start: str) -> Program:
    """The program of a famous name; `align` is used by those that are aligned."""
    settings: dict[str, Any] = {"steps": steps, "start": start}
    match method:
        case "exact":
            return recipes.shared_statistics(rank, sweeps=steps)
        case "fnmf" | "fnmf-alone":
            alone = recipes.fnmf(rank, client_align=align, server_align=align, **settings)
            return recipes.then_exact(alone, LONG_ROUNDS) if method == "fnmf" else alone
        case "fedavg":
            return recipes.fedavg(rank, **settings)
        case "fedprox":
            return recipes.fedprox(rank, **settings)
        case "ipalm-once":
            return recipes.ipalm_once(rank, **settings)
        case "mur-once":
            return recipes.mur_once(rank, **settings)
        case "syn-sd":
            return recipes.syn_sd(rank, steps=steps)
        case "syn-ssd-u" | "syn-ssd-v" | "syn-ssd-uv":
            return recipes.syn_ssd(rank, variant=method.removeprefix("syn-ssd-"), steps=steps)
        case "asyn-sd":
            return recipes.asyn_sd(rank, steps=steps)
        case "asyn-ssd-v":
            return recipes.asyn_ssd_v(rank, steps=steps)
        case "game":
            return recipes.game(rank, repeats=steps)
    raise ParameterError(f"Unknown method {method!r}; choose one of {', '.join(METHODS)}.")
