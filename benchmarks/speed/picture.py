"""Draw the distance from the best explained variance over seconds as an SVG file, first seed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.speed.curves import Run
from experiments.shared.figures import figure_svg, style_of
from partsong.reporting.charts import Line, Quantity

SMALLEST = 1e-4
"""Smaller distances are drawn at this value."""


def drawn(runs: Sequence[Run], best: float) -> str:
    """A self-contained figure with one line per run and a legend."""
    seconds = Quantity("seconds (logarithmic)", lambda place: f"{10 ** (place - 6):g}", smallest_step=1.0)
    distance = Quantity("1 − explained variance / best", lambda value: f"{100 * value:g}%")
    return figure_svg(seconds, distance, [_line(run, i, best) for i, run in enumerate(runs)])


def _line(run: Run, index: int, best: float) -> Line:
    distances = [max(SMALLEST, 1 - value / best) for _, value in run.points]
    places = [math.log10(max(seconds, 1e-5)) + 6 for seconds, _ in run.points]  # decades above a microsecond
    kept = [(place, far) for place, far in zip(places, distances, strict=True) if far <= 1]
    return Line(run.contestant, style_of(index), tuple(x for x, _ in kept), tuple(y for _, y in kept))
