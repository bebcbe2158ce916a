"""What all readers share: opening, optional packages, and one way of saying that a file is damaged."""

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

GZIP_RATIO = 1032  # deflate cannot shrink data further than this
ROWS_TO_SPARE = 10_000_000
ROWS_PER_ENTRY = 100


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What the caller asked of a file: a column of labels, features in rows to be turned, one of several arrays.

    `header` says whether the first line names the columns; None: look and decide. `features` are the names that will be
    asked for: a first line that holds all of them is a header. With `drop_extra` other columns are not even read.
    With `gaps` blank cells of a text file, and words such as NA, are NaN instead of an error.
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
                    f"{name} must be a name (text) or None, not {_describe(value)}. Pass str(…) of it.", parameter=name
                )
        if self.header is not None and not isinstance(self.header, bool):
            raise DataTypeError(
                f"header must be True, False or None, not {_describe(self.header)}.", parameter="header"
            )

    @property
    def kept(self) -> frozenset[str] | None:
        """The names of the only columns to read; None: all of them."""
        return self.features if self.drop_extra and self.features else None


def resolve_path(path: str | os.PathLike[str]) -> Path:
    """The path of a file with ~ spelled out, or the typed error for what is none."""
    given = path if isinstance(path, str) else os.fspath(path) if isinstance(path, os.PathLike) else None
    if not isinstance(given, str):
        raise DataTypeError(
            f"The path of a file is text or a pathlib.Path, not {_describe(path)}. Pass 'folder/name', say."
        )
    if not given or "\0" in given:
        raise FileError(f"{given!r} is not the path of a file: it is empty, or holds a null character. Name a file.")
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise FileError(
            f"{given}: there is no home folder of that name. Check the path, or write it in full."
        ) from error


def _describe(value: object) -> str:
    return f"{type(value).__name__} ({str(repr(value))[:40]})"


@contextmanager
def parse_errors(path: Path, kind: str) -> Iterator[None]:
    """Turn whatever a parser raises on a damaged file into FormatError; our own errors pass as they are.

    Parsers of binary formats fail in every way there is on flipped bytes, so this catches all exceptions on purpose.
    """
    try:
        yield
    except PartsongError:
        raise
    except FileNotFoundError as error:
        raise FileError(
            f"{path}: there is no such file. Check the path; relative ones start at the working folder."
        ) from error
    except PermissionError as error:
        raise FileError(
            f"{path}: permission denied. Ask for read access, or copy the file to a folder of yours."
        ) from error
    except MemoryError as error:
        raise FormatError(
            f"{path}: its contents ask for more memory than there is. If its size is right, use .npy (which stays "
            "on disk) or a sparse format; else it is damaged."
        ) from error
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "no reason given")
        raise FormatError(
            f"{path} cannot be read as {kind}: {reason[:200]} ({type(error).__name__}). "
            "It is damaged, cut short, or of another kind than its name says; copy or export it again."
        ) from error


def import_optional(module: str, extra: str) -> Any:
    """Import an optional package late, or name the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtra(
            f'This kind of file needs {package}, which is not installed. Install it: pip install "partsong[{extra}]", '
            "or use .csv, .mtx, .npy or .npz instead."
        ) from error


def is_gzipped(path: Path) -> bool:
    """Whether the name says so."""
    return path.name.lower().endswith(".gz")


def open_bytes(path: Path) -> IO[bytes]:
    """The bytes of a file, unpacked if its name ends in .gz."""
    return cast(IO[bytes], gzip.open(path, "rb")) if is_gzipped(path) else path.open("rb")


def open_text(path: Path, *, newline: str | None = None, encoding: str = "utf-8-sig") -> IO[str]:
    """The text of a file (UTF-8, with or without a byte order mark), unpacked if its name ends in .gz."""
    if is_gzipped(path):
        return cast(IO[str], gzip.open(path, "rt", encoding=encoding, newline=newline))
    return path.open("r", encoding=encoding, newline=newline)


def require_plausible(path: Path, shape: tuple[int, ...], n_entries: int) -> None:
    """Refuse a sparse matrix whose claimed sides are beyond anything its entries could fill."""
    if len(shape) != 2 or min(shape) < 0 or max(shape) > ROWS_TO_SPARE + ROWS_PER_ENTRY * n_entries:
        raise FormatError(
            f"{path}: its header claims the shape {shape}, but it holds {n_entries} entries. "
            "The header is damaged, or not meant well; export the matrix again."
        )
