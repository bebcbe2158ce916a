"""Lines for what a site's ledger and audit log do not know of: after a copy was put back, or a file was lost.

What the log says has left is charged, attempt by attempt, at the cost that the log tells. What was charged in runs that
the log does not know is noted there as left. For releases of which nothing is known but their number, as a server's
(`behind`), the costliest that there ever was is charged; without noise where one was, or where there is none. That
number is of all lines that the ledger lacks, and those which the log tells of are among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from partsong.errors import FileError
from partsong.federation.audit import Audit
from partsong.federation.chain import Chain
from partsong.federation.ledger import Books, SiteLedger
from partsong.federation.locks import locked
from partsong.federation.wholeness import Place, not_charged, not_in_log
from partsong.privacy.accounting import Ledger
from partsong.privacy.release import Release
from partsong.spending import USUAL_DELTA

FILES = ("ledger.jsonl", "audit.jsonl", "lock")


@dataclass(frozen=True, slots=True)
class MadeUp:
    """What the ledger was charged with, attempts that were noted in the log, and charges of no run."""

    charged: tuple[Place, ...]
    noted: tuple[Place, ...]
    of_no_run: int


def state_at(place: Path) -> Path:
    """The folder with ledger and log: of a site, or that folder itself."""
    tried = (place / "state", place)
    found = next((path for path in tried if any((path / name).exists() for name in FILES)), None)
    if found is None:
        raise FileError(f"{place}: this is not the folder of a site that has ever answered. Name the one with state/.")
    return found


def make_up(state: Path, why: str, count: int = 0) -> MadeUp:
    """Write the lines that are missing: `count` in the ledger, or as many as the log tells of; each says `why`."""
    ledger, audit = SiteLedger(state / "ledger.jsonl"), Audit(state / "audit.jsonl")
    with locked(state / "lock", waits=True):
        books, left = ledger.books(), audit.departures()
        charged, noted = not_charged(books, left), not_in_log(books, left)
        costs = _told_costs(audit.path)
        for place in charged:
            ledger.make_up(1, costs.get(place), why, place)
        noises = {(run, one.round, one.attempt): one.noise for run, own in books.runs.items() for one in own}
        for place in noted:
            audit.make_up(place, noises[place], why)
        unknown = max(0, count - len(charged))
        ledger.make_up(unknown, costliest(ledger.books()), why)
    return MadeUp(tuple(charged), tuple(noted), unknown)


def costliest(books: Books) -> Release | None:
    """What the dearest release has cost; None where one had no noise, or nothing was released."""
    if books.noiseless:
        return None
    return max(books.releases, key=lambda one: Ledger(((one, 1),)).epsilon(USUAL_DELTA), default=None)


def _told_costs(log: Path) -> dict[Place, Release]:
    """What each attempt has cost, as the log tells where its answers have left: a refusal, or another kind of answer
    under the same round and attempt, has cost nothing.
    """
    left = (one for one in Chain(log).lines() if one["refusal"] is None and one["kind"] in ("work", "reduce"))
    told = {(one["run"], one["round"], one["attempt"]): one.get("release") for one in left}
    return {place: Release.from_json(release) for place, release in told.items() if release is not None}
