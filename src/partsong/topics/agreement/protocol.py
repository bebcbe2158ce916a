"""Agreement on a vocabulary without pooling texts: words in ≥ d documents at ≥ m parties, from sums alone."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, cast

import numpy as np

from partsong.aggregation.linear import Sum
from partsong.core.interfaces import (
    Engine,
    Layout,
    Message,
    Program,
    ProgramBase,
    Reduction,
    Round,
    Schedule,
    Shard,
    Traits,
    Turn,
)
from partsong.core.parameters import whole_number
from partsong.core.states import state
from partsong.core.streams import fresh_seed
from partsong.errors import DataError, ParameterError, PartyError
from partsong.secure_aggregation.messages import Roster
from partsong.secure_aggregation.protocol import SecureSum
from partsong.topics.agreement.encoding import Cells, are_wide, hash_names, keyed_numbers, session_key
from partsong.topics.agreement.tables import (
    FEWEST_LAST,
    AgreedWords,
    BucketTables,
    CellSums,
    PartyWords,
    Tally,
    next_tables,
    party_words,
)
from partsong.topics.vocabulary import Vocabulary

TABLES, WORDS, FREQUENCIES, DONE = range(4)
MOST_COUNTERS = 1 << 27
_STOPPED = "Nothing was sent. Agree again with a new key."

MOST_EXCHANGES = 24
MOST_READINGS = 4
FEW_RARE, MOST_RARE = 10, 4e7
"""Allowed number of words at too few parties: a constant, plus `false_pass` times the maximum number of words."""
LONGER = (
    "To include them, set the same larger max_word_bytes (in bytes of UTF-8) at all parties; each byte makes the "
    "messages larger."
)
MOST_NAMED = 5


@state("words.step")
@dataclass(frozen=True, slots=True)
class AgreementStep:
    """The next step of all parties: stage, number of the exchange, and sizes of tables or cells."""

    stage: int
    number: int
    tables: int = 0
    buckets: int = 0
    narrow: int = 0
    wide: int = 0

    def to_array(self) -> Any:
        """Return the step as an array."""
        return np.array([self.stage, self.number, self.tables, self.buckets, self.narrow, self.wide], dtype=np.int64)

    @classmethod
    def from_array(cls, numbers: Any) -> AgreementStep:
        """Read a step from an array."""
        return cls(*(int(number) for number in numbers))

    @classmethod
    def from_request(cls, model: Message, last: int, party: str) -> AgreementStep:
        """Read the step that a server requests from a party, after its answer to step `last`.

        Pads and hashes are for one step each: a repeated step, a step out of order, or one that no honest server
        requests is refused.
        """
        try:
            step = cls.from_array(model["step"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise PartyError(f"Party {party!r}: the server's step cannot be read. {_STOPPED}") from None
        if step.number != last + 1 or step.stage not in (TABLES, WORDS, FREQUENCIES):
            raise PartyError(
                f"Party {party!r} was asked for step {step.number} of the agreement after step {last}. Each step is "
                f"answered once, in order: two answers with one pad could be read without the key. {_STOPPED}"
            )
        sizes = (step.tables, step.buckets, step.narrow, step.wide)
        if min(sizes) < 0 or max((step.tables + 1) * step.buckets, step.narrow, step.wide) > MOST_COUNTERS:
            raise PartyError(f"Party {party!r} was asked for tables or cells of invalid size. {_STOPPED}")
        return step


@state("words.remaining")
@dataclass(frozen=True, slots=True)
class RemainingWords:
    """The words that have passed so far, their names under the key, and which are wide."""

    words: tuple[bytes, ...] = field(repr=False)
    names: Any = field(repr=False)
    is_wide: Any = field(repr=False)

    def select(self, chosen: Any) -> RemainingWords:
        """Select words by a boolean array."""
        return RemainingWords(tuple(compress(self.words, chosen.tolist())), self.names[chosen], self.is_wide[chosen])


@state("words.party")
@dataclass(frozen=True, slots=True)
class AgreementPartyState:
    """State of a party: its remaining words, their places in the last tables, and finally the agreed words.

    `answered` is the number of the last answered step. `n_too_long` is the number of its words in enough documents that
    have too many bytes to be proposed; this number is not sent.
    """

    key: bytes = field(repr=False)
    parties: int
    left: RemainingWords
    answered: int = -1
    tables: BucketTables | None = None
    places: Any = field(default=None, repr=False)
    agreed: AgreedWords | None = field(default=None, repr=False)
    n_too_long: int = 0

    @property
    def words(self) -> tuple[str, ...]:
        """The agreed words; empty before the end."""
        return () if self.agreed is None else self.agreed.words

    @property
    def holders(self) -> Any:
        """The number of parties with each agreed word."""
        return None if self.agreed is None else self.agreed.holders

    def narrowed(self, bitmap: Any, party: str) -> AgreementPartyState:
        """Remove the words in buckets that did not pass."""
        if self.tables is None or bitmap.dtype != np.uint8 or bitmap.shape != (-(-self.tables.size // 8),):
            raise PartyError(f"Party {party!r}: the server's bitmap does not match the previous tables. {_STOPPED}")
        passed = self.tables.survivors(bitmap, self.places, self.left.is_wide)
        return replace(self, left=self.left.select(passed), tables=None, places=None)


@state("words.server")
@dataclass(frozen=True, slots=True)
class AgreementServerState:
    """State of the server: `chance` bounds the probability that a word at too few parties passes."""

    step: AgreementStep
    parties: int
    chance: float = 1.0
    n_tables: int = 0
    n_passing: float = 0.0
    n_wide: float = 0.0
    readings: int = 0


@dataclass(frozen=True, slots=True)
class VocabularyAgreement(ProgramBase):
    """Find the words in ≥ `min_documents` documents at each of ≥ `min_parties` parties, and their document counts.

        tables       sent: 0/1 for each bucket of keyed hashes          broadcast: which buckets have sums ≥ m
        words        sent: cells of the remaining words, under pads     broadcast: the sums of cells
        frequencies  sent: documents with each agreed word, documents   broadcast: their sums

    Only words that passed before take part in the next exchange of tables. A word at fewer than m parties passes a
    table if its bucket, which is independent of all others, is in use: with a probability of at most the share of
    buckets in use, which the server sees. Tables follow until the product is below `false_pass`. Words at m parties
    always pass.

    `words_expected` (words at a party) and `longest` (bytes of a word in UTF-8; longer words are not sent) are public.
    A wrong `words_expected`, which sets the size of the first tables, only costs time.
    """

    min_documents: int = 1
    min_parties: int = 2
    words_expected: int = 20_000
    longest: int = 32
    false_pass: float = 1e-6
    aggregation: Sum = field(default=Sum(), repr=False)

    def __post_init__(self) -> None:
        for name in ("min_documents", "min_parties", "words_expected", "longest"):
            whole_number(name, getattr(self, name))
        if not 1e-30 <= self.false_pass < 1:
            raise ParameterError(
                f"false_pass must be a probability from 1e-30 to below 1; got {self.false_pass!r}.",
                parameter="false_pass",
            )

    @property
    def traits(self) -> Traits:
        """All parties take part: a word of a missing party would seem rarer than it is."""
        return Traits(full_participation=True)

    def turn(self, model: Message) -> Turn:
        """All exchanges form one round, with the same parties."""
        return Turn(AgreementStep.from_array(model["step"]).number, MOST_EXCHANGES)

    def start_party(self, shard: Shard, layout: Layout) -> AgreementPartyState:
        """Start with all words that may be proposed."""
        held = party_words(shard)
        key = session_key(held.key, layout.seed, layout.parties)
        words, n_too_long = held.candidates(self.min_documents, self.longest)
        left = RemainingWords(words, hash_names(key, words), are_wide(words))
        return AgreementPartyState(key, len(layout.parties), left, n_too_long=n_too_long)

    def start_server(self, layout: Layout) -> tuple[AgreementServerState, Message]:
        """Start with one table: one bucket per four words, if no two parties share words."""
        parties = len(layout.parties)
        if self.min_parties > parties:
            raise ParameterError(
                f"min_parties must be at most {parties}, the number of parties; got {self.min_parties}. Use {parties} "
                "for words at all parties.",
                parameter="min_parties",
            )
        server = AgreementServerState(
            AgreementStep(TABLES, 0, 1, max(256, parties * self.words_expected // 4)), parties
        )
        return server, Message({"step": server.step.to_array()})

    def local(self, shard: Shard, party: AgreementPartyState, model: Message) -> tuple[AgreementPartyState, Message]:
        held = party_words(shard)
        step = AgreementStep.from_request(model, party.answered, shard.name)
        accord, is_second = model.arrays.get("accord"), party.answered == 0
        party = replace(party, answered=step.number)
        if (accord is not None and accord[0] != party.parties * _accord(held, party)) or (is_second and accord is None):
            raise PartyError(
                f"Party {shard.name!r} has a different key or different word options than the others. Nothing was "
                "agreed on. Use the same key and the same Words at all parties."
            )
        if "bitmap" in model.arrays:
            party = party.narrowed(model["bitmap"], shard.name)
        if step.stage == TABLES:
            return self._mark(held, party, step)
        if step.stage == WORDS:
            narrow, wide = self._cells(step, party.parties)
            short, others = party.left.select(~party.left.is_wide), party.left.select(party.left.is_wide)
            return party, Message(
                {
                    "narrow": narrow.filled(party.key, short.words, short.names),
                    "wide": wide.filled(party.key, others.words, others.names),
                }
            )
        return self._read(shard.name, held, party, model)

    def finish(self, server: AgreementServerState, aggregate: Message) -> tuple[AgreementServerState, Message]:
        """Compute the next step from the sums."""
        if round(aggregate.weight) != server.parties:
            raise PartyError(
                f"{server.parties - round(aggregate.weight)} of {server.parties} parties are missing from a sum, so "
                "their words would seem rarer than they are. Agree again with the remaining parties."
            )
        if server.step.stage == TABLES:
            return self._tally(server, aggregate)
        if server.step.stage == WORDS:
            server = replace(server, step=replace(server.step, stage=FREQUENCIES, number=server.step.number + 1))
            return server, Message({**aggregate.arrays, "step": server.step.to_array()})
        if aggregate["unread"][0] > 0:
            return self._again(server)
        server = replace(server, step=AgreementStep(DONE, server.step.number + 1))
        counts = {"documents": aggregate["documents"], "n_documents": aggregate["n_documents"]}
        return server, Message({**counts, "step": server.step.to_array(), "chance": np.array([server.chance])})

    @property
    def rank(self) -> int:
        """Zero: there is no factor."""
        return 0

    def components(self, server: AgreementServerState) -> Any:
        return np.zeros((0, 0))

    def is_over(self, server: AgreementServerState) -> bool:
        return server.step.stage == DONE

    def metrics(self, server: AgreementServerState) -> Mapping[str, float]:
        """The current bound on the probability that a word at too few parties passes, and estimates so far."""
        return {"false_pass": server.chance, "tables": float(server.n_tables), "passing": server.n_passing}

    def _mark(
        self, held: PartyWords, party: AgreementPartyState, step: AgreementStep
    ) -> tuple[AgreementPartyState, Message]:
        tables = BucketTables(step.number, step.tables, step.buckets, party.parties)
        places = tables.places(party.key, party.left.names)
        sent = {"tables": tables.marked(places, party.left.is_wide)}
        if step.number == 0:
            sent["accord"] = np.array([_accord(held, party)])
        return replace(party, tables=tables, places=places), Message(sent)

    def _read(
        self, name: str, held: PartyWords, party: AgreementPartyState, model: Message
    ) -> tuple[AgreementPartyState, Message]:
        """Decode the agreed words from the sums of cells, and count them in the documents of this party."""
        step = AgreementStep.from_array(model["step"])
        cells = self._cells(replace(step, number=step.number - 1), party.parties)
        agreed = CellSums.from_message(*cells, model, name).read(party.key, self.min_parties)
        if agreed is None:
            return party, Message({"unread": np.array([1.0])})
        agreed.require_sound(name, party.left.words, FEW_RARE + MOST_RARE * self.false_pass)
        sent = {"documents": held.frequencies_in(agreed.columns), "n_documents": np.array([held.n_documents])}
        return replace(party, agreed=agreed), Message({**sent, "unread": np.array([0.0])})

    def _tally(self, server: AgreementServerState, aggregate: Message) -> tuple[AgreementServerState, Message]:
        step = server.step
        before = BucketTables(step.number, step.tables, step.buckets, server.parties)
        tally = Tally.of(before, aggregate["tables"], self.min_parties)
        chance = server.chance * tally.chance if self.min_parties > 1 else 0.0
        after = next_tables(before, tally, chance, self.false_pass)
        server = replace(
            server,
            chance=chance,
            n_tables=server.n_tables + step.tables,
            n_passing=tally.passing,
            n_wide=min(tally.wide, tally.passing),
            step=AgreementStep(TABLES, after.number, after.tables, after.buckets),
        )
        if chance <= self.false_pass and (step.tables >= FEWEST_LAST or tally.words == 0):
            server = replace(server, step=self._cells_step(server))
        elif after.size > MOST_COUNTERS:
            raise ParameterError(
                f"About {tally.words:.2g} words of all parties would need tables of {after.size:.2g} counters; the "
                f"maximum is {MOST_COUNTERS:.2g}. Use a larger min_documents.",
                parameter="min_documents",
            )
        reply = {"bitmap": tally.bitmap, **({"accord": aggregate["accord"]} if "accord" in aggregate.arrays else {})}
        return server, Message({**reply, "step": server.step.to_array()})

    def _again(self, server: AgreementServerState) -> tuple[AgreementServerState, Message]:
        if server.readings + 1 >= MOST_READINGS:
            raise PartyError(
                f"The agreed words could not be decoded from {MOST_READINGS} sums. Check that all parties have the "
                "same version, and agree again with a new key."
            )
        server = replace(server, n_passing=2 * server.n_passing, n_wide=2 * server.n_wide, readings=server.readings + 1)
        server = replace(server, step=self._cells_step(server))
        return server, Message({"step": server.step.to_array()})

    def _cells_step(self, server: AgreementServerState) -> AgreementStep:
        sizes = server.n_passing - server.n_wide, server.n_wide
        return AgreementStep(
            WORDS, server.step.number + (server.step.stage != TABLES), 0, 0, *map(Cells.enough_for, sizes)
        )

    def _cells(self, step: AgreementStep, parties: int) -> tuple[Cells, Cells]:
        return Cells(step.number, step.narrow, None, parties), Cells(step.number, step.wide, self.longest, parties)


def _accord(held: PartyWords, party: AgreementPartyState) -> float:
    """A 32-bit number that is equal for parties with the same key and the same options."""
    return float(keyed_numbers(party.key, "accord", hash_names(party.key, [held.options.encode()]), 1)[0, 0])


class LongWordsWarning(UserWarning):
    """Words of a party were left out of an agreement because they have too many bytes."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreed vocabulary, the number of parties with each word (`holders`), and the cost of the agreement.

    `too_long`: for each local party, the number of its words in enough documents that have more than `rule.longest`
    bytes and were not proposed. It comes from the parties' own states and is in no message.
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
        """The number of sums."""
        return len(self.seconds)

    def summary(self) -> str:
        """Return a text summary, without any word."""
        rule, n_parties = self.rule, len(self.bytes_up)
        text = (
            f"{self.vocabulary.n_columns} words are in at least {rule.min_documents} document(s) at each of at least "
            f"{rule.min_parties} of {n_parties} parties. A word at fewer parties is revealed with a probability of at "
            f"most {self.false_pass:.1e} ({self.n_tables} tables of keyed hashes). Uploaded: "
            f"{sum(self.bytes_up.values()) / max(1, n_parties) / 1e6:.2f} MB per party in {self.exchanges} exchanges, "
            f"{sum(self.seconds):.1f} s. {self.long_words_note()}"
        )
        return text.rstrip()

    def long_words_note(self) -> str:
        """Return a note on words left out for their length, by party; empty if there are none."""
        left_out = [f"{count} at {name!r}" for name, count in self.too_long.items() if count]
        if not left_out:
            return ""
        more = f", and some at {len(left_out) - MOST_NAMED} more" if len(left_out) > MOST_NAMED else ""
        return (
            f"Words that were left out because they have more than {self.rule.longest} bytes: "
            f"{', '.join(left_out[:MOST_NAMED])}{more}."
        )


