"""Topic quality: co-occurrence, coherence (NPMI, C_v, word vectors) and diversity."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from scipy import sparse

from partsong import kernels
from partsong.core.interfaces import Array
from partsong.errors import DataError, DataTypeError, FormatError, ParameterError, ShapeError, format_count
from partsong.io.opening import open_bytes, parse_errors, resolve_path

WINDOW = 110
"""Words in a window of C_v (Röder, Both & Hinneburg, 2015)."""

LONGEST_LINE = 1 << 20
"""Bytes; a longer line cannot be a word vector."""
MOST_DIMENSIONS = 1 << 16
Vectors = dict[str, np.ndarray]
EPSILON = 1e-12
"""Added to the fraction of documents with both words, as in gensim."""
Word = TypeVar("Word", bound=Hashable)


@dataclass(frozen=True, slots=True)
class TopicPairs:
    """What is counted for the coherence of topics: their words (columns, ascending) and the pairs within each topic.

    A pair consists of two positions in `words`, the smaller first. Pairs across topics are not counted.
    """

    words: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]

    @staticmethod
    def of(topics: Sequence[Sequence[int]]) -> TopicPairs:
        """Return the words and pairs of topics, given as lists of columns."""
        words = tuple(sorted({int(word) for topic in topics for word in topic}))
        if words and words[0] < 0:
            raise ParameterError(f"The words of a topic are column numbers, from 0; got {words[0]}.")
        place = {word: i for i, word in enumerate(words)}
        lists = [sorted({place[int(word)] for word in topic}) for topic in topics]
        pairs = {(a, b) for inside in lists for i, a in enumerate(inside) for b in inside[i + 1 :]}
        return TopicPairs(words, tuple(sorted(pairs)))


@dataclass(frozen=True, slots=True, eq=False)
class Cooccurrence:
    """The number of `documents` that contain each word and each pair; int64, in the order of `topic_pairs`."""

    topic_pairs: TopicPairs
    documents: int
    words: np.ndarray
    pairs: np.ndarray

    def __add__(self, other: Cooccurrence) -> Cooccurrence:
        if self.topic_pairs != other.topic_pairs:
            raise ShapeError("Counts of different words cannot be added. Use the same topics for both.")
        return Cooccurrence(
            self.topic_pairs, self.documents + other.documents, self.words + other.words, self.pairs + other.pairs
        )

    def by_topic(self, topics: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return for each topic the number of documents that contain two of its words (c × c).

        The diagonal has the document frequency of each word. Words that occur nowhere are left out. All pairs of the
        topics must have been counted.
        """
        place = {word: i for i, word in enumerate(self.topic_pairs.words)}
        joint = {pair: int(count) for pair, count in zip(self.topic_pairs.pairs, self.pairs, strict=True)}
        joint |= {(i, i): int(count) for i, count in enumerate(self.words)}
        try:
            inside = [[place[word] for word in dict.fromkeys(map(int, topic))] for topic in topics]
            known = [[i for i in positions if self.words[i] > 0] for positions in inside]
            counts = [[joint[min(a, b), max(a, b)] for a in positions for b in positions] for positions in known]
        except KeyError as error:
            raise ParameterError(
                f"Words or pairs of these topics were not counted (the first: {error}). Count them with the "
                "same topics."
            ) from error
        sizes = [(len(positions), len(positions)) for positions in known]
        return [np.array(each, np.int64).reshape(size) for each, size in zip(counts, sizes, strict=True)]


