"""A site with texts, as it faces a run: as its words in the agreement, and as its counts of agreed words after that."""

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
"""An agreement on words is a run of its own before the run that it is for, whose name it has with this at the end."""

TEXTS = "texts"
"""The one column that sites name in it: its keyed hash is the same where the key is."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Documents, and the key of words that all sites share; without one nothing is done with them."""

    documents: tuple[str, ...] = field(repr=False)
    key: bytes = field(repr=False, default=b"")
    secret: int = field(repr=False, default=0)

    @property
    def unread(self) -> SiteData:
        """As many rows as documents, and no columns: these follow from a run's words."""
        return SiteData(np.empty((len(self.documents), 0)), (), self.secret)

    def held(self, rule: TextRule, run: str, roster: Roster | None) -> HeldData:
        """Its words, for the agreement of a run among the parties of a roster."""
        held = _held(self.documents, rule.words, run_key(self.key, run, roster or {}))
        return HeldData(replace(held, options=rule.key), (TEXTS,), self.secret)

    def counted(self, weighing: TextVectorizer) -> CountedData:
        """How often it has the agreed words, by weight."""
        frequencies = None if weighing.documents is None else tuple(np.asarray(weighing.documents).tolist())
        rows = _rows(self.documents, weighing.words, weighing.vocabulary, frequencies, weighing.n_documents)
        return CountedData(rows, tuple(weighing.names), self.secret, weighing)


@dataclass(frozen=True, slots=True)
class TextData(SiteData):
    """What follows from texts: its columns are words, which are in no log, nor in an error."""

    @property
    def hides_names(self) -> bool:
        return True

    def main_run(self, name: str) -> str:
        """A run and its agreement are one."""
        return name.removesuffix(SUFFIX)


@dataclass(frozen=True, slots=True)
class HeldData(TextData):
    """A site's words, for the agreement on words."""

    def matrix(self, order: tuple[int, ...] | None = None, least: int = 0) -> Matrix:
        return cast(Matrix, self.rows)


@dataclass(frozen=True, slots=True)
class CountedData(TextData):
    """Rows of documents over agreed words (CSR, float64); `context`: by which masks are among sites that were told the
    same frequencies of these words.
    """

    weighing: TextVectorizer | None = field(repr=False, default=None)
    context: str = ""


def run_key(key: bytes, run: str, roster: Roster) -> bytes:
    """The key of words in one run among these signing keys: pads that follow from it hide what is sent once, so that no
    two runs share one, nor those of one name in two federations.
    """
    signing = [part for name, verifying in sorted(roster.items()) for part in (name, verifying)]
    return fingerprint("partsong words of a run", run, key, *signing)


@lru_cache(maxsize=1)
def _held(documents: tuple[str, ...], words: Words, key: bytes) -> PartyWords:
    """Read once in a process, as long as the texts stay as they are."""
    return PartyWords.of(documents, words, key)


@lru_cache(maxsize=1)
def _rows(
    documents: tuple[str, ...], words: Words, vocabulary: Any, frequencies: tuple[int, ...] | None, n_documents: int
) -> Any:
    """Counted once in a process."""
    weighing = TextVectorizer(words, vocabulary, None if frequencies is None else np.array(frequencies), n_documents)
    return weighing.weighed(weighing.counted(documents)).rows.astype(np.float64)


# ---- word site --------------------------------------------------------------------------------------------------

LISTED = "vocabulary.txt"
MOST_DOCUMENTS = 1 << 53
NO_KEY = (
    "A run over texts needs the key that sites share, and this site has none: whoever has a list of words could test "
    "them. One site makes it (partsong federation shared-key) and gives it to the others out of band, not through "
    "the server, and all join again with --shared-key."
)


def facing(site: Site, texts: Texts, request: Request) -> Site:
    """The site as it answers this request; refused where texts must not be worked on, but for the end of a run, which
    brings the model to the site.
    """
    run = request.nonce.run
    if request.nonce.kind is Kind.NAMES:
        raise RequestRefused("names", "Words of texts are not told to others, but by the agreement on words.")
    is_new = request.nonce.kind in (Kind.HELLO, Kind.START)
    told = parse_experiment(request.note) if is_new else site.load_start(run).experiment
    rule = Experiment.from_table(told).text_rule
    if rule is None:
        raise RequestRefused("texts", "This site holds texts, and the experiment has no table words. It is for tables.")
    is_end = request.nonce.kind is Kind.FINISH and not run.endswith(SUFFIX)
    if not is_end:
        _require_allowed(site, texts, rule)
    if run.endswith(SUFFIX):
        return _agreeing(site, texts, rule, run)
    name = f"{run}{SUFFIX}"
    if request.nonce.kind is Kind.START and (started := site.run_folder(name).load_start()) is not None:
        require_same_data(
            texts.held(rule, name, site.roster), started
        )  # these are the texts that words were agreed on over
    return _counting(site, texts, rule, told, run)


