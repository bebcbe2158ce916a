"""`partsong audit`: what has left a site, and whether its log is as it was written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from partsong.console.options import AsJson, examples
from partsong.console.output import BAD_INPUT, facts, failure, handle_errors, put_json, put_result, tell, visible
from partsong.core.parameters import suggest_name
from partsong.errors import BrokenChain, ParameterError
from partsong.federation.audit_log import (
    COLUMNS,
    count_unlisted,
    find_log,
    format_cell,
    format_row,
    read_intact_lines,
    totals_by_run,
    verify_log,
)
from partsong.federation.consistency import add_opening_balance, find_state_folder

OPENING = examples(
    'partsong audit opening site-north --why "the disk of 3 May is lost" --releases 12 --directions 120',
    'partsong audit opening site-north --why "ledger.jsonl was edited" --releases 12 --epsilon 1.5 --delta 5e-6',
)
VERIFY = examples("partsong audit verify site-north", "partsong audit verify site-north --head 3f1c…")
SHOW = examples("partsong audit show site-north --last 20", "partsong audit show site-north --run liver-1 --json")
TOTALS = ("run", "messages", "bytes", "again", "refusals", "rounds", "ε spent (all runs)")

app = typer.Typer(
    name="audit",
    help="Show what has left a site: every message sent, without values, in a tamper-evident log.",
    epilog="Start with: partsong audit verify site-NAME",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)

Place = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="The site's folder, or its audit.jsonl.", show_default=False)
]


@app.command(epilog=VERIFY)
@handle_errors
def verify(
    place: Place,
    head: Annotated[str | None, typer.Option(help="The last hash, as it was noted elsewhere.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check that no line was edited, moved or taken out; with --head, that none was taken from the end either."""
    path = find_log(place)
    try:
        found = verify_log(path, head)
    except BrokenChain as error:
        tell(error)
        if as_json:
            told = {"is_sound": False, "file": path, "first_bad_line": error.line, "last_sound_hash": error.last}
            put_json({**told, **failure(error, BAD_INPUT)})
        raise typer.Exit(BAD_INPUT) from error
    first, last = visible(found.first or "none"), visible(found.last or "none")
    seen = [("lines", found.lines), ("first", first), ("last", last), ("last hash", found.head)]
    lines = [f"Sound: {path}", *facts(seen, 11)]
    if found.unfinished:
        lines.append(
            f"A last line of {found.unfinished} bytes has no end. If a crash has cut it off, its message was not sent, "
            "for a line is whole before that; if somebody has, it was. The file does not tell which: compare with the "
            "last hash that was noted elsewhere."
        )
    if found.since is None:
        lines.append(
            "Lines taken from the end do not show in the file: note the last hash elsewhere, and give it as --head."
        )
    else:
        lines.append(f"The hash that was noted is here; lines since: {found.since}.")
    put_result({"is_sound": True, "file": path, **asdict(found)}, lines, as_json)


@app.command(epilog=SHOW)
@handle_errors
def show(
    place: Place,
    run: Annotated[str | None, typer.Option(help="Only messages of this run.")] = None,
    last: Annotated[int | None, typer.Option(min=1, help="Only so many lines, the latest.", show_default="all")] = None,
    as_json: AsJson = False,
) -> None:
    """Show every message that has left, and totals of each run: names of arrays, shapes, bytes, norms, ε; no values."""
    path = find_log(place)
    lines, error = read_intact_lines(path)
    totals, unlisted = totals_by_run(lines), count_unlisted(path, lines)
    if run is not None:
        if run not in totals:
            raise ParameterError(f"Nothing has left in a run {visible(run)!r}. {suggest_name(run, tuple(totals))}")
        lines, totals = [line for line in lines if line["run"] == run], {run: totals[run]}
    latest = lines if last is None else lines[-last:]
    if as_json:
        runs = {name: asdict(total) for name, total in totals.items()}
        told = {"file": path, "is_sound": error is None, "runs": runs, "lines": latest}
        put_json({**told, "unlisted_refusals": unlisted})
    else:
        _put_table(COLUMNS, [format_row(line) for line in latest], left={1, 2, 4, 9, 10})
        typer.echo("")
        rows = [(name, *map(format_cell, asdict(total).values())) for name, total in totals.items()]
        _put_table(TOTALS, rows, left={0})
        typer.echo(
            "\nEach message is counted as often as it left; `again` is the same bytes once more, to the same request."
        )
        if unlisted:
            listed = ", ".join(f"{code} {count}" for code, count in unlisted.items())
            typer.echo(f"Refusals besides, of all runs, which have no line of their own: {visible(listed)}.")
    if error is not None:
        tell(error)
        raise typer.Exit(BAD_INPUT) from error


@app.command(epilog=OPENING)
@handle_errors
def opening(
    place: Annotated[Path, typer.Argument(metavar="FOLDER", help="The site's folder.", show_default=False)],
    why: Annotated[str, typer.Option(help="What has happened; it stays in the ledger.", show_default=False)],
    releases: Annotated[
        int | None, typer.Option(min=0, help="Releases that the ledger lacks.", show_default="those that the log has")
    ] = None,
    directions: Annotated[
        int | None,
        typer.Option(
            min=0, help="Combinations of rows that they sent without noise: the sum of rounds × rank.", show_default="0"
        ),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="ε of all of them, where they had noise.", show_default="what the log says")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="δ at which that ε holds.", show_default="half of the budget's")
    ] = None,
    unit: Annotated[str | None, typer.Option(help="row or party.", show_default="as in the ledger")] = None,
    relation: Annotated[
        str | None, typer.Option(help="Such as add-or-remove.", show_default="as in the ledger")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """State what a site has released before, where the newest ledger or audit log is lost: an opening balance.

    Nothing is taken away: ε that is spent stays spent, and the stated ε and combinations of rows count from now on.
    Restore newer copies first, where there are any. The site answers for what it states.
    """
    stated = add_opening_balance(
        find_state_folder(place),
        why,
        releases=releases,
        epsilon=epsilon,
        delta=delta,
        unit=unit,
        relation=relation,
        directions=directions,
    )
    cost = "No ε is stated: a privacy budget does not cover these releases."
    if stated.epsilon is not None:
        about = f"a {stated.unit} ({stated.relation})"
        cost = f"ε = {stated.epsilon:.4g} at δ = {stated.delta:g} about {about} is spent."
    count = f"{stated.releases} releases, {stated.directions} combinations of rows without noise"
    put_result(asdict(stated), (f"Opening balance: {count}", cost), as_json)


def _put_table(titles: Sequence[str], rows: Sequence[Sequence[str]], left: set[int]) -> None:
    """Columns as wide as they have to be, also in a pipe; the last one is not padded."""
    clean = [tuple(visible(cell) for cell in row) for row in (titles, *rows)]
    widths = [max(len(row[at]) for row in clean) for at in range(len(titles))]
    for row in clean:
        cells = [
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        typer.echo("  ".join(cells).rstrip())
