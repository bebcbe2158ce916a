"""Lines of ledgers and audit logs, written without a run."""

from __future__ import annotations

from partsong.federation.audit_log import Audit
from partsong.federation.ledger import SiteLedger
from partsong.federation.wire import Kind, Nonce


def charge(ledger: SiteLedger, release=None, *, place=("", 0, 0), count=1):
    """A charge, as partsong 0.1.0 wrote for releases of which it knew no more; of no run, as a rule."""
    written = None if release is None else release.to_json()
    ledger.chain.append({"attempt": list(place), "digest": "for the test", "count": count, "release": written})


def depart(audit: Audit, place, release=None):
    """A message that has left."""
    run, number, attempt = place
    known = {"refusal": None, "again": False, "arrays": [], "bytes": 0, "sha256": None, "clip": None, "epsilon": None}
    noise = None if release is None else release.noise_multiplier
    cost = None if release is None else release.to_json()
    line = {**Nonce(run, number, attempt, Kind.WORK).told(), **known, "noise_multiplier": noise, "release": cost}
    audit._append(line)
