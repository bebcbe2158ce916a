"""Pictures of docs/results/topics.md: macro-F1 over bytes (Fig. 3)."""

from __future__ import annotations

import numpy as np

from experiments import topics_published
from experiments.shared.figures import figure_svg, style_of
from experiments.topics_figures import DESCENDING, LOOKS
from experiments.topics_methods import OURS
from experiments.topics_table import Records
from experiments.topics_tables import Row, runs
from partsong.reporting.charts import Line, Quantity


def drawn_from(found: Records) -> dict[str, str]:
    """A picture for each corpus that has such runs."""
    drawn = {f"topics-bytes-{data}": over_bytes(found, data) for data in topics_published.SETS}
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
