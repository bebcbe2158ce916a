"""Ledger and audit log of a site tell of each other: what has left was charged, and what was charged is of known runs.

    audit line of work or of a phase, no refusal   →  ledger line of the same run, round and attempt, with its noise
    ledger line of a run                           →  some audit line of that run, no refusal: its start was answered

A line of the ledger without one of the log is no fault: its work was cut off, or has failed, before anything had left.
"""

from __future__ import annotations

from shlex import quote

from partsong.errors import FormatError
from partsong.federation.audit import Audit, Departures
from partsong.federation.ledger import Books, SiteLedger
from partsong.federation.refusals import Denied

Place = tuple[str, int, int]
"""Run, round and attempt."""

NEWEST = "Put the newest copy of both files back. Where there is none,"


def require_whole(ledger: SiteLedger, audit: Audit) -> None:
    """Refuse to go on (`ledger`) where one of the two is not as it was written, or does not cover the other."""
    try:
        books, left = ledger.books(), audit.departures()
    except FormatError as error:
        raise Denied("ledger", str(error)) from error
    folder = quote(str(ledger.path.parent))
    way_out = (
        f"{NEWEST} charge what is known to have left, and note what is not known: partsong audit make-up {folder} "
        '--why "one of the files was lost".'
    )
    uncharged, unknown, other = not_charged(books, left), not_in_log(books, left), _with_other_noise(books, left)
    if uncharged:
        raise Denied(
            "ledger",
            f"{audit.path.name} tells of {len(uncharged)} attempts whose answers have left (the first: "
            f"{_named(uncharged[0])}), and {ledger.path.name} has not charged them: it is an older copy, or lines were "
            f"taken from its end. {way_out}",
        )
    if other:
        raise Denied(
            "ledger",
            f"{_named(other[0])} has left with other noise than it was charged for. {NEWEST} move {ledger.path.name} "
            f"out of the folder, and charge what has left as {audit.path.name} tells, and what else was in those "
            f"{books.serial} lines at the highest of these costs: partsong audit make-up {folder} "
            f'--count {books.serial} --why "the ledger was not that of the log".',
        )
    if unknown:
        raise Denied(
            "ledger",
            f"{ledger.path.name} has charged {len(unknown)} attempts of runs (the first: {_named(unknown[0])}) of "
            f"which {audit.path.name} has no line: the log was removed, or lines were taken from its end. {way_out}",
        )


def not_charged(books: Books, left: Departures) -> list[Place]:
    """Attempts that have left, and are not in the ledger."""
    charged = {run: {(one.round, one.attempt) for one in charges} for run, charges in books.runs.items()}
    return [
        (run, *at) for run, told in left.runs.items() for at in sorted(told.works) if at not in charged.get(run, ())
    ]


def not_in_log(books: Books, left: Departures) -> list[Place]:
    """Attempts of runs of which the log knows nothing, or refusals alone."""
    known = {run for run, told in left.runs.items() if told.is_begun}
    runs = {run: charges for run, charges in books.runs.items() if run not in known}
    return [(run, one.round, one.attempt) for run, charges in runs.items() for one in charges]


def _with_other_noise(books: Books, left: Departures) -> list[Place]:
    """As far as lines were not made up, which are about no request."""
    charged = ((run, one) for run, charges in books.runs.items() for one in charges if one.about is not None)
    noises = {(run, one.round, one.attempt): one.noise for run, one in charged}
    told = {(run, *at): noise for run, one in left.runs.items() for at, noise in one.works.items()}
    return [place for place, noise in told.items() if place in noises and noises[place] != noise]


def _named(place: Place) -> str:
    return f"run {place[0]}, round {place[1]}, attempt {place[2]}"
