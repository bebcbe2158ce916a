"""HTML report of a run or a comparison of runs, as one self-contained page.

The page works offline, loads nothing and can be printed. It shows results, charts, components, privacy, the components
of each party, and attacks.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from partsong.attacks.findings import PartyFindings
from partsong.errors import ShapeError
from partsong.evaluation.metrics import LocalComponents, PartyResult, align_local_components
from partsong.io.write import atomic_write
from partsong.reporting import attack_report
from partsong.reporting.charts import Line, Quantity, bar, key, line_chart, picture
from partsong.reporting.html import (
    UNKNOWN,
    Column,
    Markup,
    document,
    element,
    format_bytes,
    format_number,
    format_percent,
    row,
    section,
    table,
)

MOST_LABELS = 12
N_STYLES = 8  # colors in the style sheet
ERROR = Quantity("relative error", format_percent)
ROUNDS = Quantity("rounds", lambda value: f"{value:,.0f}", start=0.0, smallest_step=1.0)
BYTES = Quantity("bytes sent per party", format_bytes, start=0.0, smallest_step=1.0)
SECONDS = Quantity("seconds", format_number, start=0.0)
TOP_FEATURES = 10
MASKED = "Single uploads were masked: only their senders saw them. The server knows their sums."
IN_SIMULATION = (
    "Errors, shares, drifts, row counts and the parties' own components on this page are known because all parties ran "
    "in one process. None of them was sent, and none is in the model."
)
NO_NOISE = "No noise was added: there is no privacy guarantee for rows or parties."
PLAN = (
    "ε is the cost of the whole run, over all rounds in which a party sent something. Had the run stopped early for a "
    "reason that depends on the data, only the planned ε would be a guarantee."
)
MOST_PARTIES, MOST_PARTS, PARTY_TOP_FEATURES = 20, 32, 3
NUMBERS = ("Rows", "Error", "Own error", "Drift", "Aligned")


@dataclass(frozen=True, slots=True)
class Curve:
    """Relative error along a run: one entry per recorded round, `seconds` and `bytes_up` since the start.

    `bytes_up` is the mean over parties of the bytes sent; empty if nothing is sent.
    """

    label: str
    rounds: tuple[int, ...]
    seconds: tuple[float, ...]
    errors: tuple[float, ...]
    bytes_up: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.bytes_up and len(self.bytes_up) != len(self.rounds):
            raise ShapeError(
                f"Curve {self.label!r} has {len(self.rounds)} rounds and {len(self.bytes_up)} entries of "
                "bytes_up. Pass "
                "one per recorded round, or none if nothing is sent."
            )
        if not len(self.rounds) == len(self.seconds) == len(self.errors):
            raise ShapeError(
                f"Curve {self.label!r} has {len(self.rounds)} rounds, {len(self.seconds)} seconds and "
                f"{len(self.errors)} errors. Pass one of each per recorded round."
            )


@dataclass(frozen=True, slots=True)
class ArrayTraffic:
    """One kind of array that a party sent: its size, how often it was sent, and what the receiver learns from it."""

    array: str
    shape: tuple[int, ...]
    dtype: str
    bytes_each: int
    times: int
    meaning: str

    @property
    def bytes_total(self) -> int:
        """Bytes over all times it was sent."""
        return self.bytes_each * self.times


@dataclass(frozen=True, slots=True, eq=False)
class MethodResult:
    """One method's result: quality, cost, `components` (k, m), and everything that a party sent.

    Errors, variances and shares are fractions (0.3 is 30 %). Components are shown in the order given: align them across
    methods to compare them. An oracle is a reference that has all rows in one place. A method without components shares
    nothing. `after_first_round` has the components of parties after the first round, before any exchange.
    """

    name: str
    description: str
    relative_error: float
    bytes_up_per_party: float
    bytes_down_per_party: float
    rounds: int
    seconds: float
    outcome: str
    curve: Curve
    components: npt.NDArray[Any]
    shares: tuple[float, ...]
    sent: tuple[ArrayTraffic, ...]
    is_oracle: bool = False
    init_mode: str = ""
    parties: tuple[PartyResult, ...] = ()
    after_first_round: Mapping[str, LocalComponents] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.components.ndim != 2 or len(self.components) != len(self.shares):
            raise ShapeError(
                f"Method {self.name!r} has components of shape {self.components.shape} and {len(self.shares)} shares. "
                "Pass a (k, m) array and one share per component."
            )

    @property
    def explained_variance(self) -> float:
        """1 − ‖X − W H‖² / ‖X‖²."""
        return 1.0 - self.relative_error * self.relative_error

    @property
    def drift(self) -> float:
        """Σ_p ‖H_p − H‖² / ‖H‖², by position; NaN if parties have no H of their own."""
        return sum(party.drift for party in self.parties) if self.parties else math.nan

    @property
    def aligned_drift(self) -> float:
        """The same after alignment."""
        return sum(party.aligned_drift for party in self.parties) if self.parties else math.nan

    def reorder(self, order: Sequence[int]) -> MethodResult:
        """Return the same with component order[a] in place a, here and at every party."""
        return replace(
            self,
            components=self.components[list(order)],
            shares=tuple(self.shares[i] for i in order),
            parties=tuple(party.reorder(order) for party in self.parties),
            after_first_round={name: parts.reorder(order) for name, parts in self.after_first_round.items()},
        )

    def aligned_with(self, reference: MethodResult) -> MethodResult:
        """Return the same in the order of a reference: the assignment with the largest total cosine."""
        return self.reorder(align_local_components(self.components, reference.components).places)


@dataclass(frozen=True, slots=True)
class PartyHoldings:
    """A party: the number of its rows, and of those with each label (empty: unknown, or not to be shown)."""

    name: str
    rows: int
    labels: Mapping[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """The contents of the page; `lead` is its first paragraph, `never_sent` one sentence on what parties keep.

    `privacy` is what a fit with noise has spent (`PrivacyTracker.to_dict`). `attacks` holds the findings of attacks on
    its messages, or the reason why there are none; None for comparisons, which have neither section.
    """

    title: str
    lead: str
    parties: tuple[PartyHoldings, ...]
    methods: tuple[MethodResult, ...]
    image_shape: tuple[int, int] | None
    feature_names: tuple[str, ...] | None
    settings: Mapping[str, str]
    versions: Mapping[str, str]
    never_sent: str
    privacy: Mapping[str, Any] | None = None
    is_masked: bool = False
    attacks: tuple[PartyFindings, ...] | str | None = None

    def __post_init__(self) -> None:
        for method in self.methods:
            n_features = method.components.shape[1]
            if self.image_shape is not None and self.image_shape[0] * self.image_shape[1] != n_features:
                raise ShapeError(
                    f"image_shape {self.image_shape} does not match the {n_features} "
                    f"features of method {method.name!r}. Correct image_shape, or leave it out."
                )
            if self.feature_names is not None and len(self.feature_names) != n_features:
                raise ShapeError(
                    f"{len(self.feature_names)} feature names do not match the {n_features} features of method "
                    f"{method.name!r}. Pass one name per column, or leave them out."
                )


def _best(methods: Sequence[MethodResult], is_oracle: bool) -> MethodResult | None:
    """Return the method with the lowest finite error among oracles, or among all others with a shared model."""
    ranked = [m for m in methods if m.is_oracle is is_oracle and math.isfinite(m.relative_error) and len(m.components)]
    return min(ranked, key=lambda method: method.relative_error, default=None)


def styles(methods: Sequence[MethodResult]) -> list[str]:
    """Return a class of the style sheet for each method: gray for oracles, a color for each of the others."""
    colors = itertools.cycle(range(N_STYLES))
    return ["oracle" if method.is_oracle else f"s{next(colors)}" for method in methods]


def results(report: Report) -> list[Markup]:
    """Return the verdict in a sentence, then quality and cost of each method; the best of several is marked."""
    methods, best, oracle = report.methods, _best(report.methods, False), _best(report.methods, True)
    labels = ["Relative error", "Points above pooled", "Explained variance", "Sent per party", "Received per party"]
    numbers = [label for label in [*labels, "Rounds", "Seconds"] if oracle or label != labels[1]]
    columns = [Column("Method", False), *map(Column, numbers), Column("Outcome", False)]
    is_comparison = _count_candidates(methods) > 1
    rows = []
    for method, style in zip(methods, styles(methods), strict=True):
        is_marked = method is best and is_comparison
        cells = [
            _name(method, style, is_marked),
            format_percent(method.relative_error),
            *([_points(method, oracle)] if oracle else []),
            format_percent(method.explained_variance),
            "all rows" if method.is_oracle and not method.sent else format_bytes(method.bytes_up_per_party),
            format_bytes(method.bytes_down_per_party),
            f"{method.rounds:,}",
            format_number(method.seconds),
            method.outcome,
        ]
        rows.append(row(columns, cells, "best" if is_marked else "plain"))
    caption = (
        "Relative error is \u2016X \N{MINUS SIGN} WH\u2016 / \u2016X\u2016 over the rows of all parties: 0% is a "
        "perfect fit, lower is better."
    )
    caption += (
        " “Points above pooled” is the distance to the pooled oracle, a run on all rows in one place." if oracle else ""
    )
    caption += " Seconds are those of the rounds, with all parties on one machine, and without compilation."
    return [element("p", _verdict(methods, best, oracle), class_="verdict"), table(caption, columns, rows)]


def _count_candidates(methods: Sequence[MethodResult]) -> int:
    return sum(not method.is_oracle and len(method.components) > 0 for method in methods)


def _name(method: MethodResult, style: str, is_best: bool) -> Markup:
    badges = [element("span", "pooled oracle", class_="badge reference")] if method.is_oracle else []
    badges += [element("span", "best", class_="badge")] if is_best else []
    return element("div", key(style), method.name, *badges, element("span", method.description, class_="description"))


def _points(method: MethodResult, oracle: MethodResult) -> str:
    """Return how far the error is above the oracle's, in percentage points."""
    difference = 100 * (method.relative_error - oracle.relative_error)
    return UNKNOWN if method is oracle or not math.isfinite(difference) else f"{round(difference, 2) + 0.0:+.2f}"


