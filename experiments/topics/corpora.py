"""The four corpora of the FedNMF+MI paper as word counts, with labels and word vectors.

    PARTSONG_DATA=folder python -m experiments.topics.corpora --prepare build/data/topics

writes one small file per corpus, from which all other experiments with topics run without the texts and the table of
word vectors. Without --prepare it prints the counts of Table II beside ours.
"""

from __future__ import annotations

import argparse
import csv
import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix

from experiments.shared.datasets import path_of
from partsong.core.streams import stream
from partsong.data.partition import by_label
from partsong.estimators.parties import party_names
from partsong.evaluation.topic_quality import word_vectors
from partsong.topics.tokenizer import Words
from partsong.topics.vocabulary import DocumentRows, Vocabulary, count_words, tf_idf

PREPARED = Path("build/data/topics")
VECTORS = "glove_subset.npz"
WEIGHTINGS = ("counts", "tf-idf")
"""Weighting: word counts, as in the paper, or smooth tf-idf with rows of norm 1."""


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a corpus, and its row in Table II: documents, terms, mean length, classes."""

    title: str
    file: str
    columns: tuple[str, ...]
    published: tuple[int, int, float, int]


SOURCES = {
    "spam": Source("Spam Ham", "spam_ham.csv.gz", ("text",), (5572, 7076, 8.56, 2)),
    "news": Source("Tag.News", "tag_news.csv.gz", ("title", "snippet"), (1434, 12393, 30.29, 7)),
    "rt": Source("Rt Polarity", "rt_polarity.csv.gz", ("text",), (10662, 16241, 10.66, 2)),
    "so": Source("Stack Overflow", "stack_overflow.csv.gz", ("text",), (20000, 9316, 5.44, 20)),
}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Counts (n × V), labels of the documents, words of the columns, and word vectors where available."""

    name: str
    counts: csr_matrix
    labels: np.ndarray
    words: tuple[str, ...]
    vectors: dict[str, np.ndarray]

    @property
    def statistics(self) -> tuple[int, int, float, int]:
        """Documents, terms, mean length, classes."""
        n, V = self.counts.shape
        return n, V, float(self.counts.sum()) / n, len(np.unique(self.labels))

    def weighted(self, weighting: str, known: np.ndarray | None = None) -> csr_matrix:
        """Rows (float32) as counts or tf-idf; document frequencies come from the rows in `known`, or from all."""
        if weighting == "counts":
            return self.counts
        seen = self.counts if known is None else self.counts[known]
        frequencies = np.bincount(seen.indices, minlength=seen.shape[1])
        counted = DocumentRows(self.counts, np.diff(self.counts.indptr) == 0)
        return tf_idf(counted, np.asarray(frequencies), seen.shape[0]).rows


def shares(labels: np.ndarray, parties: int, alpha: float, seed: int) -> dict[str, np.ndarray]:
    """Split documents into equal shares; labels of party p are drawn from q_p ~ Dir(α · frequencies) (Hsu et al.)."""
    rows = by_label(labels, parties, stream(seed, "parties", parties), alpha)
    return dict(zip(party_names(parties), rows, strict=True))


def corpus(name: str, folder: Path | None = None) -> Corpus:
    """Load a corpus from its prepared file, or from the texts."""
    file = (folder or PREPARED) / f"{name}.npz"
    if not file.exists():
        return from_texts(name)
    with np.load(file, allow_pickle=False) as held:
        shape = (len(held["indptr"]) - 1, len(held["words"]))
        counts = csr_matrix((held["data"].astype(np.float32), held["indices"], held["indptr"]), shape=shape)
        vectors = dict(zip(held["known"].tolist(), held["vectors"].astype(np.float32), strict=True))
        return Corpus(name, counts, held["labels"], tuple(held["words"].tolist()), vectors)


def from_texts(name: str) -> Corpus:
    """Count words of two or more letters without English stop words, including rare ones."""
    source = SOURCES[name]
    with gzip.open(path_of(source.file), "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    texts = [" ".join(row[column] for column in source.columns) for row in rows]
    labels = np.unique([row["label"] for row in rows], return_inverse=True)[1]
    words = Words()
    vocabulary = Vocabulary.of_documents(texts, words)
    vectors = word_vectors(path_of(VECTORS), vocabulary.words)
    return Corpus(name, count_words(texts, words, vocabulary).rows, labels, vocabulary.words, vectors)


def prepare(one: Corpus, folder: Path) -> Path:
    """Write a corpus to its own file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{one.name}.npz"
    known = sorted(one.vectors)
    np.savez_compressed(
        file,
        data=one.counts.data.astype(np.uint16),
        indices=one.counts.indices.astype(np.int32),
        indptr=one.counts.indptr.astype(np.int32),
        labels=one.labels.astype(np.int16),
        words=np.array(one.words),
        known=np.array(known),
        vectors=np.array([one.vectors[word] for word in known], np.float16),
    )
    return file


def table_two(names: Sequence[str] = tuple(SOURCES), folder: Path | None = None) -> str:
    """Table II: ours and the paper's."""
    lines = [
        "| corpus | documents | terms | mean length | classes | words with a vector |",
        "|---|---|---|---|---|---|",
    ]
    for name in names:
        one = corpus(name, folder)
        n, V, length, classes = one.statistics
        n0, V0, length0, classes0 = SOURCES[name].published
        cells = f"{n} / {n0} | {V} / {V0} | {length:.2f} / {length0} | {classes} / {classes0}"
        lines.append(f"| {SOURCES[name].title} | {cells} | {len(one.vectors) / V:.0%} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", type=Path, help="a folder for the prepared corpora")
    parser.add_argument("--sets", default=",".join(SOURCES), help="comma-separated names")
    chosen = parser.parse_args(arguments)
    names = chosen.sets.split(",")
    if chosen.prepare is not None:
        for name in names:
            file = prepare(from_texts(name), chosen.prepare)
            print(f"{file}: {file.stat().st_size / 1e6:.2f} MB")
    print(table_two(names, chosen.prepare))


if __name__ == "__main__":
    main()
