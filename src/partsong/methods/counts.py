"""Federated document counts: documents with a word, and with pairs of words, summed over parties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from partsong import kernels
from partsong.aggregation.linear import Sum
from partsong.core.interfaces import Array, ArraySpec, Layout, Message, ProgramBase, RowSolver, Shard, Traits
from partsong.core.states import state
from partsong.errors import CompositionError, DataError, ParameterError
from partsong.evaluation.topic_quality import Cooccurrence, TopicPairs, count_pairs
from partsong.solvers.lda import word_counts


class DocumentCounts(ProgramBase):
    """Base of programs that count documents: all parties take part once, and there is no model."""

    __slots__ = ()

    @property
    def rank(self) -> int:
        return 0

    @property
    def solver(self) -> RowSolver:
        raise CompositionError(f"{type(self).__name__} counts documents and has no model to fit rows to.")

    @property
    def traits(self) -> Traits:
        return Traits(full_participation=True)


@state("pairs.sums")
@dataclass(frozen=True, slots=True)
class CooccurrenceServerState:
    """Numbers of documents: all, with each word, with each pair (int64); None before the sum."""

    documents: Array | None = None
    words: Array | None = None
    pairs: Array | None = None


@state("pairs.party")
@dataclass(frozen=True, slots=True)
class CooccurrencePartyState:
    """Whether the party has sent its counts."""

    has_sent: bool = False


@dataclass(frozen=True, slots=True)
class CooccurrenceSums(DocumentCounts):
    """Each party counts its documents with a word and with two words of a topic; the server adds the counts.

        local:   n_p, Σ_d [x_dw > 0], Σ_d [x_dv > 0][x_dw > 0]     sent: documents (1), words (u), pairs (p): whole

    u is the number of distinct words in the topics, which are public, and p the number of pairs within topics; other
    words are not counted. The totals equal those of the pooled documents exactly. A party's own counts reveal which of
    these words its documents combine and, for a single document, which it contains. With secure aggregation
    (`secure_aggregation.protocol.SecureSum`) only totals are visible. A count to which only one party contributes is
    that party's count. There is one round: a party refuses a second one, which would add nothing about all parties but,
    with some of them missing, would reveal single counts.

    For C_v a party's rows are windows instead of documents (`evaluation.topic_quality.windows`).
    """

    topic_pairs: TopicPairs
    aggregation: Sum = Sum()

    def __post_init__(self) -> None:
        if not self.topic_pairs.words:
            raise ParameterError(
                "There is nothing to count: the topics have no words. Pass topics with at least one word."
            )

    @staticmethod
    def of(topics: Sequence[Sequence[int]]) -> CooccurrenceSums:
        """Return the program for topics given as lists of columns (`evaluation.topic_quality.top_columns`)."""
        return CooccurrenceSums(TopicPairs.of(topics))

    def start_party(self, shard: Shard, layout: Layout) -> CooccurrencePartyState:
        return CooccurrencePartyState()

    def start_server(self, layout: Layout) -> tuple[CooccurrenceServerState, Message]:
        if self.topic_pairs.words[-1] >= layout.n_features:
            raise ParameterError(
                f"Topics name column {self.topic_pairs.words[-1]}, but the parties have {layout.n_features} columns."
            )
        pairs = np.array(self.topic_pairs.pairs, np.int64).reshape(-1, 2)
        return CooccurrenceServerState(), Message({"words": np.array(self.topic_pairs.words, np.int64), "pairs": pairs})

    def local(
        self, shard: Shard, party: CooccurrencePartyState, model: Message
    ) -> tuple[CooccurrencePartyState, Message]:
        if party.has_sent:
            raise ParameterError(
                f"Party {shard.name!r} has already sent its counts. Counting takes one round, because two sums that "
                "differ by one party reveal its counts. Start a new run to count again."
            )
        counted = count_pairs(word_counts(shard.matrix), self.topic_pairs)
        documents = np.array([counted.documents], np.int64)
        return CooccurrencePartyState(True), Message(
            {"documents": documents, "words": counted.words, "pairs": counted.pairs}
        )

    def finish(self, server: CooccurrenceServerState, aggregate: Message) -> tuple[CooccurrenceServerState, Message]:
        totals = (kernels.of(aggregate[name]).to_numpy(aggregate[name]) for name in ("documents", "words", "pairs"))
        counted = CooccurrenceServerState(*totals)
        return counted, Message({"documents": counted.documents})

    def counts(self, server: CooccurrenceServerState) -> Cooccurrence:
        """Return the counts for `evaluation.topic_quality`."""
        if server.documents is None or server.words is None or server.pairs is None:
            raise DataError("Nothing has been counted yet. Run one round first.")
        return Cooccurrence(self.topic_pairs, int(server.documents[0]), server.words, server.pairs)

    def components(self, server: CooccurrenceServerState) -> Array:
        return np.zeros((0, len(self.topic_pairs.words)))

    def metrics(self, server: CooccurrenceServerState) -> Mapping[str, float]:
        return {"documents": 0.0 if server.documents is None else float(server.documents[0])}

    def upload_spec(self, layout: Layout) -> tuple[Mapping[str, ArraySpec], ...]:
        sizes = {"documents": 1, "words": len(self.topic_pairs.words), "pairs": len(self.topic_pairs.pairs)}
        return ({name: ArraySpec((size,), "int", non_negative=True) for name, size in sizes.items()},)


@state("frequencies.sums")
@dataclass(frozen=True, slots=True)
class FrequencyServerState:
    """Numbers of documents: all, and with each word; None before the sum."""

    documents: int = 0
    words: np.ndarray | None = None


@state("frequencies.party")
@dataclass(frozen=True, slots=True)
class FrequencyPartyState:
    """Whether the party has sent its frequencies."""

    has_sent: bool = False


@dataclass(frozen=True, slots=True)
class FrequencySums(DocumentCounts):
    """Each party counts its documents with each word; the server adds the counts.

        local:   n_p, Σ_d [x_dw > 0]     sent: documents (1), words (V): whole

    For vocabularies that need no agreement: a public list, or hashes. With secure aggregation only totals are visible;
    a count to which only one party contributes is that party's count. There is one round, as in CooccurrenceSums.
    Never sent: X_p.
    """

    aggregation: Sum = Sum()

    def start_party(self, shard: Shard, layout: Layout) -> FrequencyPartyState:
        return FrequencyPartyState()

    def start_server(self, layout: Layout) -> tuple[FrequencyServerState, Message]:
        return FrequencyServerState(), Message({"documents": np.zeros(1, np.int64)})

    def local(self, shard: Shard, party: FrequencyPartyState, model: Message) -> tuple[FrequencyPartyState, Message]:
        if party.has_sent:
            raise ParameterError(
                f"Party {shard.name!r} has already sent its counts, once per run. Start a new run to count again."
            )
        rows = word_counts(shard.matrix)
        words = np.bincount(rows.indices[rows.data > 0], minlength=rows.shape[1]).astype(np.int64)
        return FrequencyPartyState(True), Message({"documents": np.array([rows.shape[0]], np.int64), "words": words})

    def finish(self, server: FrequencyServerState, aggregate: Message) -> tuple[FrequencyServerState, Message]:
        documents, words = (kernels.of(aggregate[name]).to_numpy(aggregate[name]) for name in ("documents", "words"))
        return FrequencyServerState(int(documents[0]), words), Message({"documents": documents})

    def counts(self, server: FrequencyServerState) -> tuple[np.ndarray, int]:
        """Return document frequencies (V) and the number of documents."""
        if server.words is None:
            raise DataError("Nothing has been counted yet. Run one round first.")
        return server.words, server.documents

    def components(self, server: FrequencyServerState) -> Array:
        return np.zeros((0, 0 if server.words is None else len(server.words)))

    def metrics(self, server: FrequencyServerState) -> Mapping[str, float]:
        return {"documents": float(server.documents)}

    def upload_spec(self, layout: Layout) -> tuple[Mapping[str, ArraySpec], ...]:
        sizes = {"documents": 1, "words": layout.n_features}
        return ({name: ArraySpec((size,), "int", non_negative=True) for name, size in sizes.items()},)
