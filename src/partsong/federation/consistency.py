"""Whether the ledger and the audit log of a site fit together, and the opening balance that lets a site go on.

    audit line of work or of a phase, no refusal   →  ledger line of the same run, round and attempt, with its noise
    ledger line of a run                           →  such an audit line; or it is the last one of the ledger, or the
                                                      next one says that nothing had left (`unheard`)

The last line may be one of work that was cut off, or has failed, before anything had left; if that is so, the next line
says it. So a copy of one file that is older than the other by more than one attempt is found, and nothing is done a
second time.

Lines that an opening balance covers are not compared: those of the ledger before it, and the first `log_lines` of the
log. It is what a site states where newer copies of these files are lost.
"""

from __future__ import annotations

from pathlib import Path

from partsong.errors import FileError, FormatError, ParameterError
from partsong.federation.audit_log import Audit, Departure, Departures
from partsong.federation.ledger import Books, OpeningBalance, SiteLedger
from partsong.federation.locks import locked
from partsong.federation.policy import Policy
from partsong.federation.setup.site_policy import has_policy
from partsong.federation.wire import Denied
from partsong.privacy.accounting import Ledger, Release
from partsong.privacy.spending import USUAL_DELTA

Place = tuple[str, int, int]
"""Run, round and attempt."""

FILES = ("ledger.jsonl", "audit.jsonl", "site.log")
"""One of which a site has that has ever answered; no folder of a server has any."""
WAY_OUT = (
    "Restore the newest copies of ledger.jsonl and audit.jsonl. Where there are none, state what was released before: "
    "partsong audit opening FOLDER --why REASON"
)


