"""Do the strongest words of a topic belong together: by vectors of words, or by how often they occur together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.errors import DataError, ParameterError
from partsong.evaluate.cooccurrence import Cooccurrence
from partsong.evaluate.word_vectors import word_vectors

EPSILON = 1e-12
"""Added to the share of documents with both words, as in gensim."""


@dataclass(frozen=True, slots=True)
class Coherence:
    """One number per topic; NaN for a topic that was skipped, since fewer than two of its words are known."""

    topics: tuple[float, ...]
    unknown_words: int = 0

    @property
    def skipped(self) -> int:
        """How many topics have no number."""
        return sum(math.isnan(value) for value in self.topics)

    @property
    def mean(self) -> float:
        """Over the topics that have one."""
        return float(np.nanmean(self.topics))


def embedding_coherence(topics: Sequence[Sequence[str]], table: Any) -> Coherence:
    """The mean cosine between the vectors of two words of a topic, over all pairs of its words.

        (2 / N(N − 1)) Σ_{i<j} ⟨v_i, v_j⟩ / ‖v_i‖‖v_j‖

    `table` is what `word_vectors` takes. Words that it lacks, or has a vector of zeros for, are skipped and counted;
    a word that a topic names twice counts once.
    """
    lists = [list(dict.fromkeys(topic)) for topic in topics]
    vectors = word_vectors(table, (word for topic in lists for word in topic))
    units = {word: unit for word, vector in vectors.items() if (unit := _unit(vector)) is not None}
    known = [[word for word in topic if word in units] for topic in lists]

    def mean_cosine(words: list[str]) -> float:
        total = np.sum([units[word] for word in words], axis=0)
        n = len(words)
        return (float(total @ total) - n) / (n * (n - 1))

    unknown = sum(len(topic) for topic in lists) - sum(len(words) for words in known)
    return _judged(known, mean_cosine, unknown, "a vector")


def npmi_coherence(topics: Sequence[Sequence[int]], counts: Cooccurrence, epsilon: float = EPSILON) -> Coherence:
    """The mean NPMI of two words of a topic (columns), over all pairs of its words: gensim's c_npmi.

        NPMI(a, b) = log((p_ab + ε) / (p_a p_b)) / −log(p_ab + ε)

    p are shares of documents (or of windows: gensim takes those of 10 words). 1 where two words only occur together,
    −1 as ε → 0 where they never do, 0 where they are independent. Words that occur nowhere are skipped.
    """

    def mean_npmi(joint: np.ndarray) -> float:
        return float(_npmi(joint, counts.documents, epsilon)[np.triu_indices(len(joint), 1)].mean())

    return _from_counts(topics, counts, mean_npmi, epsilon)


def cv_coherence(topics: Sequence[Sequence[int]], counts: Cooccurrence, epsilon: float = EPSILON) -> Coherence:
    """gensim's c_v: the mean over words a of cos(n_a, Σ_b n_b), where n_a = (NPMI(a, b))_b over the topic's words.

    Counts are of windows of 110 words (`cooccurrence.windows`); texts that are shorter are windows themselves.
    """

    def mean_likeness(joint: np.ndarray) -> float:
        rows = _npmi(joint, counts.documents, epsilon)
        whole = rows.sum(axis=0)
        norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(whole)
        return float(np.mean(rows @ whole / np.where(norms > 0, norms, 1.0)))

    return _from_counts(topics, counts, mean_likeness, epsilon)


def _from_counts(
    topics: Sequence[Sequence[int]], counts: Cooccurrence, measure: Callable[[np.ndarray], float], epsilon: float
) -> Coherence:
    if not 0 < epsilon < 1:
        raise ParameterError(f"epsilon must be above 0 and below 1; got {epsilon}.")
    known = counts.by_topic(topics)
    unknown = sum(len({*topic}) for topic in topics) - sum(len(joint) for joint in known)
    return _judged(known, measure, unknown, "an occurrence")


def _judged(known: Sequence[Any], measure: Callable[[Any], float], unknown: int, what: str) -> Coherence:
    """A number for each topic with two known words."""
    values = tuple(measure(words) if len(words) > 1 else math.nan for words in known)
    if all(map(math.isnan, values)):
        raise DataError(
            f"None of {len(values)} topics has two words with {what}, so that there is no coherence to tell. "
            "Check that topics and reference have the same language, case and way of splitting words."
        )
    return Coherence(values, unknown)


def _npmi(joint: np.ndarray, documents: int, epsilon: float) -> np.ndarray:
    """NPMI of all pairs from joint counts (c × c) with the words' own counts on the diagonal.

    Of two words that are in every document nothing can be told (0/0); they count as 1, as all that only occur together
    do. (gensim's ε makes that −1.)
    """
    shares = joint / documents
    alone = shares.diagonal()
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.log((shares + epsilon) / np.outer(alone, alone)) / -np.log(shares + epsilon)
    return np.where(joint >= documents, 1.0, values)


def _unit(vector: np.ndarray) -> np.ndarray | None:
    """A vector over its norm, without overflow; None for zeros."""
    peak = float(np.abs(vector).max())
    return None if peak == 0 else (scaled := vector / peak) / np.linalg.norm(scaled)
