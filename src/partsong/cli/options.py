"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

# Typer before 0.12.4 does not know `Path | None`.
OptionalPath = Optional[Path]  # noqa: UP045
OptionalText = Optional[str]  # noqa: UP045
OptionalInt = Optional[int]  # noqa: UP045
OptionalFloat = Optional[float]  # noqa: UP045

Data = Annotated[
    Path,
    typer.Argument(
        metavar="DATA",
        help="A .csv, .tsv, .npy, .npz, .mtx, .parquet or .h5ad file, or a folder with matrix.mtx. Rows are samples.",
        show_default=False,
    ),
]
Label = Annotated[
    OptionalText,
    typer.Option(help="Column (or array) of labels to leave out of the numbers.", rich_help_panel="Reading"),
]
Transpose = Annotated[
    bool, typer.Option("--transpose", help="The file holds one feature per row.", rich_help_panel="Reading")
]
Key = Annotated[
    OptionalText,
    typer.Option(help="Which array of an .npz, or layer of an .h5ad, to read.", rich_help_panel="Reading"),
]
Threads = Annotated[
    OptionalInt,
    typer.Option(min=1, help="Threads to use.", show_default="all cores", rich_help_panel="Computing"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else.")]


def examples(*lines: str) -> str:
    """Examples for the end of a help page, one per line."""
    return "\n\n".join(("Examples:", *lines))
