"""`partsong compare`: models that parties learn alone, together, and from pooled rows."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from partsong import methods
from partsong.cli.inputs import read_valid_parties
from partsong.console.options import ON_PARTY_ERROR, SKIP, AsJson, examples, one_of
from partsong.console.output import exit_code, handle_errors, put_json, require_writable, visible, warn
from partsong.errors import FileError
from partsong.estimators.compare import Comparison, IncompleteWarning
from partsong.estimators.compare import compare as compare_parties
from partsong.io.party_folder import is_parts_folder, read_parts

EPILOG = examples(
    "partsong split counts.csv --parties 5 --by hospital -o parts/ && partsong compare parts/ -k 10",
    "partsong compare parts/ -k 10 --method local --method fnmf --method pooled --report report.html",
)

DEFAULT = ("local", "fedavg", "fnmf", "exact", "pooled")
NAMES = ("local", *(name for name in methods.names() if not methods.TABLE[name].required), "pooled")
OF_A_PARTY = ("rows", "relative_error", "own_error", "drift", "aligned_drift", "shares")


def _known(values: list[str]) -> list[str]:
    for value in values:
        one_of(NAMES)(value)
    if len(set(values)) < len(values):
        raise typer.BadParameter("a method is listed twice. List each method once.")
    return values


@handle_errors
def compare(
    parts: Annotated[
        Path, typer.Argument(metavar="PARTS", help="A folder that `partsong split` wrote.", show_default=False)
    ],
    n_components: Annotated[
        int | None, typer.Option("--components", "-k", min=1, help="Number of components.", show_default="20")
    ] = None,
    method: Annotated[
        list[str],
        typer.Option(help=f"A method to compare; repeat the option for several: {', '.join(NAMES)}.", callback=_known),
    ] = list(DEFAULT),  # noqa: B006  # typer copies it
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rounds of every method. local and pooled iterate as often as exact, and at least 100 times.",
            show_default="100; fnmf-local: 10",
        ),
    ] = None,
    local_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Local iterations per round, for methods that average.", show_default="the method's"),
    ] = None,
    on_party_error: Annotated[
        str,
        typer.Option(
            help="raise: a party with bad data, or whose work or upload fails, ends the comparison; skip: it continues "
            "without that party and says so.",
            callback=one_of(ON_PARTY_ERROR),
        ),
    ] = ON_PARTY_ERROR[0],
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    report: Annotated[Path | None, typer.Option(help="Also write a page with curves and components (.html).")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare, in simulation, the models that parties learn alone, together, and from pooled rows."""
    require_writable("--report", report, (".html",))
    place = parts.expanduser()
    if not is_parts_folder(place):
        raise FileError(f"{parts} is not a folder of parts. Create one: partsong split DATA --parties 5 -o parts/")

    if on_party_error == SKIP:
        holdings, unreadable = read_valid_parties(place, None, ())
        tables = holdings.tables
    else:
        tables, unreadable = read_parts(place), {}
    for name, reason in unreadable.items():
        warn(f"Party {name!r} is left out of this comparison. {reason}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IncompleteWarning)  # shown below, in one line
        found = compare_parties(
            {name: table.X for name, table in tables.items()},
            n_components,
            method,
            rounds=rounds,
            local_steps=local_steps,
            random_state=seed,
            on_party_error=on_party_error,
            verbose=0 if as_json else 1,
        )
    feature_names = next((t.feature_names for t in tables.values() if t.feature_names is not None), None)
    found = replace(found, feature_names=feature_names, left_out={**unreadable, **found.left_out})
    if report is not None:
        found.save_report(report)
    if as_json:
        put_json({"parts": parts, "report": report, **description(found)})
    else:
        typer.echo("\n".join(visible(line) for line in str(found).splitlines()))
    if found.was_interrupted:
        warn(found.notice or "Interrupted after the last method; the comparison is complete.")
        raise typer.Exit(exit_code())


def description(found: Comparison) -> dict[str, Any]:
    """Return the comparison as plain values."""
    rows = []
    per_party = found.per_party
    for row in found.rows:
        parties = per_party[row.method].items()
        about = row._asdict() | {"parties": {name: {n: getattr(at, n) for n in OF_A_PARTY} for name, at in parties}}
        del about["party_errors"]
        rows.append(about)
    return {
        "n_components": found.n_components,
        "seed": found.seed,
        "is_complete": found.is_complete,
        "missing": found.missing,
        "left_out": found.left_out,
        "methods": rows,
    }