def _verdict(methods: Sequence[MethodResult], best: MethodResult | None, oracle: MethodResult | None) -> str:
    if best is None:
        return "Without pooling the rows, no method reached a shared model with a finite error."
    rivals = _count_candidates(methods)
    error = format_percent(best.relative_error)
    verdict = f"Without pooling the rows, {best.name} reaches a relative error of {error}"
    verdict += f", the lowest of {rivals} methods," if rivals > 1 else ""
    verdict += f" for {format_bytes(best.bytes_up_per_party)} sent per party."
    return f"{verdict} Pooling reaches {format_percent(oracle.relative_error)}." if oracle else verdict


def convergence(report: Report) -> list[Markup]:
    """Return charts of the error over rounds, over bytes if any were sent, and over time; with one legend."""
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
        note += (
            " Over bytes, the pooled oracle and methods that send nothing are horizontal lines at their final error."
        )
    caption = element("figcaption", note, class_="note")
    drawn = element("div", *charts, class_="charts")
    return [element("figure", caption, element("ul", *legend, class_="legend"), drawn)]


def _over_bytes(methods: Sequence[MethodResult], over_rounds: Sequence[Line]) -> list[Line]:
    """Return the curves over bytes sent, or none if nothing was sent."""
    most = max((method.curve.bytes_up[-1] for method in methods if _sends(method)), default=0.0)
    if most == 0:
        return []
    return [
        replace(line, x=method.curve.bytes_up)
        if _sends(method)
        else replace(line, x=(0.0, most), y=(method.relative_error, method.relative_error))
        for method, line in zip(methods, over_rounds, strict=True)
    ]


