"""The page itself: escaped HTML elements, tables, numbers for human eyes, the skeleton and its style sheet."""

from __future__ import annotations

import base64
import html
import math
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# ---- page -------------------------------------------------------------------------------------------------------

VOID_ELEMENTS = frozenset({"img", "meta"})
BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
UNKNOWN = "\N{EN DASH}"
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


class Markup(str):
    """Text that is HTML already; every other string is escaped on its way into an element."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str | int) -> Markup:
    """`<tag attributes>children</tag>`; write `class_` for class and `aria_label` for aria-label."""
    named = {name.rstrip("_").replace("_", "-"): html.escape(str(value)) for name, value in attributes.items()}
    opening = " ".join([tag, *(f'{name}="{value}"' for name, value in named.items())])
    if tag in VOID_ELEMENTS:
        return Markup(f"<{opening}>")
    inside = "".join(child if isinstance(child, Markup) else html.escape(child) for child in children)
    return Markup(f"<{opening}>{inside}</{tag}>")


def significant(value: float) -> str:
    """Three significant digits, trailing zeros kept so that columns line up."""
    if not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".")


def percent(fraction: float) -> str:
    """0.2871 as 28.7%."""
    shown = significant(100 * fraction)
    return shown if shown == UNKNOWN else f"{shown}%"


def size(n_bytes: float) -> str:
    """Bytes in decimal units: 20480 as 20.5 kB."""
    if not math.isfinite(n_bytes) or n_bytes <= 0:
        return "0 B" if n_bytes == 0 else UNKNOWN
    power = 0
    while n_bytes >= 999.5 and power < len(BYTE_UNITS) - 1:
        n_bytes, power = n_bytes / 1000, power + 1
    return f"{significant(n_bytes) if power else f'{n_bytes:.0f}'}\N{NO-BREAK SPACE}{BYTE_UNITS[power]}"


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column; numbers are set flush right."""

    label: str
    is_number: bool = True

    @property
    def style(self) -> str:
        """Its class in the style sheet."""
        return "number" if self.is_number else "words"


def row(columns: Sequence[Column], cells: Sequence[str], kind: str = "plain") -> Markup:
    """One line of a table; its first cell is its header."""
    first, *rest = zip(columns, cells, strict=True)
    header = element("th", first[1], scope="row", class_=first[0].style)
    return element("tr", header, *(element("td", cell, class_=column.style) for column, cell in rest), class_=kind)


def table(caption: str, columns: Sequence[Column], *bodies: Sequence[Markup]) -> Markup:
    """A captioned table that scrolls sideways, by finger or keyboard, where the window is narrow."""
    heads = [element("th", column.label, scope="col", class_=column.style) for column in columns]
    groups = [element("tbody", *rows) for rows in bodies]
    whole = element("table", element("thead", element("tr", *heads)), *groups)
    room = element("div", whole, class_="scroll", role="region", tabindex=0, aria_label="Table, scrolls sideways")
    return element("figure", element("figcaption", caption, class_="note"), room)


def section(anchor: str, title: str, *content: Markup) -> Markup:
    """A part of the page that the contents line can point to."""
    return element(
        "section", element("h2", title, id=f"{anchor}-title"), *content, id=anchor, aria_labelledby=f"{anchor}-title"
    )


