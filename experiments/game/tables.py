"""Tables of docs/results/game.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from experiments.game.runs import MU, Method, recovered
from experiments.shared.metrics import spread

Runs = Sequence[dict[str, Any]]
SWEEPS = (100, 500, 2000, 5000, 20_000, 100_000)


def label(run: dict[str, Any]) -> str:
    """The method of a run."""
    return Method(run["method"], run.get("order", ""), run.get("eta")).label


def of(runs: Runs, **wanted: Any) -> list[dict[str, Any]]:
    """Filter runs by these settings."""
    return [run for run in runs if all(run.get(name) == value for name, value in wanted.items())]


def distinct(values: Iterable[Any]) -> list[Any]:
    """Distinct values in order of appearance."""
    return list(dict.fromkeys(values))


def short(value: float) -> str:
    """Three digits, and powers of ten where there are many zeros."""
    return f"{value:.3g}" if value >= 1e-3 or value == 0 else f"{value:.0e}"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    return "\n".join(lines + [f"| {' | '.join(cells)} |" for cells in rows])


def convergence(runs: Runs) -> str:
    """Methods × sweeps on the first data set, the longest run of each."""
    here = sorted(of(runs, data=0), key=lambda run: -run["sweeps"])
    longest = {label(run): run for run in reversed(here)}
    rows = []
    for name in distinct(label(run) for run in of(runs, data=0)):
        points = longest[name]["points"]
        ends = [next((error for sweep, error in points if sweep == at), None) for at in SWEEPS]
        rows.append([name, *("–" if error is None else short(error) for error in ends)])
    return table(["method", *(f"{at:,}" for at in SWEEPS)], rows)


def bases(runs: Runs) -> str:
    """Similarity of the final rows of H to the true ones and to those of MU, over all data sets."""
    rows = []
    sequential = [run for run in runs if run["method"] == MU or run["order"] == "sequential"]
    usual = [run for run in sequential if run["sweeps"] < SWEEPS[-1]]
    for name in distinct(label(run) for run in usual):
        own = [run for run in usual if label(run) == name]
        mu = [of(usual, data=run["data"], method=MU)[0] for run in own]
        alike = [np.mean(recovered(np.array(m["H"]), np.array(run["H"]))) for m, run in zip(mu, own, strict=True)]
        truth = [float(np.mean(run["correlations"])) for run in own]
        cells = [spread(truth, 2), "–" if name == MU else spread(alike, 2), spread([run["overlap"] for run in own], 2)]
        rows.append([name, f"{own[0]['sweeps']:,}", *cells, short(float(np.median([r["points"][-1][1] for r in own])))])
    return table(["method", "sweeps", "r with the true rows", "r with those of MU", "overlap", "error (median)"], rows)


def by_dataset(runs: Runs, name: str, at: int, norm: int = 1) -> np.ndarray:
    """Errors (data sets × starts) after so many sweeps; norm 1 is Frobenius, 2 spectral."""
    own = [run for run in runs if label(run) == name]
    numbers = distinct(run["data"] for run in own)
    return np.array([[e[norm] for run in of(own, data=d) for e in run["errors"] if e[0] == at] for d in numbers])


def datasets(runs: Runs) -> str:
    """Fig. 4: mean ± sd over all runs, and a paired test of data sets against MU."""
    from scipy.stats import wilcoxon

    looks = distinct(entry[0] for run in runs for entry in run["errors"])
    rows = []
    for name in distinct(label(run) for run in runs):
        for at in looks:
            errors = by_dataset(runs, name, at)
            if not errors.size:
                continue
            base = by_dataset(runs, MU, min(at, max(entry[0] for entry in of(runs, method=MU)[0]["errors"])))
            cells = [name, f"{at:,}", spread(errors.ravel().tolist()), short(float(np.median(errors)))]
            cells.append(spread(by_dataset(runs, name, at, 2).ravel().tolist()))
            if name == MU:
                rows.append([*cells, "–", "–", "–"])
                continue
            below = int((errors.mean(axis=1) < base.mean(axis=1)).sum())
            apart = np.abs(errors.mean(axis=1) - base.mean(axis=1)) > errors.std(axis=1, ddof=1) + base.std(
                axis=1, ddof=1
            )
            p = float(wilcoxon(errors.mean(axis=1), base.mean(axis=1)).pvalue) if len(errors) > 4 else float("nan")
            rows.append([*cells, f"{below} of {len(errors)}", f"{int(apart.sum())} of {len(errors)}", f"{p:.3f}"])
    titles = [
        "method",
        "sweeps",
        "Frobenius, mean ± sd",
        "median",
        "spectral, mean ± sd",
        "below MU",
        "bars apart",
        "p",
    ]
    return table(titles, rows)


def trajectories(runs: Runs) -> str:
    """Fig. 5: how jagged trajectories are, means over data sets."""
    rows = []
    for figure in distinct(run["figure"] for run in runs):
        here = of(runs, figure=figure)
        for method, eta in distinct((run["method"], run["eta"]) for run in here):
            own = of(here, method=method, eta=eta)
            numbers = [spread([run[key] for run in own], 1) for key in ("turning", "turning_evenly", "detour")]
            shares = own[0].get("shares")
            text = (
                " / ".join(f"{100 * share:.0f}" for share in np.mean([run["shares"] for run in own], axis=0))
                if shares
                else "–"
            )
            step = "" if method == MU else ", safe step" if eta is None else f", η = {eta:g}"
            rows.append([figure, f"{method}{step}", f"{own[0]['sweeps']:,}", *numbers, text])
    titles = [
        "figure",
        "method",
        "sweeps",
        "turn, degrees",
        "turn on 200 equal pieces",
        "length / distance",
        "variance, %",
    ]
    return table(titles, rows)


def measured(runs: Runs) -> str:
    """Time of sweeps on one thread and on two, and the ceiling from two games side by side."""
    rows = []
    for name in distinct(run["data"] for run in of(runs, kind="measured")):
        here = [of(runs, kind="measured", data=name, threads=number)[0] for number in ("1", "2", "two games")]
        one, two, both = (run["seconds"] for run in here)
        cells = [f"{1000 * run['seconds']:.0f} ({1000 * run['best']:.0f})" for run in here]
        spent = " / ".join(f"{1000 * run['processor']:.0f}" for run in here[:2])
        rate = f"{here[0]['cells'] / here[0]['processor'] / 1e6:.0f} million"
        rows.append([name, *cells, f"{one / two:.2f}×", f"{2 * one / both:.2f}×", spent, rate])
    titles = [
        "data, k = 20",
        "1 thread, ms (best)",
        "2 threads, ms (best)",
        "two games at once, ms (best)",
        "gain",
        "ceiling",
    ]
    return table([*titles, "processor ms a sweep, 1 / 2 threads", "cells per processor second"], rows)


def counted(runs: Runs) -> str:
    """Numbers and bytes that parties send in a sweep."""
    rows = []
    for run in of(runs, kind="counted"):
        n, m, k = run["shape"]
        parts = run["parties"]
        sent = [
            f"{run['player_numbers_up']:,}",
            f"{run['bytes_up'] / 1000:,.0f} kB",
            f"{run['bytes_down_each'] / 1000:,.0f} kB",
        ]
        rows.append(
            [str(parts), str(run["exchanges"]), str(run["uploads"]), *sent, f"{n * m // parts:,}", f"{n * m * 2 * k:,}"]
        )
    titles = ["parties", "exchanges", "uploads", "players' numbers up, all", "bytes up, all", "bytes down, each"]
    return table([*titles, "meetings of a party", "2k numbers a meeting would be"], rows)


def maps(runs: Runs) -> str:
    """Errors by the assignment of players to workers."""
    here = of(runs, kind="maps")
    rows = []
    for name in distinct(run["map"] for run in here):
        errors = [run["error"] for run in of(here, map=name)]
        low, middle, high = np.quantile(errors, [0.25, 0.5, 0.75])
        rows.append([name, spread(errors, 4), f"{short(middle)} ({short(low)} to {short(high)})"])
    return table(["players of", f"error after {here[0]['sweeps']} sweeps, mean ± sd", "median (quartiles)"], rows)


def held_out(runs: Runs) -> str:
    """Root mean squares over held-out ratings."""
    rows = []
    for name in distinct(run["data"] for run in runs):
        for method, rank in distinct((run["method"], run["rank"]) for run in of(runs, data=name)):
            own = of(runs, data=name, method=method, rank=rank)
            cells = [name, method, str(rank or "–"), spread([run["rmse"] for run in own], 4)]
            later = spread([run["last"] for run in own], 4) if "last" in own[0] else "–"
            stops = (
                f"{np.median([run['stopped_at'] for run in own]):.0f} of {own[0]['sweeps']}"
                if "last" in own[0]
                else "–"
            )
            chosen = (
                ", ".join(f"{value:g}" for value in sorted({r["setting"] for r in own})) if "setting" in own[0] else "–"
            )
            rows.append([*cells, later, stops, chosen])
    return table(
        ["data", "method", "k", "RMSE, held out", "at the last sweep", "stopped at", "chosen η or penalty"], rows
    )


def held_out_in_short(runs: Runs) -> str:
    """Methods × data and ranks: root mean squares over held-out ratings."""
    cases = [(name, rank) for name in distinct(run["data"] for run in runs) for rank in (5, 10, 20)]
    rows = []
    for method in distinct(run["method"] for run in runs):
        cells = []
        for name, rank in cases:
            here = of(runs, data=name, method=method)
            own = [run["rmse"] for run in here if (run["rank"] or rank) == rank]
            cells.append(spread(own, 3) if own else "–")
        rows.append([method, *cells])
    return table(["method", *(f"{name.removeprefix('MovieLens ')}, k = {rank}" for name, rank in cases)], rows)


def parties(runs: Runs) -> str:
    """Errors and bytes after so many rounds."""
    rows = []
    at = (10, 50, 200)
    for name in distinct(run["data"] for run in runs):
        for method in distinct(run["method"] for run in runs):
            cells = []
            for goal in at:
                points = [
                    next((p for p in run["points"] if p[0] == goal), None) for run in of(runs, data=name, method=method)
                ]
                known = [point for point in points if point is not None]
                text = f"{spread([p[2] for p in known], 4)} ({known[0][1] / 1e6:.3g} MB)" if known else "–"
                cells.append(text)
            rows.append([name, method, *cells])
    return table(["data", "method", *(f"{goal} rounds" for goal in at)], rows)


def leaks(runs: Runs) -> str:
    """What was recovered from one exchange."""
    single = of(runs, kind="one row")
    worst = [max(run[key] for run in single) for key in ("w", "x")]
    text = "w to {:.0e}, x of all columns of the block but the last to {:.0e} (relative, the worst of {})"
    rows = [["1", "0.05", text.format(*worst, len(single))]]
    several = of(runs, kind="several rows")
    for count, eta in distinct((run["rows"], run["eta"]) for run in several):
        own = of(several, rows=count, eta=eta)
        span, slope = (float(np.median([run[key] for run in own])) for key in ("away_from_span", "away_from_gradient"))
        rows.append(
            [str(count), f"{eta:g}", f"{span:.1e} outside the span of W_p; {slope:.3f} from η W_pᵀ(X_p − W_p H)"]
        )
    return table(["rows of the party", "η", "of the difference of a block"], rows)
