"""`partsong check` and `partsong split`: validate a table, or split it among simulated parties."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from partsong.cli.inputs import (
    MISSING_HINT,
    header_notes,
    require_usable,
    suggest_missing_ignore,
    warn_about,
    warn_about_identifiers,
    with_known_cells,
)
from partsong.console.options import (
    IGNORE,
    MISSING,
    AsJson,
    Data,
    Header,
    Key,
    Label,
    Quiet,
    Transpose,
    examples,
    one_of,
    positive,
)
from partsong.console.output import (
    BAD_INPUT,
    facts,
    failure,
    handle_errors,
    plain,
    put_failure,
    put_result,
    require_distinct,
    require_writable,
    tell,
    visible,
    warn_about_formulas,
)
from partsong.console.tables import read_table, require_applicable_options
from partsong.core.streams import fresh_seed, stream
from partsong.data.partition import by_label, by_size, contiguous, iid
from partsong.data.scan import Finding
from partsong.data.summary import offending_rows, summary_of
from partsong.data.table import Table
from partsong.data.validation import identifier_findings, inspect
from partsong.errors import ParameterError, PartsongError, format_count
from partsong.estimators.parties import party_names
from partsong.io.opening import ReadOptions, resolve_path
from partsong.io.party_folder import require_free, write_parts
from partsong.privacy.exposure import Support
from partsong.training.run_folder import write_csv

# ---- check ------------------------------------------------------------------------------------------------------
#
# `partsong check`: what is wrong with data, where, and how to fix it.

CHECK_EPILOG = examples("partsong check counts.csv", "partsong check counts.h5ad --report offending.csv")


@handle_errors
def check(
    data: Data,
    label: Label = None,
    transpose: Transpose = False,
    key: Key = None,
    header: Header = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write the list of all rows with NaN, infinite or negative cells, or only zeros (.csv)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check data: what is wrong, where, and how to fix it. Exit code 0 if they can be factorized, else 1."""
    if report is not None:
        require_distinct({"DATA": data, "--report": report})
        require_writable("--report", report, (".csv",))
    wanted = ReadOptions(label, transpose, key, header)
    try:
        with suggest_missing_ignore():
            table = read_table(data, wanted)
    except PartsongError as error:
        if not as_json:
            raise
        tell(error)
        hints = getattr(error, "__notes__", ())
        finding = {"kind": "unreadable", "severity": "error", "message": plain(error)}
        finding |= {"remedy": " ".join(hints)} if hints else {}
        unreadable = {"factorizable": False, "summary": None, "findings": [finding], "report": None}
        put_failure({**unreadable, **failure(error, BAD_INPUT)})
        raise typer.Exit(BAD_INPUT) from error

    findings = tuple(map(_with_hint, inspect(table.X, table.feature_names, table.sample_names)))
    findings += identifier_findings(table.X, table.feature_names) + header_notes(table, wanted)
    summary = summary_of(table)
    is_factorizable = not any(finding.severity == "error" for finding in findings)
    support = Support.of(table.X) if is_factorizable else None
    if report is not None:
        _write_report(report, table)
    result = {
        "factorizable": is_factorizable,
        "summary": summary,
        "findings": [asdict(finding) for finding in findings],
        "report": report,
        "exposure": None if support is None else support.to_dict(),
    }
    lines = facts(((name.replace("_", " "), _shown(value)) for name, value in summary.items()), 24)
    for each in findings:
        mark = "Error" if each.severity == "error" else "Note"
        lines.append(f"{mark}: {visible(each.message)} {visible(each.remedy)}")
    lines += [] if report is None else [f"{report} lists the rows concerned."]
    lines += ["This cannot be factorized yet."] if support is None else ["This can be factorized.", str(support)]
    put_result(result, lines, as_json)
    if not is_factorizable:
        raise typer.Exit(BAD_INPUT)


def _with_hint(finding: Finding) -> Finding:
    """Add to findings about missing values that a game can ignore them."""
    return replace(finding, remedy=f"{finding.remedy} {MISSING_HINT}") if finding.kind == "nan" else finding


def _write_report(path: Path, table: Table) -> None:
    rows = list(offending_rows(table))
    write_csv(path, ("row", "sample", "severity", "problem", "cells", "first_column", "first_feature"), rows)
    warn_about_formulas(path, (name for row in rows for name in (row[1], row[6])))


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return " × ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


# ---- split ------------------------------------------------------------------------------------------------------

CONCENTRATION = 3.0
SPLIT_EPILOG = examples(
    "partsong split counts.csv --parties 5 -o parts/",
    "partsong split cells.h5ad --parties 8 --by cell_type --concentration 1 --seed 1 -o parts/",
    "partsong split counts.csv --parties 5 --sizes 0.5 -o parts/",
)


