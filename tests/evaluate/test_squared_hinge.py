"""Laws of the linear SVM with squared hinge: it is LinearSVC's problem, and it is solved."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning
from sklearn.svm import LinearSVC

from partsong.errors import DataError, ParameterError, ShapeError
from partsong.evaluation import classification

# A plain Newton's method goes round in circles here, for C = 100.
CIRCLE = (np.array([[4.0, 8.0], [7.0, -1.0], [8.0, 4.0], [5.0, -1.0], [-2.0, -4.0], [-8.0, 3.0]]), [0, 1, 0, 1, 1, 0])


@st.composite
def problems(draw):
    """Rows (more or fewer than columns), labels with every class at least once, and C; some columns are constant."""
    classes = draw(st.integers(2, 4))
    n, d = draw(st.integers(classes, 40)), draw(st.integers(1, 50))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    labels = np.concatenate([np.arange(classes), rng.integers(0, draw(st.integers(1, classes)), n - classes)])
    X = rng.standard_normal((n, d)) + draw(st.sampled_from([0.0, 0.5, 3.0])) * rng.standard_normal((classes, d))[labels]
    X[:, : draw(st.integers(0, d))] = draw(st.sampled_from([0.0, 1.0]))
    return X, labels, draw(st.sampled_from([0.01, 0.3, 1.0, 10.0]))


def gradients(X, labels, C, machine):
    """∇f at the machine's coefficients, and at zero, for each class: written out, one document after another."""
    told = machine.classes[-1:] if len(machine.classes) == 2 else machine.classes
    found = []
    for label, w, b in zip(told, machine.coefficients, machine.intercepts, strict=True):
        here, start = np.append(w, b), np.zeros(len(w) + 1)
        for x, own in zip(X, labels, strict=True):
            y = 1 if own == label else -1
            here = here - 2 * C * max(0.0, 1 - y * (x @ w + b)) * y * np.append(x, 1.0)
            start = start - 2 * C * y * np.append(x, 1.0)
        found.append((np.linalg.norm(here), np.linalg.norm(start)))
    return found


@settings(max_examples=25, deadline=None)
@given(problems())
def test_coefficients_and_predictions_are_those_of_scikit_learn(problem):
    X, labels, C = problem
    mine = classification.fit(X, labels, C)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        theirs = LinearSVC(C=C, dual=False, tol=1e-10, max_iter=1000).fit(X, labels)
    assert np.array_equal(mine.classes, theirs.classes_)
    assert mine.coefficients == pytest.approx(theirs.coef_, abs=1e-5)
    assert mine.intercepts == pytest.approx(np.atleast_1d(theirs.intercept_), abs=1e-5)
    scores = theirs.decision_function(X)
    ordered = np.sort(np.column_stack([scores, -scores]) if scores.ndim == 1 else scores, axis=1)
    clear = ordered[:, -1] - ordered[:, -2] > 1e-3
    assert np.array_equal(mine.predict(X)[clear], theirs.predict(X)[clear])


@settings(max_examples=25, deadline=None)
@given(problems())
def test_the_gradient_vanishes_at_the_solution(problem):
    X, labels, C = problem
    for here, start in gradients(X, labels, C, classification.fit(X, labels, C)):
        assert here <= 1e-10 * max(start, 2 * C * (np.abs(X).sum() + len(X)))


def test_where_plain_steps_go_round_in_circles_shorter_ones_settle(monkeypatch):
    X, labels = CIRCLE
    ((here, start),) = gradients(X, labels, 100.0, classification.fit(X, labels, 100.0, max_steps=50))
    assert here <= 1e-10 * start
    monkeypatch.setattr(classification, "_length", lambda *_: 1.0)
    with pytest.warns(classification.UnsettledWarning, match="1 of 1 classes in 300 steps"):
        classification.fit(X, labels, 100.0, max_steps=300)


