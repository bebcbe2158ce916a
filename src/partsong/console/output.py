"""What commands leave behind: lines for people, one JSON object for programs, files that are checked beforehand."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.util
import io
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import typer

from partsong.core.runtime import press
from partsong.errors import MissingExtra, PartsongError
from partsong.io.opening import place_of
from partsong.io.write import as_json, first_formula, require_writable_file

# ---- wording ----------------------------------------------------------------------------------------------------
#
# Messages of the library in the words of the command line: arguments of functions become options.

ARGUMENTS = {
    "method_options": "--method-option",
    "n_components": "--components",
    "max_iter": "--max-iter",
    "time_budget": "--time-budget",
    "local_steps": "--local-steps",
    "l1_ratio": "--l1-ratio",
    "alpha_W": "--alpha-w",
    "alpha_H": "--alpha-h",
    "random_state": "--seed",
    "n_jobs": "--threads",
    "n_threads": "--threads",
    "kernel_threads": "--threads",
    "drop_extra": "--drop-extra",
    "n_topics": "--topics",
    "min_documents": "--min-documents",
    "min_parties": "--min-parties",
    "max_words": "--max-words",
    "longest_word": "--longest-word",
    "server_rate": "--server-rate",
}
"""Names that are no words of English: they are replaced wherever they stand alone."""

WORDS = (
    "label",
    "key",
    "header",
    "dtype",
    "tol",
    "rounds",
    "transpose",
    "concentration",
    "seed",
    "init",
    "solver",
    "method",
    "participation",
    "server",
    "vocabulary",
    "weighting",
    "encoding",
    "overwrite",
    "run_folder",
)
"""Names that are words as well: replaced before an equals sign, and where a message says what they must be."""

PHRASES = {
    " (or None)": "",
    ", or None": "",
    "The l1 penalty ": "The L1 part of --alpha-w and --alpha-h (see --l1-ratio) ",
    "The l2 penalty ": "The L2 part of --alpha-w and --alpha-h (see --l1-ratio) ",
    'faulty="leave out"': "--faulty leave-out",
    "(column=…)": "(--text-column)",
    " (longest of VocabularyAgreement)": "",
    "a smaller min_documents, or a larger max_share": "a smaller --min-documents",
    "Unknown init ": "Unknown --init ",
    "Unknown solver ": "Unknown --solver ",
    "Unknown method ": "Unknown --method ",
    "or SafeStep()": "or --step safe",
}

_ALONE = r"(?<![\w/\\.'\"-])"  # neither part of a path nor of a quoted name
_ANY = rf"{_ALONE}({'|'.join((*ARGUMENTS, *WORDS))})"
_RULES = (
    (re.compile(rf"{_ALONE}(header)=False\b"), None),
    (re.compile(rf"{_ANY}=True\b"), ""),
    (re.compile(rf"{_ANY}=(?=[\w'\"-])"), " "),
    (re.compile(rf"{_ANY}=(?=[\s).,;]|$)"), ""),
    (re.compile(rf"{_ALONE}({'|'.join(ARGUMENTS)})\b(?!['\"=/\\]|\.\w)"), ""),
    (re.compile(rf"(?:^|(?<=: ))({'|'.join(WORDS)})(?= must\b)"), ""),
)


_OF_A_FILE = re.compile(r"[^\n:]*\.toml: ")
"""How a message begins that is about the settings of a file, whose keys are not options."""


def as_options(message: str) -> str:
    """The same message with --label for label=, --components for n_components, and so on; keys of a file stay."""
    if _OF_A_FILE.match(message):
        return message
    for phrase, said in PHRASES.items():
        message = message.replace(phrase, said)
    for pattern, after in _RULES:
        message = pattern.sub(partial(_option, after), message)
    return message


def option(name: str) -> str:
    """What an argument or a setting is called on the command line."""
    return ARGUMENTS.get(name, f"--{name.replace('_', '-')}")


def _option(after: str | None, found: re.Match[str]) -> str:
    return f"--no-{found[1]}" if after is None else option(found[1]) + after


PACKAGES = {".parquet": "pyarrow.parquet", ".h5ad": "anndata"}
"""Endings that need an optional package."""

# ---- outputs ----------------------------------------------------------------------------------------------------

FAILING = ("strict", "surrogateescape", "surrogatepass")
"""What streams do about characters outside their encoding that can end in an error."""


def put_json(content: Mapping[str, Any]) -> None:
    """One JSON object on one line of standard output."""
    typer.echo(json.dumps(as_json(content), allow_nan=False))


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
    typer.echo(visible(f"Warning: {as_options(message)}"), err=True)


def warn_of_formulas(path: Path, names: Iterable[str] | None) -> None:
    """Warn of names in a text file that a spreadsheet would take for formulas; they are never changed."""
    name = path.name.lower().removesuffix(".gz")
    found = first_formula(names or ()) if name.endswith((".csv", ".tsv")) else None
    if found is not None:
        warn(
            f"{path}: a spreadsheet takes the name {found!r} for a formula and may run it. It was written as it is; "
            "rename it, or import that column as text."
        )


def require_writable(option: str, path: Path, endings: Sequence[str] = ()) -> None:
    """Refuse, before anything is computed, a file that could not be written afterwards."""
    name = path.name.lower()
    if endings and not name.endswith(tuple(endings)):
        raise typer.BadParameter(f"{path}: the name must end in {' or '.join(endings)}.", param_hint=option)
    package = next((package for ending, package in PACKAGES.items() if endings and name.endswith(ending)), None)
    if package is not None and importlib.util.find_spec(package.partition(".")[0]) is None:
        raise MissingExtra(
            f"{option} {path}: needs {package.partition('.')[0]}, which is not installed. "
            'Install it: pip install "partsong[io]", or write .csv instead.'
        )
    require_writable_file(option, place_of(path))


def require_distinct(paths: Mapping[str, Path | None]) -> None:
    """Refuse two uses of one file, such as a model that would overwrite the data."""
    seen: dict[str, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        place = os.path.realpath(place_of(path))
        if place in seen:
            raise typer.BadParameter(f"{seen[place]} is the same file: {path}. Choose another.", param_hint=option)
        seen[place] = option


# ---- termination ------------------------------------------------------------------------------------------------
#
# Signals: SIGTERM, which batch systems send before they kill, goes the way of Ctrl-C; both have their exit code.

INTERRUPTED = 130
TERMINATED = 143


@dataclass(slots=True)
class _Received:
    sigterm: bool = False


_received = _Received()


def exit_code() -> int:
    """128 + the number of the signal that ended this command: 143 after SIGTERM, 130 after Ctrl-C."""
    return TERMINATED if _received.sigterm else INTERRUPTED


def adopt(code: int) -> None:
    """Take over the exit code of another rank of the same run, which a signal has ended."""
    _received.sigterm = code == TERMINATED


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Within this block SIGTERM goes the way of SIGINT; a handler of somebody else's is left alone.

    Where SIGINT is ignored, as in the background job of a script, SIGTERM still ends the command.
    """
    _received.sigterm = False

    def pass_on(*_: object) -> None:
        _received.sigterm = True
        if callable(signal.getsignal(signal.SIGINT)):
            signal.raise_signal(signal.SIGINT)
        elif not press():
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


