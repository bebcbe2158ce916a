"""The parties' own section of the report: how each method fits each of them, and their parts beside the shared ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from partsong.evaluate.at_party import AtParty, OwnParts
from partsong.evaluate.drawing import key, picture
from partsong.evaluate.findings import MethodFindings, Report
from partsong.evaluate.page import UNKNOWN, Column, Markup, element, percent, row, significant, table
from partsong.evaluate.sections import styles

MOST_PARTIES, MOST_PARTS, TOP_FEATURES = 20, 32, 3
NUMBERS = ("Rows", "Error", "Own error", "Drift", "Aligned")


def voices(report: Report) -> list[Markup]:
    """The fit of every method at every party; then, method by method, drift, and shares and pictures of each part."""
    told = [method for method in report.methods if method.parties]
    if not told:
        return [element("p", "Nothing was computed at single parties.", class_="note")]
    blocks = [(m, style) for m, style in zip(report.methods, styles(report.methods), strict=True) if _has_parts(m)]
    shown = _most_telling([method for method, _ in blocks])
    return [_fits(told), *(_block(report, method, style, method is shown) for method, style in blocks)]


def _has_parts(method: MethodFindings) -> bool:
    return bool(method.parties) and not method.is_oracle and len(method.components) > 0


def _most_telling(methods: Sequence[MethodFindings]) -> MethodFindings | None:
    """The best of those whose parties began alone, or else of all: the block that is open at first."""
    ranked = [method for method in methods if method.found_alone] or list(methods)
    return min(ranked, key=lambda method: method.relative_error, default=None)


def _fits(methods: Sequence[MethodFindings]) -> Markup:
    alone = next((m for m in methods if m.rounds <= 1 and not math.isnan(m.parties[0].own_error)), None)
    shared = [method for method in methods if len(method.components)]
    columns = [Column("Party", False), Column("Rows"), *([Column("Alone")] if alone else [])]
    columns += [Column(method.name) for method in shared]
    lines = []
    for i, party in enumerate(methods[0].parties):
        own = [percent(alone.parties[i].own_error)] if alone else []
        errors = [percent(method.parties[i].relative_error) for method in shared]
        lines.append(row(columns, [party.name, f"{party.rows:,}", *own, *errors]))
    caption = "Relative error at each party of the shared model, with weights fitted to it there."
    if alone:
        caption += (
            f" “Alone” is that of the party's own model ({alone.name}), which fits its own rows and nobody else's."
        )
    return table(caption, columns, lines)


def _block(report: Report, method: MethodFindings, style: str, is_open: bool) -> Markup:
    title = element("summary", key(style), method.name)
    hint = element("p", _hint(method), class_="note")
    begun = [_alone(report, method)] if method.found_alone else []
    return element(
        "details", title, hint, *begun, _final(report, method), class_="voices", **({"open": "open"} if is_open else {})
    )


def _hint(method: MethodFindings) -> str:
    if all(party.own is None for party in method.parties):
        return "Parties have no parts of their own here. Percentages are the share of each part in what a party fits."
    return (
        "Columns are the shared parts; below each is the part of every party that belongs to it. The number tells its "
        "place in the party's own model: equal numbers down a column mean that parties agree on the order. Percentages "
        "are the share of the shared part in what a party fits. Faded parts, with their place in brackets, have no "
        "partner: they have nothing in common with the shared part, and stand where there was room. Drift is "
        "‖H_p − H‖² / ‖H‖², by position and after alignment."
    )


def _alone(report: Report, method: MethodFindings) -> Markup:
    """Parts after the first round, in the order of the model of the last."""
    parts = range(min(MOST_PARTS, len(method.components)))
    columns = [Column("", False), *(Column(str(i + 1), False) for i in parts)]
    lines = [row(columns, ["shared", *(_look(report, method.components[i], f"Shared part {i + 1}") for i in parts)])]
    for name, own in list(method.found_alone.items())[:MOST_PARTIES]:
        lines.append(row(columns, [name, *(_own(report, name, own, i) for i in parts)]))
    caption = "After the first round: found alone, each party in an order of its own, here in the shared order."
    return table(caption + _left_out(method, len(method.found_alone)), columns, lines)


def _final(report: Report, method: MethodFindings) -> Markup:
    parts = range(min(MOST_PARTS, len(method.components)))
    columns = [Column("", False), *map(Column, NUMBERS), *(Column(str(i + 1), False) for i in parts)]
    looks = [_look(report, method.components[i], f"Shared part {i + 1}") for i in parts]
    captions = [element("span", _short(method.shares[i]), class_="mini") for i in parts]
    total = f"{sum(party.rows for party in method.parties):,}"
    drifts = [significant(method.drift), significant(method.aligned_drift)]
    heads = [Markup(look + caption) for look, caption in zip(looks, captions, strict=True)]
    lines = [row(columns, ["shared", total, percent(method.relative_error), UNKNOWN, *drifts, *heads], "best")]
    for party in method.parties[:MOST_PARTIES]:
        lines.append(row(columns, [party.name, *_numbers(party), *(_cell(report, party, i) for i in parts)]))
    caption = "After the best round." if method.rounds > 1 else "After the only round."
    return table(caption + _left_out(method, len(method.parties)), columns, lines)


def _left_out(method: MethodFindings, parties: int) -> str:
    """What does not fit on the page."""
    more = [(parties - MOST_PARTIES, "parties"), (len(method.components) - MOST_PARTS, "parts")]
    told = [f"{count:,} more {noun}" for count, noun in more if count > 0]
    return f" Not shown: {' and '.join(told)}." if told else ""


def _numbers(party: AtParty) -> list[str]:
    errors = [percent(party.relative_error), percent(party.own_error)]
    return [f"{party.rows:,}", *errors, significant(party.drift), significant(party.aligned_drift)]


def _cell(report: Report, party: AtParty, i: int) -> Markup:
    share = element("span", _short(party.shares[i]), class_="mini")
    return share if party.own is None else Markup(_own(report, party.name, party.own, i) + share)


def _short(share: float) -> str:
    return f"{100 * share:.1f}%" if math.isfinite(share) else UNKNOWN


def _own(report: Report, name: str, own: OwnParts, i: int) -> Markup:
    place, has_partner = own.places[i] + 1, own.has_partner[i]
    about = f"Part {place} of {name}" + ("" if has_partner else ", without a partner")
    look = _look(report, own.components[i], about, "part" if has_partner else "part alone")
    return Markup(look + element("b", str(place) if has_partner else f"({place})", class_="mini"))


def _look(report: Report, values: np.ndarray, about: str, style: str = "part") -> Markup:
    """A part in small: a picture, or the names of its strongest features."""
    ink = np.nan_to_num(values.astype(float), posinf=0.0).clip(min=0.0)
    if report.image_shape is not None:
        return element("div", picture(ink.reshape(report.image_shape), about), class_=style, title=about)
    strongest = [int(i) for i in np.argsort(-ink, kind="stable")[:TOP_FEATURES] if ink[i] > 0]
    names = [f"column {i}" if report.feature_names is None else report.feature_names[i] for i in strongest]
    return element("div", ", ".join(names) or "empty", class_=f"{style} words", title=about)
