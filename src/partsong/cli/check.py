"""`partsong check`: what is wrong with data, where, and the way out."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from partsong.cli.gaps import FIT_WITHOUT_THEM, hinting_at_games
from partsong.cli.guard import BAD_INPUT, failure, guarded, plain, tell
from partsong.cli.holdings import header_notes, read_table
from partsong.cli.options import AsJson, Data, Header, Key, Label, OptionalPath, Transpose, examples
from partsong.cli.outputs import put_failure, put_json, require_distinct, require_writable, visible, warn_of_formulas
from partsong.cli.wording import as_options
from partsong.errors import PartsongError
from partsong.io.opening import Wanted

if TYPE_CHECKING:
    from partsong.data.finding import Finding
    from partsong.data.table import Table

EPILOG = examples("partsong check counts.csv", "partsong check counts.h5ad --report offending.csv")


@guarded
def check(
    data: Data,
    label: Label = None,
    transpose: Transpose = False,
    key: Key = None,
    header: Header = None,
    report: Annotated[
        OptionalPath, typer.Option(help="List every row that has NaN, infinite, negative or only zero cells (.csv).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what is wrong with data, where, and the way out; exit code 0 if they can be factorized, 1 if not."""
    if report is not None:
        require_distinct({"DATA": data, "--report": report})
        require_writable("--report", report, (".csv",))
    wanted = Wanted(label, transpose, key, header)
    try:
        with hinting_at_games(FIT_WITHOUT_THEM):
            table = read_table(data, wanted)
    except PartsongError as error:
        if not as_json:
            raise
        tell(error)
        told = {"factorizable": False, "summary": None, "findings": [_unreadable(error)], "report": None}
        put_failure({**told, **failure(error, BAD_INPUT)})
        raise typer.Exit(BAD_INPUT) from error
    from partsong.cli.check_summary import summary_of
    from partsong.data.check import inspect
    from partsong.data.identifiers import identifier_findings

    findings = tuple(map(_with_hint, inspect(table.X, table.feature_names, table.sample_names)))
    findings += identifier_findings(table.X, table.feature_names) + header_notes(table, wanted)
    summary = summary_of(table)
    is_factorizable = not any(finding.severity == "error" for finding in findings)
    if report is not None:
        _write_report(report, table)
    if as_json:
        listed = [{**asdict(finding), "remedy": as_options(finding.remedy)} for finding in findings]
        put_json({"factorizable": is_factorizable, "summary": summary, "findings": listed, "report": report})
    else:
        _tell(summary, findings, is_factorizable, report)
    if not is_factorizable:
        raise typer.Exit(BAD_INPUT)


def _unreadable(error: PartsongError) -> dict[str, Any]:
    told = {"kind": "unreadable", "severity": "error", "message": plain(error)}
    hints = getattr(error, "__notes__", ())
    return {**told, "remedy": " ".join(hints)} if hints else told


def _with_hint(finding: Finding) -> Finding:
    """Gaps are no hindrance to a game."""
    return replace(finding, remedy=f"{finding.remedy} {FIT_WITHOUT_THEM}") if finding.kind == "nan" else finding


def _write_report(path: Path, table: Table) -> None:
    from partsong.cli.check_summary import offending_rows
    from partsong.cli.run_folder import write_csv

    rows = list(offending_rows(table))
    write_csv(path, ("row", "sample", "severity", "problem", "cells", "first_column", "first_feature"), rows)
    warn_of_formulas(path, (name for row in rows for name in (row[1], row[6])))


def _tell(summary: dict[str, Any], findings: tuple[Finding, ...], is_factorizable: bool, report: Path | None) -> None:
    for name, value in summary.items():
        typer.echo(f"{name.replace('_', ' '):<24}{_shown(value)}")
    for finding in findings:
        mark = "Error" if finding.severity == "error" else "Note"
        typer.echo(f"{mark}: {visible(finding.message)} {visible(as_options(finding.remedy))}")
    if report is not None:
        typer.echo(f"All rows concerned are in {report}.")
    typer.echo("This can be factorized." if is_factorizable else "This cannot be factorized yet.")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return " × ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
