"""What stands between a command and the shell: exit codes, plain messages, and signals."""

from __future__ import annotations

import errno
import functools
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import typer

from partsong.cli.outputs import put_failure, visible
from partsong.cli.termination import exit_code, sigterm_as_interrupt
from partsong.cli.wording import as_options
from partsong.errors import PartsongError

BAD_INPUT = 1
NOTHING_SAVED = "Interrupted; no result was saved."

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(slots=True)
class _Setting:
    shows_tracebacks: bool = False


_setting = _Setting()


def show_tracebacks(wanted: bool) -> None:
    """Set by `--debug` before a command runs."""
    _setting.shows_tracebacks = wanted


def guarded(command: Command) -> Command:
    """The command, with every expected error as a plain message on standard error and an exit code.

    With --json the last line of standard output is one object in this case as well: what `failure` tells.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        is_json = bool(kwargs.get("as_json"))
        with sigterm_as_interrupt():
            try:
                return command(*args, **kwargs)
            except KeyboardInterrupt as error:
                typer.echo(NOTHING_SAVED, err=True)
                if is_json:
                    put_failure(failure(error, exit_code()))
                raise typer.Exit(exit_code()) from None
            except (PartsongError, MemoryError, OSError) as error:
                if isinstance(error, OSError) and error.errno == errno.EPIPE:
                    raise
                tell(error)
                if is_json:
                    put_failure(failure(error, BAD_INPUT))
                raise typer.Exit(BAD_INPUT) from error
            except (typer.Exit, typer.BadParameter):
                raise
            except Exception as error:  # a fault of our own: its traceback is wanted, but so is the object
                if is_json:
                    put_failure(failure(error, BAD_INPUT))
                raise

    return cast(Command, run)


def failure(error: BaseException, code: int) -> dict[str, Any]:
    """What --json says of a command that failed: the message, the class of the error, the exit code."""
    notes = () if isinstance(error, KeyboardInterrupt) else getattr(error, "__notes__", ())
    message = " ".join((plain(error), *notes))
    return {"error": message, "type": type(error).__name__, "exit_code": code}


def tell(error: BaseException) -> None:
    """The error in plain words, with what was added on its way; with `--debug`, all of where it came from."""
    if _setting.shows_tracebacks:
        typer.echo("".join(traceback.format_exception(error)), err=True)
        return
    for line in (*f"Error: {plain(error)}".splitlines(), *getattr(error, "__notes__", ())):
        typer.echo(visible(line), err=True)


def plain(error: BaseException) -> str:
    """The message of an error, in the words of the command line."""
    if isinstance(error, MemoryError):
        return "There is not enough memory for this. Use --dtype float32, a sparse format, or .npy (read from disk)."
    if isinstance(error, KeyboardInterrupt):
        return NOTHING_SAVED
    return as_options(str(error).strip() or type(error).__name__)
