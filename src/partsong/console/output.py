"""Output of commands: lines for people, one JSON object for programs, error messages and exit codes."""

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
# The library says "n_components must be ..."; the command line says "--components must be ...".

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
"""Options whose name differs from that of the library's parameter."""


@dataclass(slots=True)
class _Running:
    """The running command: the names of its arguments, and what --debug and signals have set."""

    arguments: Collection[str] = ()
    shows_tracebacks: bool = False
    got_sigterm: bool = False


_running = _Running()


def option(parameter: str) -> str:
    """Return the option that sets a parameter of the library."""
    return OPTIONS.get(parameter, f"--{parameter.lower().replace('_', '-')}")


def with_option(message: str, parameter: str | None) -> str:
    """Replace the parameter's name at the start of a message by its option, or put the option in front.

    A parameter without an option of the running command, such as a key of a file, keeps its name.
    """
    if parameter is None or {parameter, option(parameter)[2:].replace("-", "_")}.isdisjoint(_running.arguments):
        return message
    before, _, rest = f": {message}".partition(f": {parameter}")
    if rest[:1] in (" ", "="):
        return f"{before}: {option(parameter)} {rest[1:]}"[2:]
    return f"{option(parameter)}: {message}"


# ---- outputs ----------------------------------------------------------------------------------------------------

PACKAGES = {".parquet": "pyarrow.parquet", ".h5ad": "anndata"}
"""File extensions that need an optional package."""

FAILING = ("strict", "surrogateescape", "surrogatepass")
"""Error handlers of streams that raise on characters outside their encoding."""


def put_json(content: Mapping[str, Any]) -> None:
    """Print one JSON object on one line of standard output."""
    typer.echo(json.dumps(as_json(content), allow_nan=False))


def put_result(result: Mapping[str, Any], lines: Iterable[str], as_json: bool, quiet: bool = False) -> None:
    """Print a result: one JSON object, lines for people, or nothing."""
    if as_json:
        put_json(result)
    elif not quiet:
        for line in lines:
            typer.echo(line)


def facts(pairs: Iterable[tuple[str, object]], width: int) -> list[str]:
    """Format names and values, one pair a line, with the values aligned."""
    return [f"{name:<{width}}{value}" for name, value in pairs]


def put_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, as wide as the terminal allows."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*titles, box=None, header_style="bold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)


def put_failure(content: Mapping[str, Any]) -> None:
    """Print the JSON object of a failed command; if standard output is broken too, the exit code has to suffice."""
    with contextlib.suppress(OSError):
        put_json(content)


def visible(name: object) -> str:
    """Return a name that cannot disturb a terminal: line breaks and control characters are escaped."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "backslashreplace").decode()
        for letter in str(name)
    )


def escape_unprintable_output() -> None:
    """Escape characters that standard output and error cannot encode.

    An error handler that the user chose (PYTHONIOENCODING=cp1252:replace) and that never fails is kept.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in FAILING:
            stream.reconfigure(errors="backslashreplace")


def warn(message: str) -> None:
    """Print a warning on standard error."""
    typer.echo(visible(f"Warning: {message}"), err=True)


def warn_about_formulas(path: Path, names: Iterable[str] | None) -> None:
    """Warn about names in a text file that a spreadsheet would run as formulas; they are never changed."""
    name = path.name.lower().removesuffix(".gz")
    found = first_formula(names or ()) if name.endswith((".csv", ".tsv")) else None
    if found is not None:
        warn(
            f"{path}: a spreadsheet may run the name {found!r} as a formula. The name was written unchanged. "
            "Rename it, or import that column as text."
        )


def require_writable(option: str, path: Path | None, endings: Sequence[str] = ()) -> None:
    """Refuse, before anything is computed, an output file that cannot be written; None means no file."""
    if path is None:
        return
    name = path.name.lower()
    if endings and not name.endswith(tuple(endings)):
        raise typer.BadParameter(f"{path}: the name must end in {' or '.join(endings)}.", param_hint=option)
    package = next((package for ending, package in PACKAGES.items() if endings and name.endswith(ending)), None)
    if package is not None and importlib.util.find_spec(package.partition(".")[0]) is None:
        raise MissingExtra(
            f"{option} {path}: this format needs {package.partition('.')[0]}, which is not installed. "
            'Run pip install "partsong[io]", or write .csv.'
        )
    require_writable_file(option, resolve_path(path))


