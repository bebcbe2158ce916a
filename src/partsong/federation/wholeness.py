"""Ledger and audit log of a site tell of each other: what has left was charged, and what was charged has left.

    audit line of work or of a phase, no refusal   →  ledger line of the same run, round and attempt, with its noise
    ledger line of a run                           →  such an audit line; or it is the last one of the ledger, or the
                                                      next one says that nothing had left (`unheard`)

The last line may be one of work that was cut off, or has failed, before anything had left; if that is so, the next line
says it. So a log that is older than the ledger by more than one attempt is found, and nothing is done a second time.
"""

from __future__ import annotations

from pathlib import Path
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
        books, left = both_read(ledger, audit)
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
            f"{books.serial} releases as without noise: partsong audit make-up {folder} "
            f'--count {books.serial} --why "the ledger was not that of the log".',
        )
    if unknown:
        raise Denied(
            "ledger",
            f"{ledger.path.name} has charged {len(unknown)} attempts (the first: {_named(unknown[0])}) of which "
            f"{audit.path.name} has no line: it is an older copy, was removed, or lines were taken from its end. "
            f"{way_out}",
        )


def both_read(ledger: SiteLedger, audit: Audit) -> tuple[Books, Departures]:
    """Both, each compared line by line; FormatError with the way on where one was edited."""
    books = ledger_read(ledger)
    try:
        return books, audit.departures()
    except FormatError as error:
        raise _edited(audit.path, error) from error


def ledger_read(ledger: SiteLedger) -> Books:
    """The same of the ledger alone."""
    try:
        return ledger.books()
    except FormatError as error:
        raise _edited(ledger.path, error) from error


def not_charged(books: Books, left: Departures) -> list[Place]:
    """Attempts that have left, and are not in the ledger."""
    charged = {run: {(one.round, one.attempt) for one in charges} for run, charges in books.runs.items()}
    return [
        (run, *at) for run, told in left.runs.items() for at in sorted(told.works) if at not in charged.get(run, ())
    ]


def not_in_log(books: Books, left: Departures, *, with_last: bool = False) -> list[Place]:
    """Attempts that were charged, and of which the log does not say that something has left, though it should: all of a
    run that it does not know, or knows by refusals alone; of others, but for those that the ledger says had not left,
    and for the last line of all.
    """
    excused = books.unheard if with_last else books.unheard | {books.lines}
    found: dict[Place, None] = {}
    for run, charges in books.runs.items():
        told = left.runs.get(run)
        works = {} if told is None else told.works
        is_known = told is not None and told.is_begun
        for one in charges:
            if (one.round, one.attempt) not in works and not (is_known and one.number in excused):
                found[run, one.round, one.attempt] = None
    return list(found)


def place_of_last(books: Books) -> Place | None:
    """What the last line of the ledger is for; None where there is none, or it was made up."""
    ends = ((run, charges[-1]) for run, charges in books.runs.items())
    return next(((run, one.round, one.attempt) for run, one in ends if one.number == books.lines), None)


def is_last_unheard(books: Books, left: Departures) -> bool:
    """Whether the last line of the ledger is for work of which nothing has left."""
    place = place_of_last(books)
    if place is None:
        return False
    told = left.runs.get(place[0])
    return told is None or place[1:] not in told.works


def _edited(path: Path, error: FormatError) -> FormatError:
    return FormatError(
        f"{error} To go on, move {path.name} out of the folder (do not delete it: it is what there is to look into), "
        "put the newest sound copy in its place, and charge or note what that lacks, or all where there is none: "
        f'partsong audit make-up {quote(str(path.parent))} --why "{path.name} was edited".'
    )


def _with_other_noise(books: Books, left: Departures) -> list[Place]:
    """As far as lines were not made up, which are about no request."""
    charged = ((run, one) for run, charges in books.runs.items() for one in charges if one.about is not None)
    noises = {(run, one.round, one.attempt): one.noise for run, one in charged}
    told = {(run, *at): noise for run, one in left.runs.items() for at, noise in one.works.items()}
    return [place for place, noise in told.items() if place in noises and noises[place] != noise]


def _named(place: Place) -> str:
    return f"run {place[0]}, round {place[1]}, attempt {place[2]}"
