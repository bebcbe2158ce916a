"""Write the tables of docs/results/leakage.md from recorded runs.

    python -m experiments.leakage.report docs/results

The folder holds invertibility.jsonl and leakage.jsonl. Replaces the text between `<!-- table: NAME -->` and
`<!-- end -->`, and nothing else. `--print` prints every table in full. `experiments.leakage.rare_columns` writes the
table of rare columns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.leakage.invertibility import REPORTS, lines_of
from experiments.leakage.sketches import DENSITIES, SHARES
from experiments.shared.document import print_tables, replace_tables, select

Records = Sequence[dict[str, Any]]
FOUND = ("X_p", "X_p up to a factor", "span of X_p")
METHODS = {"exact": "exact", "game": "game", "fedavg": "fedavg", "syn-sd": "syn-sd", "fnmf": "fnmf-local"}
"""Names in leakage.jsonl -> names of today."""


def _lone(cells: list[str]) -> bool:
    return cells[2:4] == ["1", "1"]


def _membership(cells: list[str]) -> bool:
    return cells[1] == "0" and cells[3] != "signs"


def _exceeded(cells: list[str]) -> bool:
    return cells[0] in ("difference", "odd") and cells[1] != "rows"


def _one_or_three(cells: list[str]) -> bool:
    return cells[1] != "2"


def _float64(cells: list[str]) -> bool:
    return cells[2] == "float64"


EXCERPTS: dict[str, tuple[str, Callable[[str], str]]] = {
    "phase": ("phase, 1 %", lambda table: table),
    "real-rows": ("real", lambda table: select(table, _float64, (0, 1, 4, 5, 7))),
    "dictionary-real": ("dictionary, real", lambda table: select(table, columns=(0, 2, 4, 5, 6))),
    "lone-columns": ("lone", lambda table: select(table, _lone, (0, 1, 4, 5, 6, 9, 10))),
    "members": ("membership", lambda table: select(table, _membership, (0, 3, 4, 5, 6, 7, 8))),
    "uploads-of-H": ("factors", lambda table: table),
    "levels": ("law", lambda table: select(table, _exceeded)),
}
"""Tables of `experiments.leakage.invertibility` on the page, and their rows and columns."""


def sketches(records: Records) -> str:
    """Percentage of columns found from sketches, over T·d/n."""
    found = [record for record in records if record["kind"] == "sketches"]
    lines = [f"| cells above zero | {' | '.join(f'{share:g}' for share in SHARES)} |", "|---|" + "---|" * len(SHARES)]
    cases = [("any, linear algebra alone", "linear", DENSITIES[-1])]
    cases += [(f"{density:.0%}", "sparse", density) for density in DENSITIES]
    for name, attack, density in cases:
        own = [one for one in found if (one["sketch"], one["density"]) == ("Gaussian", density)]
        cells = [[one[f"{attack}_columns"] for one in own if one["share"] == share] for share in SHARES]
        lines.append(f"| {name} | {' | '.join(f'{100 * np.mean(cell):.0f}' for cell in cells)} |")
    return "\n".join(lines)


def small_parties(records: Records) -> str:
    """Relative errors of what is found of a party with few rows: median (worst) over seeds, by density."""
    here = [record for record in records if record["kind"] == "small party"]
    lines = ["| method | rows | found | half of the cells zero | nearest other | no cell zero | nearest other |"]
    lines.append("|---|---|---|---|---|---|---|")
    for (name, title), rows, array in ((m, n, a) for m in METHODS.items() for n in (1, 2, 3) for a in FOUND):
        cells: list[str] = []
        for density in (0.5, 1.0):
            own = [one for one in here if (one["method"], one["rows"], one["density"]) == (name, rows, density)]
            errors = [one[array] for one in own if array in one]
            others = [one["nearest_other"][array] for one in own if array in one["nearest_other"]]
            if errors:
                cells += [f"{np.median(errors):.0e} ({max(errors):.0e})", f"{min(others):.2f}" if others else "–"]
        if len(cells) == 4:
            lines.append(f"| {title} | {rows} | {array} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Update the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--print", action="store_true", help="print every table, also those that the page leaves out")
    parser.add_argument("--document", type=Path, default=Path("docs/results/leakage.md"))
    chosen = parser.parse_args(arguments)
    sums, others = (lines_of(chosen.folder / f"{name}.jsonl") for name in ("invertibility", "leakage"))
    full = {name: make(sums) for name, make in REPORTS.items()}
    own = {"sketches": sketches(others), "small-parties": small_parties(others)}
    if chosen.print:
        print_tables(full | own)
    tables = {name: shortened(full[table]) for name, (table, shortened) in EXCERPTS.items()}
    tables |= own | {"small-parties": select(own["small-parties"], _one_or_three)}
    replace_tables(chosen.document, tables)


if __name__ == "__main__":
    main()
