"""How well topic weights tell the classes of documents: a linear SVM on them, macro-F1 and accuracy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from partsong import kernels
from partsong.core.interfaces import Array
from partsong.errors import DataError, ParameterError, ShapeError

# ---- squared hinge ----------------------------------------------------------------------------------------------
#
# A linear SVM with squared hinge by Newton's method with active sets, one class against the others.
#
# For each class, with y_i = ±1 and a column of ones in X (n × d) for the intercept, which is penalised like the rest:
#
#     f(w) = ½‖w‖² + C Σ_i max(0, 1 − y_i x_i·w)²          A = {i : y_i x_i·w < 1}
#     ∇f   = w − 2C X_Aᵀ(y_A − X_A w)                       step  −(I + 2C X_AᵀX_A)⁻¹ ∇f, halved until f falls
#
# f is strongly convex, and quadratic as long as A stays: the first full step that does not change A ends at the
# solution,
# and ‖w − w*‖ ≤ ‖∇f‖ everywhere. It is the problem of scikit-learn's LinearSVC, solved to rounding.

TOLERANCE = 1e-12  # of ‖∇f‖ against ‖∇f‖ at w = 0
EPS = float(np.finfo(np.float64).eps)


class UnsettledWarning(UserWarning):
    """Newton's method has used its steps before the gradient vanished; what is returned is not the solution."""


@dataclass(frozen=True, slots=True)
class LinearMachine:
    """Classes in order, and a row of coefficients (· × d) and an intercept for each; one row in all for two classes."""

    classes: np.ndarray
    coefficients: np.ndarray
    intercepts: np.ndarray

    def predict(self, X: np.ndarray) -> np.ndarray:
        """The class of the largest score x·w + b; of two classes the second where the only score is above zero."""
        scores = X @ self.coefficients.T + self.intercepts
        found = (scores[:, 0] > 0).astype(int) if len(self.classes) == 2 else scores.argmax(axis=1)
        return np.asarray(self.classes[found])


def fit(X: np.ndarray, labels: Sequence[Any] | np.ndarray, C: float = 1.0, *, max_steps: int = 1000) -> LinearMachine:
    """The machine of all rows of X (n × d) and their labels, which may be of any type that can be put in order."""
    if not 0 < C < np.inf:
        raise ParameterError(f"C must be above zero and finite; got {C}.")
    X = np.asarray(X, np.float64)
    classes, index = np.unique(np.asarray(labels), return_inverse=True)
    if X.ndim != 2 or index.shape != X.shape[:1]:
        raise ShapeError(f"Rows and labels must fit; they have shapes {X.shape} and {index.shape}.")
    if len(classes) < 2:
        raise DataError("A classification needs rows of two classes at least. Take more rows, or other labels.")
    told = np.arange(len(classes)) if len(classes) > 2 else np.array([1])
    signs = np.where(index == told[:, None], 1.0, -1.0)
    W, unsettled = _solved(np.column_stack([X, np.ones(len(X))]), signs, float(C), max_steps)
    if unsettled:
        warnings.warn(
            f"A linear SVM has not settled for {unsettled} of {len(signs)} classes in {max_steps} steps. "
            f"Standardise the columns, or take a smaller C than {C}.",
            UnsettledWarning,
            stacklevel=2,
        )
    return LinearMachine(classes, W[:, :-1], W[:, -1])