def count_pairs(X: Any, topic_pairs: TopicPairs) -> Cooccurrence:
    """Count words and pairs in documents × words (sparse or dense); every entry above zero is an occurrence."""
    rows = sparse.csr_array(X)
    if topic_pairs.words and topic_pairs.words[-1] >= rows.shape[1]:
        raise ShapeError(
            f"Topics name column {topic_pairs.words[-1]}, but the documents have "
            f"{format_count(rows.shape[1], 'column')}."
        )
    chosen = rows[:, list(topic_pairs.words)]
    occurs = sparse.csr_array(((chosen.data > 0).astype(np.int64), chosen.indices, chosen.indptr), chosen.shape)
    words = np.bincount(occurs.indices, occurs.data, len(topic_pairs.words)).astype(np.int64)
    together = (occurs.T @ occurs).tocsr()
    first, second = (np.array([pair[i] for pair in topic_pairs.pairs], np.int64) for i in (0, 1))
    pairs = np.asarray(together[first, second]).reshape(-1) if len(first) else np.zeros(0)
    return Cooccurrence(topic_pairs, int(rows.shape[0]), words, pairs.astype(np.int64))


def windows(texts: Iterable[Sequence[str]], columns: Mapping[str, int], size: int = WINDOW) -> Any:
    """Return each sliding window of `size` words as a row of 0 and 1 (CSR); `columns` has the words to count.

    A text that is not longer than a window is one window, even if it is empty. If a word is in a window twice, gensim
    drops it once the first of the two leaves the window; here it counts until both have left.
    """
    if size < 1:
        raise ParameterError(f"size must be at least one word; got {size}.", parameter="size")
    starts: list[int] = []
    lengths: list[int] = []
    words: list[int] = []
    base = 0
    for text in texts:
        if isinstance(text, str):
            raise DataError("A text must be a list of words, but this one is a string. Split it into words first.")
        last = max(0, len(text) - size)
        ends: dict[int, int] = {}
        for position, word in enumerate(text):
            column = columns.get(word)
            if column is None:
                continue
            first = max(position - size + 1, 0, ends.get(column, -1) + 1)
            end = min(position, last)
            if end >= first:
                starts.append(base + first)
                lengths.append(end - first + 1)
                words.append(column)
            ends[column] = max(end, ends.get(column, -1))
        base += last + 1
    long = np.array(lengths, np.int64)
    rows = np.repeat(np.array(starts, np.int64) - np.cumsum(long) + long, long) + np.arange(long.sum())
    width = max(columns.values(), default=-1) + 1
    entries = np.ones(len(rows), np.float32), (rows, np.repeat(np.array(words, np.int64), long))
    return sparse.coo_array(entries, (base, width)).tocsr()


def word_vectors(table: Any, words: Iterable[str]) -> Vectors:
    """Return the vectors (float64, of one length) of those `words` that the table has.

    A table is a path, an object with `key_to_index` and `vectors`, such as gensim's KeyedVectors, or a mapping. A path
    names an .npz file with the words and a matrix, or a text file: a word and its numbers on each line, with or without
    a first line of counts, compressed or not. A text file is read as a stream, up to the last requested word. If a word
    occurs twice in a file, the first vector is used. Words must match exactly.
    """
    wanted = set(words)
    if isinstance(table, (str, os.PathLike)):
        path = resolve_path(table)
        found = _from_npz(path, wanted) if path.suffix.lower() == ".npz" else _from_text(path, wanted)
    elif hasattr(table, "key_to_index") and hasattr(table, "vectors"):
        found = {word: table.vectors[table.key_to_index[word]] for word in wanted if word in table.key_to_index}
    elif isinstance(table, Mapping):
        found = {word: table[word] for word in wanted if word in table}
    else:
        raise DataTypeError(
            f"Word vectors come from the path of a text or .npz file, gensim's KeyedVectors, or a mapping from words "
            f"to vectors; not from {type(table).__name__}."
        )
    return _checked(found)


def _checked(found: Mapping[str, Any]) -> Vectors:
    vectors = {word: _as_vector(word, found[word]) for word in sorted(found)}
    sizes = {len(vector) for vector in vectors.values()}
    if len(sizes) > 1:
        raise ShapeError(f"Word vectors must have one length; these have {min(sizes)} to {max(sizes)} numbers.")
    return vectors


