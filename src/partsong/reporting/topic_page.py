"""HTML page of a topic model: map, words, sizes and coherence. It contains no documents and loads nothing."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from partsong.evaluation.topic_quality import top_columns, topic_diversity
from partsong.io.write import atomic_write
from partsong.reporting.charts import bar
from partsong.reporting.html import (
    Column,
    Markup,
    document,
    element,
    format_number,
    format_percent,
    row,
    section,
    table,
)

WIDTH, HEIGHT, MARGIN = 720.0, 460.0, 44.0
SHOWN = 12  # words of a topic
N_STYLES = 8
LONGEST = 60
"""Characters of a word that are shown."""
JOINERS = "\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"
"""Not printable by themselves, but part of words in many scripts."""
LARGEST = 0.075
"""Radius of the largest topic, as a fraction of the map's side; smaller for more than fifty topics."""
SHOWN_SETTINGS = ("method", "server", "participation", "parties", "secure_aggregation", "weighting", "vocabulary")


def distances(H: np.ndarray) -> np.ndarray:
    """Return Hellinger distances (k × k) of topics as word distributions: 0 for equal ones, 1 for disjoint ones."""
    mass = H.sum(axis=1, keepdims=True, dtype=np.float64)
    roots = np.sqrt(H / np.where(mass > 0, mass, 1.0))
    return np.sqrt(np.clip(1.0 - roots @ roots.T, 0.0, None)) * (1 - np.eye(len(H)))


def positions(H: np.ndarray) -> np.ndarray:
    """Return positions (k × 2) in the unit square that approximate the topics' distances (classical scaling).

        B = −½ J D² J,  J = I − 11ᵀ/k;  positions are the two leading eigenvectors of B times √eigenvalue

    The signs are fixed: the largest entry of each axis is positive, so equal topics have equal positions.
    """
    k = len(H)
    center = np.eye(k) - 1.0 / k
    values, vectors = np.linalg.eigh(-0.5 * center @ distances(H) ** 2 @ center)
    leading = np.argsort(-values, kind="stable")[:2]
    axes = vectors[:, leading] * np.sqrt(np.clip(values[leading], 0.0, None))
    axes = np.pad(axes, ((0, 0), (0, 2 - axes.shape[1])))
    signs = np.where(axes[np.abs(axes).argmax(axis=0), [0, 1]] < 0, -1.0, 1.0)
    reach = np.abs(axes).max() or 1.0
    return np.asarray(0.5 + 0.5 * axes * signs / reach)


def separate_discs(places: np.ndarray, radii: np.ndarray, steps: int = 200) -> np.ndarray:
    """Return positions after moving overlapping discs apart in small steps."""
    moved = places.copy()
    angles = np.arange(len(places)) * 2.399963  # the golden angle gives discs at the same position different directions
    for _ in range(steps):
        between = moved[:, None, :] - moved[None, :, :]
        gaps = np.linalg.norm(between, axis=2)
        overlap = np.clip(radii[:, None] + radii[None, :] - gaps, 0.0, None) * (1 - np.eye(len(places)))
        if not overlap.any():
            break
        away = np.stack([np.cos(angles), np.sin(angles)], axis=1)[:, None, :]
        away = away - away.transpose(1, 0, 2)
        directions = np.where(gaps[..., None] > 1e-9, between / np.maximum(gaps, 1e-9)[..., None], away)
        moved = moved + 0.25 * (overlap[..., None] * directions).sum(axis=1)
    return moved


@dataclass(frozen=True, slots=True, eq=False)
class TopicPage:
    """Topics (k × V) with a name for each column, shares and coherence if known, and facts about the fit."""

    H: np.ndarray
    names: tuple[str, ...]
    shares: np.ndarray | None
    coherence: np.ndarray | None
    facts: Mapping[str, str]

    @property
    def title(self) -> str:
        """The heading of the page."""
        return "One topic" if len(self.H) == 1 else f"{len(self.H)} topics"

    def size(self, topic: int) -> str:
        """Return the share of a topic in percent; a dash if it is unknown."""
        return format_percent(math.nan if self.shares is None else float(self.shares[topic]))


def build_facts(settings: Mapping[str, Any], **more: int) -> dict[str, str]:
    """Return the facts about a fit that a page shows, from its settings and further numbers."""
    facts = {name: printable(str(settings[name])) for name in SHOWN_SETTINGS if name in settings}
    return facts | {name: f"{value:,}" for name, value in more.items()}


def render_topics(page: TopicPage) -> str:
    """Return the page as text; equal topics give equal pages."""
    words = [[printable(page.names[column]) for column in topic] for topic in top_columns(page.H, SHOWN)]
    lead = f"{page.title} over {len(page.names):,} words."
    if any(words):
        lead += f" {format_percent(topic_diversity(words))} of their strongest words are distinct."
    if page.coherence is not None and not np.isnan(page.coherence).all():
        lead += f" Mean coherence (NPMI): {format_number(float(np.nanmean(page.coherence)))}."
    links = [element("a", title, href=f"#{anchor}") for anchor, title in (("map", "Map"), ("topics", "Topics"))]
    header = element(
        "header",
        element("h1", page.title),
        element("p", lead, class_="lead"),
        element("nav", *links, element("a", "The fit", href="#fit"), aria_label="Contents"),
    )
    body = (
        section("map", "Map", _caption(page), _map(page, words)),
        section("topics", "Topics", _topics(page, words), _table(page, words)),
        section("fit", "The fit", _facts(page)),
    )
    return document(page.title, header, element("main", *body))


