"""`partsong topics transform`: new texts and a topic model to weights."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from partsong.cli.choices import MODEL_ENDINGS, WEIGHT_ENDINGS
from partsong.cli.guard import guarded
from partsong.cli.options import AsJson, examples
from partsong.cli.outputs import put_json, require_distinct, require_writable
from partsong.cli.topics_options import TEXTS, Encoding, TextColumn, TopicFile, texts_of
from partsong.errors import FileError

EPILOG = examples("partsong topics transform new.csv topics.safetensors --text-column title -o W.csv")


@guarded
def transform(
    texts: Annotated[Path, typer.Argument(metavar="TEXTS", help=TEXTS, show_default=False)],
    model: TopicFile,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The weights to write: .csv, .tsv, .npy, .parquet or .h5ad.")
    ],
    text_column: TextColumn = "text",
    encoding: Encoding = "utf-8",
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary.")] = False,
) -> None:
    """Weights of topics in new texts, a row for each; zeros for a text without a known word."""
    from partsong.io.weights import write_weights
    from partsong.topic_model import TopicModel

    require_distinct({"TEXTS": texts, "MODEL": model, "--output": output})
    require_writable("--output", output, WEIGHT_ENDINGS)
    if texts.name.endswith(MODEL_ENDINGS) and not model.name.endswith(MODEL_ENDINGS):
        raise FileError(
            f"{texts}: this looks like the model. Name the texts first: partsong topics transform {model} {texts}."
        )
    known = TopicModel.load(model)
    (documents,) = texts_of([texts], text_column, encoding).values()
    began = time.perf_counter()
    W = known.transform(documents)
    write_weights(output, W, component_names=[f"topic_{number}" for number in range(1, known.n_topics_ + 1)])
    n_empty = int((~W.any(axis=1)).sum())
    told = {"output": output, "model": model, "n_documents": len(W), "n_topics": known.n_topics_, "n_zero": n_empty}
    if as_json:
        put_json({**told, "seconds": round(time.perf_counter() - began, 6)})
    elif not quiet:
        typer.echo(f"{W.shape[0]} × {W.shape[1]} weights in {output}; {n_empty} texts have none")
