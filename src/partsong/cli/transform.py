"""`partsong transform`: new rows and a model to weights."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from partsong.cli.choices import IGNORE, MISSING, MODEL_ENDINGS, WEIGHT_ENDINGS, one_of
from partsong.cli.gaps import with_known_cells
from partsong.cli.guard import guarded
from partsong.cli.holdings import (
    header_notes,
    named_source,
    read_table,
    require_meaningful,
    warn_of,
)
from partsong.cli.options import AsJson, Data, Header, Key, Label, OptionalText, Threads, Transpose, examples
from partsong.cli.outputs import put_json, require_distinct, require_writable, warn_of_formulas
from partsong.errors import FileError, FormatError, ShapeError
from partsong.io.opening import Wanted

if TYPE_CHECKING:
    from partsong.core import Matrix
    from partsong.data.table import Table
    from partsong.io.model_file import Model

EPILOG = examples(
    "partsong transform new.csv model.safetensors -o W.csv",
    "partsong transform new.h5ad model.safetensors -o W.h5ad --drop-extra",
)


@guarded
def transform(
    data: Data,
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model that `partsong fit` wrote.", show_default=False)
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The weights to write: .csv, .tsv, .npy, .parquet or .h5ad."),
    ],
    drop_extra: Annotated[
        bool, typer.Option("--drop-extra", help="Leave out columns that the model does not know.")
    ] = False,
    label: Label = None,
    transpose: Transpose = False,
    key: Key = None,
    header: Header = None,
    missing: Annotated[
        OptionalText,
        typer.Option(
            help="Blanks and NaN, and cells that a sparse file does not store. refuse: an error, and zeros; ignore: "
            "not known, so that a row is fitted by its other cells.",
            callback=one_of(MISSING),
            show_default="as in the fit of the model",
            rich_help_panel="Reading",
        ),
    ] = None,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary.")] = False,
) -> None:
    """Weights of new rows: the non-negative least squares fit of each row to a model's parts."""
    from partsong.cli.model_argument import read_model
    from partsong.io.weights import write_weights

    require_distinct({"DATA": data, "MODEL": model, "--output": output})
    require_writable("--output", output, WEIGHT_ENDINGS)
    if data.name.endswith(MODEL_ENDINGS) and not model.name.endswith(MODEL_ENDINGS):
        raise FileError(f"{data}: this looks like the model. Name the data first: partsong transform {model} {data}.")
    wanted = Wanted(label, transpose, key, header, drop_extra=drop_extra)
    require_meaningful(data, wanted)
    known = read_model(model)
    require_least_squares(model, known)
    missing = missing or (IGNORE if known.settings.get("missing") == IGNORE else MISSING[0])
    wanted = replace(wanted, features=frozenset(known.feature_names or ()), gaps=missing == IGNORE)
    table = read_table(data, wanted)
    warn_of(table, header_notes(table, wanted))
    table = with_known_cells(matched(table, known, drop_extra), missing)
    began = time.perf_counter()
    W, error = weights_of(table, known, threads, missing)
    write_weights(output, W, table.sample_names)
    warn_of_formulas(output, table.sample_names)
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
    if as_json:
        put_json(result)
    elif not quiet:
        typer.echo(f"{W.shape[0]} × {W.shape[1]} weights in {output}; relative error {error:.6f}")


def require_least_squares(path: Path, model: Model) -> None:
    """Refuse topics of LDA, as a federation's server has them: weights are shares there."""
    from partsong.saving import LDA

    if model.settings.get("method") == LDA:
        raise FormatError(
            f"{path}: topics of LDA, whose weights are shares and no fit of least squares. Every site has them as "
            "topics.safetensors, for partsong topics transform."
        )


def matched(table: Table, model: Model, drop_extra: bool) -> Table:
    """The table with the model's columns in the model's order: by name where both have names, else by number."""
    if table.feature_names is not None and model.feature_names is not None:
        return table.aligned_to(model.feature_names, drop_extra=drop_extra)
    wanted, held = model.components.shape[1], int(table.X.shape[1])
    if wanted != held:
        who = "the data have" if table.feature_names is None else "the model has"
        raise ShapeError(
            f"{table.source}: {held} columns, but the model has {wanted}, and {who} no names to match them by. "
            "Bring the data to the columns of the fit, in the same order."
        )
    return table


def weights_of(table: Table, model: Model, threads: int | None, missing: str = MISSING[0]) -> tuple[Any, float]:
    """W with the penalties of the fit, and ‖X − W H‖ / ‖X‖, over known cells where only these are in the table."""
    import numpy as np

    from partsong.data.check import require_transformable
    from partsong.data.matrix import as_matrix
    from partsong.data.observed import observed
    from partsong.local.observed import ObservedRows
    from partsong.settings import solver_of
    from partsong.threads import available, kernels_on

    with named_source(table):
        require_transformable(table.X, dtype=model.components.dtype)
    is_partial, kind = missing == IGNORE, model.components.dtype
    matrix: Matrix = observed(table.X, kind) if is_partial else as_matrix(table.X, kind)
    penalties = (_number(model.settings.get(name)) for name in ("alpha_w", "alpha_h", "l1_ratio"))
    Ht = np.ascontiguousarray(model.components.T)
    with kernels_on(threads or available()):
        W = ObservedRows(solver_of("hals", *penalties)).solve_rows(matrix, Ht)
        distance = max(0.0, matrix.squared_distance(W, Ht))
        norm = matrix.squared_norm
    return W, math.sqrt(distance / norm) if norm > 0 else 0.0


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
