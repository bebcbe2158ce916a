"""A site with texts, as it faces a run: as its words in the agreement, and as its counts of agreed words after that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from partsong.core import Message, Program
from partsong.errors import DataError, ParameterError, PartsongError
from partsong.federation.consent import roster_among
from partsong.federation.data_state import require_same
from partsong.federation.experiment import Experiment
from partsong.federation.refusals import Denied
from partsong.federation.site_files import Attempt, RunFolder
from partsong.federation.site_plan import Build, Plan, experiment_in
from partsong.federation.told_alike import words_context_of
from partsong.federation.wire import Kind, Request
from partsong.federation.word_data import SUFFIX, Texts
from partsong.federation.word_rule import TextRule
from partsong.io.atomic import replacing
from partsong.privacy.admission import Roster
from partsong.text.agreed import agreed_vocabulary, masks_for_words
from partsong.text.agreement import MOST_EXCHANGES
from partsong.text.agreement_steps import Candidate
from partsong.text.counts import inverse_frequencies
from partsong.text.held_words import HeldWords
from partsong.text.vocabulary import Vocabulary
from partsong.topic_words import Weighing

if TYPE_CHECKING:
    from partsong.federation.site import Site

LISTED = "vocabulary.txt"
MOST_DOCUMENTS = 1 << 53
NO_KEY = (
    "A run over texts needs the key that sites share, and this site has none: whoever has a list of words could test "
    "them. One site makes it (partsong federation secret), tells the others by a way that does not lead through the "
    "server, and all join again with --shared-key."
)


def facing(site: Site, texts: Texts, request: Request) -> Site:
    """The site as it answers this request; refused where texts must not be worked on, but for the end of a run, which
    brings the model to the site.
    """
    run = request.nonce.run
    if request.nonce.kind is Kind.NAMES:
        raise Denied("names", "Words of texts are not told to others, but by the agreement on words.")
    told = experiment_in(request.note) if request.nonce.kind in (Kind.HELLO, Kind.START) else _started(site, run)
    rule = Experiment.from_table(told).text_rule
    if rule is None:
        raise Denied("texts", "This site holds texts, and the experiment has no table words. It is for tables.")
    is_end = request.nonce.kind is Kind.FINISH and not run.endswith(SUFFIX)
    if not is_end:
        _require_allowed(site, texts, rule)
    if run.endswith(SUFFIX):
        return _agreeing(site, texts, rule, run)
    if request.nonce.kind is Kind.START:
        _require_agreed_texts(site, texts, rule, run)
    return _counting(site, texts, rule, told, run)


def require_table(told: Mapping[str, Any]) -> None:
    """Refuse an experiment about texts where there is a table."""
    if told.get("words") is not None:
        raise Denied(
            "texts",
            "The experiment is about texts (it has a table words), and this site has joined with a table. Join with "
            "--text-column.",
        )


def vocabulary_in(files: RunFolder, counted: Attempt | None, last: Message) -> Vocabulary:
    """What a site makes of the end of an agreement: the words of its last work, and everybody's counts of them, for
    each 0 ≤ df ≤ n, and n < 2⁵³, up to which masked sums are exact.
    """
    worked = None if counted is None else files.worked(counted)
    party = None if worked is None else worked.state
    if not isinstance(party, Candidate) or party.agreed is None:
        raise Denied("out-of-step", "The agreement on words has ended before its last step was answered here.")
    try:
        with np.errstate(invalid="ignore"):  # what is no number comes out below 0
            agreed = agreed_vocabulary(party, last)
        inverse_frequencies(agreed.documents, agreed.n_documents)
        if agreed.n_documents >= MOST_DOCUMENTS:
            raise ParameterError("more documents than can be counted")
    except DataError:
        raise
    except (PartsongError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise Denied("protocol", f"The end of the agreement cannot be used ({type(error).__name__}).") from None
    return agreed


def has_own_counts(agreed: Vocabulary, held: HeldWords) -> bool:
    """Whether counts can be sums with this site's in them: 0 ≤ df − df_p ≤ n − n_p for each word."""
    own = held.frequencies_in({word: column for column, word in enumerate(agreed.words)})
    others, elsewhere = np.asarray(agreed.documents) - own, agreed.n_documents - held.n_documents
    return bool(others.min() >= 0 and others.max() <= elsewhere)


def keep_vocabulary(folder: Path, weighing: Weighing) -> None:
    """The words beside the result of a run, one a line in the order of the columns: for its owner alone."""
    with replacing(folder / LISTED, private=True) as draft:
        draft.write_text("".join(f"{word}\n" for word in weighing.names), encoding="utf-8", errors="surrogatepass")


