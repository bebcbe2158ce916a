"""Write the tables and figures of docs/results/dsanls.md from recorded runs.

    python -m experiments.dsanls.report docs/results

The folder holds dsanls-curves.jsonl, dsanls-ranks-k.jsonl (Fig. 4), dsanls-ranks.json and dsanls-speeds.jsonl (Fig. 3),
dsanls-secure.jsonl and dsanls-rates.jsonl, or some of them. Replaces the text between `<!-- table: NAME -->` and
`<!-- end -->`, and nothing else. `--print` prints every table, also those that the page leaves out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.dsanls.curves import CONTESTANTS
from experiments.dsanls.datasets import SETS
from experiments.dsanls.secure import METHODS
from experiments.shared.document import print_tables, replace_tables
from experiments.shared.figures import figure_svg, style_of
from experiments.shared.metrics import spread
from experiments.shared.names import shown
from partsong.reporting.charts import Line, Quantity

SLACK = 1.05
Runs = Sequence[dict[str, Any]]
SOLVERS = ("RCD/S", "PGD/S", "RCD/G", "PGD/G")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON Lines file; empty if there is none."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def seconds_to(points: Sequence[Sequence[float]], goal: float) -> float:
    """Time of the first point with an error of at most `goal`; infinite if there is none."""
    return next((second for _, second, error in points if error <= goal), float("inf"))


def names_in(runs: Runs) -> list[str]:
    """The sets of these runs, in the order of SETS."""
    return [name for name in SETS if any(run["data"] == name for run in runs)]


def of(runs: Runs, **wanted: Any) -> list[dict[str, Any]]:
    """Filter runs by these settings, sorted by seed."""
    found = [run for run in runs if all(run[name] == value for name, value in wanted.items())]
    return sorted(found, key=lambda run: run["seed"])


def final_errors(runs: Runs) -> str:
    """Sets × methods: the error at the end of the same time, and the iterations made."""
    methods = [method for method in CONTESTANTS if of(runs, method=method)]
    lines = [f"| set | k, seconds, seeds | {' | '.join(methods)} |", "|---|---|" + "---|" * len(methods)]
    for name in names_in(runs):
        cells = []
        for method in methods:
            own = of(runs, data=name, method=method)
            ends = [run["points"][-1][2] for run in own]
            cells.append(f"{spread(ends, 4)} ({_iterations(own):.0f})" if own else "–")
        one = of(runs, data=name, method="HALS")[0]
        setting = f"{one['rank']}, {one['points'][-1][1]:.0f}, {len(of(runs, data=name, method='HALS'))}"
        lines.append(f"| {SETS[name].title} | {setting} | {' | '.join(cells)} |")
    return "\n".join(lines)


def final_in_short(runs: Runs, methods: Sequence[str] = ("HALS", "DSANLS/S", "DSANLS/C", "MU", "BPP")) -> str:
    """Sets × methods: the error at the end of the same time; and the time of DSANLS/S to the goal, over HALS's."""
    methods = [method for method in methods if of(runs, method=method)]
    ratios = dict(zip(names_in(runs), (row.split(" | ") for row in times_to_goal(runs).splitlines()[2:]), strict=True))
    lines = [f"| set | k, seconds | {' | '.join(methods)} | time ratio |", "|---|---|" + "---|" * (len(methods) + 1)]
    for name in names_in(runs):
        found = [of(runs, data=name, method=method) for method in methods]
        cells = [spread([run["points"][-1][2] for run in own], 4) if own else "–" for own in found]
        one = of(runs, data=name, method="HALS")[0]
        setting = f"{one['rank']}, {one['points'][-1][1]:.0f}"
        lines.append(f"| {SETS[name].title} | {setting} | {' | '.join(cells)} | {ratios[name][2]} |")
    return "\n".join(lines)


