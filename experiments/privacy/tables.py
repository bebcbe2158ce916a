"""Tables of docs/results/privacy.md: noise as printed, party level, secure sums, row level."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from experiments.privacy.methods import DATA_FREE, DELTA, METHODS, SIGNED, printed_scale
from experiments.privacy.parties import FEW, ROW_LEVEL
from experiments.privacy.rows import EPSILONS, RIDGES, ROUNDS, STUDIES, TUNING_RANK, USUAL, Study, best
from experiments.privacy.runs import Records, Trial
from experiments.privacy.sensitivity import EXCHANGED
from experiments.shared.metrics import spread
from experiments.shared.names import shown
from partsong.privacy.accounting import composed_epsilon, gaussian_epsilon, laplace_epsilon

ROUNDS_PRINTED = 10


def values_of(found: Records, field: str, **wanted: Any) -> list[float]:
    """A field of all runs with these values of trial and setting, one per seed, without tuning runs."""
    return [record[field] for trial, record in found.items() if not trial.is_tuning and is_like(trial, wanted)]


def is_like(trial: Trial, wanted: Mapping[str, Any]) -> bool:
    """Whether a run, or its setting, has these values."""
    return all(getattr(trial if hasattr(trial, name) else trial.setting, name) == wanted[name] for name in wanted)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def mean_and_spread(values: Sequence[float], digits: int = 3) -> str:
    """Format mean ± deviation, or a dash."""
    return spread(values, digits) if values else "–"


def printed(found: Records, kind: str) -> str:
    """RMSD of methods × ε of a round, with noise as printed."""
    epsilons = sorted({t.setting.epsilon for t in found if t.purpose == "printed" and t.setting.kind == kind})
    rows = []
    for method in ("FNMF-LAP (paper)", *METHODS):
        same = {"method": method, "purpose": "printed", "kind": kind}
        cells = [values_of(found, "rmsd", epsilon=epsilon, **same) for epsilon in epsilons]
        rows.append([shown(method), *(f"{np.mean(cell):.3f}" if cell else "–" for cell in cells)])
    return table(["method", *(f"{e:g}" for e in epsilons)], rows)


def true_epsilons(measured: Sequence[Mapping[str, Any]], kind: str, method: str = "FNMF-LAP (paper)") -> str:
    """ε over all rounds if Δ = 1, and a lower bound on ε of the first round from measured moves."""
    norm = "l2" if kind == "gaussian" else "l1"
    moves = {
        name: float(np.median([m[norm] for m in measured if (m["method"], m.get("exchanged")) == (method, name)]))
        for name in EXCHANGED
    }
    rows = []
    for epsilon in (0.1, 1.0, 3.0, 10.0, 100.0):
        scale = printed_scale(kind, epsilon)
        least = [_shifted(kind, moves[name] / scale) for name in moves]
        rows.append([f"{epsilon:g}", f"{scale:.3g}", _composed(kind, scale), *(f"{value:.3g}" for value in least), "∞"])
    head = ["ε printed", "σ" if kind == "gaussian" else "b", f"{ROUNDS_PRINTED} rounds, if Δ = 1"]
    return table([*head, *(f"first round, {name} exchanged: at least" for name in moves), "provable"], rows)


def moves(measured: Sequence[Mapping[str, Any]]) -> str:
    """How far the first upload moves: medians over seeds, with the largest."""
    here = [m for m in measured if "exchanged" in m]
    rows = []
    for method in dict.fromkeys(m["method"] for m in here):
        cells = [
            [m[norm] for m in here if (m["method"], m["exchanged"]) == (method, name)]
            for name in EXCHANGED
            for norm in ("l2", "l1")
        ]
        size = np.median([m["size"] for m in here if m["method"] == method])
        rows.append([shown(method), f"{size:.0f}", *(f"{np.median(cell):.1f} ({max(cell):.1f})" for cell in cells)])
    return table(["method", "‖H_p‖", *(f"{name}, {norm}" for name in EXCHANGED for norm in ("L2", "L1"))], rows)


def growth(measured: Sequence[Mapping[str, Any]]) -> str:
    """‖H_p‖ before the noise of some rounds, means over seeds."""
    here = [m for m in measured if "sizes" in m]
    rounds = (1, 2, 5, 10)
    rows = []
    for method, epsilon in dict.fromkeys((m["method"], m["epsilon"]) for m in here):
        sizes = np.mean([m["sizes"] for m in here if (m["method"], m["epsilon"]) == (method, epsilon)], axis=0)
        scale = printed_scale("gaussian", epsilon)
        rows.append([shown(method), f"{epsilon:g}", f"{scale:.3g}", *(f"{sizes[number - 1]:.0f}" for number in rounds)])
    return table(["method", "ε printed", "σ", *(f"round {number}" for number in rounds)], rows)


def _composed(kind: str, scale: float) -> str:
    if kind == "gaussian":
        return f"{gaussian_epsilon(math.sqrt(ROUNDS_PRINTED) / scale, DELTA):.3g}"
    return f"{composed_epsilon((('laplace', scale, ROUNDS_PRINTED),), DELTA):.3g} (δ = 0: {ROUNDS_PRINTED / scale:.3g})"


def _shifted(kind: str, shift: float) -> float:
    """ε at δ for distinguishing two known vectors at this distance in deviations (or in scales, L1 norm)."""
    return gaussian_epsilon(shift, DELTA) if kind == "gaussian" else laplace_epsilon(shift, 0.0)


def parties(found: Records, kind: str, relation: str, count: int, data: str = "blocks") -> str:
    """RMSD of methods × composed ε at party level, and of the row-level method at its own."""
    here = [t for t in found if (t.data, t.parties) == (data, count) and not t.is_tuning]
    own = [t for t in here if t.purpose == "parties" and (t.setting.kind, t.setting.relation) == (kind, relation)]
    by_row = [t for t in here if t.purpose == "rows"] if (kind, relation) == ("gaussian", "replace") else []
    epsilons = sorted({t.setting.epsilon for t in [*own, *by_row]})
    rows = []
    for method in (*METHODS, *ROW_LEVEL):
        chosen = [t for t in [*own, *by_row] if t.method == method]
        if chosen:
            cells = [[found[t]["rmsd"] for t in chosen if t.setting.epsilon == e] for e in epsilons]
            rows.append([shown(method), *(f"{np.mean(c):.3f}" if c else "" for c in cells)])
    return table(["method", *(f"{e:g}" for e in epsilons)], rows)


def floors(found: Records, cases: Mapping[str, tuple[str, int]]) -> str:
    """RMSD without noise and without data; a case is data and parties."""
    rows = []
    for method in ("pooled", *METHODS, *DATA_FREE):
        cells = [
            values_of(found, "rmsd", purpose="free", method=method, data=data, parties=count)
            for data, count in cases.values()
        ]
        rows.append([shown(method), *(mean_and_spread(cell) for cell in cells)])
    return table(["without noise", *cases], rows)


def signed(found: Records, counts: Sequence[int]) -> str:
    """RMSD of FedAvg where parties cut off at zero what they send, and where the server does it after the mean."""
    own = {t: r for t, r in found.items() if (t.purpose, t.method, t.data) == ("parties", "FedAvg", "blocks")}
    epsilons = sorted({t.setting.epsilon for t in own if t.setting.kind.endswith(SIGNED)})
    rows = []
    for count, kind in ((count, kind) for count in counts for kind in ("gaussian", "gaussian" + SIGNED)):
        same = {"parties": count, "kind": kind, "relation": "replace"}
        cells = [values_of(own, "rmsd", epsilon=epsilon, **same) for epsilon in epsilons]
        where = "by the server, after the mean" if kind.endswith(SIGNED) else "by the party"
        rows.append([str(count), where, *(mean_and_spread(cell) for cell in cells)])
    return table(["parties", "cut off at zero", *(f"{e:g}" for e in epsilons)], rows)


def clips(found: Records, count: int) -> str:
    """What tuning chose at party level: clip × rounds."""
    own = [t for t in found if (t.purpose, t.data, t.parties, t.seed) == ("parties", "blocks", count, 0)]
    own = [t for t in own if not t.setting.kind.endswith(SIGNED)]
    epsilons = sorted({t.setting.epsilon for t in own})
    rows = []
    for kind, relation, method in dict.fromkeys((t.setting.kind, t.setting.relation, t.method) for t in own):
        label = f"{shown(method)}, {kind}, {relation}"
        chosen = {
            t.setting.epsilon: t.setting
            for t in own
            if (t.setting.kind, t.setting.relation, t.method) == (kind, relation, method)
        }
        rows.append([label, *(f"{chosen[e].clip:g} × {chosen[e].rounds}" if e in chosen else "" for e in epsilons)])
    return table(["method, noise, relation", *(f"{e:g}" for e in epsilons)], sorted(rows))


def masking(records: Sequence[Mapping[str, Any]]) -> str:
    """Bytes and seconds over parties and dropouts; medians of repeats."""
    open_bytes = {r["parties"]: r["bytes_up"] for r in records if not r["masked"]}
    lines = []
    for parties_, dropped in dict.fromkeys((r["parties"], r["dropped"]) for r in records):
        here = [r for r in records if r["masked"] and (r["parties"], r["dropped"]) == (parties_, dropped)]
        up, model = here[0]["bytes_up"], open_bytes[parties_]
        down = here[0]["bytes_down"] - next(r["bytes_down"] for r in records if not r["masked"])
        party, server = (float(np.median([r[name] for r in here])) for name in ("party_seconds", "server_seconds"))
        more = f"{100 * (up / model - 1):.1f} %"
        lines.append([str(parties_), str(dropped), f"{up:,}".replace(",", " "), more,
                      f"{down:,}".replace(",", " "), f"{party:.3f}", f"{server:.3f}"])  # fmt: skip
    head = ["parties", "dropouts in phase 2", "bytes up, per party", "more than plain", "down"]
    return table([*head, "seconds, per party", "seconds, server"], lines)


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
    """Midpoint between pooled NMF and the best without it: a data-free H, or one noisy component."""
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
    """The numbers of rows with runs."""
    return [rows for rows in study.sizes if any(t.data == study.data and t.rows == rows for t in found)]


def _mean(values: list[float]) -> str:
    return f"{np.mean(values):.3f}" if values else "–"


def _marked(found: Records, study: Study, rows: int, epsilon: float, rank: int) -> str:
    values = row_errors(found, study, rows, epsilon, rank)
    if not values:
        return "–"
    is_useful = rank > 1 and float(np.mean(values)) <= halfway(found, study, rows, epsilon, rank)
    return f"**{mean_and_spread(values)}**" if is_useful else mean_and_spread(values)


def by_epsilon(found: Records, study: Study) -> str:
    """ε × k with all rows, bold where useful."""
    lines = [[f"{e:g}", *(_marked(found, study, study.whole, e, rank) for rank in study.ranks)] for e in study.epsilons]
    for method in ("pooled", *DATA_FREE, *((study.public,) if study.public else ())):
        cells = [mean_and_spread(free_errors(found, study, study.whole, rank, method)) for rank in study.ranks]
        lines.append([f"no noise: {method}", *cells])
    return table(["ε", *(f"k = {rank}" for rank in study.ranks)], lines)


def by_rounds(found: Records, study: Study) -> str:
    """ε × rounds with all rows at k = 10, and ten parties that each add the full noise."""
    lines = []
    for epsilon in USUAL:
        if not row_errors(found, study, study.whole, epsilon, TUNING_RANK):
            continue
        setting = best(found, study, study.whole, epsilon)
        same = {"data": study.data, "rows": study.whole, "rank": TUNING_RANK, "method": "row level"}
        cells = [values_of(found, "error", setting=replace(setting, rounds=rounds), **same) for rounds in ROUNDS]
        apart = values_of(found, "error", data=study.data, method="row level, open", setting=setting)
        chosen = f"{setting.clip:g}, {setting.rounds}, {setting.ridge:g}"
        lines.append([f"{epsilon:g}", chosen, *(mean_and_spread(cell) for cell in cells), mean_and_spread(apart)])
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
