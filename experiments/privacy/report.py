"""Write the tables and figures of docs/results/privacy.md from recorded runs.

    python -m experiments.privacy.report docs/results

The folder holds privacy-moments.jsonl, privacy-held-out.jsonl, privacy-moment-parties.jsonl, privacy-parties.jsonl,
privacy-shipped.jsonl, privacy-rows.jsonl, privacy-sensitivity.jsonl and privacy-masking.jsonl, or some of them.
Replaces the text between `<!-- table: NAME -->` and `<!-- end -->`, and nothing else. `--print` prints every table in
full.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from math import log10
from pathlib import Path
from typing import Any

import numpy as np

from experiments.game.runs import read_lines
from experiments.privacy import moment_tables
from experiments.privacy import tables as privacy_tables
from experiments.privacy.forecast_tables import forecast_tables
from experiments.privacy.methods import METHODS, SIGNED
from experiments.privacy.parties import DIGITS, FEW, FORMS, MANY, ROW_LEVEL, SEVERAL
from experiments.privacy.rows import STUDIES
from experiments.privacy.runs import Records, Trial, known
from experiments.privacy.tables import is_like
from experiments.shared.document import print_tables, replace_tables, select
from experiments.shared.figures import figure_svg, style_of
from experiments.shared.names import shown
from partsong.reporting.charts import Line, Quantity

FLOORS = ("pooled", "FNMF-LAP", "FNMF-SK", "FedAvg", "data-free: uniform", "data-free: pieces", "data-free: tiles")


def _is_row_level(cells: list[str]) -> bool:
    return cells[0].startswith("row level")


def _is_distinct(cells: list[str]) -> bool:
    return cells[0] in map(shown, ("FNMF-LAP (paper)", "FNMF-LAP", "iPALM once"))


def _is_floor(cells: list[str]) -> bool:
    return cells[0] in map(shown, FLOORS)


EXCERPTS: dict[str, tuple[str, Callable[[str], str]]] = {
    "printed-in-short": ("printed-gaussian", lambda table: select(table, columns=(0, 1, 4, 5, 6, 8, 10))),
    "floors-in-short": ("floors", lambda table: select(table, _is_floor)),
    "moves-in-short": ("moves", lambda table: select(table, _is_distinct)),
    "row-level": ("parties-gaussian-replace", lambda table: select(table, _is_row_level, (0, 1, 2, 3, 4, 5, 6, 7, 9))),
}
"""Excerpts on the page: the table, and its rows and columns."""
CASES = {"20 parties": FEW[:2], "1000 parties": MANY[:2], "MNIST, 200 parties": DIGITS[:2]}


def party_tables(found: Records) -> dict[str, str]:
    """Tables on Fig. 4 and party-level privacy."""
    made = {f"printed-{kind}": privacy_tables.printed(found, kind) for kind in ("gaussian", "laplace")}
    made |= {f"parties-{kind}-{form}": privacy_tables.parties(found, kind, form, FEW[1]) for kind, form in FORMS}
    made["parties-many"] = privacy_tables.parties(found, *FORMS[0], MANY[1])
    made["parties-mnist"] = privacy_tables.parties(found, *FORMS[0], DIGITS[1], DIGITS[0])
    made["signed"] = privacy_tables.signed(found, (FEW[1], SEVERAL[1]))
    made["floors"] = privacy_tables.floors(found, CASES)
    return made | {"clips": privacy_tables.clips(found, FEW[1]), "clips-many": privacy_tables.clips(found, MANY[1])}


def row_tables(found: Records) -> dict[str, str]:
    """Tables on the row-level method, for all data with runs."""
    made = {}
    for name, study in STUDIES.items():
        if any(trial.data == name and not trial.is_tuning for trial in found):
            made[f"rows-{name}"] = privacy_tables.by_rows(found, study)
            made[f"epsilon-{name}"] = privacy_tables.by_epsilon(found, study)
            made[f"rounds-{name}"] = privacy_tables.by_rounds(found, study)
    return made


def tuned_errors(found: Records, data: str, n: int, epsilon: float) -> list[float]:
    """Errors of noisy rounds whose settings other data have chosen; empty without runs."""
    study = STUDIES.get(data)
    return [] if study is None else privacy_tables.row_errors(found, study, n, epsilon, moment_tables.RANK)


def drawn(
    found: Records, field: str, curves: dict[str, dict[str, Any]], over: Callable[[Trial], float], axis: str
) -> str:
    """Means over seeds as lines over a logarithmic axis; a curve is given by what its runs have in common."""
    lines: list[Line] = []
    for name, wanted in curves.items():
        points: dict[float, list[float]] = {}
        for trial, record in found.items():
            if not trial.is_tuning and is_like(trial, wanted):
                points.setdefault(log10(over(trial)), []).append(record[field])
        if points:
            places = tuple(sorted(points))
            heights = tuple(float(np.mean(points[place])) for place in places)
            lines.append(Line(shown(name), style_of(len(lines)), places, heights))
    if not lines:
        return ""
    across = Quantity(f"{axis} (logarithmic)", lambda place: f"{10**place:g}", smallest_step=1.0)
    name = "RMSD" if field == "rmsd" else "‖X − W H‖ / ‖X‖"
    return figure_svg(across, Quantity(name, lambda value: f"{value:.3f}", 0.0), lines)


def party_pictures(found: Records) -> dict[str, str]:
    """Fig. 4: as printed over ε of a round, and with a proof over ε of all rounds."""
    made = {}
    for kind in ("gaussian", "laplace"):
        curves = {name: {"purpose": "printed", "method": name, "kind": kind} for name in ("FNMF-LAP (paper)", *METHODS)}
        axis = f"ε as printed, of each round; {kind} noise"
        made[f"privacy-printed-{kind}"] = drawn(found, "rmsd", curves, lambda t: t.setting.epsilon, axis)
        base = {"data": "blocks", "parties": FEW[1]}
        proven: dict[str, dict[str, Any]] = {
            name: {**base, "purpose": "parties", "method": name, "kind": kind, "relation": "replace"}
            for name in METHODS
        }
        proven |= {f"{name} (unit: row)": {**base, "purpose": "rows", "method": name} for name in ROW_LEVEL}
        axis = f"ε of all rounds together; {kind} noise"
        made[f"privacy-parties-{kind}"] = drawn(found, "rmsd", proven, lambda t: t.setting.epsilon, axis)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Update the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--print", action="store_true", help="print every table, also those that the page leaves out")
    parser.add_argument("--document", type=Path, default=Path("docs/results/privacy.md"))
    chosen = parser.parse_args(arguments)
    parties, rows = (known(chosen.folder / f"privacy-{name}.jsonl") for name in ("parties", "rows"))
    tables: dict[str, str] = {}
    pictures: dict[str, str] = {}
    if parties:
        tables |= party_tables(parties)
        pictures |= party_pictures(parties)
    shipped = known(chosen.folder / "privacy-shipped.jsonl")
    for kind in ("gaussian", "laplace") if shipped else ():
        tables[f"shipped-{kind}"] = privacy_tables.parties(shipped, kind + SIGNED, "replace", FEW[1])
    if rows:
        tables |= row_tables(rows) | {"ridges": privacy_tables.ridges({**parties, **rows})}
    moments = moment_tables.read(chosen.folder / "privacy-moments.jsonl")
    tables |= moment_tables.tables(moments, lambda data, n, epsilon: tuned_errors(rows, data, n, epsilon))
    pictures["privacy-moments"] = moment_tables.picture(moments)
    if of_parties := read_lines(chosen.folder / "privacy-moment-parties.jsonl"):
        tables["moments-parties"] = moment_tables.of_parties(of_parties, moments)
    held_out = read_lines(chosen.folder / "privacy-held-out.jsonl")
    if moments and held_out:
        tables |= forecast_tables([*held_out, *(run for cell in moments.values() for run in cell)])
    moved, masked = (read_lines(chosen.folder / f"privacy-{name}.jsonl") for name in ("sensitivity", "masking"))
    if moved:
        tables |= {"moves": privacy_tables.moves(moved), "growth": privacy_tables.growth(moved)}
    if any(record["method"] == "FNMF-LAP (paper)" for record in moved):
        tables |= {f"true-{kind}": privacy_tables.true_epsilons(moved, kind) for kind in ("gaussian", "laplace")}
    if masked:
        tables["masking"] = privacy_tables.masking(masked)
    if chosen.print:
        print_tables(tables)
    tables |= {name: shortened(tables[table]) for name, (table, shortened) in EXCERPTS.items() if table in tables}
    replace_tables(chosen.document, tables)
    for name, image in ((name, image) for name, image in pictures.items() if image):
        chosen.document.with_name(f"{name}.svg").write_text(image, "utf-8")


if __name__ == "__main__":
    main()
