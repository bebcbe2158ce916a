"""Who is not in a sum of a federation, and why: by names of sites and what they have told, never by their values."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from partsong.errors import TooFewParties

NOT_ASKED = "not asked for this sum"
BEGUN_ANEW = "it has begun anew since this round was opened, answers no more of it, and is asked again in the next"
NOT_WITHOUT = (
    "A site that has lost its files after it had answered in this round cannot be in its sum any more: if there is "
    "none without it, begin a new run, under another name and with another seed."
)


def told_left_out(parties: Collection[str], heard: Collection[str], why: Mapping[str, str]) -> str:
    """A sentence on all who are missing; empty where nobody is."""
    missing = sorted(set(parties) - set(heard))
    listed = "; ".join(f"{name!r} ({why.get(name, NOT_ASKED).rstrip('.')})" for name in missing)
    return f"{len(missing)} of {len(parties)} sites were left out: {listed}." if missing else ""


def with_left_out(error: TooFewParties, told: str) -> TooFewParties:
    """The same error, which says who was left out."""
    return TooFewParties(f"{error} {told}") if told else error
