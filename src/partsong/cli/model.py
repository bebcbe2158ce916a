"""`partsong transform` and `partsong info`: weights of new rows, and the contents of a model file."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from partsong.cli.inputs import header_notes, named_source, warn_about, with_known_cells
from partsong.console.options import (
    IGNORE,
    MISSING,
    MODEL_ENDINGS,
    AsJson,
    Data,
    Header,
    Key,
    Label,
    Quiet,
    Threads,
    Transpose,
    examples,
    one_of,
)
from partsong.console.output import (
    facts,
    handle_errors,
    put_json,
    put_result,
    put_table,
    require_transform_files,
    visible,
    warn_about_formulas,
)
from partsong.console.tables import read_table, require_applicable_options
from partsong.core.interfaces import Matrix
from partsong.core.runtime import available_threads, limit_kernel_threads
from partsong.data.conversion import as_matrix
from partsong.data.observed import observed
from partsong.data.table import Table
from partsong.data.validation import require_transformable
from partsong.errors import FileError, FormatError, ShapeError, format_count
from partsong.estimators.persistence import LDA
from partsong.estimators.validation import penalties_of
from partsong.io.model_file import Model, load_model
from partsong.io.opening import ReadOptions, resolve_path
from partsong.io.weights import write_weights
from partsong.solvers.observed import ObservedRowSolver
from partsong.solvers.squared_error import build_solver
from partsong.training.result import top_features

ModelFile = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A model file that `partsong fit` wrote.", show_default=False)
]

# ---- model file --------------------------------------------------------------------------------------------------


def read_model(path: Path) -> Model:
    """Call `partsong.load_model`; for a folder, suggest a file in it."""
    place = resolve_path(path)
    if not place.is_dir():
        return load_model(place)
    held = sorted(entry.name for entry in place.iterdir() if entry.name.endswith(MODEL_ENDINGS))
    way_out = f"Pass a file in it, such as {path / held[0]}." if held else "It holds no .safetensors file."
    raise FileError(f"{path} is a folder, not a model file. {way_out}")


# ---- info -------------------------------------------------------------------------------------------------------
#
# `partsong info`: the contents of a model file.

INFO_EPILOG = examples("partsong info model.safetensors --top 15", "partsong info model.safetensors --json")


@handle_errors
def info(
    model: ModelFile,
    top: Annotated[int, typer.Option(min=1, help="Features to show per component.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Show a model: shape, error, settings, and the top features of each component."""
    content = description(read_model(model), top)
    if as_json:
        put_json({"model": model, **content})
    else:
        _show(content)


def description(model: Model, top: int) -> dict[str, Any]:
    """Return the contents of a model as plain values."""
    H, error = model.components, model.relative_error
    features, values = top_features(H, model.feature_names, top), -np.sort(-H, axis=1)[:, :top]
    return {
        "n_components": H.shape[0],
        "n_features": H.shape[1],
        "dtype": str(H.dtype),
        "has_feature_names": model.feature_names is not None,
        "relative_error": error,
        "explained_variance": None if error is None else 1.0 - error**2,
        "seed": model.seed,
        "created": model.created,
        "settings": dict(model.settings),
        "versions": dict(model.versions),
        "components": [
            {
                "component": at + 1,
                "share": None if model.shares is None else float(model.shares[at]),
                "top_features": features[at],
                "top_values": values[at].tolist(),
            }
            for at in range(len(H))
        ],
    }


def _show(content: dict[str, Any]) -> None:
    single = {name: value for name, value in content.items() if name not in ("settings", "versions", "components")}
    for group in (single, content["settings"], content["versions"]):
        shown = ((visible(n).replace("_", " "), visible(value)) for n, value in group.items() if value is not None)
        typer.echo("\n".join([*facts(shown, 20), ""]))
    rows = []
    for part in content["components"]:
        share = "" if part["share"] is None else f"{100 * part['share']:.2f} %"
        rows.append((str(part["component"]), share, ", ".join(map(visible, part["top_features"]))))
    put_table(("component", "share", "top features"), rows)


