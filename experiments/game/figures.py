"""Figures of docs/results/game.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10

from experiments.game.runs import MU, PRINTED, SELF_PLAYS
from experiments.game.tables import Runs, by_dataset, distinct, label, of
from experiments.shared.figures import figure_svg, style_of
from partsong.reporting.charts import Line, Quantity

LEAST = 1e-6
"""Smaller errors are drawn at this value, or not at all."""
AWAY = 1000.0
"""Offset that makes coordinates positive for the axes; labels subtract it."""


def drawn_from(found: Mapping[str, Runs]) -> dict[str, str]:
    """Draw all figures for which there are runs."""
    pictures = {}
    if found["game-convergence"]:
        pictures["game-convergence"] = _curves(found["game-convergence"], _as_printed(found["game-convergence"]))
        pictures["game-steps"] = _curves(found["game-convergence"], _practical(found["game-convergence"]))
    if found["game-datasets"]:
        pictures["game-datasets"] = _by_dataset(found["game-datasets"])
    if found["game-trajectories"]:
        pictures["game-ways-printed"] = _ways(of(found["game-trajectories"], data=0, figure="printed"))
        pictures["game-ways-large"] = _ways(of(found["game-trajectories"], data=0, figure="large"))
    return pictures


def _as_printed(runs: Runs) -> list[str]:
    wanted = [MU, *(f"{name}, sequential, η = {PRINTED:g}" for name in SELF_PLAYS)]
    return [name for name in wanted if any(label(run) == name for run in runs)]


def _practical(runs: Runs) -> list[str]:
    games = [run for run in runs if run["method"] in (MU, "game") and run["order"] != "stratified"]
    return distinct(label(run) for run in games)


def _curves(runs: Runs, names: Sequence[str]) -> str:
    """Error over sweeps on the first data set, up to 20000 sweeps."""
    lines = []
    for i, name in enumerate(names):
        run = min((r for r in of(runs, data=0) if label(r) == name), key=lambda r: r["sweeps"])
        points = [point for point in run["points"] if point[0] > 0 and point[1] > LEAST]
        lines.append(Line(name, style_of(i), tuple(log10(p[0]) for p in points), tuple(p[1] for p in points)))
    sweeps = Quantity("sweeps (logarithmic)", lambda t: f"{10**t:g}", 0.0, 1.0)
    return figure_svg(sweeps, Quantity("‖X − W H‖", lambda e: f"{e:g}"), lines)


def _by_dataset(runs: Runs) -> str:
    """Fig. 4 as lines: the mean error of each data set, after the second look."""
    at = runs[0]["errors"][1][0]
    names = [name for name in distinct(label(run) for run in runs) if "simultaneous" not in name and "0.3" not in name]
    lines = []
    for i, name in enumerate(names):
        means = by_dataset(runs, name, at).mean(axis=1)
        lines.append(
            Line(name, style_of(i), tuple(range(1, len(means) + 1)), tuple(max(LEAST, float(m)) for m in means))
        )
    number = Quantity("data set", lambda t: f"{t:g}", 0.0, 1.0)
    return figure_svg(number, Quantity(f"‖X − W H‖ after {at} sweeps", lambda e: f"{e:g}"), lines)


def _ways(runs: Runs) -> str:
    """Rows of H in the plane of the first two principal components."""
    lines = []
    for i, run in enumerate(runs):
        for row, path in enumerate(run["paths"], 1):
            x, y = (tuple(AWAY + point[axis] for point in path) for axis in (0, 1))
            lines.append(Line(f"{label(run)}: row {row}", style_of(i), x, y))
    return figure_svg(*(Quantity(f"component {c}", lambda v: f"{v - AWAY:.3g}") for c in (1, 2)), lines)
