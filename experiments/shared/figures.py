"""Draw a line chart as a self-contained SVG file with background, colors and legend."""

from __future__ import annotations

import re
from collections.abc import Sequence

from partsong.reporting.charts import HEIGHT, WIDTH, Line, Quantity, line_chart
from partsong.reporting.html import Markup, element

COLOURS = ("#1f5fa8", "#c2410c", "#16794f", "#8e3a9d", "#946000", "#0e7490", "#be123c", "#4f46e5")
DASHES = ("none", "9 3", "5 3", "9 3 2 3")
LINE = 16
MARGIN = 10
HOVERING = re.compile(r"<circle [^>]*class=\"hit\"><title>.*?</title></circle>")
"""Tooltips of the chart, removed because an image in a page cannot show them."""
FIGURE_STYLE = """
.paper { fill: #fff; } text { fill: #57616d; font: 12px system-ui, sans-serif; } .name { fill: #1c2127; }
.middle { text-anchor: middle; } .end { text-anchor: end; } .grid { stroke: #dfe3e8; } .axis { stroke: #57616d; }
.series { fill: none; stroke-width: 1.6; stroke-linejoin: round; } .hit { fill: transparent; }
"""


def style_of(index: int) -> str:
    """CSS class of the line with this index."""
    return f"m{index}"


def figure_svg(x: Quantity, y: Quantity, lines: Sequence[Line]) -> str:
    """A self-contained figure; lines have the styles `style_of(0)`, … and are named in the legend."""
    chart = line_chart(x, y, lines)
    inside = Markup(HOVERING.sub("", chart[chart.index(">") + 1 : chart.rindex("</svg>")]))
    legend = [_entry(line, i) for i, line in enumerate(lines)]
    height = HEIGHT + LINE * ((len(lines) + 1) // 2) + 8
    width = WIDTH + 2 * MARGIN
    paper = element("rect", x=-MARGIN, width=f"{width:.0f}", height=f"{height:.0f}", class_="paper")
    style = element("style", Markup(FIGURE_STYLE + "".join(_colour(i) for i in range(len(lines)))))
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


def _colour(index: int) -> str:
    colour, dash = COLOURS[index % len(COLOURS)], DASHES[(index + index // len(COLOURS)) % len(DASHES)]
    own = f".{style_of(index)}"
    return f"{own} .series {{ stroke: {colour}; stroke-dasharray: {dash}; }} {own} .dot {{ fill: {colour}; }}\n"


def _entry(line: Line, index: int) -> Markup:
    x, y = 12 + (index % 2) * WIDTH / 2, HEIGHT + LINE * (index // 2) + 10
    stroke = element("path", d=f"M{x:.0f} {y - 4:.0f}h26", class_="series")
    label = element("text", line.label, x=f"{x + 32:.0f}", y=f"{y:.0f}")
    return element("g", stroke, label, class_=line.style)
