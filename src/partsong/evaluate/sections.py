"""What each section of the report says: findings to tables, charts and captions."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from partsong.evaluate.drawing import Line, Quantity, bar, key, line_chart
from partsong.evaluate.findings import MethodFindings, Report, Sent
from partsong.evaluate.page import UNKNOWN, Column, Markup, element, percent, row, significant, size, table

MOST_LABELS = 12
N_STYLES = 8  # colours in the style sheet
ERROR = Quantity("relative error", percent)
ROUNDS = Quantity("rounds", lambda value: f"{value:,.0f}", start=0.0, smallest_step=1.0)
BYTES = Quantity("bytes sent per party", size, start=0.0, smallest_step=1.0)
SECONDS = Quantity("seconds", significant, start=0.0)


def _best(methods: Sequence[MethodFindings], is_oracle: bool) -> MethodFindings | None:
    """The lowest finite error among the oracles, or among all others with a shared model."""
    ranked = [m for m in methods if m.is_oracle is is_oracle and math.isfinite(m.relative_error) and len(m.components)]
    return min(ranked, key=lambda method: method.relative_error, default=None)


def styles(methods: Sequence[MethodFindings]) -> list[str]:
    """A class of the style sheet for each method: grey for oracles, a colour for each of the others."""
    colours = itertools.cycle(range(N_STYLES))
    return ["oracle" if method.is_oracle else f"s{next(colours)}" for method in methods]


def results(report: Report) -> list[Markup]:
    """The verdict in a sentence, then quality and cost of each method; the best is marked where there are several."""
    methods, best, oracle = report.methods, _best(report.methods, False), _best(report.methods, True)
    labels = ["Relative error", "Points above pooled", "Explained variance", "Sent per party", "Received per party"]
    numbers = [label for label in [*labels, "Rounds", "Seconds"] if oracle or label != labels[1]]
    columns = [Column("Method", False), *map(Column, numbers), Column("Outcome", False)]
    is_contest = _rivals(methods) > 1
    rows = []
    for method, style in zip(methods, styles(methods), strict=True):
        is_marked = method is best and is_contest
        cells = [
            _name(method, style, is_marked),
            percent(method.relative_error),
            *([_points(method, oracle)] if oracle else []),
            percent(method.explained_variance),
            "all rows" if method.is_oracle and not method.sent else size(method.bytes_up_per_party),
            size(method.bytes_down_per_party),
            f"{method.rounds:,}",
            significant(method.seconds),
            method.outcome,
        ]
        rows.append(row(columns, cells, "best" if is_marked else "plain"))
    caption = (
        "Relative error is \u2016X \N{MINUS SIGN} WH\u2016 / \u2016X\u2016 over the rows of all parties: 0% is a "
        "perfect fit, less is better."
    )
    caption += " “Points above pooled” compares it with a run that saw all rows in one place." if oracle else ""
    caption += " Seconds are those of the rounds, with all parties on one machine and all code compiled beforehand."
    return [element("p", _verdict(methods, best, oracle), class_="verdict"), table(caption, columns, rows)]


def _rivals(methods: Sequence[MethodFindings]) -> int:
    return sum(not method.is_oracle and len(method.components) > 0 for method in methods)


def _name(method: MethodFindings, style: str, is_best: bool) -> Markup:
    badges = [element("span", "pooled oracle", class_="badge reference")] if method.is_oracle else []
    badges += [element("span", "best", class_="badge")] if is_best else []
    return element("div", key(style), method.name, *badges, element("span", method.description, class_="description"))


def _points(method: MethodFindings, oracle: MethodFindings) -> str:
    """How far the error lies above the oracle's, in percentage points."""
    difference = 100 * (method.relative_error - oracle.relative_error)
    return UNKNOWN if method is oracle or not math.isfinite(difference) else f"{round(difference, 2) + 0.0:+.2f}"


def _verdict(methods: Sequence[MethodFindings], best: MethodFindings | None, oracle: MethodFindings | None) -> str:
    if best is None:
        return "Without pooling the rows, no method reached a shared model with a finite error."
    rivals = _rivals(methods)
    verdict = f"Without pooling the rows, {best.name} reaches a relative error of {percent(best.relative_error)}"
    verdict += f", the lowest of {rivals} methods," if rivals > 1 else ""
    verdict += f" for {size(best.bytes_up_per_party)} sent per party."
    return f"{verdict} Pooling reaches {percent(oracle.relative_error)}." if oracle else verdict