def _solved(X: np.ndarray, signs: np.ndarray, C: float, max_steps: int) -> tuple[np.ndarray, int]:
    """Minimisers (classes × d) for signs (classes × n), and how many of them are none yet.

    Products with X are made for all unsettled classes at once, what needs a gram matrix class by class. The bound on
    ‖∇f‖ has what rounding leaves of a gradient, ε 2C ‖X‖ (√n + ‖X‖‖w‖), beside the tolerance.
    """
    W, scores = np.zeros((len(signs), X.shape[1])), np.zeros(signs.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        gram, size = _gram(X), float(np.linalg.norm(X))
        usable = np.isfinite(2 * C * gram).all()
    if not usable:
        raise DataError(f"Squares of the rows times C = {C} are NaN or infinite. Standardise the columns first.")
    grams, active = [gram] * len(signs), np.ones(signs.shape, bool)
    first, unsettled = np.zeros(len(signs)), np.arange(len(signs))
    for step in range(max_steps + 1):
        short = np.where(active[unsettled], signs[unsettled] - scores[unsettled], 0.0)
        gradients = W[unsettled] - 2 * C * (short @ X)
        norms = np.linalg.norm(gradients, axis=1)
        if step == 0:
            first = norms
        rounding = 2 * C * EPS * size * (np.sqrt(len(X)) + size * np.linalg.norm(W[unsettled], axis=1))
        going = norms > TOLERANCE * first[unsettled] + rounding
        unsettled, gradients = unsettled[going], gradients[going]
        if not len(unsettled) or step == max_steps:
            break
        directions = _newton(grams, unsettled, gradients, C)
        moves = directions @ X.T
        for c, gradient, direction, move in zip(unsettled, gradients, directions, moves, strict=True):
            margins = (signs[c] * scores[c], signs[c] * move)
            W[c] += _length(W[c], direction, margins, float(gradient @ direction), C) * direction
        scores[unsettled] = W[unsettled] @ X.T
        for c in unsettled:
            now = signs[c] * scores[c] < 1
            grams[c], active[c] = _moved(X, grams[c], active[c], now), now
    return W, len(unsettled)


def _newton(grams: list[np.ndarray], unsettled: np.ndarray, gradients: np.ndarray, C: float) -> np.ndarray:
    """−(I + 2C gram)⁻¹ ∇f for each class; classes with the same gram (all of them at w = 0) share its factor.

    Where 2C gram is so large that I is lost in it, so much is added that Cholesky's factor exists: still a descent.
    """
    directions = np.empty_like(gradients)
    factor, factored = None, None
    for place, c in enumerate(unsettled):
        if grams[c] is not factored:
            factored = grams[c]
            curvature = 2 * C * factored
            curvature.flat[:: len(curvature) + 1] += max(1.0, 8 * EPS * float(np.trace(curvature)))
            factor = cho_factor(curvature, lower=True, overwrite_a=True, check_finite=False)
        directions[place] = -cho_solve(factor, gradients[place], check_finite=False)
    return directions


def _length(
    w: np.ndarray, direction: np.ndarray, margins: tuple[np.ndarray, np.ndarray], slope: float, C: float
) -> float:
    """The first of 1, ½, ¼, … by which f falls as much as 10⁻⁴ of the slope says, but for rounding."""

    def f(t: float) -> float:
        v, hinge = w + t * direction, np.maximum(1 - (margins[0] + t * margins[1]), 0.0)
        return 0.5 * float(v @ v) + C * float(hinge @ hinge)

    length, here = 1.0, f(0.0)
    while f(length) > here + 1e-4 * length * slope + 8 * EPS * here and length > EPS:
        length /= 2
    return length


def _moved(X: np.ndarray, gram: np.ndarray, before: np.ndarray, now: np.ndarray) -> np.ndarray:
    """X_AᵀX_A of the rows that are active now: by those that entered or left, or anew where they are fewer."""
    changed = np.flatnonzero(before != now)
    if not len(changed):
        return gram
    if len(changed) >= np.count_nonzero(now):
        return _gram(X[now])
    entered = now[changed]
    return gram + _gram(X[changed[entered]]) - _gram(X[changed[~entered]])


def _gram(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows.T @ rows)


# ---- classification ---------------------------------------------------------------------------------------------


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

    if not 0 < C < np.inf:
        raise ParameterError(f"C must be above zero and finite; got {C}.")
    if len(np.unique(y)) < 2:
        raise DataError("The documents to learn from are all of one class. Take more of them, or other labels.")
    scaler = StandardScaler().fit(X)
    told = fit(scaler.transform(X), y, C).predict(scaler.transform(X_test))
    return float(f1_score(y_test, told, average="macro", zero_division=0.0)), float(accuracy_score(y_test, told))
