"""`partsong attack`: reconstruct rows, entries or membership from the recorded traffic of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from partsong.attacks.findings import PartyFindings, severity_of, verdict_of
from partsong.attacks.runner import Attacker, RecordedRun, findings
from partsong.cli.inputs import with_known_cells
from partsong.cli.model import matched
from partsong.console.options import AsJson, Header, Key, Label, Transpose, examples, one_of
from partsong.console.output import facts, handle_errors, put_json, put_table, require_writable, visible
from partsong.console.tables import read_table
from partsong.core.interfaces import Layout
from partsong.data.table import Table
from partsong.engines.virtual_clock import Asynchronous
from partsong.errors import FileError, FormatError, ParameterError, PartsongError, ShapeError, format_count
from partsong.estimators.federated_nmf import FederatedNMF
from partsong.io.model_file import load_model
from partsong.io.opening import ReadOptions, resolve_path
from partsong.io.party_folder import is_parts_folder, read_parts
from partsong.reporting.attack_report import write_page
from partsong.training.run_folder import MODEL, SETTINGS, RunFolder
from partsong.training.traffic import TrafficRecord, read_record

ATTACKERS = ("server", "colluders")
SEEN = {
    "server": ("every upload", "sums only: uploads were masked"),
    "colluders": ("the sum, and what all other parties sent",) * 2,
}
"""What an attacker sees, without and with secure aggregation."""
WITHOUT_TRUTH = "No --data: findings are described, not compared with rows."
EPILOG = examples(
    "partsong fit parts/ -k 10 --run-folder run --record && partsong attack run",
    "partsong attack run --data parts/ --attacker colluders",
    "partsong attack run --party clinic --data clinic.csv --report attack.html",
    "partsong attack run-1 run-2 --data parts/ --candidates people.csv",
)


@handle_errors
def attack(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="The --run-folder of a fit with --record. The uploads of several runs are attacked together.",
            show_default=False,
        ),
    ],
    data: Annotated[
        list[Path],
        typer.Option(
            "--data",
            help="Rows to compare the findings with: the folder of parts or, with --party, that party's file. "
            "Repeatable. The rows are not shown.",
            show_default=False,
        ),
    ] = [],  # noqa: B006  # typer copies it
    attacker: Annotated[
        str,
        typer.Option(
            help="server: sees what the server receives; colluders: all parties but one, who know the sum.",
            callback=one_of(ATTACKERS),
        ),
    ] = ATTACKERS[0],
    party: Annotated[
        str | None, typer.Option(help="Attack only this party.", show_default="every party in turn")
    ] = None,
    candidates: Annotated[
        Path | None,
        typer.Option(
            help="Rows to test for membership, with the columns of the run. With --data, the accuracy of the test too."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Time limit for all searches together.")] = 120.0,
    report: Annotated[Path | None, typer.Option(help="Also write the findings as a page (.html).")] = None,
    label: Label = None,
    transpose: Transpose = False,
    key: Key = None,
    header: Header = None,
    as_json: AsJson = False,
) -> None:
    """Attack a recorded run as an honest-but-curious server, or as all parties but one.

    The first line is the severity: the worse of what follows from the numbers of rounds, components and rows, and of
    what was found. guess: someone with a record may guess that it was used; membership: can tell; entries, rows:
    values or whole rows can be reconstructed; unknown: only H was sent, and no bound is known for it; bounded: uploads
    had noise.
    """
    require_writable("--report", report, (".html",))
    wanted = ReadOptions(label, transpose, key, header)
    read = [Recorded.read(run, party) for run in runs]
    rows = [one.rows_of(data, party, wanted) for one in read]
    first, *others = (one.run_with(held) for one, held in zip(read, rows, strict=True))
    people = None if candidates is None else read[0].matched(read_table(candidates, wanted)).X
    try:
        found = findings(
            first,
            attacker=Attacker(attacker),
            parties=None if party is None else {party},
            others=others,
            candidates=people,
            seconds=seconds,
        )
    except ParameterError as error:
        raise FormatError(f"{runs[0]}: {error}") from error
    worst = severity_of(found)
    summary: dict[str, Any] = {
        "severity": str(worst.severity),
        "by_law": str(worst.by_law),
        "found": None if worst.found_level is None else str(worst.found_level),
        "worst_party": worst.party,
        "run": runs[0],
        "other_runs": [str(one) for one in runs[1:]],
        "method": read[0].estimator.method,
        "n_components": read[0].rank,
        "n_features": first.layout.n_features,
        "attacker": attacker,
        "secure_aggregation": first.reduction.hides_uploads,
        "exchanges": len(first.traffic),
        "compared_with": sorted(rows[0]),
        "verdict": verdict_of(found),
        "parties": [_as_json(each) for each in found],
        "report": report,
    }
    if report is not None:
        write_page(report, f"Attack on {' and '.join(one.name for one in runs)}", found)
    if as_json:
        put_json(summary)
    else:
        _show(summary, found)


def _as_json(each: PartyFindings) -> dict[str, Any]:
    """Return a party's findings as plain values."""
    found = None if each.found_level is None else str(each.found_level)
    own = {"severity": str(each.severity), "by_law": str(each.by_law), "found": found}
    return {**asdict(each), **own, "verdict": each.verdict}


