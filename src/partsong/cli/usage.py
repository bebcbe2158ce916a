"""A command line that is wrong: told to programs as well, where --json stands on it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from partsong.cli.outputs import put_failure
from partsong.cli.termination import exit_code

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
