"""Grayscale PNG images, bars, and SVG line charts for HTML pages, without a plotting library."""

from __future__ import annotations

import base64
import math
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from partsong.reporting.html import Markup, element

LARGEST_SIDE = 96  # pixels; components are shown as thumbnails
MOST_POINTS = 80  # of a curve, evenly spaced; as many again are denser toward its start
LOGARITHMIC_BEYOND = 10.0  # ratio of the largest to the smallest positive value
WIDTH, HEIGHT = 380.0, 270.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 30.0, 44.0


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Encode `pixels` (height, width) as an 8-bit grayscale PNG."""
    height, width = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    unfiltered = np.pad(pixels, ((0, 0), (1, 0))).tobytes()  # each line starts with filter type 0
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(unfiltered, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def picture(values: npt.NDArray[Any], alt: str) -> Markup:
    """Return `values` (height, width) as an image: 0 is white, the largest value is black."""
    largest = values.max(initial=0.0)
    ink = _shrink(values / largest if largest > 0 else np.zeros(values.shape))
    encoded = base64.b64encode(png(np.rint(255 * (1 - ink)).astype(np.uint8))).decode("ascii")
    height, width = ink.shape
    return element("img", src=f"data:image/png;base64,{encoded}", alt=alt, width=width, height=height)


def _shrink(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Average over square blocks, so that no side exceeds `LARGEST_SIDE`."""
    block = math.ceil(max(values.shape) / LARGEST_SIDE)
    height, width = (math.ceil(side / block) for side in values.shape)
    padding = [(0, height * block - values.shape[0]), (0, width * block - values.shape[1])]
    blocks = np.pad(values, padding, mode="edge").reshape(height, block, width, block)
    return np.asarray(blocks.mean(axis=(1, 3)))


def bar(fraction: float) -> Markup:
    """Return a bar that fills this fraction of its width; hidden from screen readers, as a number stands beside it."""
    return element("span", class_="bar", style=f"width:{100 * fraction:.1f}%", aria_hidden="true")


def key(style: str) -> Markup:
    """Return a short line in the style of a curve, for legends and tables."""
    stroke = element("path", d="M0 5H27", class_="series")
    return element("svg", stroke, class_=f"key {style}", viewBox="0 0 27 10", aria_hidden="true")


@dataclass(frozen=True, slots=True)
class Quantity:
    """What an axis measures: its name, the format of a value (`spell`), and a value that it starts from, if any."""

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
        """The finite points. Of many, a subset: evenly spaced ones, and more of them toward the start."""
        finite = [pair for pair in zip(self.x, self.y, strict=True) if all(map(math.isfinite, pair))]
        if len(finite) <= 2 * MOST_POINTS:
            return finite
        evenly = np.linspace(0, len(finite) - 1, MOST_POINTS)
        early = np.geomspace(1, len(finite), MOST_POINTS) - 1
        return [finite[i] for i in np.unique(np.rint(np.concatenate([evenly, early])).astype(int))]


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from `low` to `high` with its ticks; values outside are clipped to its ends."""

    quantity: Quantity
    ticks: tuple[float, ...]
    low: float
    high: float
    is_logarithmic: bool

    def place(self, value: float) -> float:
        """Return the position of a value between the ends, from 0 to 1."""
        value = min(max(value, self.low), self.high)
        if self.is_logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def axis(quantity: Quantity, values: Sequence[float], compared: Sequence[float]) -> Axis:
    """Return an axis for `values`; logarithmic if the positive ones of `compared` span more than a decade."""
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
    """Round up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * digit for digit in (1, 2, 5, 10, 20) if power * digit >= rough * 0.999)


def _decades(low: float, high: float) -> tuple[float, ...]:
    """Return the powers of ten within the ends, and 2 and 5 times them if there are few."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if len(exponents) <= 3 else (1,)
    every = max(1, len(exponents) // 5)
    ticks = (digit * 10.0**exponent for exponent in exponents[::every] for digit in digits)
    return tuple(tick for tick in ticks if low * 0.999 <= tick <= high * 1.001)


def line_chart(x: Quantity, y: Quantity, lines: Sequence[Line]) -> Markup:
    """Return a chart of all lines; hovering over a point shows its values."""
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
    """Return the grid lines, tick labels and names of both axes."""
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
    """Remove trailing zeros: 20.0 kB becomes 20 kB, since ticks are round numbers."""
    return re.sub(r"\.0+(?!\d)|(\.\d*[1-9])0+(?!\d)", r"\1", number)


def _curve(line: Line, x: Axis, y: Axis) -> Markup:
    """Return a curve, a dot at its end, and discs that appear on hovering, with the values as titles."""
    pixels = [_pixel(x, y, point) for point in line.points]
    path = "".join(f"{'L' if i else 'M'}{across:.1f} {up:.1f}" for i, (across, up) in enumerate(pixels))
    discs = []
    for (across, up), point in zip(pixels, line.points, strict=True):
        words = f"{line.label}: {y.quantity.spell(point[1])} at {x.quantity.name} {x.quantity.spell(point[0])}"
        discs.append(element("circle", element("title", words), cx=f"{across:.1f}", cy=f"{up:.1f}", r=5, class_="hit"))
    end = element("circle", cx=f"{pixels[-1][0]:.1f}", cy=f"{pixels[-1][1]:.1f}", r=3, class_="dot")
    return element("g", element("path", d=path, class_="series"), end, *discs, class_=line.style)
