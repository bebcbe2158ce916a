"""Tables and pictures of docs/results/dsanls.md from the runs that the other experiments have written down.

    python -m experiments.dsanls_report FOLDER

FOLDER holds dsanls-curves.jsonl, dsanls-ranks.json and dsanls-secure.jsonl, or some of them. Text between
`<!-- table: NAME -->` and `<!-- end -->` is replaced; everything else in the document is left as it is.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.dsanls_curves import CONTESTANTS
from experiments.dsanls_sets import SETS
from experiments.fnmf_report import BLOCK, renewed
from experiments.measures import spread
from partsong.evaluate.drawing import Line, Quantity
from partsong.evaluate.picture import picture, style_of

SLACK = 1.05
Runs = Sequence[dict[str, Any]]
SOLVERS = ("RCD/S", "PGD/S", "RCD/G", "PGD/G")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file with one a line; none where there is no file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def seconds_to(points: Sequence[Sequence[float]], goal: float) -> float:
    """The time at which an error is reached, from the first point at or below it; infinite if it never is."""
    return next((second for _, second, error in points if error <= goal), float("inf"))


def names_in(runs: Runs) -> list[str]:
    """The sets of these runs, in their usual order."""
    return [name for name in SETS if any(run["data"] == name for run in runs)]


def of(runs: Runs, **wanted: Any) -> list[dict[str, Any]]:
    """Those with these settings, by seed."""
    found = [run for run in runs if all(run[name] == value for name, value in wanted.items())]
    return sorted(found, key=lambda run: run["seed"])


def goal_of(runs: Runs, name: str, seed: int, rank: int) -> float:
    """1.05 times the last error of HALS from the same start."""
    return SLACK * of(runs, data=name, method="HALS", seed=seed, rank=rank)[0]["points"][-1][2]


def final_errors(runs: Runs) -> str:
    """Sets × methods: the error at the end of the same time, and the iterations made."""
    methods = [method for method in CONTESTANTS if of(runs, method=method)]
    lines = [f"| set | k, seconds, seeds | {' | '.join(methods)} |", "|---|---|" + "---|" * len(methods)]
    for name in names_in(runs):
        cells = []
        for method in methods:
            own = of(runs, data=name, method=method)
            iterations = statistics.median(run["points"][-1][0] for run in own) if own else 0
            cells.append(f"{spread([run['points'][-1][2] for run in own], 4)} ({iterations:.0f})" if own else "–")
        one = of(runs, data=name, method="HALS")[0]
        setting = f"{one['rank']}, {one['points'][-1][1]:.0f}, {len(of(runs, data=name, method='HALS'))}"
        lines.append(f"| {SETS[name].title} | {setting} | {' | '.join(cells)} |")
    return "\n".join(lines)


def times_to_goal(runs: Runs) -> str:
    """Seconds to 1.05 × the last error of HALS, as a ratio to the time of HALS itself: medians over seeds."""
    methods = [method for method in CONTESTANTS if of(runs, method=method)]
    others = [method for method in methods if method != "HALS"]
    lines = [f"| set | HALS, seconds | {' | '.join(others)} |", "|---|---|" + "---|" * len(others)]
    for name in names_in(runs):
        cells, base = [], {}
        for run in of(runs, data=name, method="HALS"):
            base[run["seed"]] = seconds_to(run["points"], goal_of(runs, name, run["seed"], run["rank"]))
        for method in others:
            ratios = [
                seconds_to(run["points"], goal_of(runs, name, run["seed"], run["rank"])) / base[run["seed"]]
                for run in of(runs, data=name, method=method)
                if run["seed"] in base
            ]
            middle = statistics.median(ratios) if ratios else None
            cells.append("–" if middle is None else "not reached" if np.isinf(middle) else f"{middle:.2f}")
        lines.append(f"| {SETS[name].title} | {statistics.median(base.values()):.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_rank(runs: Runs) -> str:
    """Fig. 4: the last error by k."""
    methods = [method for method in CONTESTANTS if of(runs, method=method)]
    ranks = sorted({run["rank"] for run in runs})
    lines = [f"| k | {' | '.join(methods)} |", "|---|" + "---|" * len(methods)]
    for rank in ranks:
        own = [of(runs, method=method, rank=rank) for method in methods]
        cells = [
            f"{spread([r['points'][-1][2] for r in some], 4)} ({some[0]['points'][-1][0]:.0f})" if some else "–"
            for some in own
        ]
        lines.append(f"| {rank} | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_solver(runs: Runs, at: Sequence[int] = (10, 30, 100, 300)) -> str:
    """Fig. 5: the error after so many iterations, coordinate descent against projected gradient."""
    lines = ["| solver | " + " | ".join(f"{count} iterations" for count in at) + " |", "|---|" + "---|" * len(at)]
    for method in SOLVERS:
        own, cells = of(runs, method=method), []
        for count in at:
            errors = [next((e for i, _, e in run["points"] if i >= count), None) for run in own]
            cells.append(spread([e for e in errors if e is not None], 4) if own and None not in errors else "–")
        if own:
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ranks_measured(found: Runs) -> str:
    """Fig. 3, measured: milliseconds of an iteration, and how much faster two ranks are."""
    lines = [
        "| set, k = 50 | method | in process, ms | 1 rank | 2 ranks | speed-up | two runs at once | of that ceiling |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        if "measured" not in one:
            continue
        t = one["measured"]
        ceiling = 2 * t["1 rank"] / t["two at once"]
        gain = t["1 rank"] / t["2 ranks"]
        cells = [f"{1000 * t['in process']:.1f}", f"{t['1 rank'] / t['in process']:.2f}×"]
        cells += [f"{1000 * t['2 ranks']:.1f} ms"]
        cells += [f"{gain:.2f}×", f"{ceiling:.2f}×", f"{gain / ceiling:.2f}"]
        lines.append(f"| {one['data']} | {one['method']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ranks_counted(found: Runs) -> str:
    """Fig. 3, counted: bytes sent and operations of one rank in an iteration."""
    ranks = [row["ranks"] for row in found[0]["counted"]]
    titles = " | ".join(f"Mflop, {n} ranks" for n in ranks)
    lines = [f"| set | method | bytes sent | {titles} |", "|---|---|---|" + "---|" * len(ranks)]
    for one in found:
        cells = [f"{row['flops'] / 1e6:,.0f}" for row in one["counted"]]
        lines.append(f"| {one['data']} | {one['method']} | {one['counted'][-1]['bytes']:,.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def secure(runs: Runs, split: str) -> str:
    """Fig. 6 or 7: methods × sets, the error at half and at the end of the virtual time."""
    sets = list(dict.fromkeys(run["data"] for run in runs))
    methods = list(dict.fromkeys(run["method"] for run in runs))
    lines = [f"| method | {' | '.join(sets)} |", "|---|" + "---|" * len(sets)]
    for method in methods:
        cells = []
        for name in sets:
            own = of(runs, data=name, split=split, method=method)
            if not own:
                cells.append("–")
                continue
            last = own[0]["points"][-1][1]
            half = [_error_at(run["points"], last / 2) for run in own]
            ends = [run["points"][-1][2] for run in own]
            iterations = statistics.median(run["points"][-1][0] for run in own)
            cells.append(f"{np.mean(half):.4f} → {spread(ends, 4)} ({iterations:.0f})")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _error_at(points: Sequence[Sequence[float]], seconds: float) -> float:
    """The latest error that is known by then; NaN before the first."""
    return next((error for _, second, error in reversed(points) if second <= seconds), float("nan"))


def drawn(runs: Runs, name: str, seed: int = 0) -> str:
    """Error over seconds on one set."""
    own = [(run["method"], run["points"]) for run in of(runs, data=name, seed=seed) if run["method"] in CONTESTANTS]
    lines = [
        Line(method, style_of(i), tuple(p[1] for p in points), tuple(p[2] for p in points))
        for i, (method, points) in enumerate(own)
    ]
    return picture(Quantity("seconds", lambda t: f"{t:g}", 0.0), Quantity("relative error", lambda e: f"{e:g}"), lines)


def tables_of(folder: Path) -> dict[str, str]:
    """All tables that the files in a folder give."""
    curves, by_k = read_lines(folder / "dsanls-curves.jsonl"), read_lines(folder / "dsanls-ranks-k.jsonl")
    hidden = read_lines(folder / "dsanls-secure.jsonl")
    place = folder / "dsanls-ranks.json"
    found: dict[str, str] = {}
    plain = [run for run in curves if run["method"] in CONTESTANTS]
    if plain:
        found |= {"final": final_errors(plain), "goal": times_to_goal(plain)}
    if by_k:
        found["by-rank"] = by_rank(by_k)
    if any(run["method"] in SOLVERS for run in curves):
        found["by-solver"] = by_solver(curves)
    if hidden:
        found |= {split: secure(hidden, split) for split in ("equal", "half")}
    if place.exists():
        ranks = json.loads(place.read_text("utf-8"))
        found |= {"ranks-measured": ranks_measured(ranks), "ranks-counted": ranks_counted(ranks)}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Renew the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--document", type=Path, default=Path("docs/results/dsanls.md"))
    chosen = parser.parse_args(arguments)
    tables = tables_of(chosen.folder)
    text = chosen.document.read_text("utf-8")
    text = BLOCK.sub(lambda block: renewed(block, tables.get(block["name"])), text)
    chosen.document.write_text(text, "utf-8")
    curves = read_lines(chosen.folder / "dsanls-curves.jsonl")
    for name in names_in([run for run in curves if run["method"] in CONTESTANTS]):
        if f"dsanls-{name}.svg" in text:
            chosen.document.with_name(f"dsanls-{name}.svg").write_text(drawn(curves, name), "utf-8")


if __name__ == "__main__":
    main()
