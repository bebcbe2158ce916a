"""What a coordinator can do about a site that did not answer as it was asked, by the code with which it has refused."""

from __future__ import annotations

from collections.abc import Mapping

from partsong.federation.wire import Refusal

USUAL = (
    'Nothing is lost: resume the run once the site is back, or with faulty = "leave out" to go on without it where '
    "that is possible."
)
POLICY = frozenset({
    "recipe", "rounds", "runs", "rows", "parties", "masks", "mask-bound", "words", "no-columns", "texts", "experiment",
    "privacy-needed", "privacy-unit", "insecure-noise", "noiseless", "budget",
})  # fmt: skip
"""Codes that the same experiment gets again, as long as the site's settings stay what they are."""
LOST = frozenset({"not-started", "out-of-turn", "out-of-step"})
"""Codes of a site whose files of the run are gone, or older than the run."""
CLOSED = frozenset({"company", "round-closed", "conflict", "over", "attempts"})
"""Codes of a site that answers this request in no way any more."""
SPOILED: Mapping[str, str] = {
    "upload": "The log of the site says what is wrong with its upload. Where a number is beyond its public bound, that "
    'takes a larger mask_bound ("How large is mask_bound?" in docs/federation.md says how to choose it), and so a new '
    "run.",
    "diverged": "The log of the site says which numbers are not finite, or too large. Other settings (a smaller rate, "
    "say), or data that are scaled alike at all sites, take a new run.",
    "failed": "The log of the site says which error it was: have it mended there, then resume the run.",
}
"""Codes of what came to nothing by the site's own numbers or programs -> what it takes."""
OTHER_DATA: Mapping[str, str] = {
    "columns": "The log of the site says which of the agreed columns it lacks, or its site.toml does not let leave: "
    "resume the run once they are there again and may leave.",
    "data": "The log of the site says what its rows are not fit for, or that they are not those that the run began "
    "with: resume the run once that is mended there.",
    "layout": "The log of the site says how its rows or columns differ from what was agreed on: resume the run once "
    "that is mended there.",
}
"""Codes of a site whose data are not, or not any more, what the run is about -> after what it can be resumed."""
NOT_IN = "The run was never started there."
"""Why a site has no result that was not in a run."""


def way_on(refusal: Refusal | None, site: str, run: str) -> str:
    """A sentence or two; without a refusal the site was not heard, or what it sent was not used."""
    code = "" if refusal is None else refusal.code
    if code in POLICY:
        return (
            "Resuming the run cannot help as long as both stay as they are: change the experiment, or ask the steward "
            "of that site to change its site.toml. Once that allows the run, resume it as it is. A changed experiment "
            "may keep its name as long as no site has begun with the run; later it needs another --name, and another "
            "seed."
        )
    if code == "roster":
        return (
            "Before a run has begun, all sites have to pin the same roster, which has its parties and no others "
            "(partsong federation join KIT --roster roster.toml); then resume it. A run that has begun cannot go on "
            "without one of its parties, or with another key of it: begin a new run, under another --name and with "
            "another seed."
        )
    if code in OTHER_DATA:
        return (
            f"{OTHER_DATA[code]} Where that is not to be, begin a new run, under another --name and with another seed; "
            'or resume this one with faulty = "leave out", which goes on without the site where that is possible.'
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
    if code in SPOILED:
        return (
            f"{SPOILED[code]} If the site says so again when the run is resumed, begin a new run, under another --name "
            "and with another seed: the rows and settings of a run that has begun stay what they are, and under masks "
            'work that came to nothing closes the run at that site. Or resume it with faulty = "leave out", which goes '
            "on without the site where that is possible."
        )
    return USUAL


def way_to_result(why: str) -> str:
    """How a site can come by what it lacks of a run that is done, by the text that says why it has no result."""
    if why == NOT_IN:
        return "A new run can have it in."
    if "(code 'not-started'" in why:
        return (
            "It does not have this run any more: its files are lost, or it has joined in a new folder. Only with its "
            "own files back could it be told the end; else a new run can have it in."
        )
    return "Once it is back, --resume tells it the end again."
