"""A site with texts in a run: its words during the vocabulary agreement, and its counts of agreed words afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from partsong.core.interfaces import Matrix, Message, Program
from partsong.errors import DataError, ParameterError, PartsongError
from partsong.federation.experiment import Experiment, TextRule
from partsong.federation.signing import vocabulary_context
from partsong.federation.site.consent import restrict_roster
from partsong.federation.site.plan import Plan, SiteData, parse_experiment
from partsong.federation.site.state import Attempt, RunFolder, require_same_data
from partsong.federation.wire import Kind, Request, RequestRefused
from partsong.io.write import write_bytes
from partsong.secure_aggregation.crypto import fingerprint
from partsong.secure_aggregation.messages import Roster
from partsong.topics.agreement.protocol import (
    MOST_EXCHANGES,
    AgreementPartyState,
    agreed_vocabulary,
    secure_sum_for_words,
)
from partsong.topics.agreement.tables import PartyWords
from partsong.topics.tokenizer import Words
from partsong.topics.vocabulary import TextVectorizer, Vocabulary, inverse_frequencies

if TYPE_CHECKING:
    from partsong.federation.site.service import Site


SUFFIX = ".words"
"""The vocabulary agreement is a run of its own before the main run, named after it with this suffix."""

TEXTS = "texts"
"""The only column of that run: its keyed hash is equal if the keys are."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Documents, and the shared key for words; without a key no run uses them."""

    documents: tuple[str, ...] = field(repr=False)
    key: bytes = field(repr=False, default=b"")
    secret: int = field(repr=False, default=0)

    @property
    def unread(self) -> SiteData:
        """One row per document and no columns; the columns follow from the words of a run."""
        return SiteData(np.empty((len(self.documents), 0)), (), self.secret)

    def held(self, rule: TextRule, run: str, roster: Roster | None) -> HeldData:
        """Return the words of this site for the agreement of a run among the parties of a roster."""
        held = _held(self.documents, rule.words, run_key(self.key, run, roster or {}))
        return HeldData(replace(held, options=rule.key), (TEXTS,), self.secret)

    def counted(self, weighing: TextVectorizer) -> CountedData:
        """Return the weighted counts of the agreed words."""
        frequencies = None if weighing.documents is None else tuple(np.asarray(weighing.documents).tolist())
        rows = _rows(self.documents, weighing.words, weighing.vocabulary, frequencies, weighing.n_documents)
        return CountedData(rows, tuple(weighing.names), self.secret, weighing)


@dataclass(frozen=True, slots=True)
class TextData(SiteData):
    """Data derived from texts: column names are words, which must not appear in logs or errors."""

    @property
    def hides_names(self) -> bool:
        return True

    def main_run(self, name: str) -> str:
        """Return the name of the main run of an agreement."""
        return name.removesuffix(SUFFIX)


@dataclass(frozen=True, slots=True)
class HeldData(TextData):
    """A site's words, for the vocabulary agreement."""

    def matrix(self, order: tuple[int, ...] | None = None, least: int = 0) -> Matrix:
        return cast(Matrix, self.rows)


@dataclass(frozen=True, slots=True)
class CountedData(TextData):
    """Rows of documents over agreed words (CSR, float64).

    `context` binds the masks to the frequencies of these words that the sites received.
    """

    weighing: TextVectorizer | None = field(repr=False, default=None)
    context: str = ""


def run_key(key: bytes, run: str, roster: Roster) -> bytes:
    """Derive the key for words in one run among these signing keys.

    One-time pads follow from it, so no two runs may share it, nor runs of one name in two federations.
    """
    signing = [part for name, verifying in sorted(roster.items()) for part in (name, verifying)]
    return fingerprint("partsong words of a run", run, key, *signing)


@lru_cache(maxsize=1)
def _held(documents: tuple[str, ...], words: Words, key: bytes) -> PartyWords:
    """Read the words once per process while the texts are unchanged."""
    return PartyWords.of(documents, words, key)


