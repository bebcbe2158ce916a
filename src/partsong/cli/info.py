"""`partsong info`: what is in a model file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from partsong.cli.guard import guarded
from partsong.cli.options import AsJson, examples
from partsong.cli.outputs import put_json, visible

if TYPE_CHECKING:
    from partsong.io.model_file import Model

EPILOG = examples("partsong info model.safetensors --top 15", "partsong info model.safetensors --json")


@guarded
def info(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model that `partsong fit` wrote.", show_default=False)
    ],
    top: Annotated[int, typer.Option(min=1, help="Features to show per component.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Show a model: its shape, error and settings, and the top features of each component."""
    from partsong.cli.model_argument import read_model

    content = description(read_model(model), top)
    if as_json:
        put_json({"model": model, **content})
    else:
        _show(content)


def description(model: Model, top: int) -> dict[str, Any]:
    """All that can be said about a model in plain values."""
    error = model.relative_error
    return {
        "n_components": model.components.shape[0],
        "n_features": model.components.shape[1],
        "dtype": str(model.components.dtype),
        "has_feature_names": model.feature_names is not None,
        "relative_error": error,
        "explained_variance": None if error is None else 1.0 - error**2,
        "seed": model.seed,
        "created": model.created,
        "settings": dict(model.settings),
        "versions": dict(model.versions),
        "components": [_component(model, at, top) for at in range(model.components.shape[0])],
    }


def _component(model: Model, at: int, top: int) -> dict[str, Any]:
    import numpy as np

    values = model.components[at]
    order = np.argsort(-values, kind="stable")[:top].tolist()
    return {
        "component": at + 1,
        "share": None if model.shares is None else float(model.shares[at]),
        "top_features": [j if model.feature_names is None else model.feature_names[j] for j in order],
        "top_values": [float(values[j]) for j in order],
    }


def _show(content: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    facts = {name: value for name, value in content.items() if name not in ("settings", "versions", "components")}
    for group in (facts, content["settings"], content["versions"]):
        for name, value in group.items():
            if value is not None:
                typer.echo(f"{visible(name).replace('_', ' '):<20}{visible(value)}")
        typer.echo("")
    table = Table("component", "share", "top features", box=None, header_style="bold")
    for part in content["components"]:
        share = "" if part["share"] is None else f"{100 * part['share']:.2f} %"
        names = ", ".join(visible(name) for name in part["top_features"])
        table.add_row(Text(str(part["component"])), Text(share), Text(names))
    Console(highlight=False).print(table)
