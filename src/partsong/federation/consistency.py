"""Check that a site's ledger and audit log agree; write opening balances after a loss.

    audit line of work or of a phase, no refusal   →  ledger line of the same run, round and attempt, with its noise
    ledger line of a run                           →  such an audit line; or it is the last one of the ledger, or the
                                                      next one says that nothing had left (`unheard`)

The last ledger line may be for work that was cut off or failed before anything had left; the next line records that. So
a backup of one file that is older than the other by more than one attempt is detected, and no work is done twice.

Lines that an opening balance covers are not compared: the ledger's lines before it, and the first `log_lines` of the
log. A site states an opening balance when newer copies of these files are lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from partsong.errors import FileError, FormatError, ParameterError, format_count
from partsong.federation.audit_log import AuditLog, ReleaseHistory, SentAttempt
from partsong.federation.chain import RESTORE_BACKUP
from partsong.federation.ledger import AttemptKey, LedgerState, OpeningBalance, SiteLedger
from partsong.federation.locks import locked
from partsong.federation.policy import Policy, has_policy
from partsong.federation.wire import RequestRefused
from partsong.privacy.accounting import Ledger, Release
from partsong.privacy.spending import DEFAULT_DELTA

SITE_FILES = ("ledger.jsonl", "audit.jsonl", "site.log")
"""A site that has ever answered has one of these; a server's folder has none."""


@dataclass(frozen=True, slots=True)
class Differences:
    """Attempts that have left but are not in the ledger; that have another noise there; and that were charged but are
    missing from the log.
    """

    uncharged: Mapping[AttemptKey, SentAttempt]
    other_noise: tuple[AttemptKey, ...]
    unlogged: tuple[AttemptKey, ...]


def compare(recorded: LedgerState, left: ReleaseHistory) -> Differences:
    """Compare all lines that no opening balance covers.

    If the log has only refusals of a run, or nothing, all its charges are missing there. Lines that 0.1.0 reconstructed
    have no request (`about`), and their noise is not compared.
    """
    number, lines = recorded.covered_lines
    charges = [((run, one.round, one.attempt), one) for run, own in recorded.runs.items() for one in own]
    works = {(run, *at): one for run, seen in left.runs.items() for at, one in sorted(seen.attempts.items())}
    new = {place: one for place, one in works.items() if one.line > lines}
    charged = {place for place, _ in charges}
    noises = {place: one.noise for place, one in charges if one.number > number and one.model_digest is not None}
    started = {run for run, seen in left.runs.items() if seen.has_started}
    excused = recorded.unsent | {recorded.lines}
    due = [
        place for place, one in charges if one.number > number and not (place[0] in started and one.number in excused)
    ]
    return Differences(
        {place: one for place, one in new.items() if place not in charged},
        tuple(place for place, one in new.items() if noises.get(place, one.noise) != one.noise),
        tuple(dict.fromkeys(place for place in due if place not in works)),
    )


def require_consistent(ledger: SiteLedger, audit: AuditLog, seen: int = 0) -> None:
    """Refuse if the server has `seen` more releases than the ledger has (`behind`), or if ledger and log are damaged or
    disagree (`ledger`).
    """
    try:
        recorded, left = ledger.load(), audit.history()
    except FormatError as error:
        raise RequestRefused("ledger", str(error)) from error
    if seen > recorded.serial:
        raise RequestRefused(
            "behind",
            f"The server has seen release {seen} of this site, but its ledger has {recorded.serial}: this folder was "
            "restored from an older backup, or is a copy of a folder in use elsewhere. Restore the newest "
            "ledger.jsonl. If it is lost, state what is missing: partsong audit opening FOLDER --why REASON --releases "
            f"{seen - recorded.serial}",
        )
    number, lines = recorded.covered_lines
    own, log, found = ledger.path.name, audit.path.name, compare(recorded, left)
    if left.lines < lines:
        why = (
            f"{log} has {format_count(left.lines, 'line')}, but had {lines} before line {number} of {own}: it "
            "is an older backup."
        )
    elif found.uncharged:
        why = (
            f"{log} lists {format_count(len(found.uncharged), 'sent attempt')} (the first: "
            f"{_format_attempt(*found.uncharged)}) that {own} has not charged: it is an older backup, or lines "
            "were removed from its end."
        )
    elif found.other_noise:
        why = (
            f"{_format_attempt(*found.other_noise)} was sent with other noise than {own} has charged: one of the files "
            "is not this site's."
        )
    elif found.unlogged:
        why = (
            f"{own} has charged {format_count(len(found.unlogged), 'attempt')} (the first: "
            f"{_format_attempt(*found.unlogged)}) that {log} does not list: it is an older backup, was removed, "
            "or lines are missing at its end."
        )
    else:
        return
    raise RequestRefused("ledger", f"{why} {RESTORE_BACKUP}")