def _as_vector(word: str, values: Any) -> np.ndarray:
    try:
        vector = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise DataTypeError(f"The vector of the word {word[:40]!r} does not consist of numbers.") from error
    if vector.ndim != 1 or not len(vector):
        raise ShapeError(f"The vector of the word {word[:40]!r} has shape {vector.shape}; it must be one-dimensional.")
    if not np.isfinite(vector).all():
        raise DataError(f"The vector of the word {word[:40]!r} has NaN or infinite values. Correct or remove it.")
    return vector


def _from_npz(path: Path, wanted: Collection[str]) -> Mapping[str, Any]:
    with parse_errors(path, "word vectors"), path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    texts = [name for name, array in arrays.items() if array.ndim == 1 and array.dtype.kind in "US"]
    tables = [name for name, array in arrays.items() if array.ndim == 2 and array.dtype.kind in "fiu"]
    words = next((name for name in ("words", *texts) if name in texts), None)
    matrix = next((name for name in ("vectors", *tables) if name in tables), None)
    if words is None or matrix is None or len(arrays[words]) != len(arrays[matrix]):
        shown = ", ".join(f"{name} {array.shape} {array.dtype}" for name, array in arrays.items())
        raise FormatError(
            f"{path} holds no word vectors: it needs a list of words and a matrix with a row for each of them, and has "
            f"{shown or 'nothing'}. Save it with np.savez(path, words=…, vectors=…)."
        )
    names = arrays[words].tolist()
    keys = [name.decode("utf-8", "replace") for name in names] if arrays[words].dtype.kind == "S" else names
    rows = {word: row for row, word in reversed(list(enumerate(keys))) if word in wanted}
    return {word: arrays[matrix][row] for word, row in rows.items()}


def _from_text(path: Path, wanted: Collection[str]) -> Mapping[str, Any]:
    names = {word.encode("utf-8", "surrogatepass"): word for word in wanted}
    found: dict[str, Any] = {}
    with parse_errors(path, "word vectors"), open_bytes(path) as stream:
        size: int | None = None
        stated: int | None = None
        number = 0
        for number, line in _lines(path, stream):
            if size is None:
                stated, size = _parse_header(path, line)
                if stated is not None:
                    continue
            word, values = _split_line(path, number, line, size)
            if word in names and names[word] not in found:
                found[names[word]] = _numbers(path, number, values)
                if len(found) == len(names):
                    return found
        if size is None:
            raise FormatError(f"{path} is empty and has no word vectors. Copy it again.")
        if stated is not None and number - 1 < stated:
            raise FormatError(
                f"{path}: its first line announces {stated} words, but it ends at line {number}. It was cut short; "
                "copy it again."
            )
    return found


