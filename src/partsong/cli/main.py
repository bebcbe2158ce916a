"""The entry point `partsong`: a table of commands, each imported only when it runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, Literal, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from partsong.console.output import (
    UsageError,
    escape_unprintable_output,
    exit_code,
    failure,
    leave,
    put_failure,
    show_tracebacks,
)
from partsong.core import renamed
from partsong.core.runtime import package_version

# ---- commands ---------------------------------------------------------------------------------------------------


class CommandSpec(NamedTuple):
    """The module of a command, which has a function of its name or a typer `app`, and its summary."""

    module: str
    summary: str

    def load(self, command: str) -> Any:
        """Import the command, with the examples of its module."""
        module = import_module(self.module)
        outer = typer.Typer(callback=lambda: None, rich_markup_mode=RICH, add_completion=False)
        if hasattr(module, "app"):
            outer.add_typer(module.app, name=command)
        else:
            epilog = getattr(module, f"{command.upper()}_EPILOG", None) or module.EPILOG
            outer.command(command, epilog=epilog)(getattr(module, command))
        group: Any = typer.main.get_command(outer)
        return group.commands[command]


RICH: Literal["rich"] = "rich"
COMMANDS = {
    "fit": CommandSpec(
        "partsong.cli.fit", "Factorize data: X ≈ W H. A folder of parts is fitted as a simulated federation."
    ),
    "transform": CommandSpec(
        "partsong.cli.model",
        "Compute the weights of new rows: the non-negative least squares fit of each row to a model's components.",
    ),
    "check": CommandSpec(
        "partsong.cli.data",
        "Check data: what is wrong, where, and how to fix it. Exit code 0 if they can be factorized, else 1.",
    ),
    "split": CommandSpec(
        "partsong.cli.data", "Split a table among simulated parties, to try a federation on one machine."
    ),
    "info": CommandSpec(
        "partsong.cli.model", "Show a model: shape, error, settings, and the top features of each component."
    ),
    "compare": CommandSpec(
        "partsong.cli.compare",
        "Compare, in simulation, the models that parties learn alone, together, and from pooled rows.",
    ),
    "attack": CommandSpec(
        "partsong.cli.attack",
        "Attack a recorded run as an honest-but-curious server, or as all parties but one.",
    ),
    "demo": CommandSpec(
        "partsong.cli.demo", "Fit a small federation, compare it with pooled data, and write a report (.html)."
    ),
    "topics": CommandSpec(
        "partsong.cli.topics",
        "Fit, show and apply topic models of texts, in one file or at several parties that keep their texts.",
    ),
    "federation": CommandSpec(
        "partsong.federation.commands.server",
        "Run experiments between institutions: one coordinator, and sites that keep their rows.",
    ),
    "audit": CommandSpec(
        "partsong.federation.commands.audit",
        "Show what has left a site: every message sent, without values, in a tamper-evident log.",
    ),
}
"""The commands in the order of the help page. A test compares the summaries with the docstrings of the commands."""


# ---- usage ------------------------------------------------------------------------------------------------------
#
# Usage errors, which --json reports as well.


class Commands(TyperGroup):
    """The group of all commands: --json reports usage errors too, and Ctrl-C has one exit code everywhere."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = {name: TyperCommand(name, help=spec.summary) for name, spec in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the named command; the help page uses the summaries instead."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and COMMANDS[str(name)].load(str(name)), rest

    def main(self, args: Sequence[str] | None = None, *rest: Any, **more: Any) -> Any:
        """Run; with --json, also print a usage error as an object."""
        try:
            return super().main(args, *rest, **more)
        except SystemExit as end:
            error = end.__context__
            options = list(sys.argv[1:] if args is None else args)
            if isinstance(error, UsageError) and "--json" in options[: [*options, "--"].index("--")]:
                put_failure(failure(error, int(end.code or 0)))
            raise

    def invoke(self, ctx: Any) -> Any:
        """Parse and run the command. Older versions of typer exit with 1 after Ctrl-C."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(exit_code()) from None
        except UsageError as error:
            _name_renamed(error)
            raise


def _name_renamed(error: Any) -> None:
    """Name the new option or command in the error about an old one."""
    wrong = re.match(r"No such (?:option|command):? '?([\w-]+)", error.message)
    if wrong and (new := {**renamed.OPTIONS, **renamed.COMMANDS}.get(wrong[1])):
        error.message, error.possibilities = f"{wrong[1]} is called {new} since version 0.2.0.", None


# ---- main -------------------------------------------------------------------------------------------------------

app = typer.Typer(
    name="partsong",
    cls=Commands,
    help="Non-negative matrix factorization X ≈ W H of data in one place, or spread over parties that keep their rows.",
    epilog="Start with: partsong demo",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=RICH,
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"partsong {package_version()}")
        raise typer.Exit


@app.callback()
def begin(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error: partsong --debug fit …")
    ] = False,
) -> None:
    """Handle the options before the command."""
    show_tracebacks(debug)


def main() -> None:
    """Run the command line and exit with its code."""
    escape_unprintable_output()
    try:
        try:
            app(prog_name="partsong")
        except SystemExit as end:
            leave(end.code)
    except KeyboardInterrupt:  # a further Ctrl-C while exiting
        leave(exit_code())


if __name__ == "__main__":
    main()