def document(title: str, *content: Markup) -> Markup:
    """The whole file; its policy forbids browsers to load or run anything at all."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(STYLE)),
    )
    whole = element("html", head, element("body", *content), lang="en")
    return Markup(f"<!DOCTYPE html>\n{whole}\n")


STYLE = """
:root { color-scheme: light dark; --paper: #fff; --wash: #f5f7f9; --ink: #1c2127; --soft: #57616d; --rule: #dfe3e8;
  --accent: #1f5fa8; --c0: #1f5fa8; --c1: #c2410c; --c2: #16794f; --c3: #8e3a9d; --c4: #946000; --c5: #0e7490;
  --c6: #be123c; --c7: #4f46e5; --frame: #dfe3e8; }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #14171b; --wash: #1c2026; --ink: #e4e7eb;
  --soft: #9da8b5; --rule: #2e353d; --accent: #78b0f0; --c0: #78b0f0; --c1: #f79a6b; --c2: #5fcb9b; --c3: #d295e0;
  --c4: #e0b04c; --c5: #58c5dc; --c6: #f7879c; --c7: #a5a1fa; --frame: #dfdad5; }
  .part img { filter: invert(0.91); } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 4rem 1.5rem 5rem; max-width: 70rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1, h2, h3 { line-height: 1.2; letter-spacing: -0.012em; text-wrap: balance; overflow-wrap: anywhere; }
h1 { margin: 0 0 1rem; font-size: 2.1rem; font-weight: 680; }
h2 { margin: 0 0 0.5rem; font-size: 1.35rem; font-weight: 650; }
h3 { margin: 2rem 0 0.75rem; font-size: 1rem; font-weight: 600; }
section { margin-top: 4rem; } figure { margin: 0; }
.lead { max-width: 44rem; margin: 0; font-size: 1.15rem; overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: 0.25rem 1.5rem; margin-top: 1.75rem; font-size: 0.9rem; }
a { color: var(--accent); text-decoration: none; } a:hover { text-decoration: underline; }
.note, .description { color: var(--soft); font-size: 0.9rem; font-weight: 400; }
.note { max-width: 44rem; margin: 0 0 1rem; }
.verdict { max-width: 44rem; margin: 0 0 1.25rem; }
.kept { max-width: 44rem; margin: 1.5rem 0 0; padding: 0.9rem 1.1rem; background: var(--wash); border-radius: 6px; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums lining-nums; }
table { --pad: 0.5rem 0.6rem; --pull: -0.5rem -0.6rem; }
th, td { padding: var(--pad); text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule); }
thead th { vertical-align: bottom; color: var(--soft); font-size: 0.8rem; font-weight: 500; line-height: 1.3; }
tbody th { max-width: 24rem; font-weight: 500; overflow-wrap: break-word; } #results tbody th { min-width: 10rem; }
.number { text-align: right; } td.number { white-space: nowrap; }
.description { display: block; max-width: 26rem; font-size: 0.82rem; line-height: 1.4; }
tr.best { background: var(--wash); }
tr.best > :nth-child(-n+2) { font-weight: 650; } tr.group th { padding-top: 1.4rem; font-weight: 650; }
#results td { white-space: nowrap; } #disclosure td:last-child { min-width: 16rem; }
.badge { margin-left: 0.5rem; padding: 0.05rem 0.5rem; border-radius: 1rem; background: var(--accent);
  color: var(--paper); font-size: 0.72rem; font-weight: 600; white-space: nowrap; }
.badge.reference { background: none; color: var(--soft); box-shadow: inset 0 0 0 1px var(--soft); }
.key { display: inline-block; width: 1.7rem; height: 0.6rem; margin-right: 0.5rem; }
.legend { display: flex; flex-wrap: wrap; gap: 0.3rem 1.5rem; margin: 0 0 0.75rem; padding: 0; list-style: none;
  font-size: 0.9rem; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); gap: 1.5rem 2rem; }
.charts svg { display: block; width: 100%; height: auto; max-width: 34rem; overflow: visible; }
svg text { fill: var(--soft); font-size: 12.5px; font-variant-numeric: tabular-nums; }
svg .name { fill: var(--ink); } svg .middle { text-anchor: middle; } svg .end { text-anchor: end; }
svg .grid { stroke: var(--rule); } svg .axis { stroke: var(--soft); }
.series { fill: none; stroke: var(--series); stroke-width: 2; stroke-linejoin: round; }
.dot { fill: var(--series); } .hit { fill: transparent; } .hit:hover { fill: var(--series); }
.oracle { --series: var(--soft); stroke-dasharray: 2 3; }
.s0 { --series: var(--c0); } .s1 { --series: var(--c1); stroke-dasharray: 9 3; }
.s2 { --series: var(--c2); stroke-dasharray: 5 3; } .s3 { --series: var(--c3); stroke-dasharray: 9 3 2 3; }
.s4 { --series: var(--c4); } .s5 { --series: var(--c5); stroke-dasharray: 9 3; }
.s6 { --series: var(--c6); stroke-dasharray: 5 3; } .s7 { --series: var(--c7); stroke-dasharray: 9 3 2 3; }
.parts { display: grid; grid-template-columns: repeat(auto-fill, minmax(5.6rem, 1fr)); gap: 0.9rem 0.8rem; }
.parts.lists { grid-template-columns: repeat(auto-fill, minmax(12.5rem, 1fr)); gap: 1.75rem 2rem; }
.part { min-width: 0; font-size: 0.8rem; }
.part img { display: block; width: 100%; height: auto; border: 1px solid var(--frame); image-rendering: pixelated; }
.part figcaption { display: flex; justify-content: space-between; margin-top: 0.25rem; color: var(--soft);
  font-variant-numeric: tabular-nums; }
