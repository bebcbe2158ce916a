"""Classification of documents by their topic weights: macro-F1 and accuracy of a linear SVM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong import kernels
from partsong.core.interfaces import Array
from partsong.errors import DataError, ParameterError, ShapeError

TOLERANCE, MOST_STEPS = 1e-6, 10_000
"""Tolerance and maximum number of steps of the linear SVM."""


@dataclass(frozen=True, slots=True)
class Classified:
    """Macro-F1 (unweighted mean over classes) and accuracy of each split."""

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
    """Classify random test sets of 20 % of all documents, one for each seed.

    `weights` (n × k) are topic weights of all documents. This is the first reading of the protocol of FedNMF+MI (Si et
    al., 2022): topics have seen the test documents, but not their labels. `judge` is for the second reading.
    """
    from sklearn.model_selection import train_test_split

    if not 0 < held_out < 1:
        raise ParameterError(f"held_out is the share of test documents. Use a number between 0 and 1, not {held_out}.")
    if not len(seeds):
        raise ParameterError("seeds is empty. Pass at least one seed.")
    X, y = _checked(weights, labels)
    if len(y) < 2:
        raise DataError(f"Classification needs at least two documents; got {len(y)}.")
    results = []
    for seed in seeds:
        train, test = train_test_split(np.arange(len(y)), test_size=held_out, random_state=int(seed))
        results.append(_judged(X[train], y[train], X[test], y[test], C))
    return Classified(tuple(f1 for f1, _ in results), tuple(accuracy for _, accuracy in results))


def judge(
    train: tuple[Array, Sequence[Any]], test: tuple[Array, Sequence[Any]], *, C: float = 1.0
) -> tuple[float, float]:
    """Macro-F1 and accuracy on documents held out before topics were learned; both arguments are (weights, labels)."""
    (X, y), (X_test, y_test) = _checked(*train), _checked(*test)
    if X.shape[1] != X_test.shape[1]:
        raise ShapeError(f"Training documents have {X.shape[1]} weights, test documents {X_test.shape[1]}.")
    return _judged(X, y, X_test, y_test, C)


def _checked(weights: Array, labels: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    X, y = np.asarray(kernels.of(weights).to_numpy(weights), np.float64), np.asarray(labels)
    if X.ndim != 2 or y.ndim != 1 or len(X) != len(y):
        raise ShapeError(f"weights (documents × topics) and labels do not match: shapes {X.shape} and {y.shape}.")
    if not np.isfinite(X).all():
        raise DataError("Topic weights contain NaN or infinity. Fit the model again, or remove those rows.")
    return X, y


def _judged(X: np.ndarray, y: np.ndarray, X_test: np.ndarray, y_test: np.ndarray, C: float) -> tuple[float, float]:
    """A linear SVM (squared hinge, one class against the others) on columns of zero mean and unit variance."""
    from sklearn.metrics import accuracy_score, f1_score
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import LinearSVC

    if not 0 < C < np.inf:
        raise ParameterError(f"C must be above zero and finite; got {C}.")
    if len(np.unique(y)) < 2:
        raise DataError("All training documents have one class. Use more documents or other labels.")
    scaler = StandardScaler().fit(X)
    # The primal problem is strongly convex, so its solution does not depend on the order of documents.
    machine = LinearSVC(C=C, dual=False, tol=TOLERANCE, max_iter=MOST_STEPS).fit(scaler.transform(X), y)
    predicted = machine.predict(scaler.transform(X_test))
    return float(f1_score(y_test, predicted, average="macro", zero_division=0.0)), float(
        accuracy_score(y_test, predicted)
    )
