"""Run an agreement on words, and what came of it."""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreed vocabulary, at how many parties each word is (`holders`), and what it took."""

    vocabulary: Vocabulary
    holders: Any = field(repr=False)
    rule: VocabularyAgreement
    false_pass: float
    n_tables: int
    bytes_up: Mapping[str, int] = field(repr=False)
    bytes_down: int
    seconds: tuple[float, ...]

    @property
    def exchanges(self) -> int:
        """How many sums it took."""
        return len(self.seconds)

    def told(self) -> str:
        """For people; no word is told."""
        rule, n_parties = self.rule, len(self.bytes_up)
        return (
            f"{self.vocabulary.n_columns} words are in at least {rule.min_documents} document(s) at each of at least "
            f"{rule.min_parties} of {n_parties} parties. A word at fewer parties leaves them with a probability of at "
            f"most {self.false_pass:.1e} ({self.n_tables} tables of keyed hashes). Sent up: "
            f"{sum(self.bytes_up.values()) / max(1, n_parties) / 1e6:.2f} MB per party in {self.exchanges} exchanges, "
            f"{sum(self.seconds):.1f} s."
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
    is called after each exchange.
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
            party: Candidate = next(iter(done.checkpoint.parties.values()))
            vocabulary = agreed_vocabulary(party, done.model)
            chance, tables = float(done.model["chance"][0]), int(done.metrics["tables"])
            return Agreement(vocabulary, party.holders, rule, chance, tables, dict(sent), answered, tuple(seconds))
    raise PartyError(f"No agreement on words after {MOST_EXCHANGES} exchanges. Ask for a larger false_pass.")


def agreed_vocabulary(party: Candidate, model: Message) -> Vocabulary:
    """What a party makes of the last message."""
    if not party.words:
        raise DataError(
            "No word meets the rule of the vocabulary. Ask for fewer documents or parties per word, or check that all "
            "parties have texts of one language."
        )
    return Vocabulary(party.words, model["documents"], int(model["n_documents"][0]))
