"""The entry point `partsong`; commands load what they need when they run, so that help is quick."""

from __future__ import annotations

from typing import Annotated

import typer

import partsong
from partsong.cli import attack, audit, check, compare, demo, federation, fit, guard, info, split, topics, transform
from partsong.cli.outputs import spell_out_what_cannot_be_written
from partsong.cli.termination import exit_code, leave
from partsong.cli.usage import Commands

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
    guard.show_tracebacks(debug)


app.command(epilog=fit.EPILOG)(fit.fit)
app.command(epilog=transform.EPILOG)(transform.transform)
app.command(epilog=check.EPILOG)(check.check)
app.command(epilog=split.EPILOG)(split.split)
app.command(epilog=info.EPILOG)(info.info)
app.command(epilog=compare.EPILOG)(compare.compare)
app.command(epilog=attack.EPILOG)(attack.attack)
app.add_typer(topics.app, name="topics")
app.command(epilog=demo.EPILOG)(demo.demo)
app.add_typer(federation.app)
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