def find_state_folder(folder: Path) -> Path:
    """Return the folder with ledger and log, given it or the site's folder; also if both files are lost."""
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
    """State releases that are missing from a site's ledger, in one line. Nothing is removed.

    Ledger and log are compared from this line on. Defaults come from the attempts that the log has and the ledger
    lacks: their number for `releases` and, if all had noise, their ε. `delta` None: half of the budget's δ that earlier
    balances leave, so that the other half remains for later releases. `directions` must be given for releases without
    noise, because the log does not have it.
    """
    ledger, audit = SiteLedger(state / "ledger.jsonl"), AuditLog(state / "audit.jsonl")
    policy = Policy.read(state.parent / "site.toml") if has_policy(state.parent) else Policy()
    budget = policy.privacy
    with locked(state / "lock", waits=True):
        recorded, left = ledger.load(), audit.history()
        found = compare(recorded, left)
        costs = [Release.from_json(one.release) for one in found.uncharged.values() if one.release is not None]
        count = max(len(found.uncharged), releases or 0)
        if not count and not found.unlogged:
            raise ParameterError("Nothing is missing: ledger and log agree. Pass releases to state some.")
        whole = DEFAULT_DELTA if budget is None else budget.delta
        rest = whole - sum(one.delta for one in recorded.openings)
        delta = rest / 2 if delta is None else delta
        if epsilon is not None and not delta < rest:
            raise ParameterError(
                f"delta = {delta:g} leaves nothing of the budget's δ = {whole:g} for releases to come; earlier opening "
                f"balances have {whole - rest:g} of it. Use a smaller delta, or raise that of the budget in site.toml."
            )
        if epsilon is None and costs and len(costs) == count:
            epsilon = float(Ledger(tuple((one, 1) for one in costs)).epsilon(delta))
        if count and epsilon is None and directions is None:
            raise ParameterError(
                f"{count - len(costs)} of {count} missing releases had no noise, as far as is known. State how many "
                "combinations of rows they sent, the sum of rounds × rank (directions), or what they cost (epsilon)."
            )
        promise = min(
            recorded.privacy_units | {(one.unit, one.relation) for one in costs}, default=("row", "add-or-remove")
        )
        unit, relation = unit or promise[0], relation or promise[1]
        spent = 0.0 if epsilon is None else delta
        opening = OpeningBalance(count, why, epsilon, spent, unit, relation, directions or 0, left.lines)
        others = {f"a {one} ({other})" for one, other in recorded.privacy_units - {(unit, relation)}}
        others |= {f"a {budget.unit} (site.toml)"} if budget is not None and budget.unit != unit else set()
        if epsilon is not None and others:  # nothing could be charged after it
            raise ParameterError(
                f"An opening balance about a {unit} ({relation}) does not add up with a ledger or budget about "
                f"{' and '.join(sorted(others))}. Pass the unit and relation of these."
            )
        ledger.append_opening(opening)
    return opening


def _format_attempt(first: AttemptKey, *_: AttemptKey) -> str:
    return f"run {first[0]}, round {first[1]}, attempt {first[2]}"
