"""Tables and pictures of docs/results/topics.md from the runs that the other experiments have written down.

    python -m experiments.topics.report docs/results/topics.jsonl

Text between `<!-- table: NAME -->` and `<!-- end -->` is replaced; everything else in the document is left as it is.
What has not been run is a dash.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from experiments.shared.document import replace_tables
from experiments.shared.figures import figure_svg, style_of
from experiments.topics import published
from experiments.topics.corpora import PREPARED, SOURCES, table_two
from experiments.topics.figure_tables import ablation, longer, over_parties, over_ranks, topics
from experiments.topics.figures import DESCENDING, LOOKS
from experiments.topics.methods import OURS
from experiments.topics.runs import known
from experiments.topics.table import OUTPUT, Records
from experiments.topics.tables import (
    Row,
    beyond,
    costs,
    information,
    information_in_short,
    missing,
    quality,
    runs,
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


def drawn_from(found: Records) -> dict[str, str]:
    """A picture for each corpus that has such runs."""
    drawn = {f"topics-bytes-{data}": over_bytes(found, data) for data in published.SETS}
    return {name: text for name, text in drawn.items() if text}


def over_bytes(found: Records, data: str) -> str:
    """Means over seeds of what was seen after the same rounds; nothing where there are no such runs."""
    lines = []
    for method in (*DESCENDING, *OURS):
        curves = [one["curve"] for one in runs(found, Row(method), data, 100, looks=LOOKS) if one["curve"]]
        if curves:
            mean = np.mean([curve[: min(map(len, curves))] for curve in curves], axis=0)
            megabytes, f1 = (tuple(float(value) for value in column) for column in (mean[:, 1] / 1e6, mean[:, 2]))
            lines.append(Line(method, style_of(len(lines)), megabytes, f1))
    if not lines:
        return ""
    return figure_svg(
        Quantity("MB, all parties, both ways", lambda v: f"{v:g}"), Quantity("macro-F1", lambda v: f"{v:.2f}"), lines
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Renew the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=OUTPUT)
    parser.add_argument("--document", type=Path, default=Path("docs/results/topics.md"))
    chosen = parser.parse_args(arguments)
    found = known(chosen.file)
    tables = {name: table(found) for name, table in TABLES.items()}
    if all((PREPARED / f"{name}.npz").exists() for name in SOURCES):
        tables["corpora"] = table_two()
    replace_tables(chosen.document, tables)
    for name, picture in drawn_from(found).items():
        chosen.document.with_name(f"{name}.svg").write_text(picture, "utf-8")


if __name__ == "__main__":
    main()
