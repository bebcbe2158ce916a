"""Laws of the classification of documents by their topic weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC

from experiments.shared.classification import classify, judge
from partsong.errors import DataError, ParameterError, ShapeError


def documents(n=200, classes=3, noise=0.3, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n)
    return np.eye(classes)[labels] + noise * rng.random((n, classes)), labels


def test_weights_that_tell_the_class_are_classified_without_error():
    weights, labels = documents()
    found = classify(weights, labels)
    assert found.means == (1.0, 1.0)
    assert found.deviations == (0.0, 0.0)
    assert len(found.macro_f1) == len(found.accuracy) == 3


def test_weights_that_tell_nothing_are_near_the_largest_class():
    rng = np.random.default_rng(1)
    labels = (rng.random(600) < 0.8).astype(int)
    f1, accuracy = classify(rng.random((600, 5)), labels).means
    assert accuracy == pytest.approx(0.8, abs=0.06)
    assert f1 == pytest.approx(0.8 / 1.8, abs=0.06)


def test_the_numbers_are_those_of_the_protocol_written_out():
    weights, labels = documents(noise=2.0)
    found = classify(weights, labels, seeds=(7,), C=0.5)
    train, test = train_test_split(np.arange(200), test_size=0.2, random_state=7)
    scaler = StandardScaler().fit(weights[train])
    model = LinearSVC(C=0.5, dual=False).fit(scaler.transform(weights[train]), labels[train])
    told = model.predict(scaler.transform(weights[test]))
    assert found.macro_f1 == (f1_score(labels[test], told, average="macro"),)
    assert found.accuracy == (accuracy_score(labels[test], told),)
    assert len(test) == 40
    assert judge((weights[train], labels[train]), (weights[test], labels[test]), C=0.5) == (
        found.macro_f1[0],
        found.accuracy[0],
    )


def test_the_order_and_scale_of_topics_and_names_of_classes_do_not_matter():
    weights, labels = documents(noise=2.0)
    plain = classify(weights, labels).means
    assert classify(weights[:, ::-1], labels).means == pytest.approx(plain, abs=1e-9)
    assert classify(weights * [1e-6, 1.0, 1e6], labels).means == pytest.approx(plain, abs=0.02)
    assert classify(weights, [f"class {label}" for label in labels]).means == plain
    assert classify(weights, labels).macro_f1 == classify(weights, labels).macro_f1


def test_topics_that_no_document_has_do_no_harm():
    weights, labels = documents()
    assert classify(np.hstack([weights, np.zeros((200, 4))]), labels).means == (1.0, 1.0)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"labels": [1, 2]}, ShapeError),
        ({"weights": np.ones(200)}, ShapeError),
        ({"weights": np.full((200, 2), math.nan)}, DataError),
        ({"labels": [0] * 200}, DataError),
        ({"weights": np.ones((1, 2)), "labels": [0]}, DataError),
        ({"held_out": 0.0}, ParameterError),
        ({"held_out": 1.0}, ParameterError),
        ({"C": 0.0}, ParameterError),
        ({"seeds": ()}, ParameterError),
    ],
    ids=str,
)
def test_what_cannot_be_classified_is_refused(change, kind):
    weights, labels = documents()
    with pytest.raises(kind):
        classify(**{"weights": weights, "labels": labels, **change})


def test_other_numbers_of_topics_are_refused():
    weights, labels = documents()
    with pytest.raises(ShapeError, match="3 weights"):
        judge((weights, labels), (weights[:, :2], labels))
