"""`partsong attack`: what others could work out from the recorded traffic of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from partsong.cli.inputs import with_known_cells
from partsong.console.options import AsJson, Header, Key, Label, OptionalPath, OptionalText, Transpose, examples, one_of
from partsong.console.output import guarded, put_json, require_writable, visible
from partsong.console.tables import read_table
from partsong.core.interfaces import Layout
from partsong.errors import FileError, FormatError, ParameterError, PartsongError, ShapeError
from partsong.io.opening import Wanted, place_of
from partsong.io.party_folder import is_parts_folder, read_parts

if TYPE_CHECKING:
    from partsong.attacks.findings import PartyFindings
    from partsong.attacks.runner import RecordedRun
    from partsong.data.table import Table
    from partsong.estimators.federated_nmf import FederatedNMF
    from partsong.training.traffic import TrafficRecord

CENTRALISED = "centralised"
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
    "partsong attack run-1 run-2 --data parts/ --candidates people.csv",
)


@guarded
def attack(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="The --run-folder of a fit with --record; of several, all uploads count together.",
            show_default=False,
        ),
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
    candidates: Annotated[
        OptionalPath,
        typer.Option(
            help="Rows to test for membership, with the columns of the run; with --data also how well the tests do.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="How long all searches together may take.")] = 120.0,
    report: Annotated[
        OptionalPath, typer.Option(help="Also write the findings as a page (.html).", show_default=False)
    ] = None,
    label: Label = None,
    transpose: Transpose = False,
    key: Key = None,
    header: Header = None,
    as_json: AsJson = False,
) -> None:
    """Try on a recorded run what an honest-but-curious server, or all parties but one, could work out of it.

    The first line is the severity: the worse of what follows from rounds, components and rows alone, and what was
    found. guess: who holds a record may guess that it was used; membership: can tell; entries, rows: values, or whole
    rows, may be computed back; unknown: only H was sent, for which no law is known; bounded: uploads had noise.
    """
    from partsong.attacks.findings import severity_of, verdict_of
    from partsong.attacks.runner import Attacker, findings
    from partsong.training.traffic import read_record

    if report is not None:
        require_writable("--report", report, (".html",))
    wanted, read = Wanted(label, transpose, key, header), []
    for run in runs:
        folder = place_of(run)
        require_recorded(folder)
        settings, record = estimator_of(folder), read_record(folder)
        if party is not None and party not in record.parties:
            raise ParameterError(f"{run}: no party is called {party!r}. There are {', '.join(record.parties[:5])}.")
        rows = truth_of(data, Truth(folder, record, party, settings.missing), wanted)
        one = recorded_run(folder, settings, record, rows)
        read.append((run, settings, record, rows, replace(one, truth=_fitting(rows, record))))
    run, settings, record, rows, recorded = read[0]
    about = Truth(place_of(run), record, party, settings.missing)
    people = None if candidates is None else _dense(_in_order(read_table(candidates, wanted), about).X)
    others = [one[-1] for one in read[1:]]
    try:
        found = findings(
            recorded,
            attacker=Attacker(attacker),
            parties=None if party is None else {party},
            others=others,
            candidates=people,
            seconds=seconds,
        )
    except ParameterError as error:
        raise FormatError(f"{run}: {error}") from error
    worst = severity_of(found)
    said: dict[str, Any] = {
        "severity": str(worst.severity),
        "by_law": str(worst.by_law),
        "found": None if worst.found_level is None else str(worst.found_level),
        "worst_party": worst.party,
        "run": run,
        "other_runs": [str(one) for one in runs[1:]],
        "method": settings.method,
        "n_components": settings.n_components,
        "n_features": recorded.layout.n_features,
        "attacker": attacker,
        "masked": recorded.reduction.hides_uploads,
        "exchanges": len(record.traffic),
        "compared_with": sorted(rows),
        "verdict": verdict_of(found),
        "parties": [_as_json(each) for each in found],
        "report": report,
    }
    if report is not None:
        from partsong.reporting.attack_report import write_page

        write_page(report, f"Attack on {' and '.join(one.name for one in runs)}", found)
    if as_json:
        put_json(said)
    else:
        _show(said, found)


def _as_json(each: PartyFindings) -> dict[str, Any]:
    """A party's findings in plain values."""
    found = None if each.found_level is None else str(each.found_level)
    own = {"severity": str(each.severity), "by_law": str(each.by_law), "found": found}
    return {**asdict(each), **own, "verdict": each.verdict}


