"""How well topic weights tell the classes of documents: a linear SVM on them, macro-F1 and accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong import kernels
from partsong.core.interfaces import Array
from partsong.errors import DataError, ParameterError, ShapeError

TOLERANCE, MOST_STEPS = 1e-6, 10_000
"""When the linear SVM is solved, and the most steps for it."""


@dataclass(frozen=True, slots=True)
class Classified:
    """Macro-F1 (the mean F1 over classes, whatever their size) and accuracy, one of each for each split."""

    macro_f1: tuple[float, ...]
    accuracy: tuple[float, ...]

    @property
    def means(self) -> tuple[float, float]:
        """Mean macro-F1 and mean accuracy."""
        return float(np.mean(self.macro_f1)), float(np.mean(self.accuracy))

    @property
    def deviations(self) -> tuple[float, float]:
        """Standard deviations over splits; zero for a single one."""
        return float(np.std(self.macro_f1)), float(np.std(self.accuracy))


def classify(
    weights: Array, labels: Sequence[Any], seeds: Sequence[int] = (0, 1, 2), *, held_out: float = 0.2, C: float = 1.0
) -> Classified:
    """Random splits of all documents, 80 % to learn from and 20 % to judge by, one for each seed.

    `weights` (n × k) are topic weights of all documents. It is the first reading of the protocol of FedNMF+MI (Si et
    al., 2022): topics have seen the documents that are judged, but not their labels. `judge` is for the second.
    """
    from sklearn.model_selection import train_test_split

    if not 0 < held_out < 1:
        raise ParameterError(f"held_out is the share of documents to judge by, between 0 and 1; got {held_out}.")
    if not len(seeds):
        raise ParameterError("A classification needs at least one seed for its split; none was given.")
    X, y = _checked(weights, labels)
    if len(y) < 2:
        raise DataError(f"Two documents at least are needed to learn from one and judge by another; there is {len(y)}.")
    results = []
    for seed in seeds:
        train, test = train_test_split(np.arange(len(y)), test_size=held_out, random_state=int(seed))
        results.append(_judged(X[train], y[train], X[test], y[test], C))
    return Classified(tuple(f1 for f1, _ in results), tuple(accuracy for _, accuracy in results))


def judge(
    train: tuple[Array, Sequence[Any]], test: tuple[Array, Sequence[Any]], *, C: float = 1.0
) -> tuple[float, float]:
    """Macro-F1 and accuracy on documents set apart before topics were learned; both are pairs of weights and labels."""
    (X, y), (X_test, y_test) = _checked(*train), _checked(*test)
    if X.shape[1] != X_test.shape[1]:
        raise ShapeError(f"Documents to learn from have {X.shape[1]} weights, those to judge by {X_test.shape[1]}.")
    return _judged(X, y, X_test, y_test, C)


def _checked(weights: Array, labels: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    X, y = np.asarray(kernels.of(weights).to_numpy(weights), np.float64), np.asarray(labels)
    if X.ndim != 2 or y.ndim != 1 or len(X) != len(y):
        raise ShapeError(f"Weights (documents × topics) and labels must fit; they have shapes {X.shape} and {y.shape}.")
    if not np.isfinite(X).all():
        raise DataError("Topic weights have NaN or infinite numbers. Fit the model again, or leave those rows out.")
    return X, y


def _judged(X: np.ndarray, y: np.ndarray, X_test: np.ndarray, y_test: np.ndarray, C: float) -> tuple[float, float]:
    """A linear SVM (squared hinge, one class against the others) on columns of zero mean and unit variance."""
    from sklearn.metrics import accuracy_score, f1_score
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import LinearSVC

    if not 0 < C < np.inf:
        raise ParameterError(f"C must be above zero and finite; got {C}.")
    if len(np.unique(y)) < 2:
        raise DataError("The documents to learn from are all of one class. Take more of them, or other labels.")
    scaler = StandardScaler().fit(X)
    # The primal problem is strongly convex, so that its solution does not depend on the order of documents.
    machine = LinearSVC(C=C, dual=False, tol=TOLERANCE, max_iter=MOST_STEPS).fit(scaler.transform(X), y)
    predicted = machine.predict(scaler.transform(X_test))
    return float(f1_score(y_test, predicted, average="macro", zero_division=0.0)), float(
        accuracy_score(y_test, predicted)
    )
