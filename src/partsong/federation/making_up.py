"""Lines for what a site's ledger and audit log do not know of: after a copy was put back, or a file was lost.

What the log says has left is charged, attempt by attempt, at the cost that the log tells. What was charged, and the log
does not know, is noted there as left. Releases of which nothing is known but their number, as a server's (`behind`),
are charged as releases without noise, for which no ε holds, unless their cost is stated: what is left of a ledger says
nothing of what is gone. That number is of all releases that the ledger lacks; those which the log tells of are in it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from partsong.errors import FileError, ParameterError
from partsong.federation.audit import Audit
from partsong.federation.chain import Chain
from partsong.federation.ledger import MOST_MADE_UP, SiteLedger
from partsong.federation.locks import locked
from partsong.federation.wholeness import Place, both_read, not_charged, not_in_log
from partsong.privacy.release import Release

FILES = ("ledger.jsonl", "audit.jsonl", "site.log")
"""One of which a site has that has ever answered; no folder of a server has any."""


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

    `release`: what each of those has cost of which the log does not tell; None: they had no noise.
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
        for place in charged:
            ledger.make_up(1, costs.get(place), why, place)
        noises = {(run, one.round, one.attempt): one.noise for run, own in books.runs.items() for one in own}
        for place in noted:
            audit.make_up(place, noises[place], why)
        besides = max(0, count - len(charged))
        if besides:
            ledger.make_up(besides, release, why)
    return MadeUp(tuple(charged), tuple(noted), besides)


def _told_costs(log: Path) -> dict[Place, Release]:
    """What each attempt has cost, as the log tells where its answers have left: a refusal, or another kind of answer
    under the same round and attempt, has cost nothing.
    """
    left = (one for one in Chain(log).lines() if one["refusal"] is None and one["kind"] in ("work", "reduce"))
    told = {(one["run"], one["round"], one["attempt"]): one.get("release") for one in left}
    return {place: Release.from_json(release) for place, release in told.items() if release is not None}