# ---- topics wording ---------------------------------------------------------------------------------------------
#
# Messages of topic models in the words of `partsong topics fit`: arguments become its options.

RENAMED = {"n_topics": "--topics", "random_state": "--seed", "max_iter": "--rounds"}
"""Arguments that have another name here; of all others it is the same."""

TOPIC_ARGUMENTS = (
    *("min_documents", "min_parties", "max_share", "max_words", "stop_words"),
    *("critic_rate", "mi_gradient", "fits_first", "server_rate"),
)
"""Names that are no words of English: they are replaced wherever they stand alone."""

TOPIC_VALUES = (
    *("epochs", "batch", "rate", "strength", "critic", "device", "method", "rounds", "server", "participation"),
    *("vocabulary", "weighting", "language"),
)
"""Names that are words as well: replaced before an equals sign, and where more or less of it is advised."""

_NO_WORD = "|".join((*RENAMED, *TOPIC_ARGUMENTS))
_WORD = "|".join(TOPIC_VALUES)
_TOPIC_RULES = (
    (re.compile(rf"{_ALONE}({_NO_WORD}|{_WORD})=True\b"), ""),
    (re.compile(rf"{_ALONE}({_NO_WORD}|{_WORD})='([\w-]+)'"), " "),
    (re.compile(rf"{_ALONE}({_NO_WORD}|{_WORD})=(?=[\w'\"-])"), " "),
    (re.compile(rf"{_ALONE}({_NO_WORD})\b(?!['\"=/\\]|\.\w)"), ""),
    (re.compile(rf"(?<=\ba smaller )({_WORD})\b"), ""),
    (re.compile(rf"(?<=\ba larger )({_WORD})\b"), ""),
)


def as_topic_options(message: str) -> str:
    """The same message with --topics for n_topics, --rate for rate=, and so on."""
    for pattern, after in _TOPIC_RULES:
        message = pattern.sub(partial(_topic_option, after), message)
    return message


@contextmanager
def in_options() -> Iterator[None]:
    """Errors that leave the block name options."""
    try:
        yield
    except PartsongError as error:
        if len(error.args) == 1:
            error.args = (as_topic_options(str(error)),)
        raise


def _topic_option(after: str, found: re.Match[str]) -> str:
    """The option, what comes after it, and a value without its quotes where one was found."""
    name, *value = found.groups()
    return RENAMED.get(name, f"--{name.replace('_', '-')}") + after + "".join(value)
