"""Names on the command line and what they stand for; no other module turns names into objects."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from partsong.methods.registry import LOCAL_ONLY
from partsong.methods.registry import METHODS as FEDERATED
from partsong.training.settings import IGNORE

if TYPE_CHECKING:
    from partsong.cli.fit_settings import FederationSettings
    from partsong.core.interfaces import Engine

SOLVERS = ("hals", "cd", "mu", "pg", "ipalm", "bpp", "sanls")
INITS = ("auto", "anchors", "random", "nndsvd", "nndsvda", "nndsvdar")
DTYPES = ("float32", "float64")
RANKED = ("mpi", "torch")
"""Engines that split one file over processes which mpiexec or torchrun has started."""
ENGINES = ("sequential", "parallel", *RANKED)
FAULTY = ("stop", "leave-out")
CENTRALISED = "centralised"

AT_ONCE = ("simultaneous", "alternating")
PLAYS = ("stratified", "sequential", "random", *AT_ONCE)
SELF_PLAYS = ("none", "min", "max")
SHRINK = 0.99
LEADERS = ("rows", "columns")
MISSING = ("refuse", IGNORE)

UNITS = ("row", "party")
RELATIONS_OF = {"row": ("add-or-remove", "replace"), "party": ("replace", "zero-out")}
NOISES = ("gaussian", "laplace")
MASKED_BOUND = 1e9

METHODS = (*FEDERATED, LOCAL_ONLY)

SUMS = ("all-reduce", "in-order")
SKETCHES = ("subsampling", "gaussian", "count", "hadamard")

MODEL_ENDINGS = (".safetensors",)
WEIGHT_ENDINGS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".npy", ".parquet", ".h5ad")
PACKAGES = {".parquet": "pyarrow.parquet", ".h5ad": "anndata"}
"""Endings that need an optional package."""


def one_of(names: Sequence[str]) -> Callable[[str | None], str | None]:
    """A check for an option: one of these names, or a usage error that names the nearest."""

    def check(value: str | None) -> str | None:
        if value is None or value in names:
            return value
        raise typer.BadParameter(unknown(value, names))

    return check


def unknown(value: str, names: Sequence[str]) -> str:
    """What to say about a name that is none of these."""
    near = difflib.get_close_matches(value.lower(), names, n=1, cutoff=0.4)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    return f"{value!r} is not one of {', '.join(names)}.{guess}"


def faulty_named(value: str) -> str:
    """What the library calls it."""
    one_of(FAULTY)(value)
    return value.replace("-", " ")


def finite(value: float | None) -> float | None:
    """A check for an option: a number, and neither NaN nor infinite."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def positive(value: float | None) -> float | None:
    """A check for an option: a finite number of more than 0."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise typer.BadParameter(f"{value} is not a finite number of more than 0.")
    return value


def program_named(settings: FederationSettings) -> Any:
    """The program of a federation."""
    from partsong.estimators.parameters import alignment_of, program_of
    from partsong.methods import recipes
    from partsong.methods.game import PlayInStrata

    rank, steps = settings.n_components, settings.local_steps
    if settings.method == LOCAL_ONLY:
        return recipes.local_only(rank, steps=steps)
    if settings.is_game:
        return PlayInStrata(rank, recipes.game_named(settings.rules()), repeats=steps)
    return program_of(settings.method, rank, steps=steps, align=alignment_of(settings.align), start=settings.start)


def engine_named(name: str, threads: int, record: bool) -> Engine:
    """The engine of a simulated federation; both give the same bits."""
    from partsong.engines.local import Parallel, Sequential

    return Sequential(record=record) if name == "sequential" else Parallel(threads, record=record)
