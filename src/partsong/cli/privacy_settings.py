"""Privacy from the command line: which of its options need each other, and the promise that they make."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import typer

from partsong.cli.choices import MASKED_BOUND, NOISES, RELATIONS_OF, UNITS
from partsong.cli.wording import option
from partsong.methods import ASYNCHRONOUS, SENDS_H

if TYPE_CHECKING:
    from partsong.cli.fit_settings import FederationSettings
    from partsong.promises import Privacy

ROW, PARTY = UNITS
FOR_NOISE = {"epsilon", "delta", "unit", "row_bound", "clip", "noise", "relation"}
FOR_ROWS, FOR_UPLOADS = {"row_bound"}, {"clip", "noise"}
FOR_PRIVACY = FOR_NOISE | {"masked", "masked_bound"}


def require_privacy(known: Mapping[str, Any], given: Collection[str]) -> None:
    """Refuse options that mean nothing together, before any data are read."""
    for name, is_wrong, why in _conflicts(known, given):
        if is_wrong:
            raise typer.BadParameter(why, param_hint=option(name))


def complete_privacy(known: dict[str, Any], given: Collection[str]) -> None:
    """Defaults of the promise that is asked for; None for each setting where there is none.

    `masked` becomes the public bound of masked numbers, None where there are no masks.
    """
    require_privacy(known, given)
    bound = MASKED_BOUND if known["masked_bound"] is None else known["masked_bound"]
    is_kept = isinstance(known["masked"], float) and "masked_bound" not in given
    known["masked"] = known["masked"] if is_kept else bound if known["masked"] else None
    del known["masked_bound"]
    if known["epsilon"] is None:
        known |= dict.fromkeys(FOR_NOISE)
        return
    known["tol"] = 0.0
    known["delta"] = 1e-5 if known["delta"] is None else known["delta"]
    known["relation"] = known["relation"] or RELATIONS_OF[known["unit"]][0]
    if known["unit"] == PARTY:
        known["clip"] = 1.0 if known["clip"] is None else known["clip"]
        known["noise"] = known["noise"] or NOISES[0]


def promise_of(settings: FederationSettings) -> Privacy | None:
    """The promise as a value."""
    from partsong.promises import PartyPrivacy, RowPrivacy

    if settings.epsilon is None or settings.delta is None or settings.relation is None:
        return None
    if settings.unit == PARTY:
        clip, kind = settings.clip or 1.0, settings.noise or NOISES[0]
        return PartyPrivacy(settings.epsilon, settings.delta, clip, kind, settings.relation)
    assert settings.row_bound is not None
    return RowPrivacy(settings.epsilon, settings.row_bound, settings.delta, settings.relation)


def _conflicts(known: Mapping[str, Any], given: Collection[str]) -> list[tuple[str, bool, str]]:
    """Option, whether it is wrong here, and why."""
    method, unit = known["method"], known["unit"]
    if known["epsilon"] is None:
        idle = next(iter(sorted(FOR_NOISE.intersection(given))), "")
        return [(idle, bool(idle), "needs --epsilon: there is no noise without it."), *_masks(known, given)]
    foreign = next(iter(sorted((FOR_UPLOADS if unit == ROW else FOR_ROWS).intersection(given))), "")
    others = ", ".join(RELATIONS_OF.get(unit, ()))
    is_relation_wrong = known["relation"] is not None and known["relation"] not in RELATIONS_OF.get(unit, ())
    measured = next((name for name in ("time_budget", "tol") if name in given and known[name]), "")
    return [
        ("unit", unit is None, f"about whom is ε? {ROW}: any single row; {PARTY}: all data of a party."),
        ("delta", known["delta"] is not None and known["delta"] >= 1, "δ must be below 1."),
        (foreign, bool(foreign), f"not for --unit {unit}."),
        ("relation", is_relation_wrong, f"--unit {unit} has {others}."),
        ("method", unit == ROW and method != "exact", "--unit row is for exact, whose messages are sums over rows."),
        ("method", unit == PARTY and method not in SENDS_H, f"--unit party is for {', '.join(SENDS_H)}."),
        ("row_bound", unit == ROW and known["row_bound"] is None, "--unit row needs one: the norm of a large row."),
        ("local_steps", unit == ROW and "local_steps" in given, "not for --unit row."),
        (measured, bool(measured), "with --epsilon nothing measured may end a run; give --rounds."),
        *_masks(known, given),
    ]


def _masks(known: Mapping[str, Any], given: Collection[str]) -> list[tuple[str, bool, str]]:
    is_alone, is_bounded = known["masked"] and known["method"] in ASYNCHRONOUS, "masked_bound" in given
    return [
        ("masked_bound", is_bounded and not known["masked"], "needs --masked."),
        ("masked_bound", is_bounded and known["epsilon"] is not None, "not with --epsilon: it follows from it."),
        ("masked", bool(is_alone), f"{known['method']} hears one party at a time, and masks need several."),
    ]
