"""Write the tables and figures of docs/results/topics.md from recorded runs.

    python -m experiments.topics.report docs/results/topics.jsonl

Replaces the text between `<!-- table: NAME -->` and `<!-- end -->`, and nothing else. A dash stands for what has not
been run. `--print` prints every table in full.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from experiments.shared.document import print_tables, replace_tables, select
from experiments.shared.figures import figure_svg, style_of
from experiments.topics import published
from experiments.topics.corpora import PREPARED, SOURCES, table_two
from experiments.topics.figures import DESCENDING, LOOKS
from experiments.topics.methods import OURS
from experiments.topics.runs import known
from experiments.topics.table import OUTPUT, Records
from experiments.topics.tables import (
    Row,
    ablation,
    beyond,
    costs,
    information,
    information_in_short,
    longer,
    missing,
    over_parties,
    over_ranks,
    quality,
    runs,
    topics,
    tuning,
)
from partsong.reporting.charts import Line, Quantity

RANKS = (50, 100, 200)
TABLES = {
    "f1": partial(quality, field="f1", ranks=RANKS),
    "f1-50": partial(quality, field="f1", ranks=(50,)),
    "accuracy": partial(quality, field="accuracy", ranks=RANKS),
    "accuracy-50": partial(quality, field="accuracy", ranks=(50,)),
    "coherence": partial(quality, field="coherence", ranks=RANKS),
    "coherence-50": partial(quality, field="coherence", ranks=(50,)),
    "before": partial(quality, field="f1", ranks=RANKS, reading="before"),
    "before-50": partial(quality, field="f1", ranks=(50,), reading="before"),
    "information": information,
    "information-in-short": information_in_short,
    "costs": costs,
    "beyond": beyond,
    "tuning": tuning,
    "ranks": over_ranks,
    "parties": over_parties,
    "topics": topics,
    "ablation": ablation,
    "longer": longer,
    "missing": missing,
}


def _in_table_four(cells: list[str]) -> bool:
    return "tf-idf" not in cells[0] or cells[0].startswith("exact")


def _over_ranks(cells: list[str]) -> bool:
    return cells[1] == "mean of three"


EXCERPTS: dict[str, tuple[str, Callable[[str], str]]] = {
    "f1-in-short": ("f1", lambda table: select(table, _in_table_four)),
    "beyond-in-short": (
        "beyond",
        lambda table: select(table, lambda cells: cells[1] == "mean of three", (0, 2, 3, 4, 5)),
    ),
}
"""Excerpts on the page: the table, and its rows and columns."""


def drawn_from(found: Records) -> dict[str, str]:
    """Draw a figure for each corpus with such runs."""
    drawn = {f"topics-bytes-{data}": over_bytes(found, data) for data in published.SETS}
    return {name: text for name, text in drawn.items() if text}


def over_bytes(found: Records, data: str) -> str:
    """Macro-F1 over bytes, means over seeds after equal rounds; empty without such runs."""
    lines = []
    for method in (*DESCENDING, *OURS):
        curves = [one["curve"] for one in runs(found, Row(method), data, 100, looks=LOOKS) if one["curve"]]
        if curves:
            mean = np.mean([curve[: min(map(len, curves))] for curve in curves], axis=0)
            megabytes, f1 = (tuple(float(value) for value in column) for column in (mean[:, 1] / 1e6, mean[:, 2]))
            lines.append(Line(Row(method).label, style_of(len(lines)), megabytes, f1))
    if not lines:
        return ""
    return figure_svg(
        Quantity("MB, all parties, both ways", lambda v: f"{v:g}"), Quantity("macro-F1", lambda v: f"{v:.2f}"), lines
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Update the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=OUTPUT)
    parser.add_argument("--print", action="store_true", help="print every table, also those that the page leaves out")
    parser.add_argument("--document", type=Path, default=Path("docs/results/topics.md"))
    chosen = parser.parse_args(arguments)
    found = known(chosen.file)
    tables = {name: table(found) for name, table in TABLES.items()}
    if all((PREPARED / f"{name}.npz").exists() for name in SOURCES):
        tables["corpora"] = table_two()
    if chosen.print:
        print_tables(tables)
    tables |= {name: shortened(tables[table]) for name, (table, shortened) in EXCERPTS.items()}
    replace_tables(chosen.document, tables)
    for name, picture in drawn_from(found).items():
        chosen.document.with_name(f"{name}.svg").write_text(picture, "utf-8")


if __name__ == "__main__":
    main()