@lru_cache(maxsize=1)
def _rows(
    documents: tuple[str, ...], words: Words, vocabulary: Any, frequencies: tuple[int, ...] | None, n_documents: int
) -> Any:
    """Count once per process."""
    weighing = TextVectorizer(words, vocabulary, None if frequencies is None else np.array(frequencies), n_documents)
    return weighing.weighed(weighing.counted(documents)).rows.astype(np.float64)


# ---- word site --------------------------------------------------------------------------------------------------

LISTED = "vocabulary.txt"
MOST_DOCUMENTS = 1 << 53
NO_KEY = (
    "A run over texts needs the shared key, and this site has none: anyone with a list of words could test it against "
    "the hashes. One site makes it (partsong federation shared-key) and gives it to the others out-of-band, not "
    "through the server. Then all sites join again with --shared-key."
)


def bind_run(site: Site, texts: Texts, request: Request) -> Site:
    """Return the site with the data of the requested run.

    Refuse if the texts must not be used, except for the end of a run, which brings the model to the site.
    """
    run = request.nonce.run
    if request.nonce.kind is Kind.NAMES:
        raise RequestRefused("names", "Words of texts are sent only by the vocabulary agreement.")
    is_new = request.nonce.kind in (Kind.HELLO, Kind.START)
    settings = parse_experiment(request.note) if is_new else site.load_start(run).experiment
    rule = Experiment.from_message(settings).text_rule
    if rule is None:
        raise RequestRefused("texts", "This site holds texts, but the experiment has no table words: it is for tables.")
    is_end = request.nonce.kind is Kind.FINISH and not run.endswith(SUFFIX)
    if not is_end:
        _require_allowed(site, texts, rule)
    if run.endswith(SUFFIX):
        return _in_agreement(site, texts, rule, run)
    name = f"{run}{SUFFIX}"
    if request.nonce.kind is Kind.START and (started := site.run_folder(name).load_start()) is not None:
        require_same_data(
            texts.held(rule, name, site.roster), started
        )  # these are the texts that words were agreed on over
    return _in_main_run(site, texts, rule, settings, run)


def require_table(settings: Mapping[str, Any]) -> None:
    """Refuse an experiment on texts at a site with a table."""
    if settings.get("words") is not None:
        raise RequestRefused(
            "texts",
            "The experiment is for texts (it has a table words), but this site joined with a table. Join with "
            "--text-column.",
        )