def _show(summary: Mapping[str, Any], found: Sequence[PartyFindings]) -> None:
    by = f"by the numbers: {summary['by_law']}; found: {summary['found'] or 'nothing beyond that'}"
    lines = {
        "severity": f"{summary['severity']} ({by}; worst for {summary['worst_party']})",
        "method": summary["method"],
        "exchanges": summary["exchanges"],
        "attacker": summary["attacker"],
        "visible": SEEN[summary["attacker"]][summary["secure_aggregation"]],
    }
    shown = facts(((name, visible(value)) for name, value in lines.items()), 12)
    typer.echo("\n".join([*shown, *([] if summary["compared_with"] else [WITHOUT_TRUTH]), ""]))
    rows = []
    for each in found:
        what = "\n".join(f"{one.array}: {one.measured}" for one in each.recovered) or f"by the numbers: {each.by_law}"
        what += "".join(f"\n{_tested(test)}" for test in each.membership)
        what += "" if each.largest_share is None else f"\nlargest share of one row in a sum: {each.largest_share:.0%}"
        cells = (each.party, str(each.severity), each.left, "\n".join(each.tried) or "no attack", what)
        rows.append(["\n".join(map(visible, cell.split("\n"))) for cell in cells])
    put_table(("party", "severity", "sent", "attacks", "recovered"), rows)
    for note in dict.fromkeys(note for each in found for note in each.notes):
        typer.echo(f"\n{visible(note)}")
    typer.echo(f"\n{visible(summary['verdict'])}")


def _tested(test: Any) -> str:
    """Describe a membership test."""
    how = f"membership by {test.test}, {test.candidates} candidates"
    if test.auc is None:
        return f"{how}: AUC unknown; computing it needs the rows, some unused rows, and enough time"
    return f"{how}: AUC {test.auc:.2f}"


# ---- recorded runs -----------------------------------------------------------------------------------------------

