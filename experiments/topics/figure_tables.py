"""What Figures 2 and 4 and Table V of the paper show, as tables of docs/results/topics.md; and steps as printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from experiments.topics import published as topics_published
from experiments.topics.corpora import SOURCES
from experiments.topics.figures import ALPHAS, DESCENDING, LONG, PARTIES, RANKS, SHOWN, VARIED
from experiments.topics.methods import OURS
from experiments.topics.settings import COUNTS
from experiments.topics.table import ROUNDS_OF_SUMS, TUNING_SEED, Records, settings_of
from experiments.topics.tables import SUMS, USUAL, Row, runs, table_of, told, values

ANCHORS = ("matlab", "qt", "bash", "scala", "svn")


def over_ranks(found: Records) -> str:
    """Fig. 2: accuracy over the number of topics."""
    lines = []
    for data in topics_published.SETS:
        for method in DESCENDING:
            cells = [values(found, Row(method), data, (rank,), "accuracy") for rank in RANKS]
            if any(cells):
                shown = " | ".join(told(cell) if cell else "–" for cell in cells)
                lines.append(f"| {SOURCES[data].title} | {method} | {shown} |")
    return table_of(["corpus", "method", *(f"k = {rank}" for rank in RANKS)], lines)


def over_parties(found: Records) -> str:
    """Fig. 4: macro-F1 over α with ten parties, and over the number of parties with α = 1."""
    cases = [{"alpha": alpha} for alpha in ALPHAS] + [{"parties": parties} for parties in PARTIES]
    lines = []
    for data in topics_published.SETS:
        for method in VARIED:
            cells = [values(found, Row(method), data, (50,), "f1", **case) for case in cases]
            if sum(bool(cell) for cell in cells) > 2:  # α = 1 and ten parties are in Table IV as well
                shown = " | ".join(told(cell) if cell else "–" for cell in cells)
                lines.append(f"| {SOURCES[data].title} | {method} | {shown} |")
    heads = [f"α = {alpha:g}" for alpha in ALPHAS] + [f"K = {parties}" for parties in PARTIES]
    return table_of(["corpus", "method", *heads], lines)


def topics(found: Records, data: str = "so") -> str:
    """Table V: of each method the topics in which a few words of the paper's table stand highest."""
    lines = []
    for method in (*SHOWN, "exact"):
        row = Row(method, COUNTS, ROUNDS_OF_SUMS[-1] if method in OURS else 0)
        for one in runs(found, row, data, 200, shown=200):
            listed = [_highest(one["topics"], word) for word in ANCHORS]
            shown = "<br>".join(" ".join(topic[:7]) for topic in listed if topic)
            lines.append(f"| {method} | {shown} | {one['diversity']:.2f} | {one['coherence']:.3f} |")
    return table_of(["method", "topics", "diversity", "coherence"], lines)


def _highest(listed: Sequence[Sequence[str]], word: str) -> Sequence[str]:
    """The topic in which a word stands highest; none where it is in no list."""
    return min((topic for topic in listed if word in topic), key=lambda topic: list(topic).index(word), default=())


def ablation(found: Records) -> str:
    """The step of weights as printed, and fitted weights before each visit, against what the tables have."""
    lines = []
    for data in topics_published.SETS:
        for method in VARIED:
            (own,) = (asdict(one) for one in settings_of(found, data, method))
            cases = [own, {**own, "weight_step": "batch"}, {**own, "fits_first": True}]
            cells = [_with_settings(found, data, method, case) for case in cases]
            if cells[1] or cells[2]:
                shown = " | ".join(told(cell) if cell else "–" for cell in cells)
                lines.append(f"| {SOURCES[data].title} | {method} | {shown} |")
    return table_of(["corpus", "method", "by document", "by batch, as printed", "by document, fitted first"], lines)


def longer(found: Records) -> str:
    """Descents for LONG rounds beside those of the tables, and 20 rounds of sums, which send as much; k = 50."""
    lines = []
    for data in topics_published.SETS:
        for method in DESCENDING:
            (own,) = (asdict(one) for one in settings_of(found, data, method))
            if here := _with_settings(found, data, method, {**own, "rounds": LONG}):
                usual = _with_settings(found, data, method, own)
                lines.append(f"| {SOURCES[data].title} | {method} | {own['rounds']}: {told(usual)} | {told(here)} |")
        for row in (one for one in SUMS if one.rounds == 20 and lines):
            if sums := values(found, row, data, (50,), "f1"):
                lines.append(f"| {SOURCES[data].title} | {row.label} | – | {told(sums)} |")
    return table_of(["corpus", "method", "rounds of the tables", f"{LONG} rounds"], lines)


def _with_settings(found: Records, data: str, method: str, own: Mapping[str, Any]) -> list[float]:
    asked = {**USUAL, "data": data, "method": method, "rank": 50, "parties": 10, "weighting": COUNTS, "settings": own}
    here = [one for one in found.values() if all(one[name] == value for name, value in asked.items())]
    return [one["f1"] for one in sorted(here, key=lambda one: one["seed"]) if one["seed"] < TUNING_SEED]
