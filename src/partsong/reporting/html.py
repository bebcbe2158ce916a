"""HTML building blocks of reports: escaped elements, tables, formatted numbers, and a page with its style sheet."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

VOID_ELEMENTS = frozenset({"img", "meta"})
BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
UNKNOWN = "\N{EN DASH}"
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

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
details.by-party { margin-top: 1.75rem; } details.by-party figure { margin-top: 1.25rem; }
summary { cursor: pointer; font-weight: 600; overflow-wrap: anywhere; }
details[open] > summary { margin-bottom: 0.75rem; }
.by-party table { --pad: 0.3rem 0.2rem; font-size: 0.8rem; width: auto; } .by-party .part { width: 2.1rem; }
.by-party td.number { padding-right: 0.5rem; }
.by-party .part.words { width: 7rem; font-size: 0.72rem; line-height: 1.3; }
.by-party .part.unmatched { opacity: 0.3; } #by-party tbody th { min-width: 5rem; }
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


class Markup(str):
    """A string that is HTML already; `element` escapes every other string."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str | int) -> Markup:
    """Return `<tag attributes>children</tag>`; write `class_` for class and `aria_label` for aria-label."""
    named = {name.rstrip("_").replace("_", "-"): html.escape(str(value)) for name, value in attributes.items()}
    opening = " ".join([tag, *(f'{name}="{value}"' for name, value in named.items())])
    if tag in VOID_ELEMENTS:
        return Markup(f"<{opening}>")
    inside = "".join(child if isinstance(child, Markup) else html.escape(child) for child in children)
    return Markup(f"<{opening}>{inside}</{tag}>")


def format_number(value: float) -> str:
    """Format a number with three significant digits; trailing zeros are kept, so that columns line up."""
    if not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".")


def format_percent(fraction: float) -> str:
    """Format a fraction as a percentage: 0.2871 as 28.7%."""
    shown = format_number(100 * fraction)
    return shown if shown == UNKNOWN else f"{shown}%"


def format_bytes(n_bytes: float) -> str:
    """Format bytes in decimal units: 20480 as 20.5 kB."""
    if not math.isfinite(n_bytes) or n_bytes <= 0:
        return "0 B" if n_bytes == 0 else UNKNOWN
    power = 0
    while n_bytes >= 999.5 and power < len(BYTE_UNITS) - 1:
        n_bytes, power = n_bytes / 1000, power + 1
    return f"{format_number(n_bytes) if power else f'{n_bytes:.0f}'}\N{NO-BREAK SPACE}{BYTE_UNITS[power]}"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; numbers are right-aligned."""

    label: str
    is_number: bool = True

    @property
    def style(self) -> str:
        """Its class in the style sheet."""
        return "number" if self.is_number else "words"


def row(columns: Sequence[Column], cells: Sequence[str], kind: str = "plain") -> Markup:
    """Return a row of a table; its first cell is the row's header."""
    first, *rest = zip(columns, cells, strict=True)
    header = element("th", first[1], scope="row", class_=first[0].style)
    return element("tr", header, *(element("td", cell, class_=column.style) for column, cell in rest), class_=kind)


def table(caption: str, columns: Sequence[Column], *bodies: Sequence[Markup]) -> Markup:
    """Return a table with a caption; in a narrow window it scrolls sideways, by touch or keyboard."""
    heads = [element("th", column.label, scope="col", class_=column.style) for column in columns]
    groups = [element("tbody", *rows) for rows in bodies]
    whole = element("table", element("thead", element("tr", *heads)), *groups)
    scrollable = element("div", whole, class_="scroll", role="region", tabindex=0, aria_label="Table, scrolls sideways")
    return element("figure", element("figcaption", caption, class_="note"), scrollable)


def section(anchor: str, title: str, *content: Markup) -> Markup:
    """Return a section of the page; the navigation links to its anchor."""
    return element(
        "section", element("h2", title, id=f"{anchor}-title"), *content, id=anchor, aria_labelledby=f"{anchor}-title"
    )


def document(title: str, *content: Markup) -> Markup:
    """Return the whole page; its Content-Security-Policy forbids browsers to load or run anything."""
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