BROKEN = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""Errors that invalid settings can cause."""
MOST_BLANK = 1000
"""Maximum ratio of the size of H to the number of values sent in total."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The run folder of a fit with --record: its unfitted estimator and the recorded traffic."""

    folder: Path
    estimator: FederatedNMF
    record: TrafficRecord

    @staticmethod
    def read(run: Path, party: str | None) -> Recorded:
        """Read a run folder; refuse one without recorded traffic, or a run in which `party` did not take part."""
        folder = resolve_path(run)
        if not folder.is_dir():
            raise FileError(f"{run}: no such folder. Pass the --run-folder of a fit with --record.")
        found = Recorded(folder, estimator_of(folder), read_record(folder))
        parties = found.record.parties
        if party is not None and party not in parties:
            raise ParameterError(f"{run}: no party is called {party!r}. Use one of {', '.join(parties[:5])}.")
        return found

    @property
    def rank(self) -> Any:
        """The rank of the run, or the largest of several."""
        k = self.estimator.n_components
        return max(k, default=None) if isinstance(k, list) and all(isinstance(one, int) for one in k) else k

    def rows_of(self, data: Sequence[Path], party: str | None, wanted: ReadOptions) -> dict[str, Table]:
        """Read the rows of parties, with columns in the order of the run."""
        parties = self.record.parties
        found: dict[str, Table] = {}
        for path in data:
            if is_parts_folder(resolve_path(path)):
                found |= read_parts(resolve_path(path))
            elif party is None and len(parties) > 1:
                raise typer.BadParameter(
                    f"{path}: the party of these rows is unknown. Name it with --party.", param_hint="--data"
                )
            else:
                found[party or parties[0]] = read_table(path, wanted)
        known = {name: table for name, table in found.items() if name in parties}
        if data and not known:
            raise FileError(
                f"{data[0]}: none of its parties ({', '.join(list(found)[:5])}) took part in this run. Pass the rows "
                "of this run."
            )
        return {name: with_known_cells(self.matched(table), self.estimator.missing) for name, table in known.items()}

    def matched(self, table: Table) -> Table:
        """Return the table with the columns of the run, matched by name if the run folder has a model."""
        width = self.record.n_features
        if (self.folder / MODEL).is_file():
            return matched(table, load_model(self.folder / MODEL), drop_extra=False)
        if width is not None and table.X.shape[1] != width:
            raise ShapeError(
                f"{table.source}: {format_count(table.X.shape[1], 'column')}, but the run had {width}. Pass the "
                "rows of this run."
            )
        return table

    def run_with(self, rows: Mapping[str, Table]) -> RecordedRun:
        """Return the run as it was set up; parties without rows get one blank row."""
        try:
            blank = with_known_cells(self._blank(), self.estimator.missing)
            tables = {name: rows.get(name, blank).X for name in self.record.parties}
            fit = self.estimator.simulation(tables)
        except (PartsongError, *BROKEN) as error:
            raise FormatError(f"{self.folder}: traffic and settings.json do not match: {error}") from error
        return RecordedRun(
            self.record.traffic,
            fit.program,
            Layout.of(fit.shards, fit.schedule.seed),
            fit.reduction,
            asynchronous=isinstance(fit.engine, Asynchronous),
            shards={shard.name: shard for shard in fit.shards if shard.name in rows},
            truth={name: table.X for name, table in rows.items()},
        )

    def _blank(self) -> Table:
        """Return one row of ones with the width of the data; refuse a width that does not fit the traffic."""
        k, width = self.rank, self.record.n_features
        numbers = sum(array.size for sent in self.record.traffic for _, _, m in sent for array in m.arrays.values())
        if not isinstance(k, int) or k < 1 or width is None or k * width > MOST_BLANK * max(1, numbers):
            raise FormatError(
                f"Components of shape ({k}, {width}) do not match this traffic. Restore the run folder, or "
                "record again."
            )
        return Table(np.ones((1, width), self.estimator.dtype))


def estimator_of(folder: Path) -> FederatedNMF:
    """Build the estimator of a recorded run from its settings.json; invalid settings are a FormatError."""
    path, written = folder / SETTINGS, RunFolder(folder).settings()
    if written.get("method") == "centralized":
        raise FileError(f"{folder}: a fit of one table, which sends nothing. Pass the run folder of a fit of parts.")
    if "threads" in written:
        raise FormatError(f"{path}: another version of partsong recorded this run. Attack it with that version.")
    if lacking := [name for name in ("method", "n_components", "dtype", "seed", "rounds") if name not in written]:
        raise FormatError(f"{path}: lacks {', '.join(lacking)}. Restore it, or record the run again.")
    try:
        return FederatedNMF.from_settings(written).set_params(n_jobs=1, dtype=str(written["dtype"]))
    except (PartsongError, *BROKEN) as error:
        raise FormatError(f"{path}: invalid settings: {error} Restore it, or record the run again.") from error
