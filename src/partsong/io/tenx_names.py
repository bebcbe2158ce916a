"""The files of names that 10x Genomics puts beside a matrix: barcodes.tsv, and features.tsv or genes.tsv."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from partsong.errors import FormatError, ParameterError
from partsong.io.opening import open_text, parsing


@dataclass(frozen=True, slots=True)
class Names:
    """Names found beside a matrix; None where there is no such file."""

    samples: tuple[str, ...] | None
    features: tuple[str, ...] | None

    def __str__(self) -> str:
        told = {"features": self.features, "barcodes": self.samples}
        return " and ".join(f"{len(given)} {what}" for what, given in told.items() if given is not None)


def names_beside(path: Path) -> Names:
    """The names for a matrix file; a prefix is shared, as in GSM1_matrix.mtx and GSM1_barcodes.tsv.

    Features are called by their symbols (the second column) where these are unique, and by identifiers otherwise.
    """
    stem = path.name.lower().removesuffix(".gz").removesuffix(".mtx")
    prefix = path.name[: len(stem) - len("matrix")] if stem.endswith("matrix") else ""
    samples = _first_existing(path.parent, f"{prefix}barcodes.tsv")
    features = _first_existing(path.parent, f"{prefix}features.tsv", f"{prefix}genes.tsv")
    return Names(
        _columns(samples)[0] if samples is not None else None,
        _most_telling(_columns(features)) if features is not None else None,
    )


def features_in_rows(path: Path, shape: tuple[int, int], names: Names, transpose: bool) -> bool:
    """What the lengths of the names say, or the caller; 10x's own order wins where both would fit."""
    if names.features is None and names.samples is None:
        return transpose
    as_10x, as_table = (
        (names.features is None or len(names.features) == n_features)
        and (names.samples is None or len(names.samples) == n_samples)
        for n_features, n_samples in (shape, shape[::-1])
    )
    if not as_10x and not as_table:
        raise FormatError(
            f"{path}: the matrix is {shape[0]} x {shape[1]}, but the files of names beside it list {names}. "
            "Put the files that belong together into one folder, or move foreign ones away."
        )
    if transpose and not as_10x:
        raise ParameterError(
            f"{path}: transpose=True says that features are in rows, but the matrix is {shape[0]} x {shape[1]} and the "
            f"files beside it list {names}. Samples are in rows already: leave transpose out."
        )
    return as_10x


def _first_existing(folder: Path, *names: str) -> Path | None:
    candidates = (folder / f"{name}{ending}" for name in names for ending in ("", ".gz"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _columns(path: Path) -> list[tuple[str, ...]]:
    """The first two columns of a file of names, or the only one."""
    with parsing(path, "a list of names"), open_text(path, newline="") as stream:
        rows = [row for row in csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE) if row]
    n_columns = min((len(row) for row in rows), default=1)
    return [tuple(row[at] for row in rows) for at in range(min(2, n_columns))]


def _most_telling(columns: list[tuple[str, ...]]) -> tuple[str, ...]:
    symbols = columns[-1]
    return symbols if len(set(symbols)) == len(symbols) else columns[0]
