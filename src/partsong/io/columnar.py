"""Read Parquet and AnnData (.h5ad) files.

An .h5ad file is checked before the HDF5 library reads it: for damage on which the library hangs, and for implausible
sizes. This does not make HDF5 safe: a damaged or malicious file can still crash the compiled library and the process
(fuzzing with flipped bytes found such a file). Convert untrusted .h5ad files on another machine first.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from partsong.data.scan import SHOWN
from partsong.data.table import Table
from partsong.errors import FeatureError, FormatError, ParameterError, first_few
from partsong.io.opening import GZIP_RATIO, ReadOptions, import_optional, parse_errors, require_plausible

DEEPEST = 4  # obs / column / categories / values
_HEAP_START = b"GCOL\x01\x00\x00\x00"
_HEAP_HEADER = _OBJECT_HEADER = 16
_SAVE_AGAIN = "The file is damaged. Copy it again, or save it again with write_h5ad."


def read_parquet(path: Path, wanted: ReadOptions) -> Table:
    """Read the numeric columns as features; one text column (or a pandas index) names the samples; nulls become NaN."""
    parquet = import_optional("pyarrow.parquet", "io")
    with parse_errors(path, "Parquet"):
        table = parquet.read_table(path, partitioning=None)
        names = [str(name) for name in table.column_names]
        label_at = None if wanted.label is None else _find(path, names, wanted.label)
        numeric = {at for at, field in enumerate(table.schema) if _is_numeric(field.type)}
        texts = [at for at in range(len(names)) if at not in {*numeric, label_at}]
        kept = None if wanted.transpose else wanted.kept
        if kept is not None:
            texts = [at for at in texts if names[at] in kept or (_is_text(table, at) and (at == 0 or len(texts) == 1))]
        names_at = _names_column(path, table, texts)
        values_at = [at for at in sorted(numeric - {label_at, names_at}) if kept is None or names[at] in kept]
        values = _stack([table.column(at) for at in values_at], table.num_rows)
        features = tuple(names[at] for at in values_at)
        samples = None if names_at is None else tuple(map(str, table.column(names_at).to_pylist()))
        labels = None if label_at is None else _as_labels(table.column(label_at))
        if wanted.transpose:
            return Table(np.ascontiguousarray(values.T), samples, features, None, str(path))
        return Table(values, features, samples, labels, str(path))


def read_h5ad(path: Path, wanted: ReadOptions) -> Table:
    """Read X (or the layer `key`) with the names of observations and variables, and a column of obs as labels.

    Other parts of the file are not read. The HDF5 library can crash on a damaged or malicious file: convert untrusted
    files to .csv, .npz or .parquet in a separate process or on another machine.
    """
    h5py, anndata = import_optional("h5py", "io"), import_optional("anndata.io", "io")
    with parse_errors(path, "AnnData"):
        check_text_heaps(path)
    with parse_errors(path, "AnnData"), h5py.File(path, "r") as file:
        place = "X" if wanted.key is None else f"layers/{wanted.key}"
        if place not in file:
            layers = ", ".join(map(repr, file.get("layers", ()))) or "none"
            raise ParameterError(
                f"{path}: there is no {place}. Layers: {layers}. Pass a layer as key, or omit key to read X.",
                parameter="key",
            )
        for part in (place, "obs", "var"):
            require_contained(path, h5py, file, part)
        X = _as_rows(path, file[place], anndata.read_elem(file[place]))
        obs, var = anndata.read_elem(file["obs"]), anndata.read_elem(file["var"])
        samples, features = tuple(map(str, obs.index)), tuple(map(str, var.index))
        if wanted.label is None:
            labels = None
        else:
            labels = _plain(obs.iloc[:, _find(path, [str(name) for name in obs.columns], wanted.label)].to_numpy())
    if wanted.transpose:
        return Table(
            X.T.tocsr() if hasattr(X, "tocsr") else np.ascontiguousarray(X.T), samples, features, None, str(path)
        )
    return Table(X, features, samples, labels, str(path))


def _find(path: Path, names: list[str], label: str) -> int:
    if names.count(label) != 1:
        shown = first_few(map(repr, names[:SHOWN]), len(names), "column")
        raise FeatureError(
            f"{path}: label={label!r} does not name exactly one column. The file has {shown}. Pass one of them.",
            parameter="label",
        )
    return names.index(label)


def _is_numeric(kind: Any) -> bool:
    types = import_optional("pyarrow", "io").types
    return any(check(kind) for check in (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal))


def _is_text(table: Any, at: int) -> bool:
    """Whether a column can name samples: text, dictionary-encoded or not, or a stored index of whole numbers."""
    types = import_optional("pyarrow", "io").types
    kind = table.schema.field(at).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_integer(kind))


def _names_column(path: Path, table: Any, other: list[int]) -> int | None:
    """The column of sample names: the stored pandas index, else the only text column."""
    index_columns = [
        name for name in (table.schema.pandas_metadata or {}).get("index_columns", []) if isinstance(name, str)
    ]
    names = table.column_names
    if len(index_columns) == 1 and names.count(index_columns[0]) == 1:
        at = names.index(index_columns[0])
        other = [at, *(column for column in other if column != at)]
    if len(other) > 1 or not all(_is_text(table, at) for at in other):
        shown = first_few(
            [f"{names[at]!r} ({table.schema.field(at).type})" for at in other[:SHOWN]], len(other), "column"
        )
        raise FormatError(
            f"{path}: {len(other)} columns are not numbers, but only one text column may name the samples: {shown}. "
            "Pass one as label, encode them as numbers, or drop them."
        )
    return other[0] if other else None


def _stack(columns: list[Any], n_rows: int) -> npt.NDArray[Any]:
    arrow = import_optional("pyarrow", "io")
    decimals = arrow.types.is_decimal
    plain = [column.cast(arrow.float64()) if decimals(column.type) else column for column in columns]
    arrays = [np.asarray(column.to_numpy()) for column in plain]
    arrays = [array.astype(np.float64) if array.dtype == object else array for array in arrays]  # booleans with nulls
    stacked = np.empty((n_rows, len(arrays)), dtype=np.result_type(*arrays) if arrays else np.float64)
    for at, array in enumerate(arrays):
        stacked[:, at] = array
    return stacked


def _as_labels(column: Any) -> npt.NDArray[Any]:
    types = import_optional("pyarrow", "io").types
    return (
        np.asarray(column.to_numpy())
        if _is_numeric(column.type) and not types.is_decimal(column.type)
        else _plain(np.array(column.to_pylist(), dtype=object))
    )


def _plain(labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Labels without Python objects: text or numbers."""
    return labels if labels.dtype.kind in "biuf" else np.array([str(label) for label in labels], dtype=np.str_)


