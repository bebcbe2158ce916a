"""`partsong attack`: what others could work out from the recorded traffic of a run."""

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
from partsong.console.output import facts, guarded, put_json, put_table, require_writable, visible
from partsong.console.tables import read_table
from partsong.core.interfaces import Layout
from partsong.data.table import Table
from partsong.engines.virtual_clock import Asynchronous
from partsong.errors import FileError, FormatError, ParameterError, PartsongError, ShapeError
from partsong.estimators.federated_nmf import FederatedNMF
from partsong.io.model_file import load_model
from partsong.io.opening import ReadOptions, resolve_path
from partsong.io.party_folder import is_parts_folder, read_parts
from partsong.reporting.attack_report import write_page
from partsong.training.run_folder import MODEL, SETTINGS, RunFolder
from partsong.training.traffic import TrafficRecord, read_record

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
        str | None, typer.Option(help="Attack this party alone.", show_default="every party in turn")
    ] = None,
    candidates: Annotated[
        Path | None,
        typer.Option(
            help="Rows to test for membership, with the columns of the run; with --data also how well the tests do."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="How long all searches together may take.")] = 120.0,
    report: Annotated[Path | None, typer.Option(help="Also write the findings as a page (.html).")] = None,
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
        "n_components": read[0].estimator.n_components,
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
    """A party's findings in plain values."""
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
    put_table(("party", "severity", "left it", "tried", "recovered"), rows)
    for note in dict.fromkeys(note for each in found for note in each.notes):
        typer.echo(f"\n{visible(note)}")
    typer.echo(f"\n{visible(summary['verdict'])}")


def _tested(test: Any) -> str:
    """A test of membership, in words."""
    how = f"membership by {test.test}, {test.candidates} candidates"
    if test.auc is None:
        return f"{how}: the AUC is not known; it takes the rows, some that were not used, and enough time"
    return f"{how}: AUC {test.auc:.2f}"


# ---- recorded runs -----------------------------------------------------------------------------------------------

BROKEN = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""What code for sound settings raises on others."""
MOST_BLANK = 1000
"""H may have so many times as many numbers as were sent in all, and no more."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The folder of a fit with --record: its estimator, not fitted, and what parties sent."""

    folder: Path
    estimator: FederatedNMF
    record: TrafficRecord

    @staticmethod
    def read(run: Path, party: str | None) -> Recorded:
        """Refuse a folder that holds no recorded run between parties, or none in which `party` took part."""
        folder = resolve_path(run)
        if not folder.is_dir():
            raise FileError(f"{run}: there is no such folder. Name the --run-folder of a fit with --record.")
        found = Recorded(folder, estimator_of(folder), read_record(folder))
        parties = found.record.parties
        if party is not None and party not in parties:
            raise ParameterError(f"{run}: no party is called {party!r}. There are {', '.join(parties[:5])}.")
        return found

    def rows_of(self, data: Sequence[Path], party: str | None, wanted: ReadOptions) -> dict[str, Table]:
        """Tables by party, with their columns in the order of the run."""
        parties = self.record.parties
        found: dict[str, Table] = {}
        for path in data:
            if is_parts_folder(resolve_path(path)):
                found |= read_parts(resolve_path(path))
            elif party is None and len(parties) > 1:
                raise typer.BadParameter(f"{path}: say whose rows these are by --party.", param_hint="--data")
            else:
                found[party or parties[0]] = read_table(path, wanted)
        known = {name: table for name, table in found.items() if name in parties}
        if data and not known:
            raise FileError(f"{data[0]}: none of its parties ({', '.join(list(found)[:5])}) took part in this run.")
        return {name: with_known_cells(self.matched(table), self.estimator.missing) for name, table in known.items()}

    def matched(self, table: Table) -> Table:
        """The table with the columns of the run: by name where its model is there, else as it is."""
        width = self.record.n_features
        if (self.folder / MODEL).is_file():
            return matched(table, load_model(self.folder / MODEL), drop_extra=False)
        if width is not None and table.X.shape[1] != width:
            raise ShapeError(
                f"{table.source}: {table.X.shape[1]} columns, but the run had {width}. Bring its own rows."
            )
        return table

    def run_with(self, rows: Mapping[str, Table]) -> RecordedRun:
        """The run as it was set up; a party whose rows are not at hand has a blank one in their place."""
        try:
            blank = with_known_cells(self._blank(), self.estimator.missing)
            tables = {name: rows.get(name, blank).X for name in self.record.parties}
            fit = self.estimator.simulation(tables)
        except (PartsongError, *BROKEN) as error:
            raise FormatError(f"{self.folder}: its traffic is not that of its settings.json: {error}") from error
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
        """One row of ones, as wide as the data were; refused where that is more than the traffic can be about."""
        k, width = self.estimator.n_components, self.record.n_features
        numbers = sum(array.size for sent in self.record.traffic for _, _, m in sent for array in m.arrays.values())
        if not isinstance(k, int) or k < 1 or width is None or k * width > MOST_BLANK * max(1, numbers):
            raise FormatError(f"{k} components of {width} columns are not what this traffic is about.")
        return Table(np.ones((1, width), self.estimator.dtype))


def estimator_of(folder: Path) -> FederatedNMF:
    """The estimator of a recorded run, from its settings.json; whatever is not as we write it is a FormatError."""
    path, written = folder / SETTINGS, RunFolder(folder).settings()
    if written.get("method") == "centralised":
        raise FileError(f"{folder}: a fit of one table, in which nobody sends anything. Attack a fit of parts.")
    if "threads" in written:
        raise FormatError(f"{path}: this run was recorded by another version of partsong. Attack it with that version.")
    if lacking := [name for name in ("method", "n_components", "dtype", "seed", "rounds") if name not in written]:
        raise FormatError(f"{path}: lacks {', '.join(lacking)}. Restore it, or record the run again.")
    try:
        return FederatedNMF.from_settings(written).set_params(n_jobs=1, dtype=str(written["dtype"]))
    except (PartsongError, *BROKEN) as error:
        raise FormatError(f"{path}: not the settings of a run: {error} Restore it, or record the run again.") from error
