"""One door for files: `read` looks at the name and picks the reader."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from partsong.data.table import Table
from partsong.errors import FileError, FormatError
from partsong.io.columnar import read_h5ad, read_parquet
from partsong.io.delimited import read_delimited
from partsong.io.matrix_market import read_matrix_market
from partsong.io.numpy_files import read_npy, read_npz
from partsong.io.opening import Wanted, parsing

READERS: dict[str, Callable[[Path, Wanted], Table]] = {
    ".npy": read_npy,
    ".npz": read_npz,
    ".csv": read_delimited,
    ".csv.gz": read_delimited,
    ".tsv": read_delimited,
    ".tsv.gz": read_delimited,
    ".mtx": read_matrix_market,
    ".mtx.gz": read_matrix_market,
    ".parquet": read_parquet,
    ".h5ad": read_h5ad,
}


def read(
    path: str | os.PathLike[str], *, label: str | None = None, transpose: bool = False, key: str | None = None
) -> Table:
    """Read a table by the ending of its name; a folder with matrix.mtx[.gz] is read as 10x Genomics writes it.

    `label` names the column (or array) of labels to take out; `transpose` says that the file holds features in rows;
    `key` picks an array of an .npz or a layer of an .h5ad. Values are not checked: see `data.check`.
    """
    place = _file_at(Path(path).expanduser())
    name = place.name.lower()
    for ending, reader in READERS.items():
        if name.endswith(ending):
            return reader(place, Wanted(label, transpose, key))
    raise FormatError(
        f"{place}: the ending {''.join(place.suffixes[-2:]) or '(none)'} is not one of {', '.join(READERS)}. "
        "Rename the file if it is one of these, or export it as one."
    )


def _file_at(path: Path) -> Path:
    with parsing(path, "a file"):
        path.stat()
        if path.is_file():
            with path.open("rb"):
                return path
        if not path.is_dir():
            raise FileError(
                f"{path}: neither a file nor a folder, but a device or a pipe. Copy its contents to a file."
            )
        held = sorted(entry.name for entry in path.iterdir())
    for name in ("matrix.mtx", "matrix.mtx.gz"):
        if name in held:
            return path / name
    shown = ", ".join(held[:5]) or "nothing"
    raise FileError(
        f"{path}: a folder is read only if it holds matrix.mtx or matrix.mtx.gz; it holds {shown}"
        f"{f' (and {len(held) - 5} more)' if len(held) > 5 else ''}. Name the file to read."
    )