def secure_sum_for_words(parties: int, roster: Roster | None = None) -> SecureSum:
    """Return a SecureSum for whole numbers that stay exact: n·bound < 2⁵³."""
    return SecureSum(bound=2.0 ** (53 - parties.bit_length()), weight_bound=1.0, roster=roster)


def agree(
    shards: Sequence[Shard],
    engine: Engine,
    rule: VocabularyAgreement | None = None,
    *,
    reduction: Reduction | None = None,
    seed: int | None = None,
    watch: Callable[[Round], object] = lambda done: None,
) -> Agreement:
    """Agree on the words of a rule, by secure sums unless another reduction is given.

    Pads follow from the parties' key and the public seed: with the same key and seed, agree only once. DataError if no
    word meets the rule. A party without any of the agreed words still takes part; its documents are empty. `watch` is
    called after each exchange. A LongWordsWarning names the parties whose words were left out for their length.
    """
    rule = rule or VocabularyAgreement()
    masks = secure_sum_for_words(len(shards)) if reduction is None else reduction
    schedule = Schedule(MOST_EXCHANGES, fresh_seed() if seed is None else seed)
    sent, answered, seconds = Counter[str](), 0, []
    for done in engine.run(cast(Program, rule), shards, schedule, reduction=masks):
        sent.update(done.bytes_up)
        answered += done.bytes_down
        seconds.append(done.seconds)
        watch(done)
        if AgreementStep.from_array(done.model["step"]).stage == DONE:
            return _concluded(rule, done, sent, answered, seconds)
    raise PartyError(f"No agreement on words after {MOST_EXCHANGES} exchanges. Use a larger false_pass.")


