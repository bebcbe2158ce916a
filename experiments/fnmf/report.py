"""Write the tables and figures of docs/results/fnmf.md from recorded runs.

    python -m experiments.fnmf.report docs/results/fnmf-runs.jsonl

Replaces the text between `<!-- table: NAME -->` and `<!-- end -->`, and nothing else. `--print` prints every table,
also those that the page leaves out.
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
from experiments.shared.document import print_tables, replace_tables
from experiments.shared.federations import EXACT, IN_ROUNDS, MIXTURES, ONCE
from experiments.shared.figures import figure_svg, style_of
from experiments.shared.metrics import spread
from experiments.shared.names import INIT_MODES, shown
from partsong.reporting.charts import Line, Quantity

Records = Mapping[Run, dict[str, Any]]
ALL = ("pooled", EXACT[-1], *ONCE, *IN_ROUNDS)
STARTS = ("independent", "common")
ON_PAGE = ("FedAvg", "FedProx", "FNMF-LAP (paper)", "FNMF-LAP", "FNMF-SK", "FNMF-LAP once, exact in all other rounds")
"""Methods that the page has in Table 1; `--print` has them all."""
TABLE = {"steps": 100, "rounds": 10, "with_curve": False}
"""The runs of Table 1; those of Fig. 3 with as many steps are recorded round by round, and not tuned."""


def values_of(found: Records, **wanted: Any) -> list[float]:
    """Σ RMSD of all runs with these settings, one for each seed; runs for tuning are left out."""
    return [
        record["rmsd_sum"]
        for run, record in sorted(found.items(), key=lambda pair: pair[0].seed)
        if run.seed != TUNING_SEED and all(getattr(run, name) == value for name, value in wanted.items())
    ]


def table_one(found: Records, cell: Callable[[list[float], float], str], rows: Iterable[tuple[str, str]]) -> str:
    """Methods × datasets at 100 steps × 10 rounds; `cell` formats the values of a cell, given the pooled mean."""
    names = [name for name in DATASETS if values_of(found, data=name, method="pooled", **TABLE)]
    lines = ["| method, init_mode | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for method, start in rows:
        cells = []
        for name in names:
            pooled = values_of(found, data=name, method="pooled", **TABLE)
            here = values_of(found, data=name, method=method, start=start, **TABLE)
            cells.append(cell(here, float(np.mean(pooled))) if here else "–")
        if set(cells) != {"–"}:
            lines.append(f"| {shown(method, '' if method in ('pooled', *EXACT) else start)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _rows() -> Iterable[tuple[str, str]]:
    yield "pooled", "independent"
    yield from ((method, "independent") for method in (*reversed(EXACT), *ONCE))
    yield from ((method, start) for start in STARTS for method in (*IN_ROUNDS, *MIXTURES))


def _rows_on_page() -> Iterable[tuple[str, str]]:
    yield from ((method, "independent") for method in (EXACT[0], "iPALM once"))
    yield from ((method, start) for start in STARTS for method in ON_PAGE)


def strengths(found: Records) -> str:
    """The strengths that tuning chose."""
    methods = [name for name in IN_ROUNDS if name != "FedAvg"]
    lines = ["| data, init_mode | " + " | ".join(map(shown, methods)) + " |", "|---|" + "---|" * len(methods)]
    for name in DATASETS:
        for start in STARTS:
            best = best_strengths(found, name, start)
            if best:
                cells = " | ".join(f"{best[method]:g}" if method in best else "–" for method in methods)
                lines.append(f"| {name}, {INIT_MODES[start]} | {cells} |")
    return "\n".join(lines)


def local_steps(found: Records, data: str = "mnist") -> str:
    """Methods × schedules."""
    schedules = ((10, 100), (100, 10), (1000, 2))
    lines = ["| method, init_mode | " + " | ".join(f"{s} × {r}" for s, r in schedules) + " |", "|---|---|---|---|"]
    for start in STARTS:
        for method in IN_ROUNDS:
            cells = [
                values_of(
                    found, data=data, method=method, start=start, steps=s, rounds=r, with_curve=(s, r) == (100, 10)
                )
                for s, r in schedules
            ]
            if any(cells):
                lines.append(f"| {shown(method, start)} | {' | '.join(spread(c) if c else '–' for c in cells)} |")
    once = {method: values_of(found, data=data, method=method, steps=1000, rounds=2) for method in ("pooled", *ONCE)}
    lines += [f"| {shown(method)} | | | {spread(numbers)} |" for method, numbers in once.items() if numbers]
    return "\n".join(lines)


def convergence(found: Records, data: str = "mnist") -> str:
    """Σ RMSD after each of ten rounds, first seed, as a figure; empty without such runs."""
    curves = [
        (run, record["curve"])
        for run, record in found.items()
        if run.data == data and run.seed == 0 and run.rounds == 10 and record["curve"]
    ]
    lines = [
        Line(shown(run.method, run.start), style_of(i), tuple(float(r + 1) for r in range(len(curve))), tuple(curve))
        for i, (run, curve) in enumerate(curves)
    ]
    if not lines:
        return ""
    return figure_svg(
        Quantity("round", lambda r: f"{r:.0f}", smallest_step=1.0), Quantity("Σ RMSD", lambda v: f"{v:.1f}"), lines
    )


def scaling(found: Records, cases: Sequence[tuple[str, str, int]], field: str, methods: Sequence[str] = ALL) -> str:
    """Methods × cases, each (heading, data, parties): the mean RMSD of a party, or the seconds of all rounds."""
    lines = ["| method | " + " | ".join(heading for heading, _, _ in cases) + " |", "|---|" + "---|" * len(cases)]
    for method in methods:
        cells = []
        for _, data, parties in cases:
            here = [r for p, r in found.items() if (p.data, p.method, p.parties) == (data, method, parties)]
            per_party = [r["rmsd_sum"] / parties if field == "rmsd" else r["seconds"] for r in here]
            cells.append(spread(per_party, 4 if field == "rmsd" else 1) if per_party else "–")
        if set(cells) != {"–"}:
            lines.append(f"| {shown(method)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def scaling_drawn(found: Records, cases: Sequence[tuple[float, str, int]], axis: str) -> str:
    """The mean RMSD of a party over cases, each (place, data, parties), as a figure; empty without runs."""
    lines = []
    for method in ("pooled", "FedAvg", "FedProx", "FNMF-LAP", "FNMF-SK", "FNMF-SK_ρ"):
        points = []
        for place, data, parties in cases:
            here = [r for p, r in found.items() if (p.data, p.method, p.parties) == (data, method, parties)]
            points += [(place, float(np.mean([r["rmsd_sum"] / parties for r in here])))] if here else []
        if points:
            lines.append(
                Line(shown(method), style_of(len(lines)), *(tuple(values) for values in zip(*points, strict=True)))
            )
    if not lines:
        return ""
    return figure_svg(Quantity(axis, lambda v: f"{v:g}"), Quantity("RMSD of a party", lambda v: f"{v:g}", 0.0), lines)


def two_stage_ratios(found: Records) -> dict[tuple[str, str, str], np.ndarray]:
    """Data, method and start -> Σ RMSD over the pooled one of the same seed, seeds × exchanges."""
    pooled = {(p.data, p.seed): r["rmsd_sum"] for p, r in found.items() if p.method == "pooled" and p.rounds == ROUNDS}
    curves: dict[tuple[str, str, str], list[np.ndarray]] = {}
    for run, record in found.items():
        if run.rounds == ROUNDS and record["curve"] and (run.data, run.seed) in pooled:
            ratios = np.array(record["curve"]) / pooled[run.data, run.seed]
            curves.setdefault((run.data, run.method, run.start), []).append(ratios)
    return {label: np.array(several) for label, several in curves.items()}


def two_stage(found: Records) -> str:
    """Data × methods after some numbers of exchanges."""
    lines = ["| data | method, init_mode | " + " | ".join(map(str, SHOWN)) + " |", "|---|---|" + "---|" * len(SHOWN)]
    ratios = two_stage_ratios(found)
    for name in DATASETS:
        for (data, method, start), curves in ratios.items():
            if data == name:
                cells = " | ".join(spread(curves[:, after - 1].tolist()) for after in SHOWN)
                lines.append(f"| {data} | {shown(method, start)} | {cells} |")
    return "\n".join(lines)


def worst_two_stage(found: Records) -> str:
    """Methods after some numbers of exchanges: the largest mean ratio over all datasets, and which one has it."""
    lines = ["| method, init_mode | " + " | ".join(map(str, SHOWN)) + " |", "|---|" + "---|" * len(SHOWN)]
    ratios = two_stage_ratios(found)
    for method, start in dict.fromkeys((method, start) for _, method, start in ratios):
        here = {data: curves.mean(0) for (data, m, s), curves in ratios.items() if (m, s) == (method, start)}
        worst = [max((float(curve[after - 1]), data) for data, curve in here.items()) for after in SHOWN]
        lines.append(f"| {shown(method, start)} | {' | '.join(f'{ratio:.3f} ({data})' for ratio, data in worst)} |")
    return "\n".join(lines)


Measured = Mapping[str, Mapping[str, Sequence[Sequence[float]]]]
"""Case -> barycenter method -> (loss, orthogonality gap, seconds), one for each seed or their means."""


def barycenters(found: Measured, kind: str) -> str:
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


def barycenters_in_short(found: Measured, case: str = "50 parties, 10 × 200") -> str:
    """Methods at one size: loss and gap of copies, loss, gap and milliseconds of independent factors."""
    copies, others = found.get(f"idealised: {case}", {}), found.get(f"realistic: {case}", {})
    lines = ["| method | copies: loss | gap | independent: loss | gap | ms |", "|---|---|---|---|---|---|"]
    for method in copies:
        (loss, gap, _), (far, wide, seconds) = np.mean(copies[method], axis=0), np.mean(others[method], axis=0)
        cells = f"{loss:.2g} | {gap:.2f} | {far:.1f} | {wide:.2f} | {1000 * seconds:.3g}"
        lines.append(f"| {method} | {cells} |")
    return "\n".join(lines)


def tables_of(found: Records) -> dict[str, str]:
    """All tables by name."""
    shortage = [(f"{c} parties", blocks(ROWS_IN_ALL // c), c) for c in PARTIES]
    surplus = [(f"{c} parties", blocks(ROWS_EACH), c) for c in PARTIES]
    absent = [(f"{100 * share:g} % absent", blocks(100, share), 20) for share in ABSENT]
    aligned = ("FNMF-LAP", "FNMF-LAP_ρ", "FNMF-SK", "FNMF-SK_ρ")
    averaged = ("pooled", "FedAvg", "FedProx", "FNMF-LAP", "FNMF-SK")

    def ratio(numbers: list[float], pooled: float) -> str:
        return f"{np.mean(numbers) / pooled:.3f}"

    def ratio_spread(numbers: list[float], pooled: float) -> str:
        return spread([number / pooled for number in numbers])

    pooled = table_one(found, lambda numbers, pooled: f"{np.mean(numbers):.3f}", [("pooled", "independent")])
    ratios = table_one(found, ratio_spread, _rows_on_page())
    return {
        "table-1": "\n".join([pooled, *ratios.splitlines()[2:]]),
        "errors": table_one(found, lambda numbers, pooled: spread(numbers), _rows()),
        "ratios": table_one(found, ratio, _rows()),
        "strengths": strengths(found),
        "two-stage": two_stage(found),
        "worst": worst_two_stage(found),
        "local-steps": local_steps(found),
        "shortage": scaling(found, shortage, "rmsd"),
        "shortage-in-short": scaling(found, shortage[::2], "rmsd", averaged),
        "surplus": scaling(found, surplus, "rmsd"),
        "absent": scaling(found, absent, "rmsd"),
        "absent-in-short": scaling(found, absent[::2], "rmsd", ("pooled", "FedAvg", *aligned)),
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
        worst[shown(method, start)] = max(ratios, default=math.nan)
    return worst


def main(arguments: Sequence[str] | None = None) -> None:
    """Update the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="JSON Lines files of runs")
    parser.add_argument("--barycenters", type=Path, help="output of experiments.fnmf.barycenters")
    parser.add_argument("--print", action="store_true", help="print every table, also those that the page leaves out")
    parser.add_argument("--document", type=Path, default=Path("docs/results/fnmf.md"))
    chosen = parser.parse_args(arguments)
    found = {run: record for path in chosen.runs for run, record in known(path).items()}
    tables = tables_of(found)
    if chosen.barycenters is not None:
        measured = json.loads(chosen.barycenters.read_text(encoding="utf-8"))
        tables |= {kind: barycenters(measured, kind) for kind in ("idealised", "realistic")}
        tables["barycenters"] = barycenters_in_short(measured)
    if chosen.print:
        print_tables(tables)
    replace_tables(chosen.document, tables)
    pictures = {
        "convergence": convergence(found),
        "shortage": scaling_drawn(
            found, [(c, blocks(ROWS_IN_ALL // c), c) for c in PARTIES], "parties, 2000 rows in total"
        ),
        "absent": scaling_drawn(found, [(100 * a, blocks(100, a), 20) for a in ABSENT], "percent of parts absent"),
    }
    for name, drawn in pictures.items():
        if drawn:
            chosen.document.with_name(f"fnmf-{name}.svg").write_text(drawn, encoding="utf-8")
    for label, ratio in sorted(worst_ratios(found).items(), key=lambda pair: pair[1]):
        print(f"{ratio:.3f}  {label}")


if __name__ == "__main__":
    main()
