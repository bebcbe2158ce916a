"""`partsong audit`: verify and show the log of what has left a site, and state an opening balance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from partsong.console.options import AsJson, examples
from partsong.console.output import BAD_INPUT, facts, failure, handle_errors, put_json, put_result, tell, visible
from partsong.core.parameters import suggest_name
from partsong.errors import BrokenChain, ParameterError, format_count
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
    head: Annotated[str | None, typer.Option(help="The last hash, as noted outside this machine.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check that no line was edited, moved or removed; with --head, that none was cut from the end."""
    path = find_log(place)
    try:
        found = verify_log(path, head)
    except BrokenChain as error:
        tell(error)
        if as_json:
            result = {"is_sound": False, "file": path, "first_bad_line": error.line, "last_sound_hash": error.last}
            put_json({**result, **failure(error, BAD_INPUT)})
        raise typer.Exit(BAD_INPUT) from error
    first, last = visible(found.first or "none"), visible(found.last or "none")
    details = [("lines", found.lines), ("first", first), ("last", last), ("last hash", found.head)]
    lines = [f"Sound: {path}", *facts(details, 11)]
    if found.unfinished:
        lines.append(
            f"The last line of {found.unfinished} bytes is incomplete. If a crash cut it, its message was not sent, "
            "because a line is written before its message. If somebody cut it, the message was sent. The file cannot "
            "show which: compare with the last hash that you noted elsewhere."
        )
    if found.since is None:
        lines.append(
            "Lines cut from the end leave no trace in the file. Note the last hash elsewhere and pass it as --head."
        )
    else:
        lines.append(f"The noted hash is in the log; lines since then: {found.since}.")
    put_result({"is_sound": True, "file": path, **asdict(found)}, lines, as_json)


@app.command(epilog=SHOW)
@handle_errors
def show(
    place: Place,
    run: Annotated[str | None, typer.Option(help="Only messages of this run.")] = None,
    last: Annotated[
        int | None, typer.Option(min=1, help="Only this many of the latest lines.", show_default="all")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show every message sent and the totals of each run: array names, shapes, bytes, norms, ε; no values."""
    path = find_log(place)
    lines, error = read_intact_lines(path)
    totals, unlisted = totals_by_run(lines), count_unlisted(path, lines)
    if run is not None:
        if run not in totals:
            raise ParameterError(f"No message of a run {visible(run)!r} has left. {suggest_name(run, tuple(totals))}")
        lines, totals = [line for line in lines if line["run"] == run], {run: totals[run]}
    latest = lines if last is None else lines[-last:]
    if as_json:
        runs = {name: asdict(total) for name, total in totals.items()}
        result = {"file": path, "is_sound": error is None, "runs": runs, "lines": latest}
        put_json({**result, "unlisted_refusals": unlisted})
    else:
        _put_table(COLUMNS, [format_row(line) for line in latest], left={1, 2, 4, 9, 10})
        typer.echo("")
        rows = [(name, *map(format_cell, asdict(total).values())) for name, total in totals.items()]
        _put_table(TOTALS, rows, left={0})
        typer.echo(
            "\nEach message counts as often as it was sent; `again` counts the same bytes resent for the same request."
        )
        if unlisted:
            listed = ", ".join(f"{code} {count}" for code, count in unlisted.items())
            typer.echo(f"Refusals of all runs without a line of their own: {visible(listed)}.")
    if error is not None:
        tell(error)
        raise typer.Exit(BAD_INPUT) from error


@app.command(epilog=OPENING)
@handle_errors
def opening(
    place: Annotated[Path, typer.Argument(metavar="FOLDER", help="The site's folder.", show_default=False)],
    why: Annotated[str, typer.Option(help="What happened. It stays in the ledger.", show_default=False)],
    releases: Annotated[
        int | None, typer.Option(min=0, help="Releases missing from the ledger.", show_default="those in the log")
    ] = None,
    directions: Annotated[
        int | None,
        typer.Option(
            min=0, help="Combinations of rows that they sent without noise: the sum of rounds × rank.", show_default="0"
        ),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Total ε of those with noise.", show_default="that in the log")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="δ of that ε.", show_default="half of the budget's")] = None,
    unit: Annotated[str | None, typer.Option(help="Unit of ε: row or party.", show_default="as in the ledger")] = None,
    relation: Annotated[
        str | None, typer.Option(help="Neighboring relation, such as add-or-remove.", show_default="as in the ledger")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """State earlier releases of a site whose latest ledger or audit log is lost: an opening balance.

    Nothing is removed: ε already spent stays spent, and the stated ε and combinations of rows count from now on.
    Restore newer backups first, if there are any. The site is responsible for what it states.
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
    cost = "No ε is stated: the privacy budget does not cover these releases."
    if stated.epsilon is not None:
        about = f"unit {stated.unit} ({stated.relation})"
        cost = f"ε = {stated.epsilon:.4g} at δ = {stated.delta:g} is spent, {about}."
    count = (
        f"{format_count(stated.releases, 'release')}, {format_count(stated.directions, 'combination')} of "
        "rows without noise"
    )
    put_result(asdict(stated), (f"Opening balance: {count}", cost), as_json)


def _put_table(titles: Sequence[str], rows: Sequence[Sequence[str]], left: set[int]) -> None:
    """Print aligned columns, in a pipe too; the last one is not padded."""
    clean = [tuple(visible(cell) for cell in row) for row in (titles, *rows)]
    widths = [max(len(row[at]) for row in clean) for at in range(len(titles))]
    for row in clean:
        cells = [
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        typer.echo("  ".join(cells).rstrip())