def _sends(method: MethodResult) -> bool:
    return not method.is_oracle and any(method.curve.bytes_up)


def holdings(report: Report) -> list[Markup]:
    """Return a table of parties × labels: numbers of rows, shaded by their share of the party's rows."""
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
        caption += (
            " Columns count the rows of each label; the darker the shade, the larger their share of the party's rows."
        )
    return [table(caption, columns, rows)]


def _natural(label: str) -> tuple[int, str]:
    return (len(label) if label.isdecimal() else 0, label)


def _heat(count: int, share: float) -> Markup:
    return element("span", f"{count:,}", class_="heat", style=f"--share:{share:.2f}")


def disclosure(report: Report) -> list[Markup]:
    """Return a table of every array that a party sent, method by method, and what was never sent."""
    labels = ("Bytes each", "Times", "Total")
    columns = [Column("Array", False), Column("Shape"), Column("Type", False), *map(Column, labels)]
    columns.append(Column("What it reveals", False))
    bodies = []
    for method, style in zip(report.methods, styles(report.methods), strict=True):
        title = element("th", key(style), method.name, colspan=len(columns), scope="rowgroup")
        lines = [row(columns, _sent_cells(sent)) for sent in method.sent]
        words = "Not federated: it needs every row in one place." if method.is_oracle else "Nothing was sent."
        nothing = element("tr", element("td", words, colspan=len(columns)))
        bodies.append([element("tr", title, class_="group"), *(lines or [nothing])])
    caption = "Every array that one party sent over the whole run, and what it reveals to the receiver."
    kept = element("p", element("strong", "Never sent. "), report.never_sent, class_="kept")
    return [table(caption, columns, *bodies), kept]


