"""Choose the sweeps per product and the extrapolation by a grid on generated data.

`partsong.solvers.update_rules.SWEEPS` and the start of `Extrapolation` are chosen from the table that this writes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.speed.curves import Run, spread
from benchmarks.speed.iterations import iterate
from experiments.shared.synthetic import gamma_factors, sparse_topics
from partsong.core import runtime
from partsong.data.conversion import as_matrix
from partsong.solvers.initialization import anchors
from partsong.solvers.squared_error import SquaredError
from partsong.solvers.update_rules import CoordinateDescent, Extrapolation, NoExtrapolation

SWEEPS = (1, 2, 3, 4, 5, 8)
STARTS = (None, 0.3, 0.5, 0.7)
LEVEL = 0.999


@dataclass(frozen=True, slots=True)
class Setting:
    """Sweeps per product, and where extrapolation starts (None: no extrapolation)."""

    sweeps: int
    start: float | None

    @property
    def name(self) -> str:
        return f"{self.sweeps} / {'off' if self.start is None else self.start}"

    def solver(self) -> SquaredError:
        momentum = NoExtrapolation() if self.start is None else Extrapolation(start=self.start)
        return SquaredError(CoordinateDescent(sweeps=self.sweeps), momentum=momentum)


def data(quick: bool) -> dict[str, tuple[Callable[[int], Any], int]]:
    """Smaller versions of the generated workloads: X by seed, and the rank."""
    if quick:
        return {
            "planted-dense": (lambda seed: gamma_factors(300, 60, 5, np.random.default_rng([seed, 11])).X, 5),
            "generated-text": (lambda seed: sparse_topics(400, 200, 5, np.random.default_rng([seed, 12])).X, 5),
        }
    return {
        "planted-dense": (lambda seed: gamma_factors(5_000, 800, 40, np.random.default_rng([seed, 11])).X, 40),
        "generated-text": (
            lambda seed: sparse_topics(6_000, 4_000, 40, np.random.default_rng([seed, 12]), words=30).X,
            40,
        ),
    }


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds and iterations of one setting to 99.9 % of the best on one kind of data, over seeds."""

    setting: Setting
    data: str
    seconds: tuple[float, ...]
    iterations: tuple[float, ...]


def measure(
    n_threads: int, seeds: int, seconds: float, quick: bool, say: Callable[[str], None] = print
) -> list[Outcome]:
    grid = [Setting(sweeps, start) for sweeps in (SWEEPS[:2] if quick else SWEEPS) for start in STARTS]
    found = []
    for name, (make, rank) in data(quick).items():
        curves: dict[Setting, list[Run]] = {setting: [] for setting in grid}
        bests = []
        for seed in range(seeds):
            X = as_matrix(make(seed))
            _curve(X, rank, grid[0], seed, n_threads, 0.05)
            for setting in [*grid[seed % len(grid) :], *grid[: seed % len(grid)]]:
                curves[setting].append(_curve(X, rank, setting, seed, n_threads, seconds))
            bests.append(max(runs[-1].best for runs in curves.values()))
            say(f"{name}, seed {seed}: {len(grid)} settings")
        for setting, runs in curves.items():
            times = [run.time_to(LEVEL * best) for run, best in zip(runs, bests, strict=True)]
            counts = [_count(run, LEVEL * best) for run, best in zip(runs, bests, strict=True)]
            found.append(Outcome(setting, name, tuple(times), tuple(counts)))
    return found


def _curve(X: Any, rank: int, setting: Setting, seed: int, n_threads: int, seconds: float) -> Run:
    """Time every iteration of a run; the start of `NMF` is the same for all settings and not counted."""
    with runtime.limit_kernel_threads(n_threads):
        start = anchors(X, rank, np.random.default_rng(seed))
    points, best, best_at = [], -math.inf, 0
    began = time.perf_counter()
    for done in iterate(X, rank, setting.solver(), start, n_threads, 1_000_000):
        value = 1 - done.metrics["relative_error"] ** 2
        points.append((time.perf_counter() - began, value))
        if value > best * (1 + 1e-6):
            best, best_at = value, len(points)
        if points[-1][0] > seconds or len(points) - best_at > 50:
            break
    return Run("tuning", setting.name, seed, tuple(points))


def _count(run: Run, target: float) -> float:
    return next((i + 1.0 for i, (_, value) in enumerate(run.points) if value >= target), math.inf)


def written(outcomes: list[Outcome], heading: str) -> str:
    """The table, sorted by the mean over data of (median seconds / smallest median seconds)."""
    names = sorted({outcome.data for outcome in outcomes})
    by_setting: dict[Setting, dict[str, Outcome]] = {}
    for outcome in outcomes:
        by_setting.setdefault(outcome.setting, {})[outcome.data] = outcome
    least = {name: min(spread(o.seconds).median for o in outcomes if o.data == name) for name in names}
    cost = {
        setting: statistics.fmean(spread(held[name].seconds).median / least[name] for name in names)
        for setting, held in by_setting.items()
    }
    lines = [
        heading,
        "",
        f"| sweeps | extrapolation | {' | '.join(names)} | cost |",
        "|---|---|" + "---|" * len(names) + "---|",
    ]
    for setting in sorted(by_setting, key=lambda s: (cost[s], s.sweeps)):
        cells = [_cell(by_setting[setting][name]) for name in names]
        start = "off" if setting.start is None else f"from {setting.start}"
        lines.append(f"| {setting.sweeps} | {start} | {' | '.join(cells)} | {cost[setting]:.2f} |")
    return "\n".join([*lines, "", _choice(by_setting, cost), ""])


def _choice(by_setting: dict[Setting, dict[str, Outcome]], cost: dict[Setting, float]) -> str:
    """The setting for `accelerated_hals`: the cheapest of those that reached the level on every seed."""
    sure = [s for s, held in by_setting.items() if all(math.isfinite(spread(o.seconds).high) for o in held.values())]
    if not sure:
        return "No setting reached the level on every seed."
    best = min(sure, key=lambda s: (cost[s], s.sweeps))
    start = "without extrapolation" if best.start is None else f"extrapolation from {best.start}"
    return f"Cheapest of the settings that reached the level on every seed: {best.sweeps} sweeps, {start}."


def _cell(outcome: Outcome) -> str:
    seconds, iterations = spread(outcome.seconds), spread(outcome.iterations)
    if not math.isfinite(seconds.median):
        return "–"
    return f"{seconds.median:.3f} s ({seconds.low:.3f}–{seconds.high:.3f}), {iterations.median:.0f} iterations"
