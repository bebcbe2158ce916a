"""`partsong audit make-up`: charge and note what ledger and log of a site do not know of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from partsong.cli.guard import guarded
from partsong.cli.options import AsJson, OptionalText, examples
from partsong.cli.outputs import put_json
from partsong.errors import ParameterError

MAKE_UP = examples(
    'partsong audit make-up site-north --why "ledger.jsonl from the copy of 3 May"',
    'partsong audit make-up site-north --count 2 --why "restored; the server has seen two more"',
)


@guarded
def make_up(
    place: Annotated[Path, typer.Argument(metavar="FOLDER", help="The site's folder.", show_default=False)],
    why: Annotated[str, typer.Option(help="What has happened; it stays in the files.", show_default=False)],
    count: Annotated[
        int,
        typer.Option(
            min=0,
            help="Releases that the ledger lacks in all, as `behind` says; those that the log tells of are among them.",
        ),
    ] = 0,
    release: Annotated[
        OptionalText,
        typer.Option(
            help="What each of these has cost of which the log does not tell: `release` of a line in another copy of "
            "ledger or log of this site, about the same unit and relation. It is written down as you state it.",
            show_default="no noise",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Charge what the audit log says has left, and note what the ledger has charged, after a file was lost or restored.

    Nothing is taken away: ε that is spent stays spent. Put newer copies back first, where there are any. Releases of
    which only the number is known count as without noise: a site with a privacy budget then refuses runs until its
    site.toml says that this is known (noiseless_before).
    """
    from partsong.federation.making_up import make_up as write_missing
    from partsong.federation.making_up import state_at, stated_release

    if not why.strip():
        raise ParameterError("--why needs a word on what has happened, for those who read the files later.")
    if release is not None and not count:
        raise ParameterError("--release is the cost of releases that --count tells of. Give both, or none.")
    stated = None if release is None else stated_release(release)
    made = write_missing(state_at(place), why.strip(), count, stated)
    if as_json:
        put_json({"charged": made.charged, "noted": made.noted, "of_no_run": made.of_no_run})
        return
    typer.echo(f"Charged, for they have left:         {len(made.charged)}")
    typer.echo(f"Noted as left, for they were charged: {len(made.noted)}")
    at_what = "as without noise: " if stated is None else "at the cost given:"
    typer.echo(f"Charged besides, {at_what}   {made.of_no_run}")
