"""Matrix Market files (.mtx, .mtx.gz), with the names that 10x Genomics puts beside them."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partsong.data.table import Table
from partsong.errors import FormatError, ParameterError
from partsong.io.opening import GZIP_RATIO, Wanted, is_gzipped, open_bytes, open_text, parsing, require_plausible


@dataclass(frozen=True, slots=True)
class _Names:
    samples: tuple[str, ...] | None
    features: tuple[str, ...] | None


def read_matrix_market(path: Path, wanted: Wanted) -> Table:
    """Read a sparse (or dense) Matrix Market file as CSR with samples in rows.

    10x files hold features in rows; where barcodes.tsv and features.tsv (or genes.tsv) lie beside the file, their
    lengths say so and the matrix is turned. `transpose` says the same where there are no names. Feature names are
    gene symbols where these are unique, and identifiers otherwise.
    """
    wanted.refuse(path, "label", "key")
    with parsing(path, "a Matrix Market file"):
        from scipy import io, sparse

        _require_honest_header(path)
        matrix = io.mmread(path)
    names = _names_beside(path)
    turned = _features_in_rows(path, matrix.shape, names, wanted.transpose)
    with parsing(path, "a Matrix Market file"):
        X: Any = sparse.csr_array(matrix.T if turned else matrix)
    return Table(X, names.features, names.samples, source=str(path))


def _require_honest_header(path: Path) -> None:
    """Hold the sizes that the header claims against the bytes that are there, before anything is allocated."""
    with open_bytes(path) as stream:
        banner = stream.readline(1000).split()
        line = stream.readline(10_000)
        while line.startswith(b"%") or (line and not line.strip()):
            line = stream.readline(10_000)
    if len(banner) < 3 or banner[0] != b"%%MatrixMarket":
        raise FormatError(f"{path}: does not begin with '%%MatrixMarket matrix', so it is not a Matrix Market file.")
    sizes = [int(word) for word in line.split()]
    is_dense = banner[2].lower() == b"array"
    if len(sizes) != (2 if is_dense else 3):
        raise FormatError(f"{path}: the line of sizes reads {line[:80]!r}. Export the matrix again.")
    n_entries = sizes[0] * sizes[1] if is_dense else sizes[2]
    available = path.stat().st_size * (GZIP_RATIO if is_gzipped(path) else 1)
    if not 0 <= n_entries <= available:  # an entry takes two bytes or more; symmetric files hold half of them
        raise FormatError(
            f"{path}: its header claims {n_entries} entries, more than the file can hold. It is cut short or damaged; "
            "copy or export it again."
        )
    require_plausible(path, (sizes[0], sizes[1]), n_entries)


def _names_beside(path: Path) -> _Names:
    stem = path.name.lower().removesuffix(".gz").removesuffix(".mtx")
    prefix = path.name[: len(stem) - len("matrix")] if stem.endswith("matrix") else ""
    samples = _first_existing(path.parent, [f"{prefix}barcodes.tsv"])
    features = _first_existing(path.parent, [f"{prefix}features.tsv", f"{prefix}genes.tsv"])
    return _Names(
        _columns(samples)[0] if samples else None,
        _most_telling(_columns(features)) if features else None,
    )


def _first_existing(folder: Path, names: list[str]) -> Path | None:
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


def _features_in_rows(path: Path, shape: tuple[int, int], names: _Names, transpose: bool) -> bool:
    """What the lengths of the names say, or the caller; 10x's own order wins where both would fit."""
    if names.features is None and names.samples is None:
        return transpose
    features_in_rows, samples_in_rows = (
        all(
            given is None or len(given) == size
            for given, size in zip((names.features, names.samples), sides, strict=True)
        )
        for sides in (shape, shape[::-1])
    )
    told = {"features": names.features, "barcodes": names.samples}
    lengths = ", ".join(f"{len(given)} {what}" for what, given in told.items() if given is not None)
    if not features_in_rows and not samples_in_rows:
        raise FormatError(
            f"{path}: the matrix is {shape[0]} x {shape[1]}, but the files of names beside it list {lengths}. "
            "Put the files that belong together into one folder, or move foreign ones away."
        )
    if transpose and not features_in_rows:
        raise ParameterError(
            f"{path}: transpose=True says that features are in rows, but the matrix is {shape[0]} x {shape[1]} "
            f"and the files beside it list {lengths}. Samples are in rows already: leave transpose out."
        )
    return features_in_rows