def printable(word: str) -> str:
    """Return a word that is safe to show: control characters, also those for text direction, are escaped."""
    safe = "".join(letter if letter.isprintable() or letter in JOINERS else ascii(letter)[1:-1] for letter in word)
    return safe if len(safe) <= LONGEST else safe[: LONGEST - 1] + "\N{HORIZONTAL ELLIPSIS}"


def write_topic_page(path: str | os.PathLike[str], page: TopicPage) -> Path:
    """Write the page atomically."""
    text = render_topics(page).encode("utf-8")
    with atomic_write(path) as draft:
        draft.write_bytes(text)
    return Path(path)


def _caption(page: TopicPage) -> Markup:
    area = "The area of a disc is proportional to the topic's size."
    if page.shares is None:
        area = "Sizes of topics are unknown: all discs are equal."
    return element(
        "p",
        "Topics that are close have words in common (Hellinger distance, classical scaling; overlapping discs are "
        f"moved apart). {area}",
        class_="note",
    )


def _map(page: TopicPage, words: list[list[str]]) -> Markup:
    sizes = np.ones(len(page.H)) if page.shares is None else np.maximum(page.shares, 0.0)
    room = LARGEST * min(1.0, math.sqrt(50 / len(page.H)))
    radii = np.maximum(0.012, room * np.sqrt(sizes / (float(sizes.max()) or 1.0)))
    places = separate_discs(positions(page.H), radii)
    low, high = places.min(axis=0), places.max(axis=0)
    places = (places - low) / np.where(high > low, high - low, 1.0)
    across = MARGIN + places[:, 0] * (WIDTH - 2 * MARGIN)
    up = HEIGHT - MARGIN - places[:, 1] * (HEIGHT - 2 * MARGIN)
    discs = []
    for i, (x, y, radius) in enumerate(zip(across, up, radii * min(WIDTH, HEIGHT), strict=True)):
        size = "" if page.shares is None else f", {page.size(i)}"
        facts = element("title", f"Topic {i + 1}{size}: {', '.join(words[i])}")
        disc = element(
            "circle", facts, cx=f"{x:.1f}", cy=f"{y:.1f}", r=f"{radius:.1f}", class_="dot", fill_opacity="0.35"
        )
        number = element("text", str(i + 1), x=f"{x:.1f}", y=f"{y + 4:.1f}", class_="middle name")
        first = element("text", words[i][0] if words[i] else "", x=f"{x:.1f}", y=f"{y + 17:.1f}", class_="middle")
        discs.append(element("g", disc, number, first, class_=f"s{i % N_STYLES}"))
    listed = "words" if page.shares is None else "words and sizes"
    label = f"Map of {len(page.H)} topics; their {listed} are in the table below."
    frame = f"0 0 {WIDTH:.0f} {HEIGHT:.0f}"
    return element("svg", *discs, viewBox=frame, role="img", aria_label=label, style="width:100%;height:auto")


def _topics(page: TopicPage, words: list[list[str]]) -> Markup:
    """Return each topic with its words, and bars for their weights."""
    lists = []
    for i, topic in enumerate(top_columns(page.H, SHOWN)):
        strongest = float(page.H[i].max()) or 1.0
        items = [
            element("li", element("span", word), bar(float(page.H[i, column]) / strongest))
            for word, column in zip(words[i], topic, strict=True)
        ]
        caption = element("figcaption", element("b", f"Topic {i + 1}"), element("span", page.size(i)))
        lists.append(element("figure", caption, element("ol", *items), class_="part"))
    return element("div", *lists, class_="parts lists")


def _table(page: TopicPage, words: list[list[str]]) -> Markup:
    columns = [Column("Topic"), Column("Size"), Column("Coherence (NPMI)"), Column("Words", False)]
    known = np.full(len(page.H), math.nan) if page.coherence is None else page.coherence
    rows = [
        row(columns, [str(i + 1), page.size(i), format_number(float(known[i])), ", ".join(words[i])])
        for i in range(len(page.H))
    ]
    size = "Size is the topic's share of what all topics explain (LDA: of the documents)."
    if page.shares is None:
        size = "Sizes are unknown: the model does not store them."
    note = f"{size} Coherence is 1 if a topic's ten strongest words only occur together, and 0 if they are independent."
    return table(note, columns, rows)


def _facts(page: TopicPage) -> Markup:
    columns = [Column("", False), Column("", False)]
    return table("How these topics were learned.", columns, [row(columns, [*fact]) for fact in page.facts.items()])
