"""From curves of explained variance over time to seconds, medians and ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

LEVELS = (0.99, 0.999)
"""Shares of the best explained variance that any method reached."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a method: (seconds, explained variance) after iterations, and why it ended.

    `after`: seconds between the last iteration and the result, where known.
    """

    workload: str
    contestant: str
    seed: int
    points: tuple[tuple[float, float], ...]
    stopped: str = "limit"
    after: float = math.nan
    note: str = ""

    @property
    def best(self) -> float:
        """The largest explained variance of the run."""
        return max((value for _, value in self.points if math.isfinite(value)), default=-math.inf)

    @property
    def seconds(self) -> float:
        """Time of the last point."""
        return self.points[-1][0] if self.points else math.nan

    def time_to(self, target: float) -> float:
        """Seconds until the explained variance reached `target`; inf if never, nan if the run was stopped earlier."""
        for seconds, value in self.points:
            if value >= target:
                return seconds
        return math.nan if self.stopped == "goal" or not self.points else math.inf

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(entry: dict[str, Any]) -> Run:
        points = tuple((float(seconds), float(value)) for seconds, value in entry["points"])
        return Run(**{**entry, "points": points})


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, smallest and largest of the known values."""

    median: float
    low: float
    high: float
    count: int


def spread(values: Iterable[float]) -> Spread:
    known = sorted(value for value in values if not math.isnan(value))
    if not known:
        return Spread(math.nan, math.nan, math.nan, 0)
    return Spread(_median(known), known[0], known[-1], len(known))


def _median(values: Sequence[float]) -> float:
    """The median; of two middle values where one is infinite, the infinite one."""
    return (
        float(statistics.median(values)) if all(map(math.isfinite, values)) else float(sorted(values)[len(values) // 2])
    )


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of the other method's time to ours; `bound` is '>' or '<' if one of the two never reached the level."""

    value: float
    bound: str = ""
    low: float = math.nan
    high: float = math.nan
    count: int = 1


def ratio(ours: Run, other: Run, target: float) -> Ratio | None:
    """other / ours of one seed; a run that never reached the level counts with its whole time. None if unknown."""
    mine, theirs = ours.time_to(target), other.time_to(target)
    if math.isnan(mine) or math.isnan(theirs) or (math.isinf(mine) and math.isinf(theirs)):
        return None
    if math.isinf(theirs):
        return Ratio(other.seconds / mine, ">")
    if math.isinf(mine):
        return Ratio(theirs / ours.seconds, "<")
    return Ratio(theirs / mine)


def median_ratio(ours: Sequence[Run], others: Sequence[Run], target: float) -> Ratio | None:
    """Median over common seeds of the ratio within a seed."""
    by_seed = {run.seed: run for run in ours}
    pairs = [(by_seed[run.seed], run) for run in others if run.seed in by_seed]
    return median_of([found for mine, other in pairs if (found := ratio(mine, other, target)) is not None])


def median_of(found: Sequence[Ratio]) -> Ratio | None:
    """Median of ratios; a bound if a deciding seed is one."""
    if not found:
        return None
    ordered = sorted(found, key=lambda one: one.value)
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    value = sum(one.value for one in middle) / len(middle)
    bounds = {one.bound for one in (ordered if len(ordered) < 3 else middle)} - {""}
    return Ratio(value, min(bounds, default=""), ordered[0].value, ordered[-1].value, len(ordered))


def fastest(runs: Iterable[Run], target: float) -> list[Run]:
    """Per seed, the run that reached the target first (the better of two starts)."""
    best: dict[int, Run] = {}
    for run in runs:
        held = best.get(run.seed)
        if held is None or _order(run, target) < _order(held, target):
            best[run.seed] = run
    return list(best.values())


def _order(run: Run, target: float) -> float:
    seconds = run.time_to(target)
    return math.inf if math.isnan(seconds) else seconds
