"""`partsong federation secret`: what sites share, and the coordinator does not know."""

from __future__ import annotations

from typing import Annotated

import typer

from partsong.cli.guard import guarded
from partsong.cli.options import AsJson, OptionalPath, examples
from partsong.cli.outputs import put_json
from partsong.errors import FileError

SECRET = examples("partsong federation secret -o sites.key")


@guarded
def secret(
    output: Annotated[
        OptionalPath, typer.Option("--output", "-o", help="A new file for it, for its owner alone.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key that all sites share and the server does not know: names of columns are hashed with it.

    One site makes it, and tells the others by telephone or by a letter that the coordinator does not read.
    """
    from partsong.consortium.shared_key import SharedKey
    from partsong.consortium.toml_text import write

    key = SharedKey.made()
    if output is not None:
        if output.exists():
            raise FileError(f"{output}: there is something already. Name a new file.")
        write(output, key.text + "\n", private=True)
    if as_json:
        put_json({"file": output} if output is not None else {"shared_key": key.text})
        return
    typer.echo(key.text if output is None else f"The key is in {output}.")
    typer.echo("For the sites alone, NOT for the coordinator: partsong federation join KIT --shared-key FILE", err=True)
