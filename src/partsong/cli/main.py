"""The entry point `partsong`: a table of commands, each loaded when it is run, so that help and errors are quick."""

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
    exit_code,
    failure,
    leave,
    put_failure,
    show_tracebacks,
    spell_out_what_cannot_be_written,
)
from partsong.core import renamed
from partsong.core.runtime import package_version

# ---- commands ---------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """The module of a command, a function of its name or a typer `app`; and its line in the list of commands."""

    module: str
    summary: str

    def load(self, command: str) -> Any:
        """The command, as if it had been added to the app directly, with the examples of its module."""
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
PLACES = {
    "fit": Place(
        "partsong.cli.fit", "Learn parts from data: X ≈ W H. A folder of parts is fitted as a simulated federation."
    ),
    "transform": Place(
        "partsong.cli.model", "Weights of new rows: the non-negative least squares fit of each row to a model's parts."
    ),
    "check": Place(
        "partsong.cli.data",
        "Say what is wrong with data, where, and the way out; exit code 0 if they can be factorized, 1 if not.",
    ),
    "split": Place("partsong.cli.data", "Split a table among parties, to try out a federation on one machine."),
    "info": Place(
        "partsong.cli.model", "Show a model: its shape, error and settings, and the top features of each component."
    ),
    "compare": Place(
        "partsong.cli.compare",
        "Compare models that parties learn alone, together, and from pooled rows; in simulation.",
    ),
    "attack": Place(
        "partsong.cli.attack",
        "Try on a recorded run what an honest-but-curious server, or all parties but one, could work out of it.",
    ),
    "demo": Place(
        "partsong.cli.demo", "Fit a small federation, compare it with the pooled data, and write a report (.html)."
    ),
    "topics": Place(
        "partsong.cli.topics", "Topics of texts, in one file or spread over parties that keep their texts."
    ),
    "federation": Place(
        "partsong.federation.commands.server",
        "Run experiments between institutions: one coordinator, and sites that keep their rows.",
    ),
    "audit": Place(
        "partsong.federation.commands.audit",
        "What has left a site: every message out, without values, in a log that cannot be changed unseen.",
    ),
}
"""The commands in the order of the list; a test compares the lines with what the commands say of themselves."""


# ---- usage ------------------------------------------------------------------------------------------------------
#
# A command line that is wrong: told to programs as well, where --json stands on it.


class Commands(TyperGroup):
    """All commands: with --json a usage error ends with one object too, and Ctrl-C has one exit code everywhere."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = {name: TyperCommand(name, help=place.summary) for name, place in PLACES.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command by that name, loaded now; help takes the lines of the list instead."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and PLACES[str(name)].load(str(name)), rest

    def main(self, args: Sequence[str] | None = None, *rest: Any, **more: Any) -> Any:
        """Run, and tell of a usage error once more after people have been told."""
        try:
            return super().main(args, *rest, **more)
        except SystemExit as end:
            error = end.__context__
            options = list(sys.argv[1:] if args is None else args)
            if isinstance(error, UsageError) and "--json" in options[: [*options, "--"].index("--")]:
                put_failure(failure(error, int(end.code or 0)))
            raise

    def invoke(self, ctx: Any) -> Any:
        """Read the options of the command and run it; older versions of typer end with 1 after Ctrl-C."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(exit_code()) from None
        except UsageError as error:
            _name_renamed(error)
            raise


def _name_renamed(error: Any) -> None:
    """Name the present option or command in the error of an old one."""
    wrong = re.match(r"No such (?:option|command):? '?([\w-]+)", error.message)
    if wrong and (new := {**renamed.OPTIONS, **renamed.COMMANDS}.get(wrong[1])):
        error.message, error.possibilities = f"{wrong[1]} is called {new} since version 0.2.0.", None


# ---- main -------------------------------------------------------------------------------------------------------

app = typer.Typer(
    name="partsong",
    cls=Commands,
    help="Non-negative matrix factorization X ≈ W H, of data in one place or spread over parties that keep their rows.",
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
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and stop.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error: partsong --debug fit …")
    ] = False,
) -> None:
    """Options before the command."""
    show_tracebacks(debug)


def main() -> None:
    """Run the command line; ends the process with its exit code."""
    spell_out_what_cannot_be_written()
    try:
        try:
            app(prog_name="partsong")
        except SystemExit as end:
            leave(end.code)
    except KeyboardInterrupt:  # once more, on the way out
        leave(exit_code())


if __name__ == "__main__":
    main()