def _as_rows(path: Path, stored: Any, X: Any) -> Any:
    """X as CSR or ndarray, with checked indices: out of range they would crash compiled code."""
    if hasattr(X, "tocsr"):
        from scipy import sparse

        require_plausible(path, X.shape, X.nnz)
        X.check_format(full_check=True)
        X = sparse.csr_array(X)
    if not isinstance(X, np.ndarray) and not hasattr(X, "tocsr"):
        raise FormatError(f"{path}: {stored.name} is a {type(X).__name__}, not a matrix. Save a file with adata.X.")
    if X.dtype.kind not in "biufc":
        raise FormatError(
            f"{path}: {stored.name} contains {X.dtype}, not numbers. Convert it with adata.X.astype(float)."
        )
    return X


def check_text_heaps(path: Path) -> None:
    """Check the heaps of text: the HDF5 library loops forever if a chain of objects misses the end of its heap."""
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(_HEAP_START)
        while start >= 0:
            end = start + _number(data, start + 8, 8)
            if end > len(data) or not _chain_ends_at(data, start + _HEAP_HEADER, end):
                raise FormatError(f"{path}: the heap of text at byte position {start} is inconsistent. {_SAVE_AGAIN}")
            start = data.find(_HEAP_START, max(end, start + 1))


def _chain_ends_at(data: mmap.mmap, at: int, end: int) -> bool:
    """Whether objects fill the heap exactly; object 0 is free space up to the end."""
    while at + _OBJECT_HEADER <= end:
        number, size = _number(data, at, 2), _number(data, at + 8, 8)
        if number == 0:
            return at + size == end
        at += _OBJECT_HEADER + -(-size // 8) * 8
    return at <= end


def _number(data: mmap.mmap, at: int, n_bytes: int) -> int:
    return int.from_bytes(data[at : at + n_bytes], "little")


def require_contained(path: Path, h5py: Any, parent: Any, name: str, depth: int = 0) -> None:
    """Refuse external links, and data that claim more bytes than the file could unpack to."""
    if depth > DEEPEST or not isinstance(parent.get(name, getlink=True), h5py.HardLink):
        raise FormatError(f"{path}: {name!r} is missing, links to another file, or is nested too deeply. {_SAVE_AGAIN}")
    part = parent[name]
    if isinstance(part, h5py.Group):
        for inner in part:
            require_contained(path, h5py, part, inner, depth + 1)
    elif isinstance(part, h5py.Dataset):
        largest = max(part.size or 0, math.prod(part.chunks or ())) * part.dtype.itemsize
        if part.external or part.is_virtual or largest > GZIP_RATIO * path.stat().st_size:
            raise FormatError(
                f"{path}: {part.name} claims {largest} bytes, more than the file can contain, or stores them "
                f"elsewhere. {_SAVE_AGAIN}"
            )
