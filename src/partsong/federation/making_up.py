"""Lines for what a site's ledger and audit log do not know of: after a copy was put back, or a file was lost.

What the log says has left is charged, attempt by attempt, at the cost that the log tells. What was charged, and the log
does not know, is noted there as left, at the cost that the ledger tells. Releases of which nothing is known but their
number, as a server's (`behind`), are charged as releases without noise, for which no ε holds, unless their cost is
stated: what is left of a ledger says nothing of what is gone. That number is of all releases that the ledger lacks;
those which the log tells of are in it. A cost that is stated must be about what books and policy are about: two
promises have no ε together, and nothing could be charged after them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from partsong.errors import FileError, ParameterError
from partsong.federation.audit import Audit
from partsong.federation.chain import Chain
from partsong.federation.ledger import MOST_MADE_UP, SiteLedger
from partsong.federation.locks import locked
from partsong.federation.policy import Policy
from partsong.federation.wholeness import Place, both_read, not_charged, not_in_log
from partsong.privacy.release import Release

FILES = ("ledger.jsonl", "audit.jsonl", "site.log")
"""One of which a site has that has ever answered; no folder of a server has any."""

LEAVE_OUT = "leave --release out: releases of which only the number is known are charged as without noise."


@dataclass(frozen=True, slots=True)
class MadeUp:
    """What the ledger was charged with, attempts that were noted in the log, and charges of no run."""

    charged: tuple[Place, ...]
    noted: tuple[Place, ...]
    of_no_run: int


def state_at(place: Path) -> Path:
    """The folder with ledger and log: of a site, or that folder itself."""
    tried = (place / "state", place)
    found = next((path for path in tried if _is_of_site(path)), None)
    if found is None:
        raise FileError(
            f"{place}: this is not the folder of a site that has ever answered. Name the one with site.toml and state/ "
            "in it, at the site."
        )
    return found


def _is_of_site(path: Path) -> bool:
    """Also where all of it is lost but that the site was there."""
    was_there = (path / "lock").exists() and (path.parent / "site.toml").exists()
    return was_there or any((path / name).exists() for name in FILES)


def stated_release(text: str) -> Release:
    """A cost as ledger and log write it."""
    try:
        return Release.from_json(json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise ParameterError(
            "A release is stated as lines of ledger.jsonl and audit.jsonl have it, such as "
            f"{json.dumps(Release('gaussian', 2.0).to_json())}; got {text[:200]!r}."
        ) from error


def make_up(state: Path, why: str, count: int = 0, release: Release | None = None) -> MadeUp:
    """Write what is missing: `count` releases in the ledger, or as many as the log tells of; each line says `why`.

    `release`: what each of those has cost of which the log does not tell; None: they had no noise. One that could not
    be added up with what is charged here, or has no noise, is refused before anything is written.
    """
    if count > MOST_MADE_UP:
        raise ParameterError(
            f"No site has released {count} times; at most {MOST_MADE_UP} are made up. If that number is a server's, "
            "ask there what it has counted."
        )
    ledger, audit = SiteLedger(state / "ledger.jsonl"), Audit(state / "audit.jsonl")
    with locked(state / "lock", waits=True):
        books, left = both_read(ledger, audit)
        charged, unknown = not_charged(books, left), not_in_log(books, left)
        is_amiss = bool(charged or unknown or count)
        noted = not_in_log(books, left, with_last=True) if is_amiss else []
        costs = _told_costs(audit.path)
        if release is not None:
            _require_adds_up(release, (*books.releases, *(costs[place] for place in charged if place in costs)))
            _require_of_policy(release, state.parent / "site.toml")
        for place in charged:
            ledger.make_up(1, costs.get(place), why, place)
        paid = _charged_costs(ledger)
        for place in noted:
            audit.make_up(place, paid[place], why)
        besides = max(0, count - len(charged))
        if besides:
            ledger.make_up(besides, release, why)
    return MadeUp(tuple(charged), tuple(noted), besides)


def _require_adds_up(stated: Release, known: Iterable[Release]) -> None:
    """One promise for all that a ledger holds, with noise."""
    if stated.kind == "none":
        raise ParameterError(f'A release of kind "none" has no noise, and states no cost. For such ones {LEAVE_OUT}')
    promises = {(one.unit, one.relation) for one in known if one.kind != "none"}
    if promises and (stated.unit, stated.relation) not in promises:
        told = " and ".join(f"a {unit} ({relation})" for unit, relation in sorted(promises))
        raise ParameterError(
            f"The release that is stated is about a {stated.unit} ({stated.relation}), and ledger and log of this site "
            f"are about {told}: these do not add up to one epsilon. Take it from a copy of this site's own ledger or "
            f"log, or {LEAVE_OUT}"
        )


def _require_of_policy(stated: Release, place: Path) -> None:
    """About the unit of the site's budget, where it has one."""
    allowance = Policy.read(place).privacy if place.exists() else None
    if allowance is not None and stated.unit != allowance.unit:
        raise ParameterError(
            f"The release that is stated is about a {stated.unit}, and privacy.unit in {place} is "
            f"{allowance.unit!r}: nothing could be charged to that budget after it. Take it from a copy of this site's "
            f"own ledger or log, or {LEAVE_OUT}"
        )


def _charged_costs(ledger: SiteLedger) -> dict[Place, Release | None]:
    """What each attempt was charged at; None: without noise."""
    lines = ((tuple(line["attempt"]), line["release"]) for line in ledger.chain.lines())
    return {place: None if cost is None else Release.from_json(cost) for place, cost in lines}


def _told_costs(log: Path) -> dict[Place, Release]:
    """What each attempt has cost, as the log tells where its answers have left: a refusal, or another kind of answer
    under the same round and attempt, has cost nothing.
    """
    left = (one for one in Chain(log).lines() if one["refusal"] is None and one["kind"] in ("work", "reduce"))
    told = {(one["run"], one["round"], one["attempt"]): one.get("release") for one in left}
    return {place: Release.from_json(release) for place, release in told.items() if release is not None}