def _sent_cells(sent: ArrayTraffic) -> list[str]:
    shape = " \N{MULTIPLICATION SIGN} ".join(map(str, sent.shape)) or "one number"
    costs = [format_bytes(sent.bytes_each), f"{sent.times:,}", format_bytes(sent.bytes_total)]
    return [sent.array, shape, sent.dtype, *costs, sent.meaning]


def reproduction(report: Report) -> list[Markup]:
    """Return settings and versions, side by side."""
    sides = [_listing("Settings", report.settings), _listing("Versions", report.versions)]
    return [element("div", *sides, class_="reproduce")]


def _listing(caption: str, entries: Mapping[str, str]) -> Markup:
    columns = [Column("Name", False), Column("Value", False)]
    return table(caption, columns, [row(columns, [name, value]) for name, value in entries.items()])


def parts(report: Report) -> list[Markup]:
    """Return the components of each method, as images or as lists of their strongest features."""
    is_picture = report.image_shape is not None
    shown = (
        "Each component is an image scaled to its maximum: the more a pixel contrasts with the page, the larger "
        "its value."
        if is_picture
        else f"Each component is a list of its {TOP_FEATURES} strongest features; bars are relative to the strongest."
    )
    note = f"{shown} The percentage is the share of the data that the component explains."
    content = [element("p", note, class_="note")]
    for method, style in zip(report.methods, styles(report.methods), strict=True):
        components = np.nan_to_num(method.components.astype(float), posinf=0.0).clip(min=0.0)
        figures = []
        for i, (values, share) in enumerate(zip(components, method.shares, strict=True), start=1):
            alt = f"Component {i} of {method.name}"
            look = picture(values.reshape(report.image_shape), alt) if is_picture else _features(values, report)
            explains = element("span", format_percent(share) if values.any() else "empty")
            label = element("figcaption", element("b", str(i)), explains)
            figures.append(element("figure", *((look, label) if is_picture else (label, look)), class_="part"))
        content.append(element("h3", key(style), method.name))
        content.append(element("div", *figures, class_="parts" if is_picture else "parts lists"))
    return content


def _features(values: npt.NDArray[Any], report: Report) -> Markup:
    """Return the strongest features with bars; none for a component of zeros."""
    strongest, names = _strongest(values, report, TOP_FEATURES)
    fractions = [float(values[i] / values[strongest[0]]) for i in strongest]
    items = [
        element("li", element("span", name, title=f"{name}: {format_number(fraction)} of the strongest"), bar(fraction))
        for name, fraction in zip(names, fractions, strict=True)
    ]
    return element("ol", *items)


def _strongest(values: npt.NDArray[Any], report: Report, count: int) -> tuple[list[int], list[str]]:
    """Return the strongest features above zero, and their names."""
    strongest = [int(i) for i in np.argsort(-values, kind="stable")[:count] if values[i] > 0]
    return strongest, [f"column {i}" if report.feature_names is None else report.feature_names[i] for i in strongest]


def privacy(report: Report) -> list[Markup]:
    """Return the unit of ε, what each party has spent, and which numbers here no party would release."""
    masked = [element("p", MASKED, class_="kept")] if report.is_masked else []
    if report.privacy is None:
        return [element("p", NO_NOISE, class_="verdict"), *masked]
    account = report.privacy
    verdict = (
        f"ε = {format_number(account['epsilon_spent'])} at δ = {account['delta']:g}, unit {account['unit']}, relation "
        f"{account['relation']}: {account['promise']}."
    )
    columns = [Column("Party", False), Column("ε spent")]
    rows = [row(columns, [name, format_number(spent)]) for name, spent in account["epsilon_by_party"].items()]
    shown = [element("p", _of_release(account), class_="verdict")] if "mechanism" in account else []
    noise = f"{account['noise']} noise of {format_number(account['noise_multiplier'])} times the sensitivity. {PLAN}"
    return [
        element("p", verdict, class_="verdict"),
        *shown,
        table(f"What each party has spent: {noise}", columns, rows),
        element("p", element("strong", "In this simulation only. "), IN_SIMULATION, class_="kept"),
        *masked,
    ]