def _fitting(rows: Mapping[str, Table], record: TrafficRecord) -> dict[str, Any]:
    """Rows by party; not those of a party whose number of rows was another in this run."""
    told = {
        party: round(float(message["rows"]))
        for sent in record.traffic
        for party, _, message in sent
        if {"rows", "cross"} <= message.arrays.keys()
    }
    return {name: _dense(table.X) for name, table in rows.items() if told.get(name, len_of(table)) == len_of(table)}


def len_of(table: Table) -> int:
    """The number of rows."""
    return int(table.X.shape[0])


def _dense(X: Any) -> Any:
    import numpy as np

    return np.asarray(X.toarray() if hasattr(X, "toarray") else X, np.float64)


def _show(said: Mapping[str, Any], found: Sequence[PartyFindings]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    by = f"by the numbers: {said['by_law']}; found: {said['found'] or 'nothing beyond that'}"
    lines = {
        "severity": f"{said['severity']} ({by}; worst for {said['worst_party']})",
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
    table = Table("party", "severity", "left it", "tried", "recovered", box=None, header_style="bold")
    for each in found:
        what = "\n".join(f"{one.array}: {one.measured}" for one in each.recovered) or f"by the numbers: {each.by_law}"
        what += "".join(f"\n{_tested(test)}" for test in each.membership)
        what += "" if each.largest_share is None else f"\nlargest share of one row in a sum: {each.largest_share:.0%}"
        cells = (each.party, str(each.severity), each.left, "\n".join(each.tried) or "no attack", what)
        table.add_row(*(Text("\n".join(visible(line) for line in cell.split("\n"))) for cell in cells))
    Console(highlight=False).print(table)
    for note in dict.fromkeys(note for each in found for note in each.notes):
        typer.echo(f"\n{visible(note)}")
    typer.echo(f"\n{visible(said['verdict'])}")


def _tested(test: Any) -> str:
    """A test of membership, in words."""
    how = f"membership by {test.test}, {test.candidates} candidates"
    if test.auc is None:
        return f"{how}: the AUC is not known; it takes the rows, some that were not used, and enough time"
    return f"{how}: AUC {test.auc:.2f}"


# ---- attack data ------------------------------------------------------------------------------------------------
#
# Rows that the findings of an attack are held against.


@dataclass(frozen=True, slots=True)
class Truth:
    """What rows have to fit: the folder and the record of the run, the one party that is meant, and unknown cells."""

    folder: Path
    record: TrafficRecord
    party: str | None
    missing: str | None


def truth_of(data: Sequence[Path], about: Truth, wanted: Wanted) -> dict[str, Table]:
    """Tables by party, with their columns in the order of the run."""
    parties = about.record.parties
    found: dict[str, Table] = {}
    for path in data:
        place = place_of(path)
        if is_parts_folder(place):
            found |= read_parts(place)
        elif about.party is None and len(parties) > 1:
            raise typer.BadParameter(f"{path}: say whose rows these are by --party.", param_hint="--data")
        else:
            found[about.party or parties[0]] = read_table(path, wanted)
    known = {name: table for name, table in found.items() if name in parties}
    if data and not known:
        raise FileError(f"{data[0]}: none of its parties ({', '.join(list(found)[:5])}) took part in this run.")
    return {name: with_known_cells(_in_order(table, about), about.missing) for name, table in known.items()}


def _in_order(table: Table, about: Truth) -> Table:
    """By name where the model of the run and the table have names; else as it is."""
    from partsong.cli.model import matched
    from partsong.io.model_file import load_model
    from partsong.training.run_folder import MODEL

    place, width = about.folder / MODEL, about.record.n_features
    if place.is_file():
        return matched(table, load_model(place), drop_extra=False)
    if width is not None and table.X.shape[1] != width:
        raise ShapeError(f"{table.source}: {table.X.shape[1]} columns, but the run had {width}. Bring its own rows.")
    return table


# ---- attack run -------------------------------------------------------------------------------------------------

BROKEN = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""What code for sound settings raises on others."""
MOST_BLANK = 1000
"""H may have so many times as many numbers as were sent in all, and no more."""


def require_recorded(folder: Path) -> None:
    """Refuse what is no folder of a run, or of one that was not recorded."""
    from partsong.training.run_folder import SETTINGS
    from partsong.training.traffic import LIST

    if not folder.is_dir():
        raise FileError(f"{folder}: there is no such folder. Name the --run-folder of a fit with --record.")
    if not (folder / SETTINGS).is_file():
        raise FileError(f"{folder} is not the folder of a run: it has no {SETTINGS}. Name the --run-folder of a fit.")
    if not (folder / LIST).is_file():
        raise FileError(
            f"{folder}: this run was not recorded, so that it cannot be attacked. Fit again with --record: "
            "partsong fit parts/ --run-folder run --record"
        )


def estimator_of(folder: Path) -> FederatedNMF:
    """The estimator of a recorded run, from its settings.json; whatever is not as we write it is a FormatError."""
    from partsong.estimators.federated_nmf import FederatedNMF
    from partsong.training.run_folder import SETTINGS, RunFolder

    told, path = RunFolder(folder).settings(), folder / SETTINGS
    if told.get("method") == CENTRALISED:
        raise FileError(f"{folder}: a fit of one table, in which nobody sends anything. Attack a fit of parts.")
    if lacking := [name for name in ("method", "n_components", "dtype", "seed", "rounds") if name not in told]:
        raise FormatError(f"{path}: lacks {', '.join(lacking)}. Restore it, or record the run again.")
    try:
        return FederatedNMF.from_settings(told).set_params(n_jobs=1, dtype=str(told["dtype"]))
    except (PartsongError, *BROKEN) as error:
        raise FormatError(f"{path}: not the settings of a run: {error} Restore it, or record the run again.") from error


def recorded_run(
    folder: Path, estimator: FederatedNMF, record: TrafficRecord, rows: Mapping[str, Table]
) -> RecordedRun:
    """The run as it was set up; a party whose rows are not at hand has a blank one in their place."""
    from partsong.attacks.runner import RecordedRun
    from partsong.data.table import Table
    from partsong.engines.virtual_clock import Asynchronous

    blank = with_known_cells(Table(_blank(folder, estimator, record)), estimator.missing)
    try:
        fit = estimator.simulation({name: rows.get(name, blank).X for name in record.parties})
        layout = Layout.of(fit.shards, fit.schedule.seed)
        if not fit.reduction.hides_uploads:
            _require_uploads(record, fit.program, layout)
    except (PartsongError, *BROKEN) as error:
        raise FormatError(f"{folder}: its traffic is not that of its settings.json: {error}") from error
    shards = {shard.name: shard for shard in fit.shards if shard.name in rows}
    is_asynchronous = isinstance(fit.engine, Asynchronous)
    return RecordedRun(record.traffic, fit.program, layout, fit.reduction, is_asynchronous, shards)


def _blank(folder: Path, settings: FederatedNMF, record: TrafficRecord) -> Any:
    """One row of ones, as wide as the data were; refused where that is more than the traffic can be about."""
    import numpy as np

    width = record.n_features or _width_of(record)
    numbers = sum(int(array.size) for sent in record.traffic for _, _, m in sent for array in m.arrays.values())
    if width is None:
        raise FormatError(f"{folder}: its record does not tell the number of columns. TrafficRecord the run anew.")
    rank = settings.n_components
    if not isinstance(rank, int) or rank < 1 or rank * width > MOST_BLANK * max(1, numbers):
        raise FormatError(f"{folder}: {rank} components of {width} columns are not what this traffic is about.")
    return np.ones((1, width), settings.dtype)


def _width_of(record: TrafficRecord) -> int | None:
    """From the arrays that have all columns; records of earlier releases tell it in no other way."""
    for _, _, message in (each for sent in record.traffic for each in sent):
        if "place" in message.arrays and message["place"].size == 3:
            return int(message["place"][2])
        for name in ("cross", "H"):
            if name in message.arrays and message[name].ndim == 2:
                return int(message[name].shape[1])
    return None


def _require_uploads(record: TrafficRecord, program: Any, layout: Any) -> None:
    """Hold every upload to what its program says of it, as engines do."""
    from partsong.engines.upload_checks import check_upload

    expected = program.upload_spec(layout)
    for index, sent in enumerate(record.traffic):
        for party, phase, message in sent:
            if phase:
                raise FormatError(f"round {index + 1} has a phase {phase}, and uploads in the open have one phase.")
            check_upload(party, message, expected)
