"""Tables and the figure on one noisy second moment: error over ε and n, by data set.

Useful, and bold, is what keeps half of the gain of ten components: at most half of the way from pooled NMF with ten
components to pooled NMF with one. For topics, NPMI at most 0.1 below that of the pooled topics; for recommendations, at
least half of what pooled NMF finds beyond one component without noise.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import log10
from pathlib import Path
from typing import Any

import numpy as np

from experiments.privacy.tables import mean_and_spread, table
from experiments.shared.figures import figure_svg, style_of
from partsong.methods.privacy_request import RowPrivacy
from partsong.reporting.charts import Line, Quantity

RANK = 10
COLUMNS = {"mnist": 784, "fashion": 784, "tcga": 1000, "stack_overflow": 2000, "rt_polarity": 2000, "movielens": 1000}
NAMES = {"mnist": "MNIST", "fashion": "Fashion", "tcga": "TCGA", "stack_overflow": "Stack Overflow",
         "rt_polarity": "film reviews", "movielens": "MovieLens"}  # fmt: skip
HELD_OUT = {"faces": "faces", "cifar": "CIFAR-10, gray", "hpa": "tissues (m = 61)", "brain": "brain cells",
            "goodreads": "Goodreads", "google_news": "news titles", "bbc_news": "BBC news"}  # fmt: skip
WAYS = {"moment": "moment", "hybrid": "hybrid", "rounds": "rounds", "sgd": "DP-SGD", "centred": "centred"}
TOPIC_LOSS = 0.1
"""NPMI that useful topics may lose."""
DIGITS, SEEN = 5, 0.11

Runs = Mapping[tuple[str, int, float, int, str], Sequence[Mapping[str, Any]]]
"""Records of all seeds by data set, rows, ε, rank and mechanism."""
Tuned = Callable[[str, int, float], list[float]]


def line_of(record: Mapping[str, Any]) -> str:
    """A line of the log: with rounded numbers, without seconds, and without visible directions if not known."""
    shown = {name: round(value, DIGITS) if isinstance(value, float) else value for name, value in record.items()}
    if shown.get("visible", -1) < 0:
        shown.pop("visible", None)
    return json.dumps({name: value for name, value in shown.items() if name != "seconds"}, separators=(",", ":"))


def read(path: Path) -> Runs:
    """All runs of a log; empty if there is none."""
    found = defaultdict(list)
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        run = json.loads(line)
        if "data" in run:
            found[run["data"], run["n"], run["epsilon"], run["rank"], run["how"]].append(run)
    return dict(found)


@cache
def tau(data: str, n: int, epsilon: float) -> float:
    """τ of a cell, from public numbers."""
    forecast = RowPrivacy(epsilon, 1.0, mechanism="moment", n_rows=n).forecast(COLUMNS[data])
    assert forecast is not None
    return forecast.tau


def values(runs: Runs, field: str, data: str, n: int, epsilon: float, how: str, rank: int = RANK) -> list[float]:
    """A field over the seeds of a cell."""
    return [run[field] for run in runs.get((data, n, epsilon, rank, how), ())]


def mean(runs: Runs, field: str, *cell: Any, **rank: int) -> float:
    """The mean of a field over the seeds of a cell; NaN where there is none."""
    found = values(runs, field, *cell, **rank)
    return float(np.mean(found)) if found else math.nan


def pooled(runs: Runs, field: str, data: str, n: int, rank: int = RANK) -> float:
    """The same of pooled NMF without noise."""
    return mean(runs, field, data, n, math.inf, "pooled", rank=rank)


def half(runs: Runs, field: str, data: str, n: int) -> float:
    """Half of the way from one component without noise to ten."""
    return (pooled(runs, field, data, n, 1) + pooled(runs, field, data, n)) / 2


def cells_of(runs: Runs, data: str, epsilons: Sequence[float] = ()) -> list[tuple[int, float]]:
    """The numbers of rows and ε of a data set, in order."""
    found = {(n, epsilon) for name, n, epsilon, _, _ in runs if name == data and epsilon < math.inf}
    return sorted(cell for cell in found if not epsilons or cell[1] in epsilons)


def errors(runs: Runs, data: str, tuned: Tuned) -> str:
    """n and ε × mechanisms: mean errors, with the deviation of the moment's."""
    cells = cells_of(runs, data)
    ways = [way for way in WAYS if any((data, *cell, RANK, way) in runs for cell in cells)]
    is_tuned = any(tuned(data, *cell) for cell in cells)
    lines = []
    for n, epsilon in cells:
        bound = half(runs, "error", data, n)
        line = [str(n), f"{epsilon:g}", _tau(data, n, epsilon), _visible(runs, data, n, epsilon)]
        line.append(_number(mean(runs, "error", data, n, epsilon, "mean", rank=1)))
        for way in ways:
            found = values(runs, "error", data, n, epsilon, way)
            shown = (
                mean_and_spread(found)
                if way in ("moment", "centred")
                else _number(mean(runs, "error", data, n, epsilon, way))
            )
            line.append(_marked(shown, bool(found) and float(np.mean(found)) <= bound))
        if is_tuned:
            found = tuned(data, n, epsilon)
            line.append(_marked(_number(float(np.mean(found))), np.mean(found) <= bound) if found else "–")
        lines.append([*line, _number(pooled(runs, "error", data, n))])
    head = ["n", "ε", "τ", "visible", "mean, k = 1", *(WAYS[way] for way in ways)]
    head += ["rounds, tuned", "pooled"] if is_tuned else ["pooled"]
    return table(head, lines)


