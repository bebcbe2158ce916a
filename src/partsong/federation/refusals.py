"""Codes with which a site says no, and what they mean at the server; the reason, with names and values, stays there."""

from __future__ import annotations

from collections.abc import Mapping

from partsong.errors import (
    BudgetSpent,
    CompositionError,
    DivergenceError,
    FeatureError,
    FileError,
    FormatError,
    ParameterError,
    PartsongError,
    PartyError,
    SiteLost,
    SiteRefused,
    TooFewParties,
    UploadError,
)
from partsong.federation.wire import Refusal

__all__ = ["CODES", "KINDS", "Denied", "SiteLost", "SiteRefused", "error_of", "refusal_of"]

CODES: Mapping[str, str] = {
    "unreadable": "the request could not be read",
    "unsigned": "the request was not signed by the coordinator that the site has pinned",
    "not-addressed": "the request was for another party",
    "not-started": "the site does not know this run; it has to be started there first",
    "conflict": "another request was answered, or charged, under the same run, round, attempt and phase; or the "
    "attempts of a round are not about one model",
    "over": "the run is over at this site; nothing of it is worked on any more",
    "attempts": "more attempts of a round, or of all rounds of a run, were asked for than a run can need",
    "out-of-turn": "this phase is not the next one of the sum that the site is in",
    "out-of-step": "the server and the site disagree on which rounds have counted, or an old round was asked for",
    "round-closed": "a masked upload of this round has left the site; the round is not summed again",
    "company": "the sum continues a round, and would be over other parties than the one before",
    "behind": "the site's ledger is behind what the server has seen: it was restored from an older copy",
    "ledger": "the site's ledger or audit log was edited, removed, or does not cover the other, and it answers nothing "
    "until somebody has looked at it",
    "recipe": "the site's policy does not allow this recipe",
    "rounds": "the site's policy allows fewer rounds",
    "runs": "the site's policy allows no further run",
    "rows": "the site holds fewer rows than its policy asks for",
    "parties": "fewer parties are in the sum than the site's policy asks for",
    "masks": "the site's policy asks for masked sums",
    "mask-bound": "the bound of masked numbers is smaller than the site's policy asks for",
    "roster": "the parties are not those of the roster that the site has pinned, or one of them is not in it any more, "
    "or has another key there than when the run began",
    "shared-key": "the site hashes names of columns with another shared key than most sites, or with none",
    "columns": "the site lacks columns that the others have, or may not let them leave",
    "names": "the site does not tell names of columns to others",
    "texts": "the experiment is about texts and the site holds a table, or the other way round",
    "words": "the site's policy allows no run over texts, or asks for words in more documents or at more parties",
    "no-shared-key": "a run over texts needs the key that sites share, and the site has none",
    "no-words": "the site does not know on which words sites have agreed for this run",
    "no-columns": "the site's policy lets no column leave",
    "layout": "number type or columns of the site do not fit what was agreed on",
    "data": "the site's data are not fit for a run, or have changed since this one began",
    "model": "the model with which the run would end is none: not finite, negative, or too large",
    "experiment": "the experiment cannot be read, or its parts do not go together",
    "privacy-needed": "the site has a privacy budget, and the program adds no noise",
    "privacy-unit": "the program's promise is about another unit or relation than the site's ledger",
    "insecure-noise": "the program's noise comes from a seed, which the site's policy does not allow",
    "noiseless": "the site has released without noise before it had a privacy budget, which does not cover that",
    "budget": "the site's privacy budget is spent, over all runs",
    "diverged": "the site's numbers are not finite, or too large",
    "upload": "the site's upload is not what its program said it would be; under masks most often: it has a number "
    "beyond mask_bound",
    "too-few": "fewer parties than a sum needs in which each is hidden",
    "protocol": "the site does not accept what the server has sent in this sum",
    "storage": "the site could not read or write its own files",
    "settings": "site.toml, another file of the site's settings, or its data cannot be used as they are",
    "failed": "the site's work ended in an error",
}
"""Code -> what it means to somebody at the server."""

KINDS: Mapping[str, type[PartyError]] = {
    "budget": BudgetSpent,
    "diverged": DivergenceError,
    "upload": UploadError,
    "too-few": TooFewParties,
}


class Denied(PartsongError):
    """Raised at a site: the code that leaves it, the reason that does not, and counts that do."""

    def __init__(self, code: str, reason: str = "", counts: Mapping[str, int] | None = None) -> None:
        super().__init__(reason or code)
        self.refusal = Refusal(code, dict(counts or {}))


def refusal_of(error: PartsongError) -> Refusal:
    """What leaves a site where its work ends in an error of ours: a code, and nothing of its text."""
    if isinstance(error, Denied):
        return error.refusal
    kinds: tuple[tuple[type[PartsongError], str], ...] = (
        (BudgetSpent, "budget"),
        (DivergenceError, "diverged"),
        (UploadError, "upload"),
        (TooFewParties, "too-few"),
        (FormatError, "unreadable"),
        (FileError, "storage"),
        (FeatureError, "columns"),
        (CompositionError, "experiment"),
        (ParameterError, "experiment"),
    )
    return Refusal(next((code for kind, code in kinds if isinstance(error, kind)), "failed"))


def error_of(party: str, refusal: Refusal, index: int) -> PartyError:
    """The error at the server; one of a kind that callers know, where there is one."""
    kind = KINDS.get(refusal.code, SiteRefused)
    counts = "".join(f", {name}: {count}" for name, count in sorted(refusal.counts.items()))
    meaning = CODES.get(refusal.code, "a code that is not known here")
    return kind(
        f"Site {party!r} refuses in round {index} (code {refusal.code!r}{counts}): {meaning}. The reason is in the log "
        "of the site; ask there."
    )