def _started(site: Site, run: str) -> Mapping[str, Any]:
    started = RunFolder(site.folder / "runs" / run).started()
    if started is None:
        raise Denied("not-started", f"Run {run!r} was not started here.")
    return started.experiment


def _require_allowed(site: Site, texts: Texts, rule: TextRule) -> None:
    site.policy.words.require(rule)
    if site.policy.columns is not None:
        raise Denied("words", "site.toml names columns that may leave, which texts do not have. Remove that line.")
    if not texts.key:
        raise Denied("no-shared-key", NO_KEY)
    if site.roster is None:
        raise Denied("roster", "Sites agree on words by masked sums among parties of a pinned roster; there is none.")


def _agreeing(site: Site, texts: Texts, rule: TextRule, run: str) -> Site:
    """All parties are in every sum: two of them that differ by one would tell its words to whoever has the key."""
    roster = roster_among(site.roster, RunFolder(site.folder / "runs" / run).started())
    policy = replace(site.policy, minimum_parties=max(site.policy.minimum_parties, len(roster or ())))
    held = texts.held(rule, run, roster)
    return replace(site, texts=None, data=held, policy=policy, roster=roster, build=_agreement_of(site, rule))


def _agreement_of(site: Site, rule: TextRule) -> Build:
    """The plan of an agreement, in the words of the experiment that it is for: what that asks for is looked at now. All
    parties agree, also where some of them are drawn for each round after that.
    """

    def build(told: Mapping[str, Any], n_parties: int, roster: Roster | None) -> Plan:
        plan = site.build(told, n_parties, roster)
        site.policy.require(plan.wish, site.data.n_rows)
        site.policy.require_mask_bound(plan.mask_bound)
        if n_parties < 3 or rule.min_parties > n_parties:
            raise Denied("parties", f"{n_parties} parties cannot agree on words at {rule.min_parties} of at least 3.")
        wish, masks = replace(plan.wish, parties=n_parties), masks_for_words(n_parties, roster)
        return Plan(cast(Program, rule.rounds), masks, wish, MOST_EXCHANGES)

    return build


def _require_agreed_texts(site: Site, texts: Texts, rule: TextRule, run: str) -> None:
    """Refuse texts whose words are not those that sites have agreed over."""
    name = f"{run}{SUFFIX}"
    started = RunFolder(site.folder / "runs" / name).started()
    if started is not None:
        require_same(texts.held(rule, name, site.roster), started)


def _counting(site: Site, texts: Texts, rule: TextRule, told: Mapping[str, Any], run: str) -> Site:
    files = RunFolder(site.folder / "runs" / f"{run}{SUFFIX}")
    agreed = files.agreed()
    if agreed is None:
        told_at = (
            f"Sites have not agreed on words for {run!r}, or this one has not heard the end of it, or has lost its "
            f"files: that takes this site's own copy of runs/{run}{SUFFIX}/vocabulary, or else a new run."
        )
        raise Denied("no-words", told_at)
    if dict(agreed.experiment) != dict(told):
        raise Denied("conflict", "Words were agreed on for this run with other settings.")
    if agreed.rows != len(texts.documents):
        raise Denied("layout", f"Words were agreed on over {agreed.rows} texts; there are {len(texts.documents)}.")
    context = words_context_of(agreed.vocabulary.documents, agreed.vocabulary.n_documents)
    return replace(site, texts=None, data=replace(texts.counted(rule.weighing(agreed.vocabulary)), context=context))


def told_of_long(party: Any, program: Any) -> str:
    """For the log of a site whose words are in part too long for an agreement: how many, and the limit; else nothing.
    Words that are too long are in nothing that leaves, and neither is their number.
    """
    if not isinstance(party, Candidate) or not party.n_too_long:
        return ""
    return (
        f"{party.n_too_long} different words here, each in at least {program.min_documents} of the texts, have more "
        f"than {program.longest} bytes of UTF-8, the longest_word of the experiment. They take no part in the "
        "agreement, are not in the model, and the server is not told of them. If they matter, ask the coordinator for "
        "a new run with a larger longest_word."
    )


def told_of_empty(rows: Any) -> str:
    """For the log of a site without any agreed word; else nothing."""
    if np.count_nonzero(rows.data):
        return ""
    return (
        f"None of the {rows.shape[0]} texts here has a word of the vocabulary. The site takes part with rows of zeros. "
        "Check the language of the texts and the rule of the experiment."
    )