# ---- transform --------------------------------------------------------------------------------------------------

TRANSFORM_EPILOG = examples(
    "partsong transform new.csv model.safetensors -o W.csv",
    "partsong transform new.h5ad model.safetensors -o W.h5ad --drop-extra",
)


@handle_errors
def transform(
    data: Data,
    model: ModelFile,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The weights to write: .csv, .tsv, .npy, .parquet or .h5ad.")
    ],
    drop_extra: Annotated[
        bool, typer.Option("--drop-extra", help="Drop columns that the model does not have.")
    ] = False,
    label: Label = None,
    transpose: Transpose = False,
    key: Key = None,
    header: Header = None,
    missing: Annotated[
        str | None,
        typer.Option(
            help="Blanks and NaN, and cells that a sparse file does not store. refuse: the former are errors, the "
            "latter zeros; ignore: all are unknown, and a row is fitted by its other cells.",
            callback=one_of(MISSING),
            show_default="as in the fit",
            rich_help_panel="Reading",
        ),
    ] = None,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compute the weights of new rows: the non-negative least squares fit of each row to a model's components."""
    require_transform_files("partsong transform", data, model, output)
    wanted = ReadOptions(label, transpose, key, header, drop_extra=drop_extra)
    require_applicable_options(data, wanted)
    known = read_model(model)
    if known.settings.get("method") == LDA:
        raise FormatError(
            f"{model}: an LDA model, whose weights are mixture proportions, not a least squares fit. Use partsong "
            "topics transform with topics.safetensors, which every site has."
        )
    missing = missing or (IGNORE if known.settings.get("missing") == IGNORE else MISSING[0])
    wanted = replace(wanted, features=frozenset(known.feature_names or ()), gaps=missing == IGNORE)
    table = read_table(data, wanted)
    warn_about(table, header_notes(table, wanted))
    table = with_known_cells(matched(table, known, drop_extra), missing)
    began = time.perf_counter()
    W, error = weights_of(table, known, threads, missing)
    write_weights(output, W, table.sample_names)
    warn_about_formulas(output, table.sample_names)
    result = {
        "output": output,
        "model": model,
        "shape": table.X.shape,
        "n_components": len(known.components),
        "missing": missing,
        "relative_error": error,
        "explained_variance": 1.0 - error**2,
        "seconds": round(time.perf_counter() - began, 6),
    }
    line = f"{W.shape[0]} × {W.shape[1]} weights in {output}; relative error {error:.6f}"
    put_result(result, (line,), as_json, quiet)


def matched(table: Table, model: Model, drop_extra: bool) -> Table:
    """Return the table with the model's columns in the model's order: by name if both have names, else by position."""
    if table.feature_names is not None and model.feature_names is not None:
        return table.aligned_to(model.feature_names, drop_extra=drop_extra)
    wanted, held = model.components.shape[1], int(table.X.shape[1])
    if wanted != held:
        who = "the data have" if table.feature_names is None else "the model has"
        raise ShapeError(
            f"{table.source}: {format_count(held, 'column')}, but the model has {wanted}, and {who} no names to "
            "match them. "
            "Pass the columns of the fit, in the same order."
        )
    return table


def weights_of(table: Table, model: Model, threads: int | None, missing: str = MISSING[0]) -> tuple[Any, float]:
    """Return W, with the penalties of the fit, and ‖X − W H‖ / ‖X‖, both over the known cells."""
    kind = model.components.dtype
    with named_source(table):
        require_transformable(table.X, dtype=kind)
    matrix: Matrix = observed(table.X, kind) if missing == IGNORE else as_matrix(table.X, kind)
    Ht = np.ascontiguousarray(model.components.T)
    with limit_kernel_threads(threads or available_threads()):
        W = ObservedRowSolver(build_solver("hals", *penalties_of(model.settings))).solve_rows(matrix, Ht)
        distance = max(0.0, matrix.squared_distance(W, Ht))
        norm = matrix.squared_norm
    return W, math.sqrt(distance / norm) if norm > 0 else 0.0
