"""Options that commands about topics share, and texts from files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

TextColumn = Annotated[
    str,
    typer.Option(
        "--text-column", help="The column (.jsonl: field) with the texts.", rich_help_panel="Reading", metavar="NAME"
    ),
]
Encoding = Annotated[
    str, typer.Option(help="How the files are written: utf-8, cp1252, latin-1, utf-16, ….", rich_help_panel="Reading")
]
TopicFile = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A model that `partsong topics fit` wrote.", show_default=False)
]
TEXTS = "A .csv, .tsv, .jsonl or .txt file (also .gz), or a folder of .txt files; one text per row, line or file."


def texts_of(paths: Sequence[Path], column: str, encoding: str) -> dict[str, list[str]]:
    """Texts by the name of their party, which is that of its file as far as it tells files apart."""
    from partsong.text.documents import read_documents

    short = [path.name.removesuffix(".gz").rpartition(".")[0] or path.name for path in paths]
    names = short if len(set(short)) == len(short) else [str(path) for path in paths]
    return {
        name: read_documents(path, column=column, encoding=encoding) for name, path in zip(names, paths, strict=True)
    }
