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
"""Codes that the same experiment gets again, whenever it is asked for."""
LOST = frozenset({"not-started", "out-of-turn", "out-of-step"})
"""Codes of a site whose files of the run are gone, or older than the run."""
CLOSED = frozenset({"company", "round-closed", "conflict", "over", "attempts"})
"""Codes of a site that answers this request in no way any more."""
SPOILED: Mapping[str, str] = {
    "upload": "Where the log of the site says that a number is beyond its public bound, it needs a larger "
    'mask_bound ("How large is mask_bound?" in docs/federation.md says how to choose it).',
    "diverged": "The log of the site says which numbers are not finite, or too large: have its data looked at before, "
    "or those of all sites scaled alike.",
    "failed": "The log of the site says which error it was: have it mended before.",
}
"""Codes of work that came to nothing by the site's own numbers -> what a new run has to have."""
NOT_IN = "The run was never started there."
"""Why a site has no result that was not in a run."""


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
    if code in SPOILED:
        return (
            "Under masks the run is closed at that site, which says so again however often it is resumed: begin a new "
            f"run, under another --name and with another seed. {SPOILED[code]} In the open it can be resumed once the "
            'cause is mended there. Or resume it with faulty = "leave out", which goes on without the site where that '
            "is possible."
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