def require_table(told: Mapping[str, Any]) -> None:
    """Refuse an experiment about texts where there is a table."""
    if told.get("words") is not None:
        raise RequestRefused(
            "texts",
            "The experiment is about texts (it has a table words), and this site has joined with a table. Join with "
            "--text-column.",
        )


def vocabulary_in(files: RunFolder, counted: Attempt | None, last: Message) -> Vocabulary:
    """What a site makes of the end of an agreement: the words of its last work, and everybody's counts of them, for
    each 0 ≤ df ≤ n, and n < 2⁵³, up to which masked sums are exact.
    """
    worked = None if counted is None else files.load_work(counted)
    party = None if worked is None else worked.state
    if not isinstance(party, AgreementPartyState) or party.agreed is None:
        raise RequestRefused("out-of-step", "The agreement on words has ended before its last step was answered here.")
    try:
        with np.errstate(invalid="ignore"):  # what is no number comes out below 0
            agreed = agreed_vocabulary(party, last)
        inverse_frequencies(agreed.documents, agreed.n_documents)
        if agreed.n_documents >= MOST_DOCUMENTS:
            raise ParameterError("more documents than can be counted")
    except DataError:
        raise
    except (PartsongError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise RequestRefused("protocol", f"The end of the agreement cannot be used ({type(error).__name__}).") from None
    return agreed


def has_own_counts(agreed: Vocabulary, held: PartyWords) -> bool:
    """Whether counts can be sums with this site's in them: 0 ≤ df − df_p ≤ n − n_p for each word."""
    own = held.frequencies_in({word: column for column, word in enumerate(agreed.words)})
    others, elsewhere = np.asarray(agreed.documents) - own, agreed.n_documents - held.n_documents
    return bool(others.min() >= 0 and others.max() <= elsewhere)


def keep_vocabulary(folder: Path, weighing: TextVectorizer) -> None:
    """The words beside the result of a run, one a line in the order of the columns: for its owner alone."""
    listed = "".join(f"{word}\n" for word in weighing.names)
    write_bytes(folder / LISTED, listed.encode("utf-8", "surrogatepass"), private=True)


def _require_allowed(site: Site, texts: Texts, rule: TextRule) -> None:
    site.policy.words.require(rule)
    if site.policy.columns is not None:
        raise RequestRefused(
            "words", "site.toml names columns that may leave, which texts do not have. Remove that line."
        )
    if not texts.key:
        raise RequestRefused("no-shared-key", NO_KEY)
    if site.roster is None:
        raise RequestRefused(
            "roster", "Sites agree on words by masked sums among parties of a pinned roster; there is none."
        )


def _agreeing(site: Site, texts: Texts, rule: TextRule, run: str) -> Site:
    """The site in an agreement. All parties are in every sum, also where some of them are drawn for each round after
    that: two sums that differ by one party would tell its words to whoever has the key.
    """
    roster = restrict_roster(site.roster, site.run_folder(run).load_start())
    policy = replace(site.policy, minimum_parties=max(site.policy.minimum_parties, len(roster or ())))

    def build(told: Mapping[str, Any], n_parties: int, roster: Roster | None) -> Plan:
        """The plan of the agreement, for an experiment that the site would take part in."""
        plan = site.build(told, n_parties, roster)
        site.policy.require(plan.request, site.data.n_rows)
        site.policy.require_mask_bound(plan.mask_bound)
        if n_parties < 3 or rule.min_parties > n_parties:
            raise RequestRefused(
                "parties", f"{n_parties} parties cannot agree on words at {rule.min_parties} of at least 3."
            )
        request, masks = replace(plan.request, parties=n_parties), secure_sum_for_words(n_parties, roster)
        return Plan(cast(Program, rule.rounds), masks, request, MOST_EXCHANGES)

    return replace(site, texts=None, data=texts.held(rule, run, roster), policy=policy, roster=roster, build=build)


def _counting(site: Site, texts: Texts, rule: TextRule, told: Mapping[str, Any], run: str) -> Site:
    agreed = site.run_folder(f"{run}{SUFFIX}").load_vocabulary()
    if agreed is None:
        told_at = (
            f"Sites have not agreed on words for {run!r}, or this one has not heard the end of it, or has lost its "
            f"files: that takes this site's own copy of runs/{run}{SUFFIX}/vocabulary, or else a new run."
        )
        raise RequestRefused("no-words", told_at)
    if dict(agreed.experiment) != dict(told):
        raise RequestRefused("conflict", "Words were agreed on for this run with other settings.")
    if agreed.rows != len(texts.documents):
        raise RequestRefused(
            "layout", f"Words were agreed on over {agreed.rows} texts; there are {len(texts.documents)}."
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
        "agreement, are not in the model, and the server is not told of them. If they matter, ask the coordinator for "
        "a new run with a larger max_word_bytes."
    )


def empty_texts_note(rows: Any) -> str:
    """For the log of a site without any agreed word; else nothing."""
    if np.count_nonzero(rows.data):
        return ""
    return (
        f"None of the {rows.shape[0]} texts here has a word of the vocabulary. The site takes part with rows of zeros. "
        "Check the language of the texts and the rule of the experiment."
    )
