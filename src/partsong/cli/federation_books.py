"""What `partsong federation status` says of a site's ledger and audit log: what was spent, whether both are whole."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from partsong.errors import BrokenChain, FormatError

if TYPE_CHECKING:
    from partsong.federation.ledger import Books, SiteLedger
    from partsong.federation.policy import Policy

SECOND_LOOK = 0.2
"""Seconds after which both files are read again, if they do not tell of each other."""
UNKNOWN: Mapping[str, Any] = {
    "releases": None,
    "releases_without_noise": None,
    "epsilon_spent": None,
    "epsilon_of": [],
}


def books_told(state: Path, policy: Policy | None) -> dict[str, Any]:
    """What was spent, how the log is, and why the site refuses everything, where it does (`refuses`). `policy` None: it
    is gone, no budget is known, and ε is that of the usual δ.
    """
    return {**_spent(policy, _ledger(state)), "audit": _audit_told(_log(state)), "refuses": _why_it_refuses(state)}


def show_books(told: Mapping[str, Any]) -> list[str]:
    """The same in lines for people; where `to_mend` has the policy, its budget is not known."""
    audit, verifying = told["audit"], f"partsong audit verify {quote(str(told['folder']))}"
    lines = [_released(told)]
    if audit["is_sound"]:
        lines.append(f"Audit log: {audit['lines']} lines, sound, last hash {audit['head']}")
    else:
        lines.append(f"Audit log: EDITED at line {audit['first_bad_line']}: {verifying}")
    if told["refuses"] is not None:
        lines.append(f"THE SITE REFUSES EVERY REQUEST (ledger): {told['refuses']}")
    return lines


def _released(told: Mapping[str, Any]) -> str:
    if told["releases"] is None:
        return "Released: unknown, for the ledger cannot be read"
    allowed, spent = told["epsilon_allowed"], told["epsilon_of"]
    none = "its budget is not known" if "policy" in told["to_mend"] else "no budget in site.toml"
    budget = none if allowed is None else f"of {allowed:g} allowed"
    noiseless = f", {told['releases_without_noise']} of them without noise" if told["releases_without_noise"] else ""
    of_what = "ε spent by the others" if noiseless else "ε spent"
    if len(spent) > 1:
        each = " and ".join(f"{one['epsilon']:.4g} about a {one['unit']} ({_relation(one)})" for one in spent)
        cost = f"{each}, which do not compose to one ε"
    else:
        cost = f"{spent[0]['epsilon'] if spent else 0:.4g}"
    return f"Released: {told['releases']} times{noiseless}; {of_what}: {cost} ({budget})"


def _relation(one: Mapping[str, Any]) -> str:
    return f"{one['relation']}, {one['releases']} releases"


def _spent(policy: Policy | None, ledger: SiteLedger) -> dict[str, Any]:
    from partsong.spending import USUAL_DELTA

    allowance = None if policy is None else policy.privacy
    allowed = {"epsilon_allowed": None if allowance is None else allowance.epsilon}
    try:
        books = ledger.books()
    except FormatError:
        return {**UNKNOWN, **allowed}
    spent = _by_promise(books, USUAL_DELTA if allowance is None else allowance.delta)
    told = {"releases": books.serial, "releases_without_noise": books.noiseless, **allowed}
    return {**told, "epsilon_spent": spent[0]["epsilon"] if len(spent) == 1 else None, "epsilon_of": spent}


def _by_promise(books: Books, delta: float) -> list[dict[str, Any]]:
    """ε of the releases about each unit and relation: only those add up to one promise."""
    from partsong.privacy.accounting import Ledger

    found = []
    for unit, relation in sorted({(release.unit, release.relation) for release in books.releases}):
        own = {one: n for one, n in books.releases.items() if (one.unit, one.relation) == (unit, relation)}
        spent = Ledger(tuple(own.items()))
        promise = {"unit": unit, "relation": relation, "releases": len(spent)}
        found.append({**promise, "epsilon": float(spent.epsilon(delta))})
    return found


def _why_it_refuses(state: Path) -> str | None:
    """What the site says to itself before it answers anything. The two files are read one after the other, without the
    lock of a site that may be at work: what was charged and logged in between is seen at a second look.
    """
    why = _not_whole(state)
    if why is not None:
        time.sleep(SECOND_LOOK)
        why = _not_whole(state)
    return why


def _not_whole(state: Path) -> str | None:
    from partsong.federation.audit import Audit
    from partsong.federation.refusals import Denied
    from partsong.federation.wholeness import require_whole

    try:
        require_whole(_ledger(state), Audit(_log(state)))
    except Denied as error:
        return str(error)
    return None


def _audit_told(path: Path) -> dict[str, Any]:
    from partsong.federation.audit_report import verified

    try:
        found = verified(path)
    except BrokenChain as error:
        return {"file": path, "is_sound": False, "first_bad_line": error.line}
    return {"file": path, "is_sound": True, "lines": found.lines, "last": found.last, "head": found.head}


def _ledger(state: Path) -> SiteLedger:
    from partsong.federation.ledger import SiteLedger

    return SiteLedger(state / "ledger.jsonl")


def _log(state: Path) -> Path:
    return state / "audit.jsonl"