@handle_errors
def split(
    data: Data,
    parties: Annotated[int, typer.Option("--parties", "-p", min=1, help="Number of parties.", show_default=False)],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder to write. It must be new or empty.", show_default=False)
    ],
    by: Annotated[
        str | None, typer.Option(help="Column or array of labels: each party gets its own mixture of them.")
    ] = None,
    concentration: Annotated[
        float | None,
        typer.Option(
            help="With --by: each party's mixture is drawn from Dirichlet(α · label frequencies). A small α gives few "
            "labels per party, a large α the same mixture everywhere.",
            callback=positive,
            show_default=str(CONCENTRATION),
        ),
    ] = None,
    sizes: Annotated[
        float | None,
        typer.Option(
            help="Random shares of unequal size, drawn from Dirichlet(α, …, α): α ≤ 1 gives a few large parties and "
            "many small ones, a large α nearly equal ones. Every party gets at least one row.",
            callback=positive,
        ),
    ] = None,
    iid: Annotated[bool, typer.Option("--iid", help="Equal random shares (default).")] = False,
    contiguous: Annotated[bool, typer.Option("--contiguous", help="Equal shares of consecutive rows.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Random seed.", show_default="drawn and printed")] = None,
    label: Label = None,
    transpose: Transpose = False,
    key: Key = None,
    header: Header = None,
    missing: Annotated[
        str,
        typer.Option(
            help="Blanks and NaN. refuse: an error; ignore: kept as NaN, for fits with --missing ignore.",
            callback=one_of(MISSING),
            rich_help_panel="Reading",
        ),
    ] = MISSING[0],
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Split a table among simulated parties, to try a federation on one machine."""
    if (by is not None) + (sizes is not None) + iid + contiguous > 1:
        raise typer.BadParameter("pass only one of --by, --sizes, --iid and --contiguous.", param_hint="--by")
    if by is not None and label is not None and by != label:
        raise typer.BadParameter("--by already names the labels. Remove this option.", param_hint="--label")
    if concentration is not None and by is None:
        raise typer.BadParameter(
            "only with --by. Remove this option, or name the labels with --by.", param_hint="--concentration"
        )

    wanted = ReadOptions(label if by is None else by, transpose, key, header, gaps=missing == IGNORE)
    label_option = "--label" if by is None else "--by"
    require_applicable_options(data, wanted, label_option)
    folder = resolve_path(output)
    require_free(folder)
    seed = fresh_seed() >> 32 if seed is None else seed
    how = "by" if by is not None else "sizes" if sizes is not None else "contiguous" if contiguous else "iid"
    with suggest_missing_ignore():
        table = read_table(data, wanted, label_option)
        warn_about(table, header_notes(table, wanted))
        require_usable(with_known_cells(table, missing))
    warn_about_identifiers([table])
    skew = next((given for given in (sizes, concentration) if given is not None), CONCENTRATION)
    rows = shares_of(table, parties, how, skew, seed)
    about: dict[str, Any] = {"source": data.name, "header": header, "split": how, "by": by, "seed": seed}
    about |= {"concentration": skew if how in ("by", "sizes") else None}
    listing = write_parts(folder, table, rows, about)
    put_result({"output": output, **listing}, _lines(output, listing), as_json, quiet)


def shares_of(table: Table, parties: int, how: str, concentration: float, seed: int) -> dict[str, np.ndarray]:
    """Return the rows of each party; the same seed gives the same shares."""
    n_rows, generator = int(table.X.shape[0]), stream(seed, "split")
    if how == "contiguous":
        shares = contiguous(n_rows, parties)
    elif how == "iid":
        shares = iid(n_rows, parties, generator)
    elif how == "sizes":
        shares = by_size(n_rows, parties, generator, concentration)
    elif table.labels is None:
        raise ParameterError(f"{table.source}: no labels to split by. Use --sizes, --iid or --contiguous.")
    else:
        shares = by_label(table.labels, parties, generator, concentration)
    return dict(zip(party_names(parties), shares, strict=True))


def _lines(output: Path, listing: dict[str, Any]) -> Iterator[str]:
    for party in listing["parties"]:
        labels = ", ".join(f"{visible(label)}: {count}" for label, count in party["labels"].items())
        yield f"{party['name']}  {format_count(party['rows'], 'row')}" + (f"  ({labels})" if labels else "")
    yield f"{format_count(len(listing['parties']), 'part')} in {output}; seed {listing['seed']}"
