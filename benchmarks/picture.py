"""Curves as an SVG file: distance from the best explained variance over seconds, first seed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from benchmarks.curves import Run
from partsong.evaluate.drawing import HEIGHT, WIDTH, Line, Quantity, line_chart
from partsong.evaluate.page import Markup, element

SMALLEST = 1e-4
"""Distances below this are drawn at it."""
COLOURS = ("#1f5fa8", "#c2410c", "#16794f", "#8e3a9d", "#946000", "#0e7490", "#be123c", "#4f46e5")
DASHES = ("none", "9 3", "5 3", "9 3 2 3")
LINE = 16
MARGIN = 10
HOVERING = re.compile(r"<circle [^>]*class=\"hit\"><title>.*?</title></circle>")
"""Discs that tell values where a mouse is; an image in a page gets none."""

STYLE = """
.paper { fill: #fff; } text { fill: #57616d; font: 12px system-ui, sans-serif; } .name { fill: #1c2127; }
.middle { text-anchor: middle; } .end { text-anchor: end; } .grid { stroke: #dfe3e8; } .axis { stroke: #57616d; }
.series { fill: none; stroke-width: 1.6; stroke-linejoin: round; } .hit { fill: transparent; }
"""


def drawn(runs: Sequence[Run], best: float) -> str:
    """A picture that needs nothing else; one line per run, named below."""
    lines = [_line(run, i, best) for i, run in enumerate(runs)]
    seconds = Quantity("seconds (logarithmic)", lambda place: f"{10 ** (place - 6):g}", smallest_step=1.0)
    distance = Quantity("1 − explained variance / best", lambda value: f"{100 * value:g}%")
    chart = line_chart(seconds, distance, lines)
    inside = Markup(HOVERING.sub("", chart[chart.index(">") + 1 : chart.rindex("</svg>")]))
    legend = [_entry(line, i) for i, line in enumerate(lines)]
    height = HEIGHT + LINE * ((len(lines) + 1) // 2) + 8
    width = WIDTH + 2 * MARGIN
    paper = element("rect", x=-MARGIN, width=f"{width:.0f}", height=f"{height:.0f}", class_="paper")
    style = element("style", Markup(STYLE + "".join(_colour(i) for i in range(len(lines)))))
    return element(
        "svg",
        style,
        paper,
        inside,
        *legend,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"{-MARGIN} 0 {width:.0f} {height:.0f}",
        width=f"{2 * width:.0f}",
    )


def _line(run: Run, index: int, best: float) -> Line:
    distances = [max(SMALLEST, 1 - value / best) for _, value in run.points]
    places = [math.log10(max(seconds, 1e-5)) + 6 for seconds, _ in run.points]  # decades above a microsecond
    kept = [(place, far) for place, far in zip(places, distances, strict=True) if far <= 1]
    return Line(run.contestant, f"m{index}", tuple(x for x, _ in kept), tuple(y for _, y in kept))


def _colour(index: int) -> str:
    colour, dash = COLOURS[index % len(COLOURS)], DASHES[(index + index // len(COLOURS)) % len(DASHES)]
    return f".m{index} .series {{ stroke: {colour}; stroke-dasharray: {dash}; }} .m{index} .dot {{ fill: {colour}; }}\n"


def _entry(line: Line, index: int) -> Markup:
    x, y = 12 + (index % 2) * WIDTH / 2, HEIGHT + LINE * (index // 2) + 10
    stroke = element("path", d=f"M{x:.0f} {y - 4:.0f}h26", class_="series")
    label = element("text", line.label, x=f"{x + 32:.0f}", y=f"{y:.0f}")
    return element("g", stroke, label, class_=line.style)
