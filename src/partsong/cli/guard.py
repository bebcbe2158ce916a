"""What stands between a command and the shell: exit codes, plain messages, and Ctrl-C."""

from __future__ import annotations

import errno
import functools
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import typer

from partsong.cli.outputs import visible
from partsong.errors import PartsongError

BAD_INPUT = 1
INTERRUPTED = 130

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(slots=True)
class _Setting:
    shows_tracebacks: bool = False


_setting = _Setting()


def show_tracebacks(wanted: bool) -> None:
    """Set by `--debug` before a command runs."""
    _setting.shows_tracebacks = wanted


def guarded(command: Command) -> Command:
    """The command, with every expected error as a plain message on standard error and an exit code."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt:
            typer.echo("Interrupted; no result was saved.", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except (PartsongError, MemoryError, OSError) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise
            tell(error)
            raise typer.Exit(BAD_INPUT) from error

    return cast(Command, run)


def tell(error: BaseException) -> None:
    """The error in plain words, with what was added on its way; with `--debug`, all of where it came from."""
    if _setting.shows_tracebacks:
        typer.echo("".join(traceback.format_exception(error)), err=True)
        return
    message = _as_options(str(error).strip() or type(error).__name__)
    if isinstance(error, MemoryError):
        message = "There is not enough memory for this. Use --dtype float32, a sparse format, or .npy (read from disk)."
    for line in (*f"Error: {message}".splitlines(), *getattr(error, "__notes__", ())):
        typer.echo(visible(line), err=True)


def _as_options(message: str) -> str:
    """Arguments of functions, as a message may name them, spelled as options: label= is --label."""
    message = re.sub(r"\b(label|key)=(?=[\s).,;]|$)", r"--\1", message)
    message = re.sub(r"\b(label|key)=(?=['\"])", r"--\1 ", message)
    return message.replace("transpose=True", "--transpose").replace("drop_extra=True", "--drop-extra")


@dataclass(slots=True)
class Interrupts:
    """How often Ctrl-C was pressed while it was held back."""

    count: int = 0


@contextmanager
def holding_interrupts(note: str) -> Iterator[Interrupts]:
    """Within this block the first Ctrl-C is only counted (and `note` is shown); the second breaks off."""
    pressed = Interrupts()

    def hold(*_: object) -> None:
        pressed.count += 1
        if pressed.count > 1:
            raise KeyboardInterrupt
        typer.echo(note, err=True)

    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if is_ignored or threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    before = signal.signal(signal.SIGINT, hold)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
