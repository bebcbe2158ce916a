"""Options that several commands share."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Optional

import typer

# Typer before 0.12.4 does not know `Path | None`.
OptionalPath = Optional[Path]  # noqa: UP045
OptionalText = Optional[str]  # noqa: UP045
OptionalInt = Optional[int]  # noqa: UP045
OptionalFloat = Optional[float]  # noqa: UP045
OptionalBool = Optional[bool]  # noqa: UP045

MODEL_ENDINGS = (".safetensors",)
WEIGHT_ENDINGS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".npy", ".parquet", ".h5ad")
REFUSE, IGNORE = MISSING = ("refuse", "ignore")
FAULTY = ("stop", "leave-out")
DTYPES = ("float32", "float64")

Data = Annotated[
    Path,
    typer.Argument(
        metavar="DATA",
        help="A .csv, .tsv, .npy, .npz, .mtx, .parquet or .h5ad file, or a folder with matrix.mtx. Rows are samples.",
        show_default=False,
    ),
]
Label = Annotated[
    OptionalText,
    typer.Option(
        help="Name of a column (.npz: array) that is not a feature: labels, or an identifier.",
        rich_help_panel="Reading",
    ),
]
Transpose = Annotated[
    bool,
    typer.Option(
        "--transpose", help="The file holds features in rows and samples in columns.", rich_help_panel="Reading"
    ),
]
Key = Annotated[
    OptionalText,
    typer.Option(
        help="Which array of an .npz, or layer of an .h5ad, to read, if not the main one.", rich_help_panel="Reading"
    ),
]
Header = Annotated[
    OptionalBool,
    typer.Option(
        "--header/--no-header",
        help="Whether the first line of a .csv or .tsv names the columns; numbers, such as years, need --header.",
        show_default="as it looks",
        rich_help_panel="Reading",
    ),
]
Threads = Annotated[
    OptionalInt,
    typer.Option(min=1, help="Threads to use.", show_default="all cores", rich_help_panel="Computing"),
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON object, and nothing else, on standard output; on failure, also by wrong options, one with "
        "error, type and exit_code.",
    ),
]


def examples(*lines: str) -> str:
    """Examples for the end of a help page, one per line."""
    return "\n\n".join(("Examples:", *lines))


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


def positive(value: float | None) -> float | None:
    """A check for an option: a finite number of more than 0."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise typer.BadParameter(f"{value} is not a finite number of more than 0.")
    return value
