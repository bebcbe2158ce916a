"""What commands leave behind: lines for people, one JSON object for programs, files that are checked beforehand."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import json
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import typer

from partsong.console.options import MODEL_ENDINGS, WEIGHT_ENDINGS
from partsong.core.runtime import trigger
from partsong.errors import FileError, MissingExtra, PartsongError
from partsong.io.opening import resolve_path
from partsong.io.write import as_json, first_formula, require_writable_file

# ---- options ----------------------------------------------------------------------------------------------------
#
# The library says "n_components must be ..." and names the parameter; the command line says "--components must be ...".

OPTIONS = {
    "column": "--text-column",
    "kernel_threads": "--threads",
    "n_components": "--components",
    "n_jobs": "--threads",
    "n_threads": "--threads",
    "n_topics": "--topics",
    "order": "--game-order",
    "play": "--game-order",
    "random_state": "--seed",
}
"""Options that have another name than the parameter of the library."""


@dataclass(slots=True)
class _Running:
    """The command that runs: the names of its arguments, and what --debug and signals have set."""

    arguments: Collection[str] = ()
    shows_tracebacks: bool = False
    got_sigterm: bool = False


_running = _Running()


def option(parameter: str) -> str:
    """The option that sets a parameter of the library."""
    return OPTIONS.get(parameter, f"--{parameter.lower().replace('_', '-')}")


def with_option(message: str, parameter: str | None) -> str:
    """The message with the option in the place of the parameter's name, or in front where the message begins otherwise.

    A parameter that the running command has no option for, such as a key of a file, keeps its name.
    """
    if parameter is None or {parameter, option(parameter)[2:].replace("-", "_")}.isdisjoint(_running.arguments):
        return message
    before, _, rest = f": {message}".partition(f": {parameter}")
    if rest[:1] in (" ", "="):
        return f"{before}: {option(parameter)} {rest[1:]}"[2:]
    return f"{option(parameter)}: {message}"


# ---- outputs ----------------------------------------------------------------------------------------------------

PACKAGES = {".parquet": "pyarrow.parquet", ".h5ad": "anndata"}
"""Endings that need an optional package."""

FAILING = ("strict", "surrogateescape", "surrogatepass")
"""What streams do about characters outside their encoding that can end in an error."""


def put_json(content: Mapping[str, Any]) -> None:
    """One JSON object on one line of standard output."""
    typer.echo(json.dumps(as_json(content), allow_nan=False))


def put_result(told: Mapping[str, Any], lines: Iterable[str], as_json: bool, quiet: bool = False) -> None:
    """What a command came to: one JSON object, or lines for people, or nothing."""
    if as_json:
        put_json(told)
    elif not quiet:
        for line in lines:
            typer.echo(line)


def facts(pairs: Iterable[tuple[str, object]], width: int) -> list[str]:
    """Names and values, a line for each; values begin in one column."""
    return [f"{name:<{width}}{value}" for name, value in pairs]


def put_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table for people, as wide as the terminal allows."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*titles, box=None, header_style="bold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)


def put_failure(content: Mapping[str, Any]) -> None:
    """The same about a command that failed; where nothing can be written either, its exit code has to do."""
    with contextlib.suppress(OSError):
        put_json(content)


def visible(name: object) -> str:
    """A name that cannot disturb a terminal: line breaks and control characters are spelled out."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "backslashreplace").decode()
        for letter in str(name)
    )


