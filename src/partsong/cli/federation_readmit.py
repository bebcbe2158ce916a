"""`partsong federation readmit`: a site that has lost its files of a run begins anew in it."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from partsong.cli.federation_server import Folder
from partsong.cli.guard import guarded
from partsong.cli.options import AsJson, examples
from partsong.cli.outputs import put_json
from partsong.errors import FileError, ParameterError

READMIT = examples("partsong federation readmit north --run liver-2 --folder liver")


@guarded
def readmit(
    site: Annotated[str, typer.Argument(help="The site that has lost its files of the run.", show_default=False)],
    run: Annotated[str, typer.Option(help="The run that it is to go on with.", show_default=False)],
    folder: Folder = Path(),
    as_json: AsJson = False,
) -> None:
    """Let a site that has lost its states begin anew in a run: it is started again when the run is resumed.

    It misses what is left of a round in which it has answered before; faulty = "leave out" is not needed for that. Only
    a masked round of several exchanges (fnmf-by-sums) cannot do without it: then a new run has to be made.
    Over texts it also needs its own copy of state/runs/RUN.words/vocabulary; without one, a new run has to be made.
    """
    from partsong.consortium.locking import held
    from partsong.consortium.server_folder import ServerFolder
    from partsong.federation.arrivals_record import ArrivalsJournal, Ongoing
    from partsong.federation.conducting import record_in
    from partsong.federation.keys import nearest
    from partsong.federation.record import Journal

    place = ServerFolder.at(folder).known_run(run)
    with held(place.lock, f"Run {run!r} is being worked on by another process"):
        record = record_in(place.state)
        if record is None:
            raise FileError(f"Run {run!r} has not begun: there is nothing to begin anew.")
        if site not in record.layout.parties:
            raise ParameterError(f"Site {site!r} is not in run {run!r}. {nearest(site, record.layout.parties)}")
        journal = ArrivalsJournal(place.state) if isinstance(record, Ongoing) else Journal(place.state)
        after = journal.readmit(site)
    is_adrift = after is not None and site in after.adrift
    if as_json:
        put_json({"readmitted": site, "run": run, "misses_rest_of_round": record.index if is_adrift else None})
        return
    typer.echo(
        f"Site {site!r} begins anew in run {run!r}, with the same options as before: partsong federation run "
        f"{quote(str(place.experiment))} --folder {quote(str(folder))} --name {run} --resume"
    )
    if is_adrift:
        typer.echo(
            f"Round {record.index} was under way there. It ends with what the site has sent of it before, and without "
            "the rest; the site is in the next one. (A masked round of several exchanges, as of fnmf-by-sums, cannot "
            "do without it: then a new run has to be made.)"
        )
    elif not isinstance(record, Ongoing):
        typer.echo(
            f"If the site has answered in round {record.index} already, that round goes on without it, and it is in "
            "the next one."
        )