.part b { color: var(--ink); font-weight: 600; }
.part ol { margin: 0.3rem 0 0; padding: 0; list-style: none; }
.part li { display: grid; grid-template-columns: minmax(0, 1fr) 4.5rem; gap: 0.6rem; align-items: center; }
.part li > span:first-child { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
details.voices { margin-top: 1.75rem; } details.voices figure { margin-top: 1.25rem; }
summary { cursor: pointer; font-weight: 600; overflow-wrap: anywhere; }
details[open] > summary { margin-bottom: 0.75rem; }
.voices table { --pad: 0.3rem 0.2rem; font-size: 0.8rem; width: auto; } .voices .part { width: 2.1rem; }
.voices td.number { padding-right: 0.5rem; } .voices .part.words { width: 7rem; font-size: 0.72rem; line-height: 1.3; }
.voices .part.alone { opacity: 0.3; } #voices tbody th { min-width: 5rem; }
.mini { display: block; color: var(--soft); font-size: 0.68rem; line-height: 1.3; } b.mini { color: var(--ink); }
td .bar { margin-top: 0.4rem; }
.bar { display: block; height: 0.6rem; min-width: 1px; background: var(--accent); opacity: 0.75; }
.heat { display: block; margin: var(--pull); padding: var(--pad);
  background: color-mix(in srgb, var(--accent) min(60%, calc(var(--share) * 90%)), transparent); }
.reproduce { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 2rem 3rem; }
.reproduce td { overflow-wrap: anywhere; }
@media screen and (max-width: 40rem) { th:first-child { position: sticky; left: 0; background: var(--paper); }
  tr.best th { background: var(--wash); } tbody th { max-width: 12rem; }
  .parts { grid-template-columns: repeat(auto-fill, minmax(4.2rem, 1fr)); }
  body { padding: 2rem 1rem 3rem; } h1 { font-size: 1.6rem; } section { margin-top: 3rem; } }
@media print { @page { margin: 16mm; } :root { font-size: 12px; } body { padding: 0; } nav { display: none; }
  section { margin-top: 2.5rem; } .scroll { overflow: visible; }
  .parts { grid-template-columns: repeat(auto-fill, minmax(4.6rem, 1fr)); }
  .charts { grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); }
  tr, .note, .part, #convergence { break-inside: avoid; } h2, h3, .note, .group { break-after: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


# ---- drawing ----------------------------------------------------------------------------------------------------
#
# Pictures without a plotting library: greyscale PNGs, SVG line charts, and bars.

LARGEST_SIDE = 96  # pixels; a part is shown no larger than a thumbnail
MOST_POINTS = 80  # of a curve, evenly spaced; as many again crowd toward its start
LOGARITHMIC_BEYOND = 10.0  # ratio of the largest to the smallest positive value
WIDTH, HEIGHT = 380.0, 270.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 30.0, 44.0


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """An 8-bit greyscale PNG of `pixels` (height, width)."""
    height, width = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    unfiltered = np.pad(pixels, ((0, 0), (1, 0))).tobytes()  # each line starts with filter type 0
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(unfiltered, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def picture(values: npt.NDArray[Any], alt: str) -> Markup:
    """`values` (height, width) as ink on white paper: 0 is white, the largest value is black."""
    largest = values.max(initial=0.0)
    ink = _shrink(values / largest if largest > 0 else np.zeros(values.shape))
    encoded = base64.b64encode(png(np.rint(255 * (1 - ink)).astype(np.uint8))).decode("ascii")
    height, width = ink.shape
    return element("img", src=f"data:image/png;base64,{encoded}", alt=alt, width=width, height=height)


def _shrink(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Means over square blocks, so that no side is longer than a thumbnail's."""
    block = math.ceil(max(values.shape) / LARGEST_SIDE)
    height, width = (math.ceil(side / block) for side in values.shape)
    padding = [(0, height * block - values.shape[0]), (0, width * block - values.shape[1])]
    blocks = np.pad(values, padding, mode="edge").reshape(height, block, width, block)
    return np.asarray(blocks.mean(axis=(1, 3)))


def bar(fraction: float) -> Markup:
    """A bar of this fraction of its room; decoration next to a number or a name."""
    return element("span", class_="bar", style=f"width:{100 * fraction:.1f}%", aria_hidden="true")


def key(style: str) -> Markup:
    """A short stroke in the style of a line, for legends and tables."""
    stroke = element("path", d="M0 5H27", class_="series")
    return element("svg", stroke, class_=f"key {style}", viewBox="0 0 27 10", aria_hidden="true")


@dataclass(frozen=True, slots=True)
class Quantity:
    """What an axis measures: its name, how a value is spelled, and a value it should start from, if any."""

    name: str
    spell: Callable[[float], str]
    start: float | None = None
    smallest_step: float = 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """One curve of a chart; `style` is its class in the style sheet."""

    label: str
    style: str
    x: tuple[float, ...]
    y: tuple[float, ...]

    @property
    def points(self) -> list[tuple[float, float]]:
        """The finite points, thinned where there are many: evenly, and once more densely toward the start."""
        finite = [pair for pair in zip(self.x, self.y, strict=True) if all(map(math.isfinite, pair))]
        if len(finite) <= 2 * MOST_POINTS:
            return finite
        evenly = np.linspace(0, len(finite) - 1, MOST_POINTS)
        early = np.geomspace(1, len(finite), MOST_POINTS) - 1
        return [finite[i] for i in np.unique(np.rint(np.concatenate([evenly, early])).astype(int))]


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from `low` to `high` with its ticks; values beyond the ends of the scale are placed at its ends."""

    quantity: Quantity
    ticks: tuple[float, ...]
    low: float
    high: float
    is_logarithmic: bool

    def place(self, value: float) -> float:
        """Where a value lies between the ends: 0 to 1."""
        value = min(max(value, self.low), self.high)
        if self.is_logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def axis(quantity: Quantity, values: Sequence[float], compared: Sequence[float]) -> Axis:
    """An axis for `values`; logarithmic where the positive ones among `compared` span more than a decade."""
    positive = [value for value in compared if value > 0]
    if positive and max(positive) / min(positive) > LOGARITHMIC_BEYOND:
        earliest = min(positive) / LOGARITHMIC_BEYOND**2
        low, high = max(earliest, min(value for value in values if value > 0)), max(values)
        return Axis(quantity, _decades(low, high), low, high, True)
    known = [*values] if quantity.start is None else [quantity.start, *values]
    low, high = min(known), max(known)
    step = max(_round_step((high - low or abs(high) or 1.0) / 5), quantity.smallest_step)
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    ticks = tuple(step * i for i in range(first, last + 1))
    return Axis(quantity, ticks, ticks[0], ticks[-1], False)


def _round_step(rough: float) -> float:
    """The next step of the form 1, 2 or 5 times a power of ten; a whole number from 1 on."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * digit for digit in (1, 2, 5, 10, 20) if power * digit >= rough * 0.999)


def _decades(low: float, high: float) -> tuple[float, ...]:
    """Powers of ten within the ends, with their doubles and fives where there is room for them."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if len(exponents) <= 3 else (1,)
    every = max(1, len(exponents) // 5)
    ticks = (digit * 10.0**exponent for exponent in exponents[::every] for digit in digits)
    return tuple(tick for tick in ticks if low * 0.999 <= tick <= high * 1.001)


def line_chart(x: Quantity, y: Quantity, lines: Sequence[Line]) -> Markup:
    """A chart of all lines; hovering over a point tells its values."""
    points = [point for line in lines for point in line.points]
    if not points:
        return element("p", f"No finite values of {y.name} over {x.name} to draw.", class_="note")
    across = [point[0] for point in points]
    ends = [line.points[-1][0] for line in lines if line.points]
    upward = [point[1] for point in points]
    axes = axis(x, across, ends), axis(y, upward, upward)
    label = f"Line chart: {y.name} over {x.name}, {len(lines)} methods. The final values are in the table of results."
    drawn = [*_frame(*axes), *(_curve(line, *axes) for line in lines if line.points)]
    return element("svg", *drawn, viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}", role="img", aria_label=label)


def _pixel(x: Axis, y: Axis, point: tuple[float, float]) -> tuple[float, float]:
    across = LEFT + x.place(point[0]) * (WIDTH - LEFT - RIGHT)
    return across, HEIGHT - BOTTOM - y.place(point[1]) * (HEIGHT - TOP - BOTTOM)


def _frame(x: Axis, y: Axis) -> list[Markup]:
    """Grid lines, tick labels, and the names of both axes."""
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    drawn = [element("path", d=f"M{LEFT:.1f} {floor:.1f}H{right:.1f}", class_="axis")]
    for tick in y.ticks:
        _, up = _pixel(x, y, (x.low, tick))
        drawn.append(element("path", d=f"M{LEFT:.1f} {up:.1f}H{right:.1f}", class_="grid"))
        drawn.append(_text(_trimmed(y.quantity.spell(tick)), LEFT - 6, up + 4, "end"))
    for tick in x.ticks:
        along, _ = _pixel(x, y, (tick, y.low))
        drawn.append(element("path", d=f"M{along:.1f} {floor:.1f}v4", class_="axis"))
        drawn.append(_text(_trimmed(x.quantity.spell(tick)), along, floor + 17, "middle"))
    name_x, name_y = (a.quantity.name + (" (logarithmic)" if a.is_logarithmic else "") for a in (x, y))
    return [*drawn, _text(name_x, (LEFT + right) / 2, HEIGHT - 8, "middle name"), _text(name_y, 0.0, 12.0, "name")]


def _text(words: str, x: float, y: float, style: str) -> Markup:
    return element("text", words, x=f"{x:.1f}", y=f"{y:.1f}", class_=style)


def _trimmed(number: str) -> str:
    """20.0 kB as 20 kB: ticks are round, and need no trailing zeros."""
    return re.sub(r"\.0+(?!\d)|(\.\d*[1-9])0+(?!\d)", r"\1", number)


def _curve(line: Line, x: Axis, y: Axis) -> Markup:
    """The polyline, a dot where it ends, and discs that appear on hovering and carry the values as titles."""
    pixels = [_pixel(x, y, point) for point in line.points]
    path = "".join(f"{'L' if i else 'M'}{across:.1f} {up:.1f}" for i, (across, up) in enumerate(pixels))
    discs = []
    for (across, up), point in zip(pixels, line.points, strict=True):
        words = f"{line.label}: {y.quantity.spell(point[1])} at {x.quantity.name} {x.quantity.spell(point[0])}"
        discs.append(element("circle", element("title", words), cx=f"{across:.1f}", cy=f"{up:.1f}", r=5, class_="hit"))
    end = element("circle", cx=f"{pixels[-1][0]:.1f}", cy=f"{pixels[-1][1]:.1f}", r=3, class_="dot")
    return element("g", element("path", d=path, class_="series"), end, *discs, class_=line.style)


# ---- picture ----------------------------------------------------------------------------------------------------
#
# A line chart as an SVG file of its own: paper, colours and a legend inside.

COLOURS = ("#1f5fa8", "#c2410c", "#16794f", "#8e3a9d", "#946000", "#0e7490", "#be123c", "#4f46e5")
DASHES = ("none", "9 3", "5 3", "9 3 2 3")
LINE = 16
MARGIN = 10
HOVERING = re.compile(r"<circle [^>]*class=\"hit\"><title>.*?</title></circle>")
"""Discs that tell values where a mouse is; an image in a page gets none."""

FIGURE_STYLE = """
.paper { fill: #fff; } text { fill: #57616d; font: 12px system-ui, sans-serif; } .name { fill: #1c2127; }
.middle { text-anchor: middle; } .end { text-anchor: end; } .grid { stroke: #dfe3e8; } .axis { stroke: #57616d; }
.series { fill: none; stroke-width: 1.6; stroke-linejoin: round; } .hit { fill: transparent; }
"""


def style_of(index: int) -> str:
    """The class of the line with this number, for which a picture has a colour."""
    return f"m{index}"


def figure_svg(x: Quantity, y: Quantity, lines: Sequence[Line]) -> str:
    """A picture that needs nothing else; lines have the styles `style_of(0)`, … and are named below."""
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
