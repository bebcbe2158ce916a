"""Read NumPy's .npy (memory-mapped) and .npz (dense, or SciPy's sparse format).

Headers are checked before any value is read.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from partsong.data.table import Table
from partsong.errors import FormatError, ParameterError, ShapeError
from partsong.io.opening import GZIP_RATIO, ReadOptions, parse_errors, require_plausible

FEATURE_KEYS = ("feature_names", "genes", "features")
SAMPLE_KEYS = ("sample_names", "samples")
RESAVE = "Save it again with np.save or np.savez from plain number or text arrays (X.astype(float), names.astype(str))."


@dataclass(frozen=True, slots=True)
class Header:
    """The header of an array: shape, type, and where its values begin."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int

    @property
    def n_bytes(self) -> int:
        """Bytes of header and values."""
        return self.offset + self.dtype.itemsize * math.prod(self.shape)


def read_header(stream: IO[bytes]) -> Header:
    """Read the header of an array; the stream is left at the first value."""
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"version {version} of the .npy format is not supported")
    shape, _, dtype = readers[version](stream)
    if min(shape, default=0) < 0:
        raise ValueError(f"the shape {shape} is negative")
    return Header(shape, dtype, stream.tell())


def member_headers(path: Path, archive: zipfile.ZipFile) -> Iterator[tuple[str, Header]]:
    """Yield the header of each array, after checks of the stated sizes against the archive."""
    for member in archive.infolist():
        if not member.filename.endswith(".npy"):
            continue
        where = f"{path}, array {member.filename.removesuffix('.npy')!r}"
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise FormatError(f"{where}: uses a compression that np.savez does not use. {RESAVE}")
        ratio = 1 if member.compress_type == zipfile.ZIP_STORED else GZIP_RATIO
        if member.file_size > ratio * min(member.compress_size, path.stat().st_size) + ratio:
            raise FormatError(f"{where}: claims {member.file_size} bytes, more than the archive can contain. {RESAVE}")
        with archive.open(member) as stream:
            header = read_header(stream)
        if not header.dtype.hasobject:
            require_stated_size(where, header, member.file_size)
        yield member.filename.removesuffix(".npy"), header


def require_stated_size(where: str, header: Header, held: int) -> None:
    """Refuse an array whose size differs from its header."""
    if not header.dtype.hasobject and header.n_bytes != held:
        raise FormatError(
            f"{where}: its header claims {header.n_bytes} bytes (shape {header.shape}, {header.dtype}), "
            f"but it has {held}. It is truncated or damaged. {RESAVE}"
        )


def require_numbers(where: str, dtype: np.dtype[Any]) -> None:
    """Refuse Python objects and text instead of numbers."""
    if dtype.hasobject:
        raise FormatError(
            f"{where}: contains Python objects, which are never loaded because they can run code. {RESAVE}"
        )
    if dtype.kind not in "biufc":
        raise FormatError(f"{where}: contains {dtype}, not numbers. {RESAVE}")


def names_in(
    path: Path, headers: Mapping[str, Header], arrays: Any, keys: tuple[str, ...], length: int
) -> tuple[str, ...] | None:
    """Return the first array with one of these keys and this length, as text; None if there is none."""
    for key in keys:
        if key in headers and headers[key].shape == (length,):
            if headers[key].dtype.kind not in "USiu":
                raise FormatError(f"{path}, array {key!r}: names must be text, not {headers[key].dtype}. {RESAVE}")
            return tuple(
                name.decode("utf-8") if isinstance(name, bytes) else str(name) for name in arrays[key].tolist()
            )
    return None


def read_npy(path: Path, wanted: ReadOptions) -> Table:
    """Open a .npy file as a memory map; values are read on use."""
    with parse_errors(path, "a NumPy array"):
        X = open_npy(path)
        return Table(_native(X.T if wanted.transpose else X), source=str(path))


def open_npy(path: Path) -> npt.NDArray[Any]:
    """Open the array of a .npy file, memory-mapped if possible; its header is checked against the file size."""
    with path.open("rb") as stream:
        header = read_header(stream)
    require_stated_size(str(path), header, path.stat().st_size)
    require_numbers(str(path), header.dtype)
    on_disk = header.n_bytes > header.offset and header.dtype.isnative
    found: npt.NDArray[Any] = np.load(path, mmap_mode="r" if on_disk else None, allow_pickle=False)
    return found


