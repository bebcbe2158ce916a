"""`partsong fit`: factorize a file, a folder of parts, or one file over ranks."""

from __future__ import annotations

import inspect
from copy import copy
from typing import Annotated, Any, get_args

import typer

from partsong import methods
from partsong.cli.fit_options import CHOICES, KNOWN, METHOD_PANEL, PARAMETERS, RANKED, FitOptions
from partsong.console.options import examples, parameters_of, with_options
from partsong.console.output import handle_errors, option

EPILOG = examples(
    "partsong fit counts.csv -k 20 -o model.safetensors --weights W.csv",
    "partsong fit big.npy -k 50 -o model.safetensors --checkpoint fit.ckpt --time-budget 3600",
    "partsong fit big.npy -o model.safetensors --resume fit.ckpt",
    "partsong split counts.h5ad --parties 5 --by hospital -o parts/ && partsong fit parts/ -k 20 -o model.safetensors",
    "partsong fit parts/ -k 20 --epsilon 3 --unit row --row-bound 10 --secure-aggregation -o model.safetensors",
    "mpiexec -n 4 partsong fit X.npz -k 50 --method dsanls --engine mpi -o model.safetensors --weights W.npy",
)

BASIC = frozenset({
    "data", "output", "weights", "run_folder", "n_components", "solver", "max_iter", "tol", "rounds", "method",
    "engine", "secure_aggregation", "epsilon", "seed", "as_json", "quiet", "help_all",
})  # fmt: skip
"""The options that `--help` shows; `--help-all` shows all."""


def _show_all(ctx: typer.Context, is_wanted: bool) -> None:
    if is_wanted:
        for parameter in ctx.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
            if parameter.name == "method":
                short = parameter.help.replace(" --help-all describes all methods.", "")  # type: ignore[attr-defined]
                summaries = (f"{name}: {methods.TABLE[name].summary}" for name in KNOWN)
                parameter.help = f"{short} {' '.join(summaries)}"  # type: ignore[attr-defined]
        typer.echo(ctx.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool, typer.Option("--help-all", callback=_show_all, is_eager=True, help="Show all options and exit.")
]


def _parameters() -> list[inspect.Parameter]:
    """Return the fields of `FitOptions`, the parameters of methods and --help-all; only basic ones are shown."""
    found = [one for one in parameters_of(FitOptions) if one.name != "method_options"]
    for name in PARAMETERS:
        values = f": {', '.join(CHOICES[name])}" if name in CHOICES else ""
        help = f"{', '.join(methods.names_with(name, KNOWN))}{values}."
        shown = typer.Option(option(name), help=help, rich_help_panel=METHOD_PANEL, metavar="VALUE")
        found.append(_keyword(name, Annotated[str | None, shown], None))
    found.append(_keyword("help_all", HelpAll, False))
    return [_keyword("ctx", typer.Context), *map(_as_basic, found)]


def _keyword(name: str, hint: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _as_basic(parameter: inspect.Parameter) -> inspect.Parameter:
    """Hide a parameter from --help unless it is basic."""
    kind, shown = get_args(parameter.annotation)
    shown = copy(shown)  # other commands share some of them
    shown.hidden = parameter.name not in BASIC
    return parameter.replace(annotation=Annotated[kind, shown])


@with_options(_parameters())
@handle_errors
def fit(ctx: typer.Context, help_all: bool = False, **values: Any) -> None:
    """Factorize data: X ≈ W H. A folder of parts is fitted as a simulated federation.

    The line "exposure" of the result says what could be computed from everything the parties sent: with enough
    rounds × components, their rows (docs/reference/exposure.md).
    """
    named = {name: value for name in PARAMETERS if (value := values.pop(name)) is not None}
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    given = frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")
    options = FitOptions(**values, method_options=named)
    if options.engine in RANKED:
        from partsong.cli.ranks import run_over_ranks

        run_over_ranks(options, given)
    else:
        from partsong.cli.fit_session import run_fit

        run_fit(options, given)
