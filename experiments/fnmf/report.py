"""Tables and pictures of docs/results/fnmf.md from the runs that the other experiments have written down.

    python -m experiments.fnmf.report docs/results/fnmf-runs.jsonl

Text between `<!-- table: NAME -->` and `<!-- end -->` is replaced; everything else in the document is left as it is.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.fnmf.runs import Run, blocks, known
from experiments.fnmf.scaling import ABSENT, PARTIES, ROWS_EACH, ROWS_IN_ALL
from experiments.fnmf.table import TUNING_SEED, best_strengths
from experiments.fnmf.two_stages import ROUNDS, SHOWN
from experiments.shared.datasets import DATASETS
from experiments.shared.document import replace_tables
from experiments.shared.federations import EXACT, IN_ROUNDS, MIXTURES, ONCE
from experiments.shared.figures import figure_svg, style_of
from experiments.shared.metrics import spread
from partsong.reporting.charts import Line, Quantity

Records = Mapping[Run, dict[str, Any]]
STARTS = ("independent", "common")
TABLE = {"steps": 100, "rounds": 10, "with_curve": False}
"""The runs of Table 1; those of Fig. 3 with as many steps are recorded round by round, and not tuned."""


def values_of(found: Records, **wanted: Any) -> list[float]:
    """Σ RMSD of all runs with these settings, one for each seed; runs for tuning are left out."""
    return [
        record["rmsd_sum"]
        for run, record in sorted(found.items(), key=lambda pair: pair[0].seed)
        if run.seed != TUNING_SEED and all(getattr(run, name) == value for name, value in wanted.items())
    ]


def table_one(found: Records, told: Callable[[list[float], float], str]) -> str:
    """Methods × datasets at 100 steps × 10 rounds; `told` spells the numbers of a cell, given the pooled mean."""
    names = [name for name in DATASETS if values_of(found, data=name, method="pooled", **TABLE)]
    lines = ["| method, start | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for method, start in _rows():
        cells = []
        for name in names:
            pooled = values_of(found, data=name, method="pooled", **TABLE)
            here = values_of(found, data=name, method=method, start=start, **TABLE)
            cells.append(told(here, float(np.mean(pooled))) if here else "–")
        if set(cells) != {"–"}:
            lines.append(f"| {method}{'' if method in ('pooled', *EXACT) else f', {start}'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _rows() -> Iterable[tuple[str, str]]:
    yield "pooled", "independent"
    yield from ((method, "independent") for method in (*reversed(EXACT), *ONCE))
    yield from ((method, start) for start in STARTS for method in (*IN_ROUNDS, *MIXTURES))


def strengths(found: Records) -> str:
    """The strengths that tuning chose."""
    methods = [name for name in IN_ROUNDS if name != "FedAvg"]
    lines = ["| data, start | " + " | ".join(methods) + " |", "|---|" + "---|" * len(methods)]
    for name in DATASETS:
        for start in STARTS:
            best = best_strengths(found, name, start)
            if best:
                cells = " | ".join(f"{best[method]:g}" if method in best else "–" for method in methods)
                lines.append(f"| {name}, {start} | {cells} |")
    return "\n".join(lines)


def local_steps(found: Records, data: str = "mnist") -> str:
    """Methods × schedules."""
    schedules = ((10, 100), (100, 10), (1000, 2))
    lines = ["| method, start | " + " | ".join(f"{s} × {r}" for s, r in schedules) + " |", "|---|---|---|---|"]
    for start in STARTS:
        for method in IN_ROUNDS:
            cells = [
                values_of(
                    found, data=data, method=method, start=start, steps=s, rounds=r, with_curve=(s, r) == (100, 10)
                )
                for s, r in schedules
            ]
            if any(cells):
                lines.append(f"| {method}, {start} | {' | '.join(spread(c) if c else '–' for c in cells)} |")
    once = {method: values_of(found, data=data, method=method, steps=1000, rounds=2) for method in ("pooled", *ONCE)}
    lines += [f"| {method} | | | {spread(numbers)} |" for method, numbers in once.items() if numbers]
    return "\n".join(lines)


def convergence(found: Records, data: str = "mnist") -> str:
    """Σ RMSD after each of ten rounds, first seed, as a picture; nothing where there are no such runs."""
    curves = [
        (run, record["curve"])
        for run, record in found.items()
        if run.data == data and run.seed == 0 and run.rounds == 10 and record["curve"]
    ]
    lines = [
        Line(f"{run.method}, {run.start}", style_of(i), tuple(float(r + 1) for r in range(len(curve))), tuple(curve))
        for i, (run, curve) in enumerate(curves)
    ]
    if not lines:
        return ""
    return figure_svg(
        Quantity("round", lambda r: f"{r:.0f}", smallest_step=1.0), Quantity("Σ RMSD", lambda v: f"{v:.1f}"), lines
    )


def scaling(found: Records, cases: Sequence[tuple[str, str, int]], field: str) -> str:
    """Methods × cases, each (heading, data, parties): the mean RMSD of a party, or the seconds of all rounds."""
    lines = ["| method | " + " | ".join(heading for heading, _, _ in cases) + " |", "|---|" + "---|" * len(cases)]
    for method in ("pooled", EXACT[-1], *ONCE, *IN_ROUNDS):
        cells = []
        for _, data, parties in cases:
            here = [r for p, r in found.items() if (p.data, p.method, p.parties) == (data, method, parties)]
            per_party = [r["rmsd_sum"] / parties if field == "rmsd" else r["seconds"] for r in here]
            cells.append(spread(per_party, 4 if field == "rmsd" else 1) if per_party else "–")
        if set(cells) != {"–"}:
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def scaling_drawn(found: Records, cases: Sequence[tuple[float, str, int]], axis: str) -> str:
    """The mean RMSD of a party over cases, each (place, data, parties), as a picture; nothing without runs."""
    lines = []
    for method in ("pooled", "FedAvg", "FedProx", "FNMF-LAP", "FNMF-SK", "FNMF-SK_ρ"):
        points = []
        for place, data, parties in cases:
            here = [r for p, r in found.items() if (p.data, p.method, p.parties) == (data, method, parties)]
            points += [(place, float(np.mean([r["rmsd_sum"] / parties for r in here])))] if here else []
        if points:
            lines.append(Line(method, style_of(len(lines)), *(tuple(values) for values in zip(*points, strict=True))))
    if not lines:
        return ""
    return figure_svg(Quantity(axis, lambda v: f"{v:g}"), Quantity("RMSD of a party", lambda v: f"{v:g}", 0.0), lines)


def relay_ratios(found: Records) -> dict[tuple[str, str, str], np.ndarray]:
    """Data, method and start -> Σ RMSD over the pooled one of the same seed, seeds × exchanges."""
    pooled = {(p.data, p.seed): r["rmsd_sum"] for p, r in found.items() if p.method == "pooled" and p.rounds == ROUNDS}
    curves: dict[tuple[str, str, str], list[np.ndarray]] = {}
    for run, record in found.items():
        if run.rounds == ROUNDS and record["curve"] and (run.data, run.seed) in pooled:
            ratios = np.array(record["curve"]) / pooled[run.data, run.seed]
            curves.setdefault((run.data, run.method, run.start), []).append(ratios)
    return {label: np.array(several) for label, several in curves.items()}


def relays(found: Records) -> str:
    """Data × methods after some numbers of exchanges."""
    lines = ["| data | method, start | " + " | ".join(map(str, SHOWN)) + " |", "|---|---|" + "---|" * len(SHOWN)]
    ratios = relay_ratios(found)
    for name in DATASETS:
        for (data, method, start), curves in ratios.items():
            if data == name:
                cells = " | ".join(spread(curves[:, after - 1].tolist()) for after in SHOWN)
                lines.append(f"| {data} | {method}, {start} | {cells} |")
    return "\n".join(lines)


def worst_relays(found: Records) -> str:
    """Methods after some numbers of exchanges: the largest mean ratio over all datasets, and which one has it."""
    lines = ["| method, start | " + " | ".join(map(str, SHOWN)) + " |", "|---|" + "---|" * len(SHOWN)]
    ratios = relay_ratios(found)
    for method, start in dict.fromkeys((method, start) for _, method, start in ratios):
        here = {data: curves.mean(0) for (data, m, s), curves in ratios.items() if (m, s) == (method, start)}
        worst = [max((float(curve[after - 1]), data) for data, curve in here.items()) for after in SHOWN]
        lines.append(f"| {method}, {start} | {' | '.join(f'{ratio:.3f} ({data})' for ratio, data in worst)} |")
    return "\n".join(lines)


def barycenters(found: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], kind: str) -> str:
    """Methods × cases of one kind: loss, orthogonality gap, milliseconds; means over seeds."""
    cases = {title.partition(": ")[2]: values for title, values in found.items() if title.startswith(kind)}
    lines = ["| method | " + " | ".join(cases) + " |", "|---|" + "---|" * len(cases)]
    for method in dict.fromkeys(name for values in cases.values() for name in values):
        cells = []
        for values in cases.values():
            loss, gap, seconds = np.mean(values[method], axis=0)
            cells.append(f"{loss:.3g}, {gap:.2f}, {1000 * seconds:.3g} ms")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables_of(found: Records) -> dict[str, str]:
    """All tables by name."""
    shortage = [(f"{c} parties", blocks(ROWS_IN_ALL // c), c) for c in PARTIES]
    surplus = [(f"{c} parties", blocks(ROWS_EACH), c) for c in PARTIES]
    absent = [(f"{100 * share:g} % absent", blocks(100, share), 20) for share in ABSENT]

    def ratio(numbers: list[float], pooled: float) -> str:
        return f"{np.mean(numbers) / pooled:.3f}"

    return {
        "table-1": table_one(found, lambda numbers, pooled: spread(numbers)),
        "ratios": table_one(found, ratio),
        "strengths": strengths(found),
        "relay": relays(found),
        "worst": worst_relays(found),
        "local-steps": local_steps(found),
        "shortage": scaling(found, shortage, "rmsd"),
        "surplus": scaling(found, surplus, "rmsd"),
        "absent": scaling(found, absent, "rmsd"),
        "seconds": scaling(found, surplus, "seconds"),
    }


def worst_ratios(found: Records) -> dict[str, float]:
    """For each method and start the largest ratio to pooled over the datasets that it was run on."""
    worst: dict[str, float] = {}
    for method, start in _rows():
        ratios = [
            float(np.mean(here) / np.mean(values_of(found, data=name, method="pooled", **TABLE)))
            for name in DATASETS
            if (here := values_of(found, data=name, method=method, start=start, **TABLE))
            and values_of(found, data=name, method="pooled", **TABLE)
        ]
        worst[f"{method}, {start}"] = max(ratios, default=math.nan)
    return worst


def main(arguments: Sequence[str] | None = None) -> None:
    """Bring the document up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="files with one run a line")
    parser.add_argument("--barycenters", type=Path, help="what experiments.fnmf.barycenters has written")
    parser.add_argument("--document", type=Path, default=Path("docs/results/fnmf.md"))
    chosen = parser.parse_args(arguments)
    found = {run: record for path in chosen.runs for run, record in known(path).items()}
    tables = tables_of(found)
    if chosen.barycenters is not None:
        measured = json.loads(chosen.barycenters.read_text(encoding="utf-8"))
        tables |= {kind: barycenters(measured, kind) for kind in ("idealised", "realistic")}
    replace_tables(chosen.document, tables)
    pictures = {
        "convergence": convergence(found),
        "shortage": scaling_drawn(
            found, [(c, blocks(ROWS_IN_ALL // c), c) for c in PARTIES], "parties, 2000 rows in all"
        ),
        "absent": scaling_drawn(found, [(100 * a, blocks(100, a), 20) for a in ABSENT], "per cent of parts absent"),
    }
    for name, drawn in pictures.items():
        if drawn:
            chosen.document.with_name(f"fnmf-{name}.svg").write_text(drawn, encoding="utf-8")
    for label, ratio in sorted(worst_ratios(found).items(), key=lambda pair: pair[1]):
        print(f"{ratio:.3f}  {label}")


if __name__ == "__main__":
    main()
