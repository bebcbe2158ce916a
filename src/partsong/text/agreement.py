"""A vocabulary that parties agree on without pooling: words in ≥ d documents at ≥ m parties, by sums alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from partsong.aggregate.linear import Sum
from partsong.core import Layout, Message, Shard
from partsong.errors import ParameterError, PartyError
from partsong.text.agreed_words import CellSums
from partsong.text.agreement_steps import DONE, FREQUENCIES, MOST_COUNTERS, TABLES, WORDS, Candidate, Count, Left, Step
from partsong.text.cells import Cells
from partsong.text.held_words import HeldWords, held_by
from partsong.text.keys import lanes, names_of, session_key
from partsong.text.letters import are_wide
from partsong.text.tables import FEWEST_LAST, Tables, Tally, next_tables

MOST_EXCHANGES = 24
MOST_READINGS = 4
FEW_RARE, MOST_RARE = 10, 4e7
"""Words at too few parties that may pass by chance: so many, and `false_pass` of as many as there may be in all."""


@dataclass(frozen=True, slots=True)
class VocabularyAgreement:
    """Which words are in ≥ `min_documents` documents at each of ≥ `min_parties` parties, and in how many in all.

        tables       sent: 0/1 for each bucket of keyed hashes          broadcast: which buckets have sums ≥ m
        words        sent: cells of the words left, under pads          broadcast: the sums of cells
        frequencies  sent: documents with each agreed word, documents   broadcast: their sums

    In each exchange of tables only words take part that passed before. A word at fewer than m parties passes a table if
    its bucket, which is independent of all others', is in use: with a probability of at most the share of buckets in
    use, which the server sees. Tables follow until the product is below `false_pass`. Words at m parties always pass.

    `words_expected` at a party and `longest` (bytes of a word in UTF-8; longer ones stay at home) are public. The first
    sets the size of the first tables and costs time, nothing else, where it is wrong.
    """

    min_documents: int = 1
    min_parties: int = 2
    words_expected: int = 20_000
    longest: int = 32
    false_pass: float = 1e-6
    aggregation: Sum = field(default=Sum(), repr=False)

    def __post_init__(self) -> None:
        for name in ("min_documents", "min_parties", "words_expected", "longest"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ParameterError(f"{name} must be a whole number of at least 1; got {value!r}.")
        if not 1e-30 <= self.false_pass < 1:
            raise ParameterError(f"false_pass must be a probability from 1e-30 to below 1; got {self.false_pass!r}.")

    @property
    def needs_everyone(self) -> bool:
        """A word of a missing party would seem rarer than it is."""
        return True

    def exchange(self, model: Message) -> tuple[int, int]:
        """All exchanges are one round: over the same parties."""
        return Step.read(model["step"]).number, MOST_EXCHANGES

    def start_party(self, shard: Shard, layout: Layout) -> Candidate:
        """All words that may be proposed are left."""
        held = held_by(shard)
        key = session_key(held.key, layout.seed, layout.parties)
        words, n_too_long = held.candidates(self.min_documents, self.longest)
        left = Left(words, names_of(key, words), are_wide(words))
        return Candidate(key, len(layout.parties), left, n_too_long=n_too_long)

    def start_server(self, layout: Layout) -> tuple[Count, Message]:
        """A table for a first look: one bucket for four words, if no two parties have one in common."""
        parties = len(layout.parties)
        if self.min_parties > parties:
            raise ParameterError(
                f"A word cannot be at {self.min_parties} parties where there are {parties}. For words that all of them "
                f"have take min_parties={parties}."
            )
        server = Count(Step(TABLES, 0, 1, max(256, parties * self.words_expected // 4)), parties)
        return server, Message({"step": server.step.written()})

    def local(self, shard: Shard, party: Candidate, model: Message) -> tuple[Candidate, Message]:
        """What the step asks for."""
        held = held_by(shard)
        step = Step.asked(model, party.answered, shard.name)
        accord, is_second = model.arrays.get("accord"), party.answered == 0
        party = replace(party, answered=step.number)
        if (accord is not None and accord[0] != party.parties * _accord(held, party)) or (is_second and accord is None):
            raise PartyError(
                f"Party {shard.name!r} has another key, or other options of its words, than the others. Nothing was "
                "agreed on. Give the same key and the same Words to all parties."
            )
        if "bitmap" in model.arrays:
            party = party.narrowed(model["bitmap"], shard.name)
        if step.stage == TABLES:
            return self._mark(held, party, step)
        if step.stage == WORDS:
            narrow, wide = self._cells(step, party.parties)
            short, others = party.left.some(~party.left.is_wide), party.left.some(party.left.is_wide)
            return party, Message(
                {
                    "narrow": narrow.filled(party.key, short.words, short.names),
                    "wide": wide.filled(party.key, others.words, others.names),
                }
            )
        return self._read(shard.name, held, party, model)

    def finish(self, server: Count, aggregate: Message) -> tuple[Count, Message]:
        """The next step, with what the sums have told."""
        if round(aggregate.weight) != server.parties:
            raise PartyError(
                f"{server.parties - round(aggregate.weight)} of {server.parties} parties are missing from a sum, and "
                "their words would seem rarer than they are. Agree again, with those that are there."
            )
        if server.step.stage == TABLES:
            return self._tally(server, aggregate)
        if server.step.stage == WORDS:
            server = replace(server, step=replace(server.step, stage=FREQUENCIES, number=server.step.number + 1))
            return server, Message({**aggregate.arrays, "step": server.step.written()})
        if aggregate["unread"][0] > 0:
            return self._again(server)
        server = replace(server, step=Step(DONE, server.step.number + 1))
        told = {"documents": aggregate["documents"], "n_documents": aggregate["n_documents"]}
        return server, Message({**told, "step": server.step.written(), "chance": np.array([server.chance])})

    def metrics(self, server: Count) -> Mapping[str, float]:
        """The bound so far on the probability that a word at too few parties passes, and about how many words do."""
        return {"false_pass": server.chance, "tables": float(server.n_tables), "passing": server.n_passing}

    def _mark(self, held: HeldWords, party: Candidate, step: Step) -> tuple[Candidate, Message]:
        tables = Tables(step.number, step.tables, step.buckets, party.parties)
        places = tables.places(party.key, party.left.names)
        sent = {"tables": tables.marked(places, party.left.is_wide)}
        if step.number == 0:
            sent["accord"] = np.array([_accord(held, party)])
        return replace(party, tables=tables, places=places), Message(sent)

    def _read(self, name: str, held: HeldWords, party: Candidate, model: Message) -> tuple[Candidate, Message]:
        """The agreed words from the sums of cells, and in how many documents of this party each is."""
        step = Step.read(model["step"])
        cells = self._cells(replace(step, number=step.number - 1), party.parties)
        agreed = CellSums.heard(*cells, model, name).read(party.key, self.min_parties)
        if agreed is None:
            return party, Message({"unread": np.array([1.0])})
        agreed.require_sound(name, party.left.words, FEW_RARE + MOST_RARE * self.false_pass)
        sent = {"documents": held.frequencies_in(agreed.columns), "n_documents": np.array([held.n_documents])}
        return replace(party, agreed=agreed), Message({**sent, "unread": np.array([0.0])})

    def _tally(self, server: Count, aggregate: Message) -> tuple[Count, Message]:
        step = server.step
        before = Tables(step.number, step.tables, step.buckets, server.parties)
        tally = Tally.of(before, aggregate["tables"], self.min_parties)
        chance = server.chance * tally.chance if self.min_parties > 1 else 0.0
        after = next_tables(before, tally, chance, self.false_pass)
        server = replace(
            server,
            chance=chance,
            n_tables=server.n_tables + step.tables,
            n_passing=tally.passing,
            n_wide=min(tally.wide, tally.passing),
            step=Step(TABLES, after.number, after.tables, after.buckets),
        )
        if chance <= self.false_pass and (step.tables >= FEWEST_LAST or tally.words == 0):
            server = replace(server, step=self._cells_step(server))
        elif after.size > MOST_COUNTERS:
            raise ParameterError(
                f"About {tally.words:.2g} words of all parties would need tables of {after.size:.2g} counters, and "
                f"{MOST_COUNTERS:.2g} are the most. Ask for more documents per word (min_documents)."
            )
        told = {"bitmap": tally.bitmap, **({"accord": aggregate["accord"]} if "accord" in aggregate.arrays else {})}
        return server, Message({**told, "step": server.step.written()})

    def _again(self, server: Count) -> tuple[Count, Message]:
        if server.readings + 1 >= MOST_READINGS:
            raise PartyError(
                f"The agreed words could not be read from {MOST_READINGS} sums. Check that all parties have the same "
                "version, and agree again with a fresh key."
            )
        server = replace(server, n_passing=2 * server.n_passing, n_wide=2 * server.n_wide, readings=server.readings + 1)
        server = replace(server, step=self._cells_step(server))
        return server, Message({"step": server.step.written()})

    def _cells_step(self, server: Count) -> Step:
        sizes = server.n_passing - server.n_wide, server.n_wide
        return Step(WORDS, server.step.number + (server.step.stage != TABLES), 0, 0, *map(Cells.enough_for, sizes))

    def _cells(self, step: Step, parties: int) -> tuple[Cells, Cells]:
        return Cells(step.number, step.narrow, None, parties), Cells(step.number, step.wide, self.longest, parties)


def _accord(held: HeldWords, party: Candidate) -> float:
    """A number of 32 bits that parties with the same key and the same options have in common."""
    return float(lanes(party.key, "accord", names_of(party.key, [held.options.encode()]), 1)[0, 0])
