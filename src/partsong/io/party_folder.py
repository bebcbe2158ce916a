"""Folders of parts: one .npz per party and a parts.json that lists them, as written by `partsong split`.

parts.json contains the SHA-256 of each file, so that a swapped, edited or damaged file is detected.
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
    """The entry of one party in parts.json; `sha256` is optional in a list written by hand."""

    name: str
    file: str
    rows: int
    sha256: str | None = None


def read_listing(folder: Path) -> list[Part]:
    """Read the list of parties in a folder."""
    path = folder / LISTING
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path} cannot be read as JSON ({error}). Split the data again.") from error
    listing = content if isinstance(content, dict) else {}
    if listing.get("format") != FORMAT or listing.get("version") != VERSION:
        raise FormatError(f"{path}: not version {VERSION} of a {FORMAT} file. Split the data again.")
    entries = listing.get("parties")
    if not isinstance(entries, list) or not entries:
        raise FormatError(f"{path}: lists no parties. {_WAY_OUT}")
    parts = [_part(f"{path}, party {number}", entry) for number, entry in enumerate(entries, start=1)]
    for what, values in (("name", [part.name for part in parts]), ("file", [part.file for part in parts])):
        _require_different(path, what, values)
    return parts


def _part(where: str, entry: Any) -> Part:
    """Check one entry, field by field."""
    if not isinstance(entry, dict):
        raise FormatError(f"{where}: is {_shown(entry)}, not an object with name, file and rows. {_WAY_OUT}")
    for field in ("name", "file", "rows"):
        if field not in entry:
            raise FormatError(f"{where}: has no {field!r}. {_WAY_OUT}")
    name, file = (_text(where, field, entry[field]) for field in ("name", "file"))
    rows, sha256 = entry["rows"], entry.get("sha256")
    if type(rows) is not int or rows < 1:
        raise FormatError(f"{where}: rows must be a whole number of at least 1; got {_shown(rows)}. {_WAY_OUT}")
    if Path(file).name != file or file.startswith("."):
        raise FormatError(f"{where}: {file!r} is not the name of a file in the same folder. {_WAY_OUT}")
    if sha256 is not None and not (isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256)):
        raise FormatError(f"{where}: the sha256 of {file!r} must be 64 hexadecimal digits. {_WAY_OUT}")
    return Part(name, file, rows, sha256)


def _text(where: str, field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise FormatError(f"{where}: {field} must be text in quotes; got {_shown(value)}. {_WAY_OUT}")
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
    """Whether this is a folder of parts; a folder with matrix.mtx is a data set."""
    return path.is_dir() and not holds_matrix(path) and (path / LISTING).is_file()


def holds_matrix(path: Path) -> bool:
    """Whether this is a folder in the format of 10x Genomics."""
    return any((path / name).exists() for name in ("matrix.mtx", "matrix.mtx.gz"))


def require_free(folder: Path) -> None:
    """Refuse a folder that is not empty or cannot be created."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileError(f"{folder} already exists and is not empty; nothing was overwritten. Choose another name.")
    require_writable_folder("--output", folder.absolute().parent)


def write_parts(folder: Path, table: Table, rows: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> dict[str, Any]:
    """Write all parts atomically; return the contents of parts.json."""
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
    """Read the tables of all parties by name, with columns in the order of the first."""
    return align_columns({part.name: read_part(folder, part) for part in read_listing(folder)})


def read_part(folder: Path, part: Part) -> Table:
    """Read the table of one party; a file other than the listed one is refused."""
    from partsong.io.read import read

    _require_unchanged(folder / part.file, part)
    table = read(folder / part.file)
    if table.X.shape[0] != part.rows:
        raise FormatError(
            f"{folder / part.file}: has {table.X.shape[0]} rows, but {LISTING} lists {part.rows} for party "
            f"{part.name!r}. Restore the right file, or split the data again."
        )
    return table


def align_columns(tables: Mapping[str, Table]) -> dict[str, Table]:
    """Return the tables with named columns in the order of the first table that has names."""
    names = next((table.feature_names for table in tables.values() if table.feature_names is not None), None)
    return {
        party: table if names is None or table.feature_names is None else table.aligned_to(names)
        for party, table in tables.items()
    }


def _require_unchanged(path: Path, part: Part) -> None:
    if part.sha256 is not None and _sha256(path) != part.sha256:
        raise FormatError(
            f"{path}: not the file listed for party {part.name!r}: its SHA-256 differs from {LISTING}. It was edited, "
            "swapped or damaged. Restore the right file, or split the data again."
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
    """Write dense rows as X, sparse ones in the format of scipy.sparse.save_npz, with names and labels."""
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