def times_to_goal(runs: Runs) -> str:
    """Seconds to 1.05 × the last error of HALS, as a ratio to the time of HALS itself: medians over seeds.

    A goal of 1 or more is reached by W = 0, and omitted.
    """
    methods = [method for method in CONTESTANTS if of(runs, method=method)]
    others = [method for method in methods if method != "HALS"]
    lines = [f"| set | HALS, seconds | {' | '.join(others)} |", "|---|---|" + "---|" * len(others)]
    for name in names_in(runs):
        cells, base = [], {}
        goals = {run["seed"]: SLACK * run["points"][-1][2] for run in of(runs, data=name, method="HALS")}
        if max(goals.values()) >= 1:
            lines.append(f"| {SETS[name].title} | goal above 1 | {' | '.join('–' for _ in others)} |")
            continue
        for run in of(runs, data=name, method="HALS"):
            base[run["seed"]] = seconds_to(run["points"], goals[run["seed"]])
        for method in others:
            ratios = [
                seconds_to(run["points"], goals[run["seed"]]) / base[run["seed"]]
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
            f"{spread([r['points'][-1][2] for r in some], 4)} ({_iterations(some):.0f})" if some else "–"
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
    sets = names_in(runs)
    lines = [f"| method | {' | '.join(sets)} |", "|---|" + "---|" * len(sets)]
    for method in METHODS:
        cells = []
        for name in sets:
            own = of(runs, data=name, split=split, method=method)
            if not own:
                cells.append("–")
                continue
            last = own[0]["points"][-1][1]
            half = [_error_at(run["points"], last / 2) for run in own]
            ends = [run["points"][-1][2] for run in own]
            cells.append(f"{np.mean(half):.4f} → {spread(ends, 4)} ({_iterations(own):.0f})")
        lines.append(f"| {shown(method)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def secure_ends(runs: Runs) -> str:
    """Fig. 6 and 7: methods × sets and splits, the error at the end of the virtual time."""
    cases = [(name, split) for name in names_in(runs) for split in ("equal", "half")]
    lines = [f"| method | {' | '.join(f'{name}, {split}' for name, split in cases)} |", "|---|" + "---|" * len(cases)]
    for method in METHODS:
        found = [of(runs, data=name, split=split, method=method) for name, split in cases]
        cells = [spread([run["points"][-1][2] for run in own], 4) if own else "–" for own in found]
        lines.append(f"| {shown(method)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def scaling(runs: Runs) -> str:
    """Fig. 8 and 9: methods × sets, the rate at the most parties over that at the fewest, for both splits."""
    sets, numbers = names_in(runs), sorted({run["parties"] for run in runs})
    titles = [f"{name}, {split}" for name in sets for split in ("equal", "half")]
    lines = [f"| method | {' | '.join(titles)} |", "|---|" + "---|" * len(titles)]
    for method in METHODS:
        cells = []
        for name, split in ((name, split) for name in sets for split in ("equal", "half")):
            own = {n: [r["rate"] for r in of(runs, data=name, split=split, method=method, parties=n)] for n in numbers}
            first, last = own[numbers[0]], own[numbers[-1]]
            cells.append(f"{statistics.median(last) / statistics.median(first):.2f}" if first and last else "–")
        lines.append(f"| {shown(method)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rates(runs: Runs, split: str) -> str:
    """Fig. 8 or 9: sets and methods × numbers of parties, iterations per virtual second (medians over seeds)."""
    found = {
        (name, method, parties): [
            run["rate"] for run in of(runs, data=name, split=split, method=method, parties=parties)
        ]
        for name in names_in(runs)
        for method in METHODS
        for parties in sorted({run["parties"] for run in runs})
    }
    return _over_numbers(found)


def speeds(runs: Runs) -> str:
    """Fig. 3, measured: sets and methods × numbers of ranks, iterations per second (medians over repeats)."""
    found = {
        (name, method, ranks): [1 / run["seconds"] for run in of(runs, data=name, method=method, ranks=ranks)]
        for name in names_in(runs)
        for method in CONTESTANTS
        for ranks in sorted({run["ranks"] for run in runs})
    }
    return _over_numbers(found)


def _over_numbers(found: Mapping[tuple[str, str, int], Sequence[float]]) -> str:
    """(set, method) × N: medians, and the ratio of the last to the first; rows with gaps are omitted."""
    numbers = sorted({number for _, _, number in found})
    titles = " | ".join(f"N = {number}" for number in numbers)
    last = f"{numbers[-1]} over {numbers[0]}"
    lines = [f"| set | method | {titles} | {last} |", "|---|---|" + "---|" * (len(numbers) + 1)]
    for name, method in dict.fromkeys((name, method) for name, method, _ in found):
        if not all(found[name, method, number] for number in numbers):
            continue
        middles = [statistics.median(found[name, method, number]) for number in numbers]
        cells = [f"{middle:.{0 if middle >= 100 else 1}f}" for middle in middles]
        lines.append(f"| {name} | {shown(method)} | {' | '.join(cells)} | {middles[-1] / middles[0]:.2f} |")
    return "\n".join(lines)


def _iterations(runs: Runs) -> float:
    """Median over seeds of the iterations in the whole time."""
    return statistics.median(run["points"][-1][0] for run in runs)


def _error_at(points: Sequence[Sequence[float]], seconds: float) -> float:
    """The latest error recorded by then; NaN before the first."""
    return next((error for _, second, error in reversed(points) if second <= seconds), float("nan"))


def drawn(runs: Runs, name: str, seed: int = 0) -> str:
    """Error over seconds on one set."""
    own = [(method, run["points"]) for method in CONTESTANTS for run in of(runs, data=name, seed=seed, method=method)]
    lines = [
        Line(method, style_of(i), tuple(p[1] for p in points), tuple(p[2] for p in points))
        for i, (method, points) in enumerate(own)
    ]
    return figure_svg(
        Quantity("seconds", lambda t: f"{t:g}", 0.0), Quantity("relative error", lambda e: f"{e:g}"), lines
    )


def tables_of(folder: Path) -> dict[str, str]:
    """All tables that the files in a folder give."""
    curves, by_k = read_lines(folder / "dsanls-curves.jsonl"), read_lines(folder / "dsanls-ranks-k.jsonl")
    hidden, paces = read_lines(folder / "dsanls-secure.jsonl"), read_lines(folder / "dsanls-rates.jsonl")
    several = read_lines(folder / "dsanls-speeds.jsonl")
    place = folder / "dsanls-ranks.json"
    found: dict[str, str] = {}
    plain = [run for run in curves if run["method"] in CONTESTANTS]
    if plain:
        found |= {"final": final_errors(plain), "goal": times_to_goal(plain), "errors": final_in_short(plain)}
    if by_k:
        found["by-rank"] = by_rank(by_k)
    if any(run["method"] in SOLVERS for run in curves):
        found["by-solver"] = by_solver(curves)
    if hidden:
        found |= {split: secure(hidden, split) for split in ("equal", "half")} | {"secure": secure_ends(hidden)}
    if paces:
        found |= {f"rates-{split}": rates(paces, split) for split in ("equal", "half")} | {"scaling": scaling(paces)}
    if several:
        found["speeds"] = speeds(several)
        found["speeds-in-short"] = speeds([one for one in several if one["method"] in ("DSANLS/S", "HALS")])
    if place.exists():
        ranks = json.loads(place.read_text("utf-8"))
        found |= {"ranks-measured": ranks_measured(ranks), "ranks-counted": ranks_counted(ranks)}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Update the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--print", action="store_true", help="print every table, also those that the page leaves out")
    parser.add_argument("--document", type=Path, default=Path("docs/results/dsanls.md"))
    chosen = parser.parse_args(arguments)
    tables = tables_of(chosen.folder)
    if chosen.print:
        print_tables(tables)
    replace_tables(chosen.document, tables)
    curves = read_lines(chosen.folder / "dsanls-curves.jsonl")
    for name in names_in([run for run in curves if run["method"] in CONTESTANTS]):
        if f"dsanls-{name}.svg" in chosen.document.read_text("utf-8"):
            chosen.document.with_name(f"dsanls-{name}.svg").write_text(drawn(curves, name), "utf-8")


if __name__ == "__main__":
    main()