def require_distinct(paths: Mapping[str, Path | None]) -> None:
    """Refuse one file in two roles, such as a model that would overwrite the data."""
    seen: dict[str, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        place = os.path.realpath(resolve_path(path))
        if place in seen:
            raise typer.BadParameter(f"{path} is also {seen[place]}. Choose another file.", param_hint=option)
        seen[place] = option


def require_transform_files(command: str, data: Path, model: Path, output: Path) -> None:
    """Refuse an output that would replace an input or cannot be written, and swapped DATA and MODEL."""
    require_distinct({"DATA": data, "MODEL": model, "--output": output})
    require_writable("--output", output, WEIGHT_ENDINGS)
    if data.name.endswith(MODEL_ENDINGS) and not model.name.endswith(MODEL_ENDINGS):
        raise FileError(f"{data} looks like the model, which is the second argument. Run {command} {model} {data}.")


# ---- termination ------------------------------------------------------------------------------------------------
#
# SIGTERM, which batch systems send before they kill a job, is handled like Ctrl-C, with its own exit code.

INTERRUPTED = 130
TERMINATED = 143


def exit_code() -> int:
    """Return 128 + the signal that ended this command: 143 after SIGTERM, 130 after Ctrl-C."""
    return TERMINATED if _running.got_sigterm else INTERRUPTED


def adopt(code: int) -> None:
    """Take over the exit code of another rank of the same run that a signal ended."""
    _running.got_sigterm = code == TERMINATED


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM like SIGINT within this block, unless the process already has a SIGTERM handler.

    Where SIGINT is ignored, as in a background job of a script, SIGTERM still ends the command.
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
    """Exit with this code, and ignore further signals.

    After an interrupt, threads that still compute are not waited for.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if code in (INTERRUPTED, TERMINATED):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(exit_code())
    sys.exit(code)  # type: ignore[arg-type]


# ---- errors -----------------------------------------------------------------------------------------------------
#
# Between a command and the shell: exit codes, plain messages and signals.

BAD_INPUT = 1
NOTHING_SAVED = "Interrupted; no result was saved."
UsageError: type[BaseException] = typer.BadParameter.__mro__[1]  # typer does not name it, and may or may not use click
EXPECTED = (PartsongError, MemoryError, OSError, KeyboardInterrupt)

Command = TypeVar("Command", bound=Callable[..., Any])


def show_tracebacks(wanted: bool) -> None:
    """Set whether errors show their traceback (`--debug`)."""
    _running.shows_tracebacks = wanted


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print each UserWarning once, as one line on standard error; show other warnings as Python does."""

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


def handle_errors(command: Command) -> Command:
    """Turn every expected error of a command into a plain message on standard error and an exit code.

    With --json, the last line of standard output is then the object that `failure` returns.
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
                is_expected = isinstance(error, EXPECTED)  # a bug in partsong keeps its traceback
                if is_expected:
                    tell(error)
                if is_json:
                    put_failure(failure(error, code))
                if is_expected:
                    raise typer.Exit(code) from error
                raise

    return cast(Command, run)


def failure(error: BaseException, code: int) -> dict[str, Any]:
    """Return the --json object of a failed command: message, class of the error, exit code."""
    notes = () if isinstance(error, KeyboardInterrupt) else getattr(error, "__notes__", ())
    kind = UsageError if isinstance(error, UsageError) else type(error)
    return {"error": " ".join((plain(error), *notes)), "type": kind.__name__, "exit_code": code}


def tell(error: BaseException) -> None:
    """Print an error and its notes; with `--debug`, its traceback."""
    if isinstance(error, KeyboardInterrupt):
        typer.echo(NOTHING_SAVED, err=True)
    elif _running.shows_tracebacks:
        typer.echo("".join(traceback.format_exception(error)), err=True)
    else:
        for line in (*f"Error: {plain(error)}".splitlines(), *getattr(error, "__notes__", ())):
            typer.echo(visible(line), err=True)


def plain(error: BaseException) -> str:
    """Return the message of an error, with options in place of parameter names."""
    if isinstance(error, MemoryError):
        return "Out of memory. Use --dtype float32, a sparse format, or .npy (read from disk)."
    if isinstance(error, KeyboardInterrupt):
        return NOTHING_SAVED
    if isinstance(error, UsageError):
        return str(error.format_message())  # type: ignore[attr-defined]
    return with_option(str(error).strip() or type(error).__name__, getattr(error, "parameter", None))
