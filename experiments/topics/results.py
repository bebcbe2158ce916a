"""Results of a run: macro-F1 and accuracy of a classifier on topic weights, coherence, diversity, bytes, seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import numpy as np

from experiments.shared.classification import classify, judge
from experiments.topics.corpora import Corpus, corpus, shares
from experiments.topics.methods import MI, NUMPY, Learned, learn
from experiments.topics.settings import TFIDF, WORDS, Run
from partsong.core.streams import stream
from partsong.errors import DivergenceError
from partsong.evaluation.topic_quality import embedding_coherence, top_words, topic_diversity


def result_of(asked: Run, device: str = NUMPY) -> dict[str, Any]:
    """Execute a run; a run that diverges has only this result."""
    began = time.perf_counter()
    try:
        found = _measured(asked, device)
    except DivergenceError:
        found = {"f1": 0.0, "accuracy": 0.0, "diverged": True, "curve": []}
    whole = round(time.perf_counter() - began, 2)
    return {
        **asdict(asked),
        **{name: _rounded(value) for name, value in found.items()},
        "whole_seconds": whole,
        "device": device,
    }


def _measured(asked: Run, device: str) -> dict[str, Any]:
    one = _corpus(asked.data)
    train, test = (
        split(len(one.labels), asked.seed) if asked.reading == "before" else (np.arange(len(one.labels)), None)
    )
    X = one.weighted(asked.weighting, train)
    if asked.method == WORDS:
        return _by_words(one, train, test, asked.seed)
    held = {
        name: train[rows] for name, rows in shares(one.labels[train], asked.parties, asked.alpha, asked.seed).items()
    }
    rows = {name: X[own] for name, own in held.items()}
    curve: list[list[float]] = []

    def judged(learned: Learned, is_last: bool = True) -> dict[str, float]:
        return _judged(asked, one, X, held, test, learned, is_last)

    def watch(learned: Learned) -> None:
        if asked.looks and learned.rounds % max(1, asked.settings.rounds // asked.looks) == 0:
            seen = judged(learned, False)
            curve.append([learned.rounds, learned.bytes, _rounded(seen["f1"]), _rounded(seen["accuracy"])])

    how = {"seed": asked.seed, "fraction": asked.fraction, "watch": watch, "device": device}
    learned = learn(asked.method, rows, asked.rank, asked.settings, **how)
    words = top_words(learned.H, one.words, 10)
    coherence = embedding_coherence(words, one.vectors)
    return {
        **judged(learned),
        "coherence": coherence.mean, "skipped": coherence.skipped, "diversity": topic_diversity(words),
        "information": learned.information, "rounds": learned.rounds, "bytes": learned.bytes,
        "seconds": learned.seconds, "curve": curve, "topics": [list(topic) for topic in words[: asked.shown]],
    }  # fmt: skip


def _judged(
    asked: Run,
    one: Corpus,
    X: Any,
    held: Mapping[str, np.ndarray],
    test: np.ndarray | None,
    learned: Learned,
    both: bool,
) -> dict[str, float]:
    """Macro-F1 and accuracy; with a critic, also for weights fitted to the topics alone."""
    places = {**held, **({} if test is None else {"set apart": test})}
    W = _placed(len(one.labels), places, learned.weights({name: X[own] for name, own in places.items()}))
    f1, accuracy = _scores(W, one.labels, test, asked.seed)
    found = {"f1": f1, "accuracy": accuracy}
    if both and asked.method.endswith(MI):
        W = _placed(len(one.labels), places, {name: learned.fitted(X[own]) for name, own in places.items()})
        found["f1_fitted"], found["accuracy_fitted"] = _scores(W, one.labels, test, asked.seed)
    return found


def split(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split documents into four fifths for learning topics and classes, and one fifth for testing."""
    order = stream(seed, "set apart").permutation(n)
    cut = n - n // 5
    return np.sort(order[:cut]), np.sort(order[cut:])


def _placed(n: int, places: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray]) -> np.ndarray:
    W = np.zeros((n, next(iter(weights.values())).shape[1]))
    for name, own in places.items():
        W[own] = weights[name]
    return W


def _scores(W: np.ndarray, labels: np.ndarray, test: np.ndarray | None, seed: int) -> tuple[float, float]:
    if test is None:
        return classify(W, labels, (seed,)).means
    train = np.setdiff1d(np.arange(len(labels)), test)
    return judge((W[train], labels[train]), (W[test], labels[test]))


def _by_words(one: Corpus, train: np.ndarray, test: np.ndarray | None, seed: int) -> dict[str, Any]:
    from sklearn.metrics import accuracy_score, f1_score
    from sklearn.svm import LinearSVC

    if test is None:
        train, test = split(len(one.labels), seed)
    X = one.weighted(TFIDF, train)
    predicted = LinearSVC().fit(X[train], one.labels[train]).predict(X[test])
    scores = f1_score(one.labels[test], predicted, average="macro"), accuracy_score(one.labels[test], predicted)
    return {"f1": float(scores[0]), "accuracy": float(scores[1]), "curve": []}


@lru_cache(maxsize=2)
def _corpus(name: str) -> Corpus:
    return corpus(name)


def _rounded(value: Any) -> Any:
    """Round floats to five digits; None for values that are not finite."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value
