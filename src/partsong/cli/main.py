"""The entry point `partsong`; commands load what they need when they run, so that help is quick."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import partsong
from partsong.cli import attack, audit, compare, data, demo, federation_server, fit, model, output, topics
from partsong.cli.output import exit_code, leave, put_failure, spell_out_what_cannot_be_written

# ---- usage ------------------------------------------------------------------------------------------------------
#
# A command line that is wrong: told to programs as well, where --json stands on it.

UsageError: type[BaseException] = typer.BadParameter.__mro__[1]  # typer does not name it, and may or may not use click


class Commands(TyperGroup):
    """All commands: with --json a usage error ends with one object too, and Ctrl-C has one exit code everywhere."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **more: Any) -> Any:
        """Run, and tell of a usage error once more after people have been told."""
        try:
            return super().main(args, *rest, **more)
        except SystemExit as end:
            error = end.__context__
            if isinstance(error, UsageError) and _wants_json(sys.argv[1:] if args is None else args):
                message = error.format_message()  # type: ignore[attr-defined]
                put_failure({"error": message, "type": "UsageError", "exit_code": end.code})
            raise

    def invoke(self, ctx: Any) -> Any:
        """Read the options of the command and run it; older versions of typer end with 1 after Ctrl-C."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(exit_code()) from None


def _wants_json(args: Sequence[str]) -> bool:
    options = args[: args.index("--")] if "--" in args else args
    return "--json" in options


# ---- main -------------------------------------------------------------------------------------------------------

app = typer.Typer(
    name="partsong",
    cls=Commands,
    help="Non-negative matrix factorization X ≈ W H, of data in one place or spread over parties that keep their rows.",
    epilog="Start with: partsong demo",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"partsong {partsong.__version__}")
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
    output.show_tracebacks(debug)


app.command(epilog=fit.EPILOG)(fit.fit)
app.command(epilog=model.EPILOG)(model.transform)
app.command(epilog=data.CHECK_EPILOG)(data.check)
app.command(epilog=data.EPILOG)(data.split)
app.command(epilog=model.INFO_EPILOG)(model.info)
app.command(epilog=compare.EPILOG)(compare.compare)
app.command(epilog=attack.EPILOG)(attack.attack)
app.add_typer(topics.app, name="topics")
app.command(epilog=demo.EPILOG)(demo.demo)
app.add_typer(federation_server.app)
app.add_typer(audit.app)


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