def convergence(report: Report) -> list[Markup]:
    """Error over rounds, over bytes where any were sent, and over time; one legend for all."""
    pairs = list(zip(report.methods, styles(report.methods), strict=True))
    over_rounds = [Line(m.curve.label, style, m.curve.rounds, m.curve.errors) for m, style in pairs]
    over_seconds = [Line(m.curve.label, style, m.curve.seconds, m.curve.errors) for m, style in pairs]
    over_bytes = _over_bytes(report.methods, over_rounds)
    charts = [line_chart(ROUNDS, ERROR, over_rounds)]
    charts += [line_chart(BYTES, ERROR, over_bytes)] if over_bytes else []
    charts += [line_chart(SECONDS, ERROR, over_seconds)]
    legend = [element("li", key(line.style), line.label) for line in over_rounds]
    note = "Lower and further left is better. Point at a curve to read its values."
    if over_bytes and not all(map(_sends, report.methods)):
        note += " There, the pooled oracle and methods that send nothing are level lines at their final error."
    caption = element("figcaption", note, class_="note")
    drawn = element("div", *charts, class_="charts")
    return [element("figure", caption, element("ul", *legend, class_="legend"), drawn)]


def _over_bytes(methods: Sequence[MethodFindings], over_rounds: Sequence[Line]) -> list[Line]:
    """The curves over bytes sent, or none where nothing was sent."""
    most = max((method.curve.bytes_up[-1] for method in methods if _sends(method)), default=0.0)
    if most == 0:
        return []
    return [
        replace(line, x=method.curve.bytes_up)
        if _sends(method)
        else replace(line, x=(0.0, most), y=(method.relative_error, method.relative_error))
        for method, line in zip(methods, over_rounds, strict=True)
    ]


def _sends(method: MethodFindings) -> bool:
    return not method.is_oracle and any(method.curve.bytes_up)


def holdings(report: Report) -> list[Markup]:
    """Party by label: rows held, shaded by their share of the party's rows."""
    totals: Counter[str] = Counter()
    for party in report.parties:
        totals.update(party.labels)
    kept = sorted((label for label, _ in totals.most_common(MOST_LABELS)), key=_natural)
    others = ["other labels"] if len(totals) > len(kept) else []
    columns = [Column("Party", False), Column("Rows"), Column("Size", False), *map(Column, [*kept, *others])]
    largest = max((party.rows for party in report.parties), default=0) or 1
    rows = []
    for party in report.parties:
        counts = [party.labels.get(label, 0) for label in kept]
        counts += [sum(party.labels.values()) - sum(counts)] if others else []
        heat = [_heat(count, count / max(party.rows, 1)) for count in counts]
        rows.append(row(columns, [party.name, f"{party.rows:,}", bar(party.rows / largest), *heat]))
    holders = "1 party holds" if len(report.parties) == 1 else f"{len(report.parties):,} parties hold"
    caption = f"{holders} {sum(party.rows for party in report.parties):,} rows."
    if kept:
        caption += " Columns count the rows of each label; the stronger the tint, the larger its share of that party."
    return [table(caption, columns, rows)]


def _natural(label: str) -> tuple[int, str]:
    return (len(label) if label.isdecimal() else 0, label)


def _heat(count: int, share: float) -> Markup:
    return element("span", f"{count:,}", class_="heat", style=f"--share:{share:.2f}")


def disclosure(report: Report) -> list[Markup]:
    """Every array that left a party, method by method, and what never left."""
    labels = ("Bytes each", "Times", "Total")
    columns = [Column("Array", False), Column("Shape"), Column("Type", False), *map(Column, labels)]
    columns.append(Column("What it tells", False))
    bodies = []
    for method, style in zip(report.methods, styles(report.methods), strict=True):
        title = element("th", key(style), method.name, colspan=len(columns), scope="rowgroup")
        lines = [row(columns, _sent_cells(sent)) for sent in method.sent]
        words = "Not federated: it needs every row in one place." if method.is_oracle else "Nothing was sent."
        nothing = element("tr", element("td", words, colspan=len(columns)))
        bodies.append([element("tr", title, class_="group"), *(lines or [nothing])])
    caption = "Every array that one party sent over the whole run, and what it tells whoever receives it."
    kept = element("p", element("strong", "Never sent. "), report.never_sent, class_="kept")
    return [table(caption, columns, *bodies), kept]


def _sent_cells(sent: Sent) -> list[str]:
    shape = " \N{MULTIPLICATION SIGN} ".join(map(str, sent.shape)) or "one number"
    costs = [size(sent.bytes_each), f"{sent.times:,}", size(sent.bytes_total)]
    return [sent.array, shape, sent.dtype, *costs, sent.meaning]


def reproduction(report: Report) -> list[Markup]:
    """Settings and versions, side by side."""
    sides = [_listing("Settings", report.settings), _listing("Versions", report.versions)]
    return [element("div", *sides, class_="reproduce")]


def _listing(caption: str, entries: Mapping[str, str]) -> Markup:
    columns = [Column("Name", False), Column("Value", False)]
    return table(caption, columns, [row(columns, [name, value]) for name, value in entries.items()])