def vocabulary_in(files: RunFolder, counted: Attempt | None, last: Message) -> Vocabulary:
    """Return the agreed vocabulary: the words of the site's last step and the summed document frequencies.

    Require 0 ≤ df ≤ n for each word, and n < 2⁵³, up to which secure sums are exact.
    """
    worked = None if counted is None else files.load_work(counted)
    party = None if worked is None else worked.state
    if not isinstance(party, AgreementPartyState) or party.agreed is None:
        raise RequestRefused("out-of-step", "The vocabulary agreement ended before this site answered its last step.")
    try:
        with np.errstate(invalid="ignore"):  # NaN becomes a value below 0
            agreed = agreed_vocabulary(party, last)
        inverse_frequencies(agreed.documents, agreed.n_documents)
        if agreed.n_documents >= MOST_DOCUMENTS:
            raise ParameterError("too many documents")
    except DataError:
        raise
    except (PartsongError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise RequestRefused(
            "protocol", f"The result of the vocabulary agreement is invalid ({type(error).__name__})."
        ) from None
    return agreed


def has_own_counts(agreed: Vocabulary, held: PartyWords) -> bool:
    """Return whether the sums can include this site's counts: 0 ≤ df − df_p ≤ n − n_p for each word."""
    own = held.frequencies_in({word: column for column, word in enumerate(agreed.words)})
    others, elsewhere = np.asarray(agreed.documents) - own, agreed.n_documents - held.n_documents
    return bool(others.min() >= 0 and others.max() <= elsewhere)


def keep_vocabulary(folder: Path, weighing: TextVectorizer) -> None:
    """Write the words next to the result of a run, one per line in column order; readable by the owner only."""
    listed = "".join(f"{word}\n" for word in weighing.names)
    write_bytes(folder / LISTED, listed.encode("utf-8", "surrogatepass"), private=True)


def _require_allowed(site: Site, texts: Texts, rule: TextRule) -> None:
    site.policy.words.require(rule)
    if site.policy.columns is not None:
        raise RequestRefused("words", "site.toml sets columns, which texts do not have. Remove that line.")
    if not texts.key:
        raise RequestRefused("no-shared-key", NO_KEY)
    if site.roster is None:
        raise RequestRefused(
            "roster",
            "Sites agree on words by secure sums among parties of a pinned roster, and this site has no roster.",
        )


def _in_agreement(site: Site, texts: Texts, rule: TextRule, run: str) -> Site:
    """Return the site in a vocabulary agreement.

    All parties are in every sum, even if later rounds sample parties: two sums that differ by one party would reveal
    its words to anyone with the key.
    """
    roster = restrict_roster(site.roster, site.run_folder(run).load_start())
    policy = replace(site.policy, minimum_parties=max(site.policy.minimum_parties, len(roster or ())))

    def build(settings: Mapping[str, Any], n_parties: int, roster: Roster | None) -> Plan:
        """Build the plan of the agreement for an experiment that the site accepts."""
        plan = site.build(settings, n_parties, roster)
        site.policy.require(plan.request, site.data.n_rows)
        site.policy.require_mask_bound(plan.mask_bound)
        if n_parties < 3 or rule.min_parties > n_parties:
            raise RequestRefused(
                "parties",
                f"{n_parties} parties cannot agree on words with min_parties = {rule.min_parties}. Use at least 3.",
            )
        request, masks = replace(plan.request, parties=n_parties), secure_sum_for_words(n_parties, roster)
        return Plan(cast(Program, rule.rounds), masks, request, MOST_EXCHANGES)

    return replace(site, texts=None, data=texts.held(rule, run, roster), policy=policy, roster=roster, build=build)


def _in_main_run(site: Site, texts: Texts, rule: TextRule, settings: Mapping[str, Any], run: str) -> Site:
    agreed = site.run_folder(f"{run}{SUFFIX}").load_vocabulary()
    if agreed is None:
        reason = (
            f"This site has no vocabulary for {run!r}: the agreement did not finish here, or its files are lost. "
            f"Restore runs/{run}{SUFFIX}/vocabulary from a backup, or start a new run."
        )
        raise RequestRefused("no-words", reason)
    if dict(agreed.experiment) != dict(settings):
        raise RequestRefused("conflict", "The vocabulary of this run was agreed on with other settings.")
    if agreed.rows != len(texts.documents):
        raise RequestRefused(
            "layout",
            f"The vocabulary was agreed on over {agreed.rows} texts, but there are {len(texts.documents)} now.",
        )
    context = vocabulary_context(agreed.vocabulary.documents, agreed.vocabulary.n_documents)
    return replace(site, texts=None, data=replace(texts.counted(rule.weighing(agreed.vocabulary)), context=context))


def long_words_note(party: Any, program: Any) -> str:
    """For the log of a site whose words are in part too long for an agreement: how many, and the limit; else nothing.
    Words that are too long are in nothing that leaves, and neither is their number.
    """
    if not isinstance(party, AgreementPartyState) or not party.n_too_long:
        return ""
    return (
        f"{party.n_too_long} different words here, each in at least {program.min_documents} of the texts, have more "
        f"than {program.longest} bytes of UTF-8, the max_word_bytes of the experiment. They take no part in the "
        "agreement, are not in the model, and the server does not learn of them. If they matter, ask the coordinator "
        "for a new run with a larger max_word_bytes."
    )


def empty_texts_note(rows: Any) -> str:
    """For the log of a site without any agreed word; else nothing."""
    if np.count_nonzero(rows.data):
        return ""
    return (
        f"None of the {rows.shape[0]} texts here has a word of the vocabulary. The site takes part with rows of zeros. "
        "Check the language of the texts and the rule of the experiment."
    )
