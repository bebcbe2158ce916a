"""Run an agreement on words, and what came of it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from partsong.core import Engine, Message, Program, Reduction, Round, Schedule, Shard
from partsong.errors import DataError, PartyError
from partsong.privacy.admission import Roster
from partsong.privacy.masking import MaskedSum
from partsong.streams import fresh_seed
from partsong.text.agreement import MOST_EXCHANGES, VocabularyAgreement
from partsong.text.agreement_steps import DONE, Candidate, Step
from partsong.text.vocabulary import Vocabulary

LONGER = (
    "To let them take part, give all parties the same larger longest_word (longest of VocabularyAgreement), in bytes "
    "of UTF-8; each byte makes what is sent larger."
)
MOST_NAMED = 5


class LongWordsWarning(UserWarning):
    """Words of a party took no part in an agreement, because they have too many bytes."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreed vocabulary, at how many parties each word is (`holders`), and what it took.

    `too_long`: of each party that is here, how many of its words in enough documents have more than `rule.longest`
    bytes, and stayed at home. It comes from the parties' own states; no message has it.
    """

    vocabulary: Vocabulary
    holders: Any = field(repr=False)
    rule: VocabularyAgreement
    false_pass: float
    n_tables: int
    bytes_up: Mapping[str, int] = field(repr=False)
    bytes_down: int
    seconds: tuple[float, ...]
    too_long: Mapping[str, int] = field(default_factory=dict)

    @property
    def exchanges(self) -> int:
        """How many sums it took."""
        return len(self.seconds)

    def told(self) -> str:
        """For people; no word is told."""
        rule, n_parties = self.rule, len(self.bytes_up)
        told = (
            f"{self.vocabulary.n_columns} words are in at least {rule.min_documents} document(s) at each of at least "
            f"{rule.min_parties} of {n_parties} parties. A word at fewer parties leaves them with a probability of at "
            f"most {self.false_pass:.1e} ({self.n_tables} tables of keyed hashes). Sent up: "
            f"{sum(self.bytes_up.values()) / max(1, n_parties) / 1e6:.2f} MB per party in {self.exchanges} exchanges, "
            f"{sum(self.seconds):.1f} s. {self.told_of_long_words()}"
        )
        return told.rstrip()

    def told_of_long_words(self) -> str:
        """Which parties kept words back because of their length, and how many different ones; empty where none did."""
        left_out = [f"{count} at {name!r}" for name, count in self.too_long.items() if count]
        if not left_out:
            return ""
        more = f", and some at {len(left_out) - MOST_NAMED} more" if len(left_out) > MOST_NAMED else ""
        return (
            f"Different words that stayed at home because they have more than {self.rule.longest} bytes: "
            f"{', '.join(left_out[:MOST_NAMED])}{more}."
        )


def masks_for_words(parties: int, roster: Roster | None = None) -> MaskedSum:
    """Masked sums of whole numbers that stay exact: n·bound < 2⁵³."""
    return MaskedSum(bound=2.0 ** (53 - parties.bit_length()), weight_bound=1.0, roster=roster)


def agree(
    shards: Sequence[Shard],
    engine: Engine,
    rule: VocabularyAgreement | None = None,
    *,
    reduction: Reduction | None = None,
    seed: int | None = None,
    watch: Callable[[Round], object] = lambda done: None,
) -> Agreement:
    """The words of the rule, by masked sums unless another reduction is given; the same at all parties.

    Pads follow from the parties' key and the public seed: with the same two, agree once only. DataError where no word
    meets the rule. A party that has none of the agreed words takes part all the same; its documents are empty. `watch`
    is called after each exchange. A LongWordsWarning tells where words were left out because of their length.
    """
    rule = rule or VocabularyAgreement()
    masks = masks_for_words(len(shards)) if reduction is None else reduction
    schedule = Schedule(MOST_EXCHANGES, fresh_seed() if seed is None else seed)
    sent, answered, seconds = Counter[str](), 0, []
    for done in engine.run(cast(Program, rule), shards, schedule, reduction=masks):
        sent.update(done.bytes_up)
        answered += done.bytes_down
        seconds.append(done.seconds)
        watch(done)
        if Step.read(done.model["step"]).stage == DONE:
            return _concluded(rule, done, sent, answered, seconds)
    raise PartyError(f"No agreement on words after {MOST_EXCHANGES} exchanges. Ask for a larger false_pass.")


def _concluded(rule: VocabularyAgreement, done: Round, sent: Counter[str], answered: int, s: list[float]) -> Agreement:
    parties: Mapping[str, Candidate] = done.checkpoint.parties
    party = max(parties.values(), key=lambda one: one.n_too_long)
    vocabulary = agreed_vocabulary(party, done.model)
    chance, tables = float(done.model["chance"][0]), int(done.metrics["tables"])
    too_long = {name: one.n_too_long for name, one in parties.items()}
    agreement = Agreement(vocabulary, party.holders, rule, chance, tables, dict(sent), answered, tuple(s), too_long)
    if party.n_too_long:
        warnings.warn(f"{agreement.told_of_long_words()} {LONGER}", LongWordsWarning, stacklevel=3)
    return agreement


def agreed_vocabulary(party: Candidate, model: Message) -> Vocabulary:
    """What a party makes of the last message."""
    if not party.words:
        long = f" {party.n_too_long} different words of a party were left out for their length. {LONGER}"
        raise DataError(
            "No word meets the rule of the vocabulary. Ask for fewer documents or parties per word, or check that all "
            f"parties have texts of one language.{long if party.n_too_long else ''}"
        )
    return Vocabulary(party.words, model["documents"], int(model["n_documents"][0]))