def test_weights_that_are_all_zero_leave_an_intercept_in_closed_form():
    labels = ["a"] * 7 + ["b"] * 2 + ["c"]
    machine = classification.fit(np.zeros((10, 3)), labels, 0.5)
    counts = np.array([7, 2, 1])
    assert np.array_equal(machine.coefficients, np.zeros((3, 3)))
    assert machine.intercepts == pytest.approx((2 * counts - 10) / (1 + 10))
    assert machine.predict(np.zeros((2, 3))).tolist() == ["a", "a"]


def test_two_classes_of_equal_size_without_weights_have_no_preference():
    machine = classification.fit(np.zeros((4, 2)), [1, 0, 0, 1])
    assert not machine.coefficients.any()
    assert not machine.intercepts.any()


@pytest.mark.parametrize("kind", [str, object, "datetime64[D]", bool], ids=str)
def test_two_rows_are_enough_and_labels_may_be_of_any_type(kind):
    labels = np.array([1, 0]).astype(kind)
    machine = classification.fit(np.array([[1.0, 0.0], [-1.0, 0.0]]), labels, 1.0)
    assert machine.coefficients[0] == pytest.approx([0.8 if labels[0] > labels[1] else -0.8, 0.0])  # w + 4(w − 1) = 0
    assert machine.intercepts == pytest.approx([0.0])
    assert np.array_equal(machine.predict(np.array([[3.0, 1.0], [-2.0, 5.0]])), labels)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.floats(0, 1))
def test_a_gram_matrix_follows_the_rows_that_enter_and_leave(seed, before, now):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((30, 4))
    before, now = rng.random(30) < before, rng.random(30) < now
    moved = classification._moved(X, X[before].T @ X[before], before, now)
    assert moved == pytest.approx(X[now].T @ X[now], abs=1e-12)


def test_documents_like_those_of_topics_settle_in_a_few_steps_and_twice_to_the_bit():
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 5, 600)
    weights = rng.gamma(0.1 + rng.gamma(0.3, 1.0, (5, 20))[labels])
    X = (weights - weights.mean(axis=0)) / weights.std(axis=0)
    machine = classification.fit(X, labels, max_steps=20)
    assert np.array_equal(machine.coefficients, classification.fit(X, labels).coefficients)
    assert np.mean(machine.predict(X) == labels) > 0.6


@pytest.mark.parametrize("C", [1e-300, 1e-9, 1e9, 1e30])
def test_any_penalty_ends(C):
    rng = np.random.default_rng(0)
    machine = classification.fit(rng.standard_normal((30, 4)), rng.integers(0, 3, 30), C)
    assert np.isfinite(machine.coefficients).all()
    assert np.linalg.norm(machine.coefficients, axis=1).max() <= math.sqrt(2 * C * 30)  # ½‖w‖² ≤ f(w) ≤ f(0) = C n


def test_steps_that_do_not_suffice_are_told():
    X, labels = CIRCLE
    with pytest.warns(classification.UnsettledWarning, match="in 1 steps"):
        classification.fit(X, labels, 100.0, max_steps=1)


@pytest.mark.parametrize(
    ("X", "labels", "C", "kind"),
    [
        (np.ones((2, 1)), [0, 1], 0.0, ParameterError),
        (np.ones((2, 1)), [0, 1], math.inf, ParameterError),
        (np.ones((2, 1)), [0, 1, 2], 1.0, ShapeError),
        (np.ones(2), [0, 1], 1.0, ShapeError),
        (np.ones((2, 1)), [0, 0], 1.0, DataError),
        (np.full((2, 1), math.nan), [0, 1], 1.0, DataError),
        (np.full((2, 1), 1e200), [0, 1], 1.0, DataError),
        (np.full((2, 1), 1e100), [0, 1], 1e150, DataError),
    ],
)
def test_what_has_no_solution_in_numbers_is_refused(X, labels, C, kind):
    with pytest.raises(kind):
        classification.fit(X, labels, C)
