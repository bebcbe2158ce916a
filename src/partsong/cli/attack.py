"""`partsong attack`: what others could work out from the recorded traffic of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from partsong.cli.choices import one_of
from partsong.cli.options import AsJson, Header, Key, Label, OptionalPath, OptionalText, Transpose, examples
from partsong.cli.output import guarded, put_json, require_writable, visible
from partsong.errors import FormatError, ParameterError
from partsong.io.opening import Wanted, place_of

if TYPE_CHECKING:
    from partsong.attacks.findings import PartyFindings

ATTACKERS = ("server", "colluders")
SEEN = {
    "server": ("every upload", "sums alone: uploads were masked"),
    "colluders": ("the sum, and what all others have sent",) * 2,
}
"""By attacker, in the open and under masks."""
WITHOUT_TRUTH = "No --data: what was found is described, and not compared with rows."
EPILOG = examples(
    "partsong fit parts/ -k 10 --run-folder run --record && partsong attack run",
    "partsong attack run --data parts/ --attacker colluders",
    "partsong attack run --party clinic --data clinic.csv --report attack.html",
)


@guarded
def attack(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The --run-folder of a fit with --record.", show_default=False),
    ],
    data: Annotated[
        list[Path],
        typer.Option(
            "--data",
            help="Rows to hold the findings against: the folder of parts, or with --party that party's file. Once for "
            "each. None of it is shown.",
            show_default=False,
        ),
    ] = [],  # noqa: B006  # typer copies it
    attacker: Annotated[
        str,
        typer.Option(
            help="server: whoever reads the server's inbox; colluders: all parties but one, who know the sum.",
            callback=one_of(ATTACKERS),
        ),
    ] = ATTACKERS[0],
    party: Annotated[
        OptionalText, typer.Option(help="Attack this party alone.", show_default="every party in turn")
    ] = None,
    report: Annotated[
        OptionalPath, typer.Option(help="Also write the findings as a page (.html).", show_default=False)
    ] = None,
    label: Label = None,
    transpose: Transpose = False,
    key: Key = None,
    header: Header = None,
    as_json: AsJson = False,
) -> None:
    """Try on a recorded run what an honest-but-curious server, or all parties but one, could work out of it."""
    from partsong.attacks.findings import verdict_of
    from partsong.attacks.runner import Attacker, findings
    from partsong.attacks.transcript import read_record
    from partsong.cli.attack_run import Truth, recorded_run, require_recorded, settings_of, truth_of

    if report is not None:
        require_writable("--report", report, (".html",))
    folder = place_of(run)
    require_recorded(folder)
    settings, record = settings_of(folder), read_record(folder)
    if party is not None and party not in record.parties:
        raise ParameterError(f"{run}: no party is called {party!r}. There are {', '.join(record.parties[:5])}.")
    rows = truth_of(data, Truth(folder, record, party, settings.missing), Wanted(label, transpose, key, header))
    recorded = recorded_run(folder, settings, record, rows)
    truth = {name: _dense(table.X) for name, table in rows.items()}
    try:
        found = findings(recorded, attacker=Attacker(attacker), truth=truth, parties=None if party is None else {party})
    except ParameterError as error:
        raise FormatError(f"{run}: {error}") from error
    said: dict[str, Any] = {
        "run": run,
        "method": settings.method,
        "n_components": settings.n_components,
        "n_features": recorded.layout.n_features,
        "attacker": attacker,
        "masked": recorded.reduction.hides_uploads,
        "exchanges": len(record.traffic),
        "compared_with": sorted(rows),
        "verdict": verdict_of(found),
        "parties": [{**asdict(each), "verdict": each.verdict} for each in found],
        "report": report,
    }
    if report is not None:
        from partsong.reporting.attack_report import write_page

        write_page(report, f"Attack on {run.name}", found)
    if as_json:
        put_json(said)
    else:
        _show(said, found)


def _dense(X: Any) -> Any:
    import numpy as np

    return np.asarray(X.toarray() if hasattr(X, "toarray") else X, np.float64)


def _show(said: Mapping[str, Any], found: Sequence[PartyFindings]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    lines = {
        "method": said["method"],
        "exchanges": said["exchanges"],
        "attacker": said["attacker"],
        "visible": SEEN[said["attacker"]][said["masked"]],
    }
    for name, value in lines.items():
        typer.echo(f"{name:<12}{visible(value)}")
    if not said["compared_with"]:
        typer.echo(WITHOUT_TRUTH)
    typer.echo("")
    table = Table("party", "left it", "tried", "recovered", box=None, header_style="bold")
    for each in found:
        what = "\n".join(f"{one.array}: {one.measured}" for one in each.recovered) or "nothing"
        cells = (each.party, each.left, "\n".join(each.tried) or "nothing", what)
        table.add_row(*(Text("\n".join(visible(line) for line in cell.split("\n"))) for cell in cells))
    Console(highlight=False).print(table)
    for note in dict.fromkeys(note for each in found for note in each.notes):
        typer.echo(f"\n{visible(note)}")
    typer.echo(f"\n{visible(said['verdict'])}")
