"""A folder of parts: one .npz per party and a parts.json that lists them, as `partsong split` writes it.

parts.json holds the SHA-256 of each file, so that one that was swapped, edited or damaged is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partsong.errors import FileError, FormatError
from partsong.io.opening import parse_errors
from partsong.io.write import require_writable_folder, write_json

if TYPE_CHECKING:
    import numpy as np

    from partsong.data.table import Table


LISTING = "parts.json"
FORMAT = "partsong-parts"
VERSION = 1
_WAY_OUT = "Correct the list, or split the data again."


@dataclass(frozen=True, slots=True)
class Part:
    """One party's entry in parts.json; a list written by hand may leave `sha256` out."""

    name: str
    file: str
    rows: int
    sha256: str | None = None


def read_listing(folder: Path) -> list[Part]:
    """The parties of a folder, or what is wrong with the list of them."""
    path = folder / LISTING
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path} cannot be read as JSON ({error}). Split the data again.") from error
    told = content if isinstance(content, dict) else {}
    if told.get("format") != FORMAT or told.get("version") != VERSION:
        raise FormatError(f"{path}: this is not version {VERSION} of a {FORMAT} file. Split the data again.")
    entries = told.get("parties")
    if not isinstance(entries, list) or not entries:
        raise FormatError(f"{path}: lists no parties. {_WAY_OUT}")
    parts = [_part(f"{path}, party {number}", entry) for number, entry in enumerate(entries, start=1)]
    for what, values in (("name", [part.name for part in parts]), ("file", [part.file for part in parts])):
        _require_different(path, what, values)
    return parts


def _part(where: str, entry: Any) -> Part:
    """One entry, each field checked by itself."""
    if not isinstance(entry, dict):
        raise FormatError(f"{where}: is {_shown(entry)}, not an object with name, file and rows. {_WAY_OUT}")
    for field in ("name", "file", "rows"):
        if field not in entry:
            raise FormatError(f"{where}: has no {field!r}. {_WAY_OUT}")
    name, file = (_text(where, field, entry[field]) for field in ("name", "file"))
    rows, sha256 = entry["rows"], entry.get("sha256")
    if type(rows) is not int or rows < 1:
        raise FormatError(f"{where}: rows is {_shown(rows)}, but must be a whole number of at least 1. {_WAY_OUT}")
    if Path(file).name != file or file.startswith("."):
        raise FormatError(f"{where}: {file!r} is not the plain name of a file beside the list. {_WAY_OUT}")
    if sha256 is not None and not (isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256)):
        raise FormatError(f"{where}: the sha256 of {file!r} is not 64 hexadecimal digits. {_WAY_OUT}")
    return Part(name, file, rows, sha256)


def _text(where: str, field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise FormatError(f"{where}: its {field} is {_shown(value)}, but must be text, in quotes. {_WAY_OUT}")
    return value


def _require_different(path: Path, what: str, values: Sequence[str]) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise FormatError(f"{path}: two parties have the same {what}, {value!r}. {_WAY_OUT}")
        seen.add(value)


def _shown(value: Any) -> str:
    return json.dumps(value)[:40]


def is_parts_folder(path: Path) -> bool:
    """Whether this is a folder of parts; one that holds matrix.mtx is data."""
    return path.is_dir() and not holds_matrix(path) and (path / LISTING).is_file()


def holds_matrix(path: Path) -> bool:
    """Whether this is a folder as 10x Genomics writes it."""
    return any((path / name).exists() for name in ("matrix.mtx", "matrix.mtx.gz"))


def require_free(folder: Path) -> None:
    """Refuse a folder that holds anything, or a place where none can be made."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileError(f"{folder} is there already and not empty; nothing was overwritten. Choose another name.")
    require_writable_folder("--output", folder.absolute().parent)


def write_parts(folder: Path, table: Table, rows: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> dict[str, Any]:
    """Write all parts; the folder appears with all of them or not at all. Returns what parts.json says."""
    require_free(folder)
    target = folder.absolute()
    draft = target.with_name(f".{secrets.token_hex(8)}.{target.name}")
    draft.mkdir()
    try:
        for name, chosen in rows.items():
            _write_part(draft / f"{name}.npz", table, chosen)
        listing = _listing(draft, table, rows, about)
        write_json(draft / LISTING, listing)
        if target.exists():
            target.rmdir()
        os.replace(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return listing


def read_parts(folder: Path) -> dict[str, Table]:
    """The tables of all parties by name, with the columns of all in the order of the first."""
    return align_columns({part.name: read_part(folder, part) for part in read_listing(folder)})


def read_part(folder: Path, part: Part) -> Table:
    """The table of one party, if it is the one that was listed."""
    from partsong.io.read import read

    _require_unchanged(folder / part.file, part)
    table = read(folder / part.file)
    if table.X.shape[0] != part.rows:
        raise FormatError(
            f"{folder / part.file}: holds {table.X.shape[0]} rows, but {LISTING} says {part.rows} for party "
            f"{part.name!r}. Put the right file back, or split the data again."
        )
    return table


def align_columns(tables: Mapping[str, Table]) -> dict[str, Table]:
    """The same tables with their columns, where these have names, in the order of the first that names them."""
    names = next((table.feature_names for table in tables.values() if table.feature_names is not None), None)
    return {
        party: table if names is None or table.feature_names is None else table.aligned_to(names)
        for party, table in tables.items()
    }


def _require_unchanged(path: Path, part: Part) -> None:
    if part.sha256 is not None and _sha256(path) != part.sha256:
        raise FormatError(
            f"{path}: not the file that was listed for party {part.name!r}: its SHA-256 is not that in {LISTING}. It "
            "was edited, swapped or damaged. Put the right file back, or split the data again."
        )


def _sha256(path: Path) -> str:
    with parse_errors(path, "a part"), path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _listing(folder: Path, table: Table, rows: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> dict[str, Any]:
    parties = []
    for name, chosen in rows.items():
        counts = {} if table.labels is None else Counter(str(label) for label in table.labels[chosen].tolist())
        about_file = {"file": f"{name}.npz", "sha256": _sha256(folder / f"{name}.npz")}
        parties.append({"name": name, **about_file, "rows": len(chosen), "labels": dict(sorted(counts.items()))})
    return {
        "format": FORMAT,
        "version": VERSION,
        **about,
        "n_samples": int(table.X.shape[0]),
        "n_features": int(table.X.shape[1]),
        "parties": parties,
    }


def _write_part(path: Path, table: Table, rows: np.ndarray) -> None:
    """Dense rows as X, sparse ones as scipy.sparse.save_npz lays them out; names and labels beside them."""
    import numpy as np

    from partsong.data.scan import is_sparse

    chosen = table.X[rows]
    arrays: dict[str, Any] = {"X": np.ascontiguousarray(chosen)} if not is_sparse(chosen) else _sparse_arrays(chosen)
    if table.feature_names is not None:
        arrays["feature_names"] = np.array(table.feature_names, dtype=np.str_)
    if table.sample_names is not None:
        arrays["sample_names"] = np.array([table.sample_names[row] for row in rows.tolist()], dtype=np.str_)
    if table.labels is not None:
        arrays["labels"] = table.labels[rows]
    with path.open("wb") as stream:
        np.savez(stream, **arrays)


def _sparse_arrays(X: Any) -> dict[str, Any]:
    import numpy as np

    X = X.tocsr()
    return {
        "format": np.array(b"csr"),
        "shape": np.array(X.shape),
        "data": X.data,
        "indices": X.indices,
        "indptr": X.indptr,
    }