def _lines(path: Path, stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield numbered lines, from 1, without line ends; blank lines at the end of the file are ignored."""
    number, blank = 0, 0
    while line := stream.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise FormatError(f"{path}, line {number}: too long for a word vector. Pass a file of word vectors.")
        if b"\0" in line:
            raise FormatError(f"{path}, line {number}: contains a null byte. Pass a text file, or copy it again.")
        stripped = line.rstrip()
        if blank and stripped:
            raise FormatError(f"{path}, line {blank}: blank; every line must have a word and its vector. Remove it.")
        blank = number if not stripped else 0
        if stripped:
            yield number, stripped


def _parse_header(path: Path, line: bytes) -> tuple[int | None, int]:
    """Return the number of words that a first line of counts states (None: it is a vector), and the vector length."""
    line = line.removeprefix(b"\xef\xbb\xbf")
    fields = line.split()
    if len(fields) == 2 and fields[0].isdigit() and fields[1].isdigit():
        if not 0 < int(fields[1]) <= MOST_DIMENSIONS:
            raise FormatError(f"{path}, line 1: announces vectors of {fields[1].decode()[:20]} numbers.")
        return int(fields[0]), int(fields[1])
    if not 2 <= len(fields) <= MOST_DIMENSIONS + 1:
        raise FormatError(
            f"{path}, line 1: not a word and its vector, nor the numbers of words and dimensions ({len(fields)} parts)."
        )
    return None, len(fields) - 1


def _split_line(path: Path, number: int, line: bytes, size: int) -> tuple[bytes, list[bytes]]:
    """Return a word and its unparsed numbers; a word may contain spaces, as a few of GloVe do, but no numbers."""
    if number == 1:
        line = line.removeprefix(b"\xef\xbb\xbf")
    if line.count(b" ") == size and line[:1] != b" ":
        word, _, rest = line.partition(b" ")
        return word, [rest]
    fields = line.split()
    if len(fields) == size + 1:
        return fields[0], fields[1:]
    if len(fields) <= size or any(map(_is_number, fields[1:-size])):
        raise FormatError(
            f"{path}, line {number}: has {len(fields)} parts, not a word and {size} numbers. It was cut short or "
            "damaged there; copy it again."
        )
    return b" ".join(fields[:-size]), fields[-size:]


def _numbers(path: Path, number: int, values: list[bytes]) -> np.ndarray:
    fields = values[0].split(b" ") if len(values) == 1 else values
    try:
        vector = np.array([float(field) for field in fields])
    except ValueError as error:
        raise FormatError(f"{path}, line {number}: the vector is not all numbers. Copy the file again.") from error
    if not np.isfinite(vector).all():
        raise FormatError(f"{path}, line {number}: the vector has NaN or infinite numbers. Copy the file again.")
    return vector


def _is_number(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Coherence:
    """One value per topic; NaN for a skipped topic, of which fewer than two words are known."""

    topics: tuple[float, ...]
    unknown_words: int = 0

    @property
    def skipped(self) -> int:
        """The number of topics without a value."""
        return sum(math.isnan(value) for value in self.topics)

    @property
    def mean(self) -> float:
        """The mean over topics that have a value."""
        return float(np.nanmean(self.topics))


def embedding_coherence(topics: Sequence[Sequence[str]], table: Any) -> Coherence:
    """Return the mean cosine between the vectors of two words of a topic, over all pairs of its words.

        (2 / N(N − 1)) Σ_{i<j} ⟨v_i, v_j⟩ / ‖v_i‖‖v_j‖

    `table` is as in `word_vectors`. Words without a vector, or with a vector of zeros, are skipped and counted. A word
    that a topic lists twice counts once.
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
    return _coherence(known, mean_cosine, unknown, "a vector")


def npmi_coherence(topics: Sequence[Sequence[int]], counts: Cooccurrence, epsilon: float = EPSILON) -> Coherence:
    """Return the mean NPMI of two words of a topic (columns), over all pairs of its words: gensim's c_npmi.

        NPMI(a, b) = log((p_ab + ε) / (p_a p_b)) / −log(p_ab + ε)

    p are fractions of documents (or of windows: gensim uses 10 words). NPMI is 1 if two words only occur together, 0 if
    they are independent, and −1 in the limit ε → 0 if they never do. Words that occur nowhere are skipped.
    """

    def mean_npmi(joint: np.ndarray) -> float:
        return float(_npmi(joint, counts.documents, epsilon)[np.triu_indices(len(joint), 1)].mean())

    return _from_counts(topics, counts, mean_npmi, epsilon)


def cv_coherence(topics: Sequence[Sequence[int]], counts: Cooccurrence, epsilon: float = EPSILON) -> Coherence:
    """Return gensim's c_v: the mean over words a of cos(n_a, Σ_b n_b), n_a = (NPMI(a, b))_b over the topic's words.

    Count windows of 110 words (`windows`); a shorter text is one window.
    """

    def mean_similarity(joint: np.ndarray) -> float:
        rows = _npmi(joint, counts.documents, epsilon)
        whole = rows.sum(axis=0)
        norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(whole)
        return float(np.mean(rows @ whole / np.where(norms > 0, norms, 1.0)))

    return _from_counts(topics, counts, mean_similarity, epsilon)


def _from_counts(
    topics: Sequence[Sequence[int]], counts: Cooccurrence, measure: Callable[[np.ndarray], float], epsilon: float
) -> Coherence:
    if not 0 < epsilon < 1:
        raise ParameterError(f"epsilon must be above 0 and below 1; got {epsilon}.", parameter="epsilon")
    known = counts.by_topic(topics)
    unknown = sum(len({*topic}) for topic in topics) - sum(len(joint) for joint in known)
    return _coherence(known, measure, unknown, "an occurrence")


def _coherence(known: Sequence[Any], measure: Callable[[Any], float], unknown: int, what: str) -> Coherence:
    """Compute a value for each topic with at least two known words."""
    values = tuple(measure(words) if len(words) > 1 else math.nan for words in known)
    if all(map(math.isnan, values)):
        raise DataError(
            f"No topic has two words with {what}, so coherence is undefined. "
            "Check that topics and reference have the same language, case and tokenization."
        )
    return Coherence(values, unknown)


def _npmi(joint: np.ndarray, documents: int, epsilon: float) -> np.ndarray:
    """Return the NPMI of all pairs from joint counts (c × c), with the words' own counts on the diagonal.

    For two words that occur in every document, NPMI is undefined (0/0). Here it is 1, as for all words that only occur
    together; gensim's ε makes it −1.
    """
    shares = joint / documents
    alone = shares.diagonal()
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.log((shares + epsilon) / np.outer(alone, alone)) / -np.log(shares + epsilon)
    return np.where(joint >= documents, 1.0, values)


def _unit(vector: np.ndarray) -> np.ndarray | None:
    """Return a vector divided by its norm, without overflow; None for zeros."""
    peak = float(np.abs(vector).max())
    return None if peak == 0 else (scaled := vector / peak) / np.linalg.norm(scaled)


def top_columns(H: Array, n: int = 10) -> tuple[tuple[int, ...], ...]:
    """Return for each row of H (k × V) the columns of its n largest entries, largest first; ties in column order.

    Zeros are left out, so a topic may have fewer than n words.
    """
    values = np.asarray(kernels.of(H).to_numpy(H), np.float64)
    if values.ndim != 2:
        raise ShapeError(
            "Topics are the rows of a matrix (topics × words); this array has "
            f"{format_count(values.ndim, 'dimension')}."
        )
    if n < 1:
        raise ParameterError(f"n must be at least 1 word per topic; got n={n}.", parameter="n")
    if not np.isfinite(values).all():
        raise DataError("The topics contain NaN or infinite values. Fit the model again.")
    order = np.argsort(-values, axis=1, kind="stable")[:, :n]
    return tuple(tuple(int(j) for j in row if weights[j] > 0) for row, weights in zip(order, values, strict=True))


def top_words(H: Array, vocabulary: Sequence[str], n: int = 10) -> tuple[tuple[str, ...], ...]:
    """Return the same as words; `vocabulary` has one for each column."""
    topics = top_columns(H, n)
    if len(vocabulary) != H.shape[1]:
        raise ShapeError(
            f"The vocabulary has {format_count(len(vocabulary), 'word')}, but topics have "
            f"{format_count(H.shape[1], 'column')}."
        )
    return tuple(tuple(vocabulary[j] for j in topic) for topic in topics)


def topic_diversity(topics: Sequence[Sequence[Word]]) -> float:
    """Return the fraction of distinct words in the lists: 1 if no two topics share a word, 1/k if all k are equal."""
    words = [word for topic in topics for word in topic]
    if not words:
        raise DataError(
            "Diversity needs at least one word, but the topics have none. Fit the model to texts with words."
        )
    return len(set(words)) / len(words)
