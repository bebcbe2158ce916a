"""Findings to one self-contained HTML page: opens offline, loads nothing, prints well."""

from __future__ import annotations

import os
from pathlib import Path

from partsong.evaluate import leakage_section, parts, privacy_section, sections, voices
from partsong.evaluate.findings import Report
from partsong.evaluate.page import Markup, document, element, section
from partsong.io.atomic import replacing

CONTENTS = (
    ("results", "Results", sections.results),
    ("convergence", "Convergence", sections.convergence),
    ("parts", "Learned parts", parts.parts),
    ("voices", "At each party", voices.voices),
    ("parties", "Who holds what", sections.holdings),
    ("disclosure", "What left each party", sections.disclosure),
    ("reproduce", "Reproduce", sections.reproduction),
)
OF_ONE_FIT = (
    ("privacy", "Privacy", privacy_section.privacy),
    (leakage_section.ANCHOR, leakage_section.TITLE, lambda report: _attacks(report)),
)
"""Sections on a single fit, before the last."""


def render(report: Report) -> str:
    """The page as text; the same findings give the same page."""
    contents = CONTENTS if report.attacks is None else (*CONTENTS[:-1], *OF_ONE_FIT, CONTENTS[-1])
    links = [element("a", title, href=f"#{anchor}") for anchor, title, _ in contents]
    header = element(
        "header",
        element("h1", report.title),
        element("p", report.lead, class_="lead"),
        element("nav", *links, aria_label="Contents"),
    )
    body = [section(anchor, title, *content(report)) for anchor, title, content in contents]
    return document(report.title, header, element("main", *body))


def _attacks(report: Report) -> list[Markup]:
    found = report.attacks
    return [element("p", found, class_="kept")] if isinstance(found, str) else leakage_section.attacks(found or ())


def write_report(path: str | os.PathLike[str], report: Report) -> Path:
    """Write the page; a reader finds the old file or the whole new one, never a half."""
    page = render(report).encode("utf-8", "replace")
    with replacing(path) as partial:
        partial.write_bytes(page)
    return Path(path)
