"""Tables of docs/results/privacy.md: the row-level method over rows, ε, rounds and ridges, and where it is useful."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from experiments.privacy.methods import DATA_FREE
from experiments.privacy.parties import FEW
from experiments.privacy.rows import EPSILONS, RIDGES, ROUNDS, STUDIES, TUNING_RANK, USUAL, Study, best
from experiments.privacy.runs import Records
from experiments.privacy.tables import is_like, table, told, values_of


def row_errors(found: Records, study: Study, rows: int, epsilon: float, rank: int) -> list[float]:
    """‖X − W H‖ / ‖X‖ of the row-level method with the settings that other data have chosen."""
    try:
        setting = best(found, study, rows, epsilon, rank)
    except LookupError:
        return []
    same = {"data": study.data, "rows": rows, "rank": rank, "setting": setting}
    return values_of(found, "error", purpose="rows", method="row level", **same)


def free_errors(found: Records, study: Study, rows: int, rank: int, method: str) -> list[float]:
    """The same without noise."""
    return values_of(found, "error", purpose="free", data=study.data, method=method, rows=rows, rank=rank, parties=1)


def halfway(found: Records, study: Study, rows: int, epsilon: float, rank: int) -> float:
    """Half of the way from pooled NMF to the best that there is without it: an H of no data, or one noisy component."""
    pooled = float(np.mean(free_errors(found, study, rows, rank, "pooled")))
    others = [free_errors(found, study, rows, rank, name) for name in DATA_FREE]
    others.append(row_errors(found, study, rows, epsilon, 1))
    return (pooled + min(float(np.mean(other)) for other in others if other)) / 2


def by_rows(found: Records, study: Study) -> str:
    """n × (k, ε): errors, bold where useful."""
    ranks = [rank for rank in study.ranks if rank > 1]
    head = ["n", "one component, ε = " + ", ".join(f"{e:g}" for e in USUAL)]
    for rank in ranks:
        head += [f"k = {rank}: pooled", "no data", *(f"ε = {e:g}" for e in USUAL)]
    lines = []
    for rows in measured_sizes(found, study):
        line = [str(rows), ", ".join(_mean(row_errors(found, study, rows, e, 1)) for e in USUAL)]
        for rank in ranks:
            line.append(_mean(free_errors(found, study, rows, rank, "pooled")))
            line.append(min(_mean(free_errors(found, study, rows, rank, name)) for name in DATA_FREE))
            line += [_marked(found, study, rows, e, rank) for e in USUAL]
        lines.append(line)
    return table(head, lines)


def measured_sizes(found: Records, study: Study) -> list[int]:
    """The numbers of rows that there are runs of."""
    return [rows for rows in study.sizes if any(t.data == study.data and t.rows == rows for t in found)]


def _mean(values: list[float]) -> str:
    return f"{np.mean(values):.3f}" if values else "–"


def _marked(found: Records, study: Study, rows: int, epsilon: float, rank: int) -> str:
    values = row_errors(found, study, rows, epsilon, rank)
    if not values:
        return "–"
    is_useful = rank > 1 and float(np.mean(values)) <= halfway(found, study, rows, epsilon, rank)
    return f"**{told(values)}**" if is_useful else told(values)


def by_epsilon(found: Records, study: Study) -> str:
    """ε × k with all rows, bold where useful."""
    lines = [[f"{e:g}", *(_marked(found, study, study.whole, e, rank) for rank in study.ranks)] for e in study.epsilons]
    for method in ("pooled", *DATA_FREE, *((study.public,) if study.public else ())):
        cells = [told(free_errors(found, study, study.whole, rank, method)) for rank in study.ranks]
        lines.append([f"no noise: {method}", *cells])
    return table(["ε", *(f"k = {rank}" for rank in study.ranks)], lines)


def by_rounds(found: Records, study: Study) -> str:
    """ε × rounds with all rows at k = 10, and ten parties with noise of their own."""
    lines = []
    for epsilon in USUAL:
        if not row_errors(found, study, study.whole, epsilon, TUNING_RANK):
            continue
        setting = best(found, study, study.whole, epsilon)
        same = {"data": study.data, "rows": study.whole, "rank": TUNING_RANK, "method": "row level"}
        cells = [values_of(found, "error", setting=replace(setting, rounds=rounds), **same) for rounds in ROUNDS]
        apart = values_of(found, "error", data=study.data, method="row level, open", setting=setting)
        chosen = f"{setting.clip:g}, {setting.rounds}, {setting.ridge:g}"
        lines.append([f"{epsilon:g}", chosen, *(told(cell) for cell in cells), told(apart)])
    return table(["ε", "bound, rounds, ridge", *(f"{r} rounds" for r in ROUNDS), "ten parties apart"], lines)


def ridges(found: Records, rounds: int = 10) -> str:
    """Error at the best bound and so many rounds over the least of all ridges: mean and worst over n and ε ≤ 100."""
    sets = {study.other: 1 for study in STUDIES.values()} | {FEW[0]: FEW[1]}
    lines = []
    for data, parties in sets.items():
        cells: dict[Any, dict[float, dict[float, list[float]]]] = {}
        same = {"data": data, "parties": parties, "rank": TUNING_RANK, "method": "row level", "rounds": rounds}
        for t, record in found.items():
            if t.is_tuning and t.setting.epsilon <= EPSILONS[-1] and is_like(t, same):
                by_ridge = cells.setdefault((t.rows, t.setting.epsilon), {})
                by_ridge.setdefault(t.setting.ridge, {}).setdefault(t.setting.clip, []).append(record["error"])
        least = [{r: min(np.mean(v) for v in b.values()) for r, b in cell.items()} for cell in cells.values()]
        for name, fold in (("mean", np.mean), ("worst", np.max)):
            ratios = [[cell[r] / min(cell.values()) for cell in least if r in cell] for r in RIDGES]
            lines.append([f"{data}, {name} of {len(least)}", *(f"{fold(r):.3f}" if r else "–" for r in ratios)])
    return table(["ridge", *(f"{r:g}" for r in RIDGES)], lines)
