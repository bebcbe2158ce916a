"""Options that several commands share."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from partsong.core.renamed import hint

Command = TypeVar("Command", bound=Callable[..., Any])

MODEL_ENDINGS = (".safetensors",)
WEIGHT_ENDINGS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".npy", ".parquet", ".h5ad")
REFUSE, IGNORE = MISSING = ("refuse", "ignore")
RAISE, SKIP = ON_PARTY_ERROR = ("raise", "skip")
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
    str | None,
    typer.Option(
        help="Column (.npz: array) that is not a feature: labels or an identifier.",
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
    str | None,
    typer.Option(
        help="Array of an .npz file or layer of an .h5ad file to read instead of the main one.",
        rich_help_panel="Reading",
    ),
]
Header = Annotated[
    bool | None,
    typer.Option(
        "--header/--no-header",
        help="Whether the first line of a .csv or .tsv file holds column names. Numeric names (years) need --header.",
        show_default="detected",
        rich_help_panel="Reading",
    ),
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads to use.", show_default="all cores", rich_help_panel="Computing")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No summary.")]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON object on standard output and nothing else. After a failure, including a usage error, it "
        "holds error, type and exit_code.",
    ),
]


def examples(*lines: str) -> str:
    """Format the examples at the end of a help page, one per line."""
    return "\n\n".join(("Examples:", *lines))


def opt(default: Any, panel: str | None, help: str, *names: str, choices: Sequence[str] = (), **more: Any) -> Any:
    """Make a field of an options dataclass: its help panel, help text and choices."""
    if choices:
        help, more["callback"] = f"{help} One of {', '.join(choices)}.", one_of(choices)
    return field(default=default, metadata={"option": typer.Option(*names, help=help, rich_help_panel=panel, **more)})


def parameters_of(options: type) -> list[inspect.Parameter]:
    """Return the fields of an options dataclass as parameters of a command."""
    found, hints = [], get_type_hints(options, include_extras=True)
    for one in fields(options):
        hint: Any = hints[one.name]
        if "option" in one.metadata:
            hint = Annotated[hint, one.metadata["option"]]
        default = inspect.Parameter.empty if one.default is NO_DEFAULT else one.default
        found.append(inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint))
    return found


def with_options(parameters: Sequence[inspect.Parameter]) -> Callable[[Command], Command]:
    """Give a command that takes **kwargs these parameters as its arguments and options."""

    def described(command: Command) -> Command:
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return described


def one_of(names: Sequence[str]) -> Callable[[str | None], str | None]:
    """Return a check for an option: one of these names, or a usage error that suggests the nearest."""

    def check(value: str | None) -> str | None:
        if value is None or value in names:
            return value
        raise typer.BadParameter(unknown(value, names))

    return check


def unknown(value: str, names: Sequence[str]) -> str:
    """Describe an unknown name, the known ones and the nearest."""
    near = difflib.get_close_matches(value.lower(), names, n=1, cutoff=0.4)
    guess = f" {hint(value, names)}".rstrip() or (f" Did you mean {near[0]!r}?" if near else "")
    return f"{value!r} is not one of {', '.join(names)}.{guess}"


def positive(value: float | None) -> float | None:
    """Check an option: a finite number above 0."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise typer.BadParameter(f"{value} is not a finite number above 0.")
    return value
