"""Write the weights W: one row per sample, one column per component."""

from __future__ import annotations

import csv
import gzip
import io
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from partsong.errors import DataTypeError, FeatureError, FileError, ShapeError, format_count
from partsong.io.delimited import SAMPLE_TITLE
from partsong.io.opening import import_optional, resolve_path
from partsong.io.write import atomic_write, quoting_for


@dataclass(frozen=True, slots=True)
class _Weights:
    W: npt.NDArray[Any]
    samples: tuple[str, ...] | None
    components: tuple[str, ...]


def write_weights(
    path: str | os.PathLike[str],
    W: npt.ArrayLike,
    sample_names: Sequence[str] | None = None,
    component_names: Sequence[str] | None = None,
) -> None:
    """Write the weights atomically, in the format of the file name extension.

    Text has all digits, so that reading gives the same numbers. .npy has numbers only, no names. Components are named
    component_1, component_2, … by default. Names are written unchanged, quoted if the format needs it: a name that a
    spreadsheet takes for a formula (`first_formula`) remains one.
    """
    weights = _checked(np.asarray(W), sample_names, component_names)
    name = resolve_path(path).name.lower()
    for ending, writer in _WRITERS.items():
        if name.endswith(ending):
            with atomic_write(path) as draft:
                writer(draft, weights)
            return
    require_weight_ending(path)


def require_weight_ending(path: str | os.PathLike[str]) -> None:
    """Refuse a file name extension of no supported format."""
    if not resolve_path(path).name.lower().endswith(tuple(_WRITERS)):
        raise FileError(f"{path}: weights can be written as {', '.join(_WRITERS)}. Use one of these extensions.")


def shard_path(weights: Path, rank: int, ranks: int) -> Path:
    """Return the file for the rows of one rank: W.rank0of4.npy for W.npy."""
    ending = _ending(weights)
    return weights.with_name(f"{weights.name[: len(weights.name) - len(ending)]}.rank{rank}of{ranks}{ending}")


def listing_path(weights: Path) -> Path:
    """Return the file that lists the files of all ranks: W.shards.json for W.npy."""
    return weights.with_name(f"{weights.name[: len(weights.name) - len(_ending(weights))]}.shards.json")


def _ending(path: Path) -> str:
    found = [ending for ending in _WRITERS if path.name.lower().endswith(ending)]
    return path.name[len(path.name) - len(max(found, key=len)) :] if found else ""


def _checked(
    W: npt.NDArray[Any], sample_names: Sequence[str] | None, component_names: Sequence[str] | None
) -> _Weights:
    if W.dtype.kind not in "biuf":
        raise DataTypeError(f"W must be numbers, not {W.dtype}. Convert it with W.astype(float).")
    if W.ndim != 2:
        raise ShapeError(f"W must be samples x components, but has shape {W.shape}. Reshape it.")
    n_samples, n_components = W.shape
    if sample_names is not None and len(sample_names) != n_samples:
        raise ShapeError(
            f"{format_count(len(sample_names), 'sample name')} for {format_count(n_samples, 'row')} of W. Pass "
            "one per row, or none."
        )
    if component_names is None:
        component_names = [f"component_{number}" for number in range(1, n_components + 1)]
    if len(component_names) != n_components:
        raise ShapeError(
            f"{format_count(len(component_names), 'component name')} for {format_count(n_components, 'column')} "
            "of W. Pass one per column."
        )
    if len(set(component_names)) < n_components:
        raise FeatureError(f"Component names must differ; got {', '.join(component_names[:5])}, …. Rename some.")
    kept = W if W.dtype in (np.float32, np.float64) else W.astype(np.float64)
    samples = None if sample_names is None else tuple(map(str, sample_names))
    return _Weights(kept, samples, tuple(map(str, component_names)))


def _write_text(draft: Path, weights: _Weights) -> None:
    name = draft.name.lower()
    with ExitStack() as stack:
        raw = stack.enter_context(draft.open("wb"))
        if name.endswith(".gz"):  # without name and time, so that equal weights give equal bytes
            raw = cast(Any, stack.enter_context(gzip.GzipFile("", "wb", 6, raw, mtime=0)))
        text = stack.enter_context(io.TextIOWrapper(raw, encoding="utf-8", newline=""))
        names = weights.samples
        writer = csv.writer(
            text,
            delimiter="\t" if name.removesuffix(".gz").endswith(".tsv") else ",",
            lineterminator="\n",
            quoting=quoting_for((*(names or ()), *weights.components)),
        )
        writer.writerow(weights.components if names is None else (SAMPLE_TITLE, *weights.components))
        rows = map(np.ndarray.tolist, weights.W)
        writer.writerows(rows if names is None else ([sample, *row] for sample, row in zip(names, rows, strict=True)))


def _write_npy(draft: Path, weights: _Weights) -> None:
    with draft.open("wb") as stream:
        np.save(stream, weights.W, allow_pickle=False)


def _write_parquet(draft: Path, weights: _Weights) -> None:
    arrow, parquet = import_optional("pyarrow", "io"), import_optional("pyarrow.parquet", "io")
    columns = [arrow.array(np.ascontiguousarray(column)) for column in weights.W.T]
    names = list(weights.components)
    if weights.samples is not None:
        columns, names = [arrow.array(weights.samples, type=arrow.string()), *columns], [SAMPLE_TITLE, *names]
    parquet.write_table(arrow.table(columns, names=names), draft)


def _write_h5ad(draft: Path, weights: _Weights) -> None:
    """Write AnnData with the weights as X, so that any reader of .h5ad finds samples and components by name."""
    anndata, pandas = import_optional("anndata", "io"), import_optional("pandas", "io")
    samples = weights.samples or tuple(map(str, range(len(weights.W))))
    anndata.AnnData(
        X=weights.W, obs=pandas.DataFrame(index=list(samples)), var=pandas.DataFrame(index=list(weights.components))
    ).write_h5ad(draft)


_WRITERS: dict[str, Callable[[Path, _Weights], None]] = {
    ".csv": _write_text,
    ".csv.gz": _write_text,
    ".tsv": _write_text,
    ".tsv.gz": _write_text,
    ".npy": _write_npy,
    ".parquet": _write_parquet,
    ".h5ad": _write_h5ad,
}