def read_npz(path: Path, wanted: ReadOptions) -> Table:
    """Read one matrix of an .npz (by key, the only one, 'X', or 'X_train') with matching names and labels.

    SciPy's sparse format may also contain names and labels.
    """
    with parse_errors(path, "an .npz archive"):
        with zipfile.ZipFile(path) as archive:
            headers = dict(member_headers(path, archive))
        is_sparse = {"format", "shape", "data"} <= headers.keys()
        if is_sparse and wanted.key is not None:
            raise ParameterError(
                f"{path}: key={wanted.key!r} selects one of several arrays, but this is a single sparse matrix. "
                "Remove key.",
                parameter="key",
            )
        key = "X" if is_sparse else _choose(path, headers, wanted.key)
        with np.load(path, allow_pickle=False) as arrays:
            X: Any = _sparse(path, headers, arrays) if is_sparse else _dense(path, key, headers[key], arrays)
            X = X.T if wanted.transpose else X
            X = X.tocsr() if is_sparse else X
            features = names_in(path, headers, arrays, FEATURE_KEYS, X.shape[1])
            samples = names_in(path, headers, arrays, SAMPLE_KEYS, X.shape[0])
            labels = _labels(path, headers, arrays, wanted.label, key, X.shape[0])
        return Table(X, features, samples, labels, str(path))


def _choose(path: Path, headers: Mapping[str, Header], key: str | None) -> str:
    listed = ", ".join(f"{name!r} {header.shape} {header.dtype}" for name, header in list(headers.items())[:20])
    if key is not None and key not in headers:
        raise ParameterError(
            f"{path}: there is no array {key!r}. It contains: {listed or 'nothing'}. Pass one of these as key.",
            parameter="key",
        )
    matrices = [name for name, header in headers.items() if len(header.shape) == 2]
    only = matrices if len(matrices) == 1 else []
    candidates = [key] if key is not None else [*only, *(name for name in ("X", "X_train") if name in headers)]
    if not candidates:
        raise FormatError(
            f"{path}: {len(matrices)} of its arrays are matrices, so it is unclear which to read. "
            f"It contains: {listed or 'no arrays'}. Pass one as key, or save it as 'X' (samples x features).",
            parameter="key",
        )
    return candidates[0]


def _dense(path: Path, key: str, header: Header, arrays: Any) -> npt.NDArray[Any]:
    where = f"{path}, array {key!r}"
    require_numbers(where, header.dtype)
    if len(header.shape) != 2:
        raise ShapeError(
            f"{where}: has shape {header.shape}, not samples x features. Save X.reshape(len(X), -1) instead."
        )
    return _native(arrays[key])


def _sparse(path: Path, headers: Mapping[str, Header], arrays: Any) -> Any:
    from scipy import sparse

    shape = tuple(int(side) for side in arrays["shape"].ravel()[:3])
    require_plausible(path, shape, math.prod(headers["data"].shape))
    matrix = sparse.load_npz(path)
    require_numbers(str(path), matrix.dtype)
    if hasattr(matrix, "check_format"):
        matrix.check_format(full_check=True)  # indices out of range would crash compiled code
    return sparse.csr_array(matrix)


def _native(X: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return X if X.dtype.isnative else X.astype(X.dtype.newbyteorder("="))


def _labels(
    path: Path, headers: Mapping[str, Header], arrays: Any, label: str | None, key: str, length: int
) -> npt.NDArray[Any] | None:
    if label is not None:
        if label not in headers or headers[label].shape != (length,) or headers[label].dtype.hasobject:
            known = [
                name for name, header in headers.items() if header.shape == (length,) and not header.dtype.hasobject
            ]
            raise ParameterError(
                f"{path}: {label!r} is not an array of {length} labels, one per row. Arrays of this length: {known}. "
                "Pass one of these as label, or none.",
                parameter="label",
            )
        return np.asarray(arrays[label])
    suffix = key.removeprefix("X") if key.startswith("X") else ""
    for name in (f"y{suffix}",) if suffix else ("y", "labels", "y_train"):
        if name in headers and headers[name].shape == (length,) and headers[name].dtype.kind in "biufUS":
            return np.asarray(arrays[name])
    return None
