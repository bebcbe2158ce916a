"""How good the forecasts of a noisy moment are, and the choice of "auto", from the records of `moments`.

The public guesses are the errors without noise on as many rows: what somebody knows who has seen similar data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any

from experiments.privacy.moment_tables import HELD_OUT, NAMES
from partsong.privacy.accounting import largest_mu
from partsong.privacy.forecast import MAX_TAU, Forecast

COLUMNS = {
    "mnist": 784, "fashion": 784, "tcga": 1000, "stack_overflow": 2000, "rt_polarity": 2000, "movielens": 1000,
    "faces": 361, "cifar": 1024, "hpa": 61, "brain": 1000, "goodreads": 1000, "google_news": 2000, "bbc_news": 2000,
}  # fmt: skip
DELTA, SLACK, CLOSE = 1e-5, 2, 0.02
MECHANISMS = ("moment", "hybrid", "rounds")

Record = Mapping[str, Any]


def forecast_tables(records: Iterable[Record]) -> dict[str, str]:
    """Tables by name: of the forecasts, and of the choice of "auto"."""
    cells = _cells(records)
    names = [name for name in COLUMNS if any(data == name for data, *_ in cells)]
    return {
        "forecasts": _table(
            ("data", "cells", f"visible within {SLACK}", "worst", "error within 0.02", "median", "worst"),
            [_forecast_row(name, cells) for name in names],
        ),
        "auto": _table(
            ("data", "cells", "auto is best, or within 0.01", "median loss", "worst loss with τ ≤ 0.4"),
            [_auto_row(name, cells) for name in names],
        ),
    }


Cells = dict[tuple[str, int, int, float], dict[str, list[Record]]]


def _cells(records: Iterable[Record]) -> Cells:
    """Records of each (data, rows, rank, ε) by mechanism, with the pooled runs and the noisy mean beside them."""
    pooled: dict[tuple[str, int, int], list[Record]] = {}
    means: dict[tuple[str, int, float], list[Record]] = {}
    cells: Cells = {}
    for one in records:
        data, n, rank, epsilon, how = one["data"], one["n"], one["rank"], one["epsilon"], one["how"]
        if how == "pooled":
            pooled.setdefault((data, n, rank), []).append(one)
        elif how == "mean":
            means.setdefault((data, n, epsilon), []).append(one)
        elif how in MECHANISMS and rank > 1:
            cells.setdefault((data, n, rank, epsilon), {}).setdefault(how, []).append(one)
    for (data, n, rank, epsilon), found in cells.items():
        found |= {"pooled": pooled[data, n, rank], "alone": pooled[data, n, 1], "mean": means[data, n, epsilon]}
    return cells


def _error(records: Sequence[Record]) -> float:
    return mean(one["error"] for one in records)


def _forecast(key: tuple[str, int, int, float]) -> Forecast:
    data, n, _, epsilon = key
    return Forecast(n, COLUMNS[data], 1 / largest_mu(epsilon, DELTA), epsilon)


def _forecast_row(name: str, cells: Cells) -> list[str]:
    counts, errors = [], []
    for key, found in cells.items():
        if key[0] != name:
            continue
        forecast, rank = _forecast(key), key[2]
        alone = _error(found["alone"])
        guess = (rank, alone, min(alone, _error(found["pooled"])))
        expected = forecast.expected_directions(*guess)
        counts.append(max(abs(expected - min(rank, one["visible"])) for one in found["moment"]))
        if forecast.tau <= MAX_TAU:
            errors.append(abs(forecast.expected_error(*guess) - _error(found["moment"])))
    near, close = sum(one <= SLACK for one in counts), sum(one <= CLOSE for one in errors)
    shown = [f"{near} of {len(counts)}", str(max(counts)), f"{close} of {len(errors)}"]
    return [_shown(name), str(len(counts)), *shown, f"{median(errors):.3f}", f"{max(errors):.3f}"]


def _auto_row(name: str, cells: Cells) -> list[str]:
    losses, likely = [], []
    for key, found in cells.items():
        if key[0] != name:
            continue
        forecast = _forecast(key)
        chosen = "mean" if forecast.tau > MAX_TAU else forecast.mechanism
        best = min(_error(found[how]) for how in ("mean", *MECHANISMS))
        losses.append(_error(found[chosen]) - best)
        if forecast.tau <= MAX_TAU:
            likely.append(losses[-1])
    fine = sum(one <= CLOSE / 2 for one in losses)
    worst = max(likely, default=math.nan)
    return [_shown(name), str(len(losses)), f"{fine} of {len(losses)}", f"{median(losses):.3f}", f"{worst:.3f}"]


def _shown(name: str) -> str:
    return f"{HELD_OUT[name]} (left out)" if name in HELD_OUT else NAMES[name]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