def require_whole(ledger: SiteLedger, audit: Audit) -> None:
    """Refuse to go on (`ledger`) where one of the two is not as it was written, or does not cover the other."""
    try:
        books, left = both_read(ledger, audit)
    except FormatError as error:
        raise Denied("ledger", str(error)) from error
    number, lines = books.covered
    if left.lines < lines:
        raise Denied(
            "ledger",
            f"{audit.path.name} has {left.lines} lines, and had {lines} when line {number} of {ledger.path.name} was "
            f"written: it is an older copy. {WAY_OUT}",
        )
    if uncharged := not_charged(books, left):
        raise Denied(
            "ledger",
            f"{audit.path.name} has {len(uncharged)} attempts that have left (the first: {_named(uncharged[0])}), and "
            f"{ledger.path.name} has not charged them: it is an older copy, or lines were taken from its end. "
            f"{WAY_OUT}",
        )
    if other := _with_other_noise(books, left):
        raise Denied(
            "ledger",
            f"{_named(other[0])} has left with other noise than {ledger.path.name} has charged: one of the files is "
            f"not this site's. {WAY_OUT}",
        )
    if unknown := not_in_log(books, left):
        raise Denied(
            "ledger",
            f"{ledger.path.name} has charged {len(unknown)} attempts (the first: {_named(unknown[0])}) of which "
            f"{audit.path.name} has no line: it is an older copy, was removed, or lines were taken from its end. "
            f"{WAY_OUT}",
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
    return list(_uncharged(books, left))


def not_in_log(books: Books, left: Departures) -> list[Place]:
    """Attempts that were charged, and of which the log does not say that something has left, though it should: all of a
    run that it does not know, or knows by refusals alone; of others, but for those that the ledger says had not left,
    and for the last line of all.
    """
    covered, _ = books.covered
    excused = books.unheard | {books.lines}
    found: dict[Place, None] = {}
    for run, charges in books.runs.items():
        seen = left.runs.get(run)
        works = {} if seen is None else seen.works
        is_known = seen is not None and seen.is_begun
        for one in charges:
            is_due = one.number > covered and not (is_known and one.number in excused)
            if is_due and (one.round, one.attempt) not in works:
                found[run, one.round, one.attempt] = None
    return list(found)


def place_of_last(books: Books) -> Place | None:
    """What the last line of the ledger is for; None where there is none, or it is of no run."""
    ends = ((run, charges[-1]) for run, charges in books.runs.items())
    return next(((run, one.round, one.attempt) for run, one in ends if one.number == books.lines), None)


def is_last_unheard(books: Books, left: Departures) -> bool:
    """Whether the last line of the ledger is for work of which nothing has left."""
    place = place_of_last(books)
    if place is None:
        return False
    seen = left.runs.get(place[0])
    return seen is None or place[1:] not in seen.works


def state_of(folder: Path) -> Path:
    """The folder with ledger and log: of a site, or that folder itself."""
    tried = (folder / "state", folder)
    found = next((path for path in tried if _is_of_site(path)), None)
    if found is None:
        raise FileError(
            f"{folder}: this is not the folder of a site that has ever answered. Name the one with site.toml and "
            "state/ in it, at the site."
        )
    return found


def open_balance(
    state: Path,
    why: str,
    *,
    releases: int | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    unit: str | None = None,
    relation: str | None = None,
    directions: int | None = None,
) -> OpeningBalance:
    """State what a site has released that its ledger does not know of, in one line; nothing is taken away.

    Ledger and log are compared from this line on. What the log says of attempts that the ledger lacks stands for what
    is not given: there are as many `releases` at least and, where all of them had noise, their ε is known. `delta`
    None: half of that of the budget, so that the other half is left for what comes. How many combinations of rows left
    without noise has to be given, because the log does not have it.
    """
    ledger, audit = SiteLedger(state / "ledger.jsonl"), Audit(state / "audit.jsonl")
    policy = Policy.read(state.parent / "site.toml") if has_policy(state.parent) else Policy()
    with locked(state / "lock", waits=True):
        books, left = both_read(ledger, audit)
        missing = list(_uncharged(books, left).values())
        costs = [Release.from_json(one.release) for one in missing if one.release is not None]
        count = max(len(missing), releases or 0)
        if not count and not not_in_log(books, left):
            raise ParameterError("Nothing is missing: ledger and log fit together. Give releases to state some.")
        promise = min(books.promises | {(one.unit, one.relation) for one in costs}, default=("row", "add-or-remove"))
        if delta is None:
            delta = (USUAL_DELTA if policy.privacy is None else policy.privacy.delta) / 2
        if epsilon is None and costs and len(costs) == count:
            epsilon = float(Ledger(tuple((one, 1) for one in costs)).epsilon(delta))
        if count and epsilon is None and directions is None:
            raise ParameterError(
                f"{count - len(costs)} of {count} missing releases had no noise, as far as is known. State how many "
                "combinations of rows they sent, the sum of rounds × rank (directions), or what they cost (epsilon)."
            )
        opening = OpeningBalance(
            count,
            why,
            epsilon,
            0.0 if epsilon is None else delta,
            promise[0] if unit is None else unit,
            promise[1] if relation is None else relation,
            directions or 0,
            left.lines,
        )
        _require_adds_up(opening, books, policy)
        ledger.open_with(opening)
    return opening


def _require_adds_up(opening: OpeningBalance, books: Books, policy: Policy) -> None:
    """Refuse a promise that does not add up with the ledger's or the budget's: nothing could be charged after it."""
    if opening.epsilon is None:
        return
    for unit, relation in sorted(books.promises - {(opening.unit, opening.relation)}):
        raise ParameterError(
            f"An opening balance about a {opening.unit} ({opening.relation}) does not add up with a ledger about a "
            f"{unit} ({relation}). Use unit={unit!r} and relation={relation!r}."
        )
    if policy.privacy is not None and policy.privacy.unit != opening.unit:
        raise ParameterError(
            f"The opening balance is about a {opening.unit}, and site.toml has a budget about a {policy.privacy.unit}. "
            f"Use unit={policy.privacy.unit!r}."
        )


def _uncharged(books: Books, left: Departures) -> dict[Place, Departure]:
    _, covered = books.covered
    charged = {run: {(one.round, one.attempt) for one in charges} for run, charges in books.runs.items()}
    return {
        (run, *at): one
        for run, seen in left.runs.items()
        for at, one in sorted(seen.works.items())
        if one.line > covered and at not in charged.get(run, ())
    }


def _with_other_noise(books: Books, left: Departures) -> list[Place]:
    """As far as lines are about a request: those that 0.1.0 made up are not."""
    covered, in_log = books.covered
    charged = ((run, one) for run, charges in books.runs.items() for one in charges if one.about is not None)
    noises = {(run, one.round, one.attempt): one.noise for run, one in charged if one.number > covered}
    seen = {(run, *at): one for run, released in left.runs.items() for at, one in released.works.items()}
    return [
        place for place, one in seen.items() if one.line > in_log and place in noises and noises[place] != one.noise
    ]


def _is_of_site(path: Path) -> bool:
    """Also where all of it is lost but that the site was there."""
    was_there = (path / "lock").exists() and (path.parent / "site.toml").exists()
    return was_there or any((path / name).exists() for name in FILES)


def _edited(path: Path, error: FormatError) -> FormatError:
    return FormatError(
        f"{error} To go on, move {path.name} out of the folder (keep it: it is the evidence), and put the newest sound "
        "copy in its place. Where there is none, state what was released before: partsong audit opening FOLDER "
        "--why REASON"
    )


def _named(place: Place) -> str:
    return f"run {place[0]}, round {place[1]}, attempt {place[2]}"
