"""`partsong federation demo`: a server and four sites as processes of their own, on this machine."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from partsong.cli.guard import BAD_INPUT, guarded
from partsong.cli.options import AsJson, OptionalPath, examples
from partsong.cli.outputs import put_json
from partsong.errors import FileError

DEMO = examples("partsong federation demo", "partsong federation demo --keep here")


@guarded
def demo(
    keep: Annotated[
        OptionalPath, typer.Option(help="A new folder in which all files stay.", show_default="nothing stays")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """A federation on this machine, with one site killed on the way; ends by comparing bits with one process."""
    from partsong.federation_demo import run_demo

    if keep is not None and keep.exists():
        raise FileError(f"--keep {keep}: there is something already. Name a new folder.")
    with tempfile.TemporaryDirectory() as scratch:
        folder = keep or Path(scratch) / "demo"
        folder.mkdir(parents=True)
        told = run_demo(folder.resolve(), lambda line: typer.echo(line, err=as_json))
    if as_json:
        put_json(told)
    if not told["is_same"]:
        raise typer.Exit(BAD_INPUT)
