"""Names on the command line; those of methods and their parts are in the table of the registry."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from partsong import methods
from partsong.training.distributed_settings import IGNORE, RANK_SOLVERS

if TYPE_CHECKING:
    from partsong.cli.fit_settings import FederationSettings
    from partsong.core.interfaces import Engine

CHOICES = methods.CHOICES
SOLVERS = CHOICES["rule"]
GAME = "game"
"""A solver of one table, and a method between parties and over ranks."""
INITS = ("auto", "anchors", "random", "nndsvd", "nndsvda", "nndsvdar")
DTYPES = ("float32", "float64")
RANKED = ("mpi", "torch")
"""Engines that split one file over processes which mpiexec or torchrun has started."""
ENGINES = ("sequential", "parallel", *RANKED)
FAULTY = ("stop", "leave-out")
CENTRALISED = "centralised"

AT_ONCE = ("simultaneous", "alternating")
PLAYS = CHOICES["order"]
SELF_PLAYS = CHOICES["self_play"]
SHRINK = 0.99
LEADERS = CHOICES["leader"]
MISSING = ("refuse", IGNORE)

UNITS = ("row", "party")
RELATIONS_OF = {"row": ("add-or-remove", "replace"), "party": ("replace", "zero-out")}
NOISES = ("gaussian", "laplace")
MASKED_BOUND = 1e9

METHODS = methods.names()
RANK_METHODS = tuple(dict.fromkeys((*RANK_SOLVERS, *methods.names(methods.RANKS))))
WITH_SKETCHES = methods.taking("sketch", methods.names(methods.RANKS))
"""Methods over ranks."""

SUMS = ("all-reduce", "in-order")
SKETCHES = CHOICES["sketch"]

MODEL_ENDINGS = (".safetensors",)
WEIGHT_ENDINGS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".npy", ".parquet", ".h5ad")


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


def is_game(method: str | None) -> bool:
    """Whether a method is played, and takes the options of games."""
    return method in methods.TABLE and "order" in methods.TABLE[method].parameters


def program_named(settings: FederationSettings) -> Any:
    """The program of a federation."""
    from partsong.methods.registry import Problem

    method = methods.method(settings.method)
    options = {**settings.options(method.parameters), **settings.method_options}
    return method.build(Problem(settings.n_components, rounds=settings.rounds), options)


def engine_named(name: str, threads: int, record: bool) -> Engine:
    """The engine of a simulated federation; both give the same bits."""
    from partsong.engines.local import Parallel, Sequential

    return Sequential(record=record) if name == "sequential" else Parallel(threads, record=record)