def _concluded(rule: VocabularyAgreement, done: Round, sent: Counter[str], answered: int, s: list[float]) -> Agreement:
    parties: Mapping[str, AgreementPartyState] = done.checkpoint.parties
    party = max(parties.values(), key=lambda one: one.n_too_long)
    vocabulary = agreed_vocabulary(party, done.model)
    chance, tables = float(done.model["chance"][0]), int(done.metrics["tables"])
    too_long = {name: one.n_too_long for name, one in parties.items()}
    agreement = Agreement(vocabulary, party.holders, rule, chance, tables, dict(sent), answered, tuple(s), too_long)
    if party.n_too_long:
        warnings.warn(f"{agreement.long_words_note()} {LONGER}", LongWordsWarning, stacklevel=3)
    return agreement


def agreed_vocabulary(party: AgreementPartyState, model: Message) -> Vocabulary:
    """Return the vocabulary of a party from the last message."""
    if not party.words:
        long = f" {party.n_too_long} words of a party were left out for their length. {LONGER}"
        raise DataError(
            "No word meets the rule of the vocabulary. Lower min_documents or min_parties, or check that all parties "
            f"have texts of one language.{long if party.n_too_long else ''}"
        )
    return Vocabulary(party.words, model["documents"], int(model["n_documents"][0]))