def _of_release(account: Mapping[str, Any]) -> str:
    """Return what a release of the second moment has shown."""
    return f"Mechanism {account['mechanism']}: {account['verdict']}"


def party_section(report: Report) -> list[Markup]:
    """Return the error of every method at every party; then, method by method, drift and each party's components."""
    evaluated = [method for method in report.methods if method.parties]
    if not evaluated:
        return [element("p", "Nothing was evaluated at single parties.", class_="note")]
    styled = zip(report.methods, styles(report.methods), strict=True)
    blocks = [(m, style) for m, style in styled if m.parties and not m.is_oracle and len(m.components)]
    shown = _initially_open([method for method, _ in blocks])
    return [_fits(evaluated), *(_block(report, method, style, method is shown) for method, style in blocks)]


def _initially_open(methods: Sequence[MethodResult]) -> MethodResult | None:
    """Return the method whose block is open at first: the best with local initialization, or else of all."""
    ranked = [method for method in methods if method.after_first_round] or list(methods)
    return min(ranked, key=lambda method: method.relative_error, default=None)


def _fits(methods: Sequence[MethodResult]) -> Markup:
    alone = next((m for m in methods if m.rounds <= 1 and not math.isnan(m.parties[0].own_error)), None)
    shared = [method for method in methods if len(method.components)]
    columns = [Column("Party", False), Column("Rows"), *([Column("Alone")] if alone else [])]
    columns += [Column(method.name) for method in shared]
    lines = []
    for i, party in enumerate(methods[0].parties):
        own = [format_percent(alone.parties[i].own_error)] if alone else []
        errors = [format_percent(method.parties[i].relative_error) for method in shared]
        lines.append(row(columns, [party.name, f"{party.rows:,}", *own, *errors]))
    caption = "Relative error of the shared model at each party, with weights fitted there."
    if alone:
        caption += f" “Alone” is that of the party's own model ({alone.name}), fitted to its own rows only."
    return table(caption, columns, lines)


def _block(report: Report, method: MethodResult, style: str, is_open: bool) -> Markup:
    title = element("summary", key(style), method.name)
    hint = element("p", _hint(method), class_="note")
    first = [_first_round(report, method)] if method.after_first_round else []
    return element(
        "details",
        title,
        hint,
        *first,
        _final(report, method),
        class_="by-party",
        **({"open": "open"} if is_open else {}),
    )


def _hint(method: MethodResult) -> str:
    if all(party.own is None for party in method.parties):
        return (
            "Parties have no local components here. Percentages are the share of each component in what a party fits."
        )
    return (
        "Columns are the shared components; below each is the matching component of every party. The number is its "
        "position in the party's own model; if all numbers of a column are equal, parties agree on the order. "
        "Percentages are the share of the shared component in what a party fits. Faded components, with their position "
        "in parentheses, have no match and fill the free places. Drift is "
        "‖H_p − H‖² / ‖H‖², by position and after alignment."
    )


def _first_round(report: Report, method: MethodResult) -> Markup:
    """Return a table of the components after the first round, in the order of the final model."""
    parts = range(min(MOST_PARTS, len(method.components)))
    columns = [Column("", False), *(Column(str(i + 1), False) for i in parts)]
    lines = [
        row(
            columns, ["shared", *(_thumbnail(report, method.components[i], f"Shared component {i + 1}") for i in parts)]
        )
    ]
    for name, own in list(method.after_first_round.items())[:MOST_PARTIES]:
        lines.append(row(columns, [name, *(_own(report, name, own, i) for i in parts)]))
    caption = "After the first round, before any exchange. Each party has its own order; here, the shared one is used."
    return table(caption + _not_shown(method, len(method.after_first_round)), columns, lines)


