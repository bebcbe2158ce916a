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

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from partsong.errors import FileError, FormatError, ParameterError
from partsong.federation.audit_log import AuditLog, ReleaseHistory, SentAttempt
from partsong.federation.chain import RESTORE_BACKUP
from partsong.federation.ledger import AttemptKey, LedgerState, OpeningBalance, SiteLedger
from partsong.federation.locks import locked
from partsong.federation.policy import Policy, has_policy
from partsong.federation.wire import RequestRefused
from partsong.privacy.accounting import Ledger, Release
from partsong.privacy.spending import USUAL_DELTA

SITE_FILES = ("ledger.jsonl", "audit.jsonl", "site.log")
"""One of which a site has that has ever answered; no folder of a server has any."""


@dataclass(frozen=True, slots=True)
class Differences:
    """Attempts that have left and are not in the ledger, or are there with other noise; attempts that were charged, and
    of which the log does not say that something has left, though it should.
    """

    uncharged: Mapping[AttemptKey, SentAttempt]
    other_noise: tuple[AttemptKey, ...]
    unlogged: tuple[AttemptKey, ...]


def compare(books: LedgerState, left: ReleaseHistory) -> Differences:
    """Compare all lines after those that the last opening balance covers.

    Of a run that the log knows by refusals alone, or not at all, every charge is missing there. Lines that 0.1.0 made
    up are of no request (`about`), and their noise is not compared.
    """
    number, lines = books.covered_lines
    charges = [((run, one.round, one.attempt), one) for run, own in books.runs.items() for one in own]
    works = {(run, *at): one for run, seen in left.runs.items() for at, one in sorted(seen.attempts.items())}
    new = {place: one for place, one in works.items() if one.line > lines}
    charged = {place for place, _ in charges}
    noises = {place: one.noise for place, one in charges if one.number > number and one.model_digest is not None}
    begun = {run for run, seen in left.runs.items() if seen.has_started}
    excused = books.unsent | {books.lines}
    due = [place for place, one in charges if one.number > number and not (place[0] in begun and one.number in excused)]
    return Differences(
        {place: one for place, one in new.items() if place not in charged},
        tuple(place for place, one in new.items() if noises.get(place, one.noise) != one.noise),
        tuple(dict.fromkeys(place for place in due if place not in works)),
    )


def require_consistent(ledger: SiteLedger, audit: AuditLog, seen: int = 0) -> None:
    """Refuse to go on where the server has `seen` more releases than the ledger has (`behind`), and where one of the
    two is not as it was written, or does not cover the other (`ledger`).
    """
    try:
        books, left = ledger.load(), audit.history()
    except FormatError as error:
        raise RequestRefused("ledger", str(error)) from error
    if seen > books.serial:
        raise RequestRefused(
            "behind",
            f"The server has seen release {seen} of this site, whose ledger has {books.serial}: this folder was "
            "restored from an older backup, or is a copy of one that is used elsewhere. Use the newest ledger.jsonl. "
            "Where it is lost, state what is missing: partsong audit opening FOLDER --why REASON --releases "
            f"{seen - books.serial}",
        )
    number, lines = books.covered_lines
    own, log, found = ledger.path.name, audit.path.name, compare(books, left)
    if left.lines < lines:
        why = f"{log} has {left.lines} lines, and had {lines} before line {number} of {own}: it is an older copy."
    elif found.uncharged:
        why = (
            f"{log} has {len(found.uncharged)} attempts that have left (the first: "
            f"{_format_attempt(*found.uncharged)}), and {own} has not charged them: it is an older copy, or lines were "
            "taken from its end."
        )
    elif found.other_noise:
        why = (
            f"{_format_attempt(*found.other_noise)} has left with other noise than {own} has charged: one of the files "
            "is not this site's."
        )
    elif found.unlogged:
        why = (
            f"{own} has charged {len(found.unlogged)} attempts (the first: {_format_attempt(*found.unlogged)}) of "
            f"which {log} has no line: it is an older copy, was removed, or lines were taken from its end."
        )
    else:
        return
    raise RequestRefused("ledger", f"{why} {RESTORE_BACKUP}")


def find_state_folder(folder: Path) -> Path:
    """The folder with ledger and log: of a site, or that folder itself; also where nothing is left of both."""
    for state in (folder / "state", folder):
        was_there = (state / "lock").exists() and (state.parent / "site.toml").exists()
        if was_there or any((state / name).exists() for name in SITE_FILES):
            return state
    raise FileError(
        f"{folder}: this is not the folder of a site that has ever answered. Name the one with site.toml and state/ in "
        "it, at the site."
    )


def add_opening_balance(
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
    None: half of what earlier balances leave of the budget's, so that the other half is left for what comes. How many
    combinations of rows left without noise has to be given, because the log does not have it.
    """
    ledger, audit = SiteLedger(state / "ledger.jsonl"), AuditLog(state / "audit.jsonl")
    policy = Policy.read(state.parent / "site.toml") if has_policy(state.parent) else Policy()
    budget = policy.privacy
    with locked(state / "lock", waits=True):
        books, left = ledger.load(), audit.history()
        found = compare(books, left)
        costs = [Release.from_json(one.release) for one in found.uncharged.values() if one.release is not None]
        count = max(len(found.uncharged), releases or 0)
        if not count and not found.unlogged:
            raise ParameterError("Nothing is missing: ledger and log fit together. Give releases to state some.")
        whole = USUAL_DELTA if budget is None else budget.delta
        rest = whole - sum(one.delta for one in books.openings)
        delta = rest / 2 if delta is None else delta
        if epsilon is not None and not delta < rest:
            raise ParameterError(
                f"delta = {delta:g} leaves nothing of the budget's δ = {whole:g} for releases to come; earlier opening "
                f"balances have {whole - rest:g} of it. Give a smaller delta, or raise that of the budget in site.toml."
            )
        if epsilon is None and costs and len(costs) == count:
            epsilon = float(Ledger(tuple((one, 1) for one in costs)).epsilon(delta))
        if count and epsilon is None and directions is None:
            raise ParameterError(
                f"{count - len(costs)} of {count} missing releases had no noise, as far as is known. State how many "
                "combinations of rows they sent, the sum of rounds × rank (directions), or what they cost (epsilon)."
            )
        promise = min(
            books.privacy_units | {(one.unit, one.relation) for one in costs}, default=("row", "add-or-remove")
        )
        unit, relation = unit or promise[0], relation or promise[1]
        spent = 0.0 if epsilon is None else delta
        opening = OpeningBalance(count, why, epsilon, spent, unit, relation, directions or 0, left.lines)
        others = {f"a {one} ({other})" for one, other in books.privacy_units - {(unit, relation)}}
        others |= {f"a {budget.unit} (site.toml)"} if budget is not None and budget.unit != unit else set()
        if epsilon is not None and others:  # nothing could be charged after it
            raise ParameterError(
                f"An opening balance about a {unit} ({relation}) does not add up with a ledger or budget about "
                f"{' and '.join(sorted(others))}. Give the unit and relation of these."
            )
        ledger.append_opening(opening)
    return opening


def _format_attempt(first: AttemptKey, *_: AttemptKey) -> str:
    return f"run {first[0]}, round {first[1]}, attempt {first[2]}"
