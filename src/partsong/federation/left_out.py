"""Who is not in a sum of a federation, and why: by names of sites and what they have told, never by their values."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from partsong.errors import TooFewParties

NOT_ASKED = "not asked for this sum"


def told_left_out(parties: Collection[str], heard: Collection[str], why: Mapping[str, str]) -> str:
    """A sentence on all who are missing; empty where nobody is."""
    missing = sorted(set(parties) - set(heard))
    listed = "; ".join(f"{name!r} ({why.get(name, NOT_ASKED).rstrip('.')})" for name in missing)
    return f"{len(missing)} of {len(parties)} sites were left out: {listed}." if missing else ""


def with_left_out(error: TooFewParties, told: str) -> TooFewParties:
    """The same error, which says who was left out."""
    return TooFewParties(f"{error} {told}") if told else error
