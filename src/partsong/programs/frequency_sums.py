"""In how many documents of all parties each word of a known vocabulary occurs: one sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from partsong import kernels
from partsong.aggregate.linear import Sum
from partsong.core import Array, Form, Layout, Message, RowSolver, Shard
from partsong.errors import CompositionError, DataError, ParameterError
from partsong.local.lda_rows import word_counts


@dataclass(frozen=True, slots=True)
class Frequencies:
    """What the server knows: how many documents there are, and with each word; None before the sum."""

    documents: int = 0
    words: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Sender:
    """Whether a party has sent its frequencies."""

    has_sent: bool = False


@dataclass(frozen=True, slots=True)
class FrequencySums:
    """Each party counts its documents with each word; the server adds the counts.

        local:   n_p, Σ_d [x_dw > 0]     sent: documents (1), words (V): whole

    For vocabularies that need no agreement: a public list, or hashes. Masked, only totals are seen; a count to which
    one party alone adds is that party's. One round is all, as in CooccurrenceSums. Never sent: X_p.
    """

    aggregation: Sum = Sum()

    @property
    def rank(self) -> int:
        """Nothing is factorized."""
        return 0

    @property
    def solver(self) -> RowSolver:
        """Nothing is fitted."""
        raise CompositionError("FrequencySums counts documents; it has no model to fit rows to.")

    @property
    def needs_everyone(self) -> bool:
        """Frequencies are those of all documents."""
        return True

    def start_party(self, shard: Shard, layout: Layout) -> Sender:
        """Nothing was sent yet."""
        return Sender()

    def start_server(self, layout: Layout) -> tuple[Frequencies, Message]:
        """There is nothing to ask for but the counts."""
        return Frequencies(), Message({"documents": np.zeros(1, np.int64)})

    def local(self, shard: Shard, party: Sender, model: Message) -> tuple[Sender, Message]:
        """One pass over the party's documents."""
        if party.has_sent:
            raise ParameterError(f"Party {shard.name!r} has sent its counts already. Counting takes one round.")
        rows = word_counts(shard.matrix)
        words = np.bincount(rows.indices[rows.data > 0], minlength=rows.shape[1]).astype(np.int64)
        return Sender(True), Message({"documents": np.array([rows.shape[0]], np.int64), "words": words})

    def finish(self, server: Frequencies, aggregate: Message) -> tuple[Frequencies, Message]:
        """The sums are all there is."""
        documents, words = (kernels.of(aggregate[name]).to_numpy(aggregate[name]) for name in ("documents", "words"))
        return Frequencies(int(documents[0]), words), Message({"documents": documents})

    def counts(self, server: Frequencies) -> tuple[np.ndarray, int]:
        """Document frequencies (V), and the number of documents."""
        if server.words is None:
            raise DataError("Nothing has been counted yet. Run one round first.")
        return server.words, server.documents

    def components(self, server: Frequencies) -> Array:
        """No topics of its own."""
        return np.zeros((0, 0 if server.words is None else len(server.words)))

    def metrics(self, server: Frequencies) -> Mapping[str, float]:
        """How many documents were counted."""
        return {"documents": float(server.documents)}

    def expects(self, layout: Layout) -> tuple[Mapping[str, Form], ...]:
        """Counts."""
        sizes = {"documents": 1, "words": layout.n_features}
        return ({name: Form((size,), "int", non_negative=True) for name, size in sizes.items()},)