def scores(runs: Runs, field: str, names: Sequence[str], is_useful: Callable[[float, str, int], bool]) -> str:
    """Data, n and ε × errors and scores of the mean, the moment, noisy rounds and DP-SGD."""
    ways = ("moment", "rounds", "sgd")
    lines = []
    for data in names:
        for n, epsilon in cells_of(runs, data, (1.0, 3.0, 10.0)):
            line = [NAMES[data], str(n), f"{epsilon:g}", _tau(data, n, epsilon), _visible(runs, data, n, epsilon)]
            line.append(_number(mean(runs, "error", data, n, epsilon, "mean", rank=1)))
            line += [_number(mean(runs, "error", data, n, epsilon, way)) for way in ways]
            line.append(_number(pooled(runs, "error", data, n)))
            for way in ways:
                score = mean(runs, field, data, n, epsilon, way)
                line.append(_marked(_number(score), is_useful(score, data, n)))
            lines.append([*line, _number(pooled(runs, field, data, n))])
    several = ["moment", "rounds", "DP-SGD", "pooled"]
    head = ["data", "n", "ε", "τ", "visible", "error: mean, k = 1", *several]
    return table([*head, f"{SCORES[field]}: moment", *several[1:]], lines)


SCORES = {"npmi": "NPMI", "hits": "found"}


def tables(runs: Runs, tuned: Tuned) -> dict[str, str]:
    """All tables; `tuned` has the errors of noisy rounds with settings chosen on other data."""
    images = [data for data in ("mnist", "fashion", "tcga") if cells_of(runs, data)]
    made = {f"moments-{data}": errors(runs, data, tuned) for data in images}
    texts = [data for data in ("stack_overflow", "rt_polarity") if cells_of(runs, data)]
    if texts:
        made["moments-texts"] = scores(
            runs, "npmi", texts, lambda score, data, n: score >= pooled(runs, "npmi", data, n) - TOPIC_LOSS
        )
    if cells_of(runs, "movielens"):
        made["moments-ratings"] = scores(
            runs, "hits", ["movielens"], lambda score, data, n: score >= half(runs, "hits", data, n)
        )
    return made


def of_parties(records: Sequence[Mapping[str, Any]], runs: Runs) -> str:
    """Parties × ε for both relations: errors of the moment at party level; bold as for 10000 rows."""
    bound, lines = half(runs, "error", "mnist", 10000) if runs else 0.0, []
    cells = {(one["parties"], one["epsilon"], one["relation"]) for one in records}
    relations = ("zero-out", "replace")
    for parties, epsilon in sorted({cell[:2] for cell in cells}):
        line = [str(parties), f"{epsilon:g}"]
        for relation in relations:
            here = [
                one
                for one in records
                if (one["parties"], one["epsilon"], one["relation"]) == (parties, epsilon, relation)
            ]
            found, visible = [one["error"] for one in here], [one["visible"] for one in here]
            line += [f"{here[0]['tau']:.2g}", _range(visible), _marked(mean_and_spread(found), np.mean(found) <= bound)]
        lines.append(line)
    head = [column for relation in relations for column in (f"{relation}: τ", "visible", "error")]
    return table(["parties", "ε", *head], lines)


def picture(runs: Runs) -> str:
    """The share of the gain of ten components over one that the moment keeps, over τ; shares below SEEN as zero."""
    lines = []
    for data, name in NAMES.items():
        points = []
        for n, epsilon in cells_of(runs, data):
            one, ten = (pooled(runs, "error", data, n, rank) for rank in (1, RANK))
            kept = (one - mean(runs, "error", data, n, epsilon, "moment")) / (one - ten)
            points.append((log10(tau(data, n, epsilon)), kept if kept >= SEEN else 0.0))
        if points:
            places, heights = zip(*sorted(points), strict=True)
            lines.append(Line(name, style_of(len(lines)), places, heights))
    if not lines:
        return ""
    across = Quantity("τ (logarithmic)", lambda place: f"{10**place:.2g}", smallest_step=1.0)
    return figure_svg(across, Quantity("share of the gain", lambda value: f"{value:.2f}", 0.0), lines)


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3f}".replace("-", "−")


def _tau(data: str, n: int, epsilon: float) -> str:
    return f"{tau(data, n, epsilon):.2g}"


def _marked(shown: str, is_useful: bool) -> str:
    return f"**{shown}**" if is_useful else shown


def _visible(runs: Runs, data: str, n: int, epsilon: float) -> str:
    """The visible directions of the moment: the least and the most of all seeds."""
    return _range(values(runs, "visible", data, n, epsilon, "moment"))


def _range(found: Sequence[float]) -> str:
    least, most = int(min(found, default=0)), int(max(found, default=0))
    return str(least) if least == most else f"{least}–{most}"
