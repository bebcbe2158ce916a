"""The strongest words of topics, and how many of them are distinct."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

import numpy as np

from partsong import kernels
from partsong.core import Array
from partsong.errors import DataError, ParameterError, ShapeError

Word = TypeVar("Word", bound=Hashable)


def top_columns(H: Array, n: int = 10) -> tuple[tuple[int, ...], ...]:
    """Of each row of H (k × V) the columns of its n largest entries, largest first, equal ones in their order.

    Entries of zero belong to no topic: a row with fewer others has fewer words, and so has a vocabulary below n.
    """
    values = np.asarray(kernels.of(H).to_numpy(H), np.float64)
    if values.ndim != 2:
        raise ShapeError(f"Topics are the rows of a matrix (topics × words); this has {values.ndim} dimensions.")
    if n < 1:
        raise ParameterError(f"A topic is shown by at least one word; got n={n}.")
    if not np.isfinite(values).all():
        raise DataError("Topics with NaN or infinite entries have no largest ones. Fit the model again.")
    order = np.argsort(-values, axis=1, kind="stable")[:, :n]
    return tuple(tuple(int(j) for j in row if weights[j] > 0) for row, weights in zip(order, values, strict=True))


def top_words(H: Array, vocabulary: Sequence[str], n: int = 10) -> tuple[tuple[str, ...], ...]:
    """The same as words: `vocabulary` has one for each column."""
    topics = top_columns(H, n)
    if len(vocabulary) != H.shape[1]:
        raise ShapeError(f"The vocabulary has {len(vocabulary)} words, but topics have {H.shape[1]} columns.")
    return tuple(tuple(vocabulary[j] for j in topic) for topic in topics)


def topic_diversity(topics: Sequence[Sequence[Word]]) -> float:
    """Distinct words over all words of the lists: 1 where no two topics share one, 1/k where all k are the same."""
    words = [word for topic in topics for word in topic]
    if not words:
        raise DataError("Diversity needs at least one word, and the topics have none. Fit the model to some text.")
    return len(set(words)) / len(words)