def spell_out_what_cannot_be_written() -> None:
    """Let standard output and error take every character: those outside their encoding are spelled out.

    An error handler that was asked for (PYTHONIOENCODING=cp1252:replace) and that never fails is left alone.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in FAILING:
            stream.reconfigure(errors="backslashreplace")


def warn(message: str) -> None:
    """What a person should know although the command goes on; on standard error."""
    typer.echo(visible(f"Warning: {message}"), err=True)


def warn_of_formulas(path: Path, names: Iterable[str] | None) -> None:
    """Warn of names in a text file that a spreadsheet would take for formulas; they are never changed."""
    name = path.name.lower().removesuffix(".gz")
    found = first_formula(names or ()) if name.endswith((".csv", ".tsv")) else None
    if found is not None:
        warn(
            f"{path}: a spreadsheet takes the name {found!r} for a formula and may run it. It was written as it is; "
            "rename it, or import that column as text."
        )


def require_writable(option: str, path: Path | None, endings: Sequence[str] = ()) -> None:
    """Refuse, before anything is computed, a file that could not be written afterwards; None is no file."""
    if path is None:
        return
    name = path.name.lower()
    if endings and not name.endswith(tuple(endings)):
        raise typer.BadParameter(f"{path}: the name must end in {' or '.join(endings)}.", param_hint=option)
    package = next((package for ending, package in PACKAGES.items() if endings and name.endswith(ending)), None)
    if package is not None and importlib.util.find_spec(package.partition(".")[0]) is None:
        raise MissingExtra(
            f"{option} {path}: needs {package.partition('.')[0]}, which is not installed. "
            'Install it: pip install "partsong[io]", or write .csv instead.'
        )
    require_writable_file(option, resolve_path(path))


def require_distinct(paths: Mapping[str, Path | None]) -> None:
    """Refuse two uses of one file, such as a model that would overwrite the data."""
    seen: dict[str, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        place = os.path.realpath(resolve_path(path))
        if place in seen:
            raise typer.BadParameter(f"{seen[place]} is the same file: {path}. Choose another.", param_hint=option)
        seen[place] = option


def require_transform_files(command: str, data: Path, model: Path, output: Path) -> None:
    """Refuse an output that would replace an input or cannot be written, and the model in the place of the data."""
    require_distinct({"DATA": data, "MODEL": model, "--output": output})
    require_writable("--output", output, WEIGHT_ENDINGS)
    if data.name.endswith(MODEL_ENDINGS) and not model.name.endswith(MODEL_ENDINGS):
        raise FileError(f"{data}: this looks like the model, which comes second: {command} {model} {data}.")


# ---- termination ------------------------------------------------------------------------------------------------
#
# Signals: SIGTERM, which batch systems send before they kill, goes the way of Ctrl-C; both have their exit code.

INTERRUPTED = 130
TERMINATED = 143


def exit_code() -> int:
    """128 + the number of the signal that ended this command: 143 after SIGTERM, 130 after Ctrl-C."""
    return TERMINATED if _running.got_sigterm else INTERRUPTED


def adopt(code: int) -> None:
    """Take over the exit code of another rank of the same run, which a signal has ended."""
    _running.got_sigterm = code == TERMINATED


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Within this block SIGTERM goes the way of SIGINT; a handler of somebody else's is left alone.

    Where SIGINT is ignored, as in the background job of a script, SIGTERM still ends the command.
    """
    _running.got_sigterm = False

    def pass_on(*_: object) -> None:
        _running.got_sigterm = True
        if callable(signal.getsignal(signal.SIGINT)):
            signal.raise_signal(signal.SIGINT)
        elif not trigger():
            raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def leave(code: object) -> NoReturn:
    """End the process with this exit code, which no further signal can change: nothing is left to interrupt.

    After an interrupt the threads that still compute are not waited for.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if code in (INTERRUPTED, TERMINATED):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(exit_code())
    sys.exit(code)  # type: ignore[arg-type]


# ---- guard ------------------------------------------------------------------------------------------------------
#
# What stands between a command and the shell: exit codes, plain messages, and signals.

BAD_INPUT = 1
NOTHING_SAVED = "Interrupted; no result was saved."
UsageError: type[BaseException] = typer.BadParameter.__mro__[1]  # typer does not name it, and may or may not use click
EXPECTED = (PartsongError, MemoryError, OSError, KeyboardInterrupt)

Command = TypeVar("Command", bound=Callable[..., Any])


def show_tracebacks(wanted: bool) -> None:
    """Set by `--debug` before a command runs."""
    _running.shows_tracebacks = wanted


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Within this block warnings for people are lines on standard error, each once; others are shown as Python does."""

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, UserWarning):
            warn(str(message))
        else:
            as_before(message, category, *place, **more)

    with warnings.catch_warnings():
        as_before = warnings.showwarning
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = show
        yield


def guarded(command: Command) -> Command:
    """The command, with every expected error as a plain message on standard error and an exit code.

    With --json the last line of standard output is one object in this case as well: what `failure` tells.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        is_json = bool(kwargs.get("as_json"))
        _running.arguments = frozenset(kwargs)
        with sigterm_as_interrupt(), warnings_as_lines():
            try:
                return command(*args, **kwargs)
            except (typer.Exit, typer.BadParameter, BrokenPipeError):
                raise
            except (Exception, KeyboardInterrupt) as error:
                code = exit_code() if isinstance(error, KeyboardInterrupt) else BAD_INPUT
                is_expected = isinstance(error, EXPECTED)  # of a fault of our own the traceback is wanted
                if is_expected:
                    tell(error)
                if is_json:
                    put_failure(failure(error, code))
                if is_expected:
                    raise typer.Exit(code) from error
                raise

    return cast(Command, run)


def failure(error: BaseException, code: int) -> dict[str, Any]:
    """What --json says of a command that failed: the message, the class of the error, the exit code."""
    notes = () if isinstance(error, KeyboardInterrupt) else getattr(error, "__notes__", ())
    kind = UsageError if isinstance(error, UsageError) else type(error)
    return {"error": " ".join((plain(error), *notes)), "type": kind.__name__, "exit_code": code}


def tell(error: BaseException) -> None:
    """The error in plain words, with what was added on its way; with `--debug`, all of where it came from."""
    if isinstance(error, KeyboardInterrupt):
        typer.echo(NOTHING_SAVED, err=True)
    elif _running.shows_tracebacks:
        typer.echo("".join(traceback.format_exception(error)), err=True)
    else:
        for line in (*f"Error: {plain(error)}".splitlines(), *getattr(error, "__notes__", ())):
            typer.echo(visible(line), err=True)


def plain(error: BaseException) -> str:
    """The message of an error, in the words of the command line."""
    if isinstance(error, MemoryError):
        return "There is not enough memory for this. Use --dtype float32, a sparse format, or .npy (read from disk)."
    if isinstance(error, KeyboardInterrupt):
        return NOTHING_SAVED
    if isinstance(error, UsageError):
        return str(error.format_message())  # type: ignore[attr-defined]
    return with_option(str(error).strip() or type(error).__name__, getattr(error, "parameter", None))
