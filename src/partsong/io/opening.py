"""Shared parts of all readers: options, paths, optional packages, and the error for damaged files."""

from __future__ import annotations

import gzip
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from partsong.errors import DataTypeError, FileError, FormatError, MissingExtra, PartsongError

GZIP_RATIO = 1032  # the maximum compression ratio of deflate
ROWS_TO_SPARE = 10_000_000
ROWS_PER_ENTRY = 100


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options for reading a file: the column of labels, a transpose, the key of one of several arrays.

    `header`: whether the first line names the columns (None: detect). `features` are the names to be selected later: a
    first line that contains all of them is a header. With `drop_extra` other columns are not read. With `gaps`, blank
    cells of a text file and words such as NA become NaN instead of an error.
    """

    label: str | None = None
    transpose: bool = False
    key: str | None = None
    header: bool | None = None
    features: frozenset[str] = frozenset()
    drop_extra: bool = False
    gaps: bool = False

    def __post_init__(self) -> None:
        for name in ("label", "key"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise DataTypeError(
                    f"{name} must be text or None, not {_describe(value)}. Convert it with str().", parameter=name
                )
        if self.header is not None and not isinstance(self.header, bool):
            raise DataTypeError(
                f"header must be True, False or None, not {_describe(self.header)}.", parameter="header"
            )

    @property
    def kept(self) -> frozenset[str] | None:
        """Names of the columns to read; None: all."""
        return self.features if self.drop_extra and self.features else None


def resolve_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file with ~ expanded; refuse anything that is not a path."""
    given = path if isinstance(path, str) else os.fspath(path) if isinstance(path, os.PathLike) else None
    if not isinstance(given, str):
        raise DataTypeError(
            f"The path of a file must be text or a pathlib.Path, not {_describe(path)}. Pass 'folder/name'."
        )
    if not given or "\0" in given:
        raise FileError(
            f"{given!r} is not the path of a file: it is empty or contains a null character. Pass a file name."
        )
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise FileError(f"{given}: there is no such home folder. Check the path, or pass the full path.") from error


def _describe(value: object) -> str:
    return f"{type(value).__name__} ({str(repr(value))[:40]})"


@contextmanager
def parse_errors(path: Path, kind: str) -> Iterator[None]:
    """Convert any exception of a parser on a damaged file to FormatError; errors of partsong pass through.

    Parsers of binary formats can fail in any way on flipped bytes, so this catches all exceptions on purpose.
    """
    try:
        yield
    except PartsongError:
        raise
    except FileNotFoundError as error:
        raise FileError(
            f"{path}: there is no such file. Check the path; relative paths start at the working folder."
        ) from error
    except PermissionError as error:
        raise FileError(
            f"{path}: permission denied. Ask for read access, or copy the file to your own folder."
        ) from error
    except MemoryError as error:
        raise FormatError(
            f"{path}: its contents need more memory than available. If the size is right, use .npy (which stays on "
            "disk) or a sparse format; otherwise the file is damaged."
        ) from error
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "no reason given")
        raise FormatError(
            f"{path} cannot be read as {kind}: {reason[:200]} ({type(error).__name__}). "
            "It is damaged, truncated, or of another format than its name says. Copy or export it again."
        ) from error


def import_optional(module: str, extra: str) -> Any:
    """Import an optional package, or raise MissingExtra with the extra that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtra(
            f'This kind of file needs {package}, which is not installed. Install it: pip install "partsong[{extra}]", '
            "or use .csv, .mtx, .npy or .npz instead."
        ) from error


def is_gzipped(path: Path) -> bool:
    """Whether the file name ends in .gz."""
    return path.name.lower().endswith(".gz")


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file as bytes, decompressed if its name ends in .gz."""
    return cast(IO[bytes], gzip.open(path, "rb")) if is_gzipped(path) else path.open("rb")


def open_text(path: Path, *, newline: str | None = None, encoding: str = "utf-8-sig") -> IO[str]:
    """Open a file as text (UTF-8, with or without a byte order mark), decompressed if its name ends in .gz."""
    if is_gzipped(path):
        return cast(IO[str], gzip.open(path, "rt", encoding=encoding, newline=newline))
    return path.open("r", encoding=encoding, newline=newline)


def require_plausible(path: Path, shape: tuple[int, ...], n_entries: int) -> None:
    """Refuse a sparse matrix with an implausible shape for its number of entries."""
    if len(shape) != 2 or min(shape) < 0 or max(shape) > ROWS_TO_SPARE + ROWS_PER_ENTRY * n_entries:
        raise FormatError(
            f"{path}: its header claims the shape {shape}, but it has only {n_entries} entries. "
            "The header is damaged or malicious. Export the matrix again."
        )
