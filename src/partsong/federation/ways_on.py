"""What a coordinator can do about a site that did not answer as it was asked, by the code with which it has refused."""

from __future__ import annotations

from partsong.federation.wire import Refusal

USUAL = (
    'Nothing is lost: resume the run once the site is back, or with faulty = "leave out" to go on without it where '
    "that is possible."
)
POLICY = frozenset({
    "recipe", "rounds", "runs", "rows", "parties", "masks", "mask-bound", "words", "no-columns", "texts", "experiment",
    "privacy-needed", "privacy-unit", "insecure-noise", "noiseless", "budget",
})  # fmt: skip
"""Codes that the same experiment gets again, whenever it is asked for."""
LOST = frozenset({"not-started", "out-of-turn", "out-of-step"})
"""Codes of a site whose files of the run are gone, or older than the run."""
CLOSED = frozenset({"company", "round-closed", "conflict", "over", "attempts"})
"""Codes of a site that answers this request in no way any more."""


def way_on(refusal: Refusal | None, site: str, run: str) -> str:
    """A sentence or two; without a refusal the site was not heard, or what it sent was not used."""
    code = "" if refusal is None else refusal.code
    if code in POLICY:
        return (
            "Resuming the run as it is cannot help: change the experiment, or ask the steward of that site to change "
            "its site.toml. As long as no site has begun with the run, a corrected experiment may keep its name; later "
            "it needs another --name."
        )
    if code in LOST:
        return (
            f"If the site has lost its files of the run (state/runs/{run}): partsong federation readmit {site} --run "
            f"{run}, then resume the run. Otherwise resume it once the site's newest files are back, or with faulty = "
            '"leave out" to go on without it where that is possible.'
        )
    if code in CLOSED:
        return (
            'The site will say so again: resume the run with faulty = "leave out", which goes on without it where that '
            "is possible, or begin a new run, under another --name and with another seed."
        )
    return USUAL