def _final(report: Report, method: MethodResult) -> Markup:
    parts = range(min(MOST_PARTS, len(method.components)))
    columns = [Column("", False), *map(Column, NUMBERS), *(Column(str(i + 1), False) for i in parts)]
    looks = [_thumbnail(report, method.components[i], f"Shared component {i + 1}") for i in parts]
    captions = [element("span", _short(method.shares[i]), class_="mini") for i in parts]
    total = f"{sum(party.rows for party in method.parties):,}"
    drifts = [format_number(method.drift), format_number(method.aligned_drift)]
    heads = [Markup(look + caption) for look, caption in zip(looks, captions, strict=True)]
    lines = [row(columns, ["shared", total, format_percent(method.relative_error), UNKNOWN, *drifts, *heads], "best")]
    for party in method.parties[:MOST_PARTIES]:
        lines.append(row(columns, [party.name, *_numbers(party), *(_cell(report, party, i) for i in parts)]))
    caption = "After the best round." if method.rounds > 1 else "After the only round."
    return table(caption + _not_shown(method, len(method.parties)), columns, lines)


def _not_shown(method: MethodResult, parties: int) -> str:
    """Return a sentence on what is left out for lack of space."""
    more = [(parties - MOST_PARTIES, "parties"), (len(method.components) - MOST_PARTS, "components")]
    missing = [f"{count:,} more {noun}" for count, noun in more if count > 0]
    return f" Not shown: {' and '.join(missing)}." if missing else ""


def _numbers(party: PartyResult) -> list[str]:
    errors = [format_percent(party.relative_error), format_percent(party.own_error)]
    return [f"{party.rows:,}", *errors, format_number(party.drift), format_number(party.aligned_drift)]


def _cell(report: Report, party: PartyResult, i: int) -> Markup:
    share = element("span", _short(party.shares[i]), class_="mini")
    return share if party.own is None else Markup(_own(report, party.name, party.own, i) + share)


def _short(share: float) -> str:
    return f"{100 * share:.1f}%" if math.isfinite(share) else UNKNOWN


def _own(report: Report, name: str, own: LocalComponents, i: int) -> Markup:
    place, has_partner = own.places[i] + 1, own.has_partner[i]
    about = f"Component {place} of {name}" + ("" if has_partner else ", without a match")
    look = _thumbnail(report, own.components[i], about, "part" if has_partner else "part unmatched")
    return Markup(look + element("b", str(place) if has_partner else f"({place})", class_="mini"))


def _thumbnail(report: Report, values: np.ndarray, about: str, style: str = "part") -> Markup:
    """Return a thumbnail of a component: an image, or the names of its strongest features."""
    ink = np.nan_to_num(values.astype(float), posinf=0.0).clip(min=0.0)
    if report.image_shape is not None:
        return element("div", picture(ink.reshape(report.image_shape), about), class_=style, title=about)
    _, names = _strongest(ink, report, PARTY_TOP_FEATURES)
    return element("div", ", ".join(names) or "empty", class_=f"{style} words", title=about)


SECTIONS = (
    ("results", "Results", results),
    ("convergence", "Convergence", convergence),
    ("components", "Components", parts),
    ("by-party", "At each party", party_section),
    ("parties", "Rows of each party", holdings),
    ("disclosure", "What left each party", disclosure),
    ("reproduce", "Reproduce", reproduction),
)
SINGLE_FIT_SECTIONS = (
    ("privacy", "Privacy", privacy),
    (attack_report.ANCHOR, attack_report.TITLE, lambda report: _attacks(report)),
)
"""Sections for a single fit, placed before the last one."""


def render(report: Report) -> str:
    """Return the page as text; equal reports give equal pages."""
    contents = SECTIONS if report.attacks is None else (*SECTIONS[:-1], *SINGLE_FIT_SECTIONS, SECTIONS[-1])
    links = [element("a", title, href=f"#{anchor}") for anchor, title, _ in contents]
    header = element(
        "header",
        element("h1", report.title),
        element("p", report.lead, class_="lead"),
        element("nav", *links, aria_label="Contents"),
    )
    body = [section(anchor, title, *content(report)) for anchor, title, content in contents]
    return document(report.title, header, element("main", *body))


def _attacks(report: Report) -> list[Markup]:
    found = report.attacks
    return [element("p", found, class_="kept")] if isinstance(found, str) else attack_report.attacks(found or ())


def write_report(path: str | os.PathLike[str], report: Report) -> Path:
    """Write the page atomically: a reader finds the old file or the complete new one."""
    page = render(report).encode("utf-8", "replace")
    with atomic_write(path) as partial:
        partial.write_bytes(page)
    return Path(path)
