"""partsong.FederatedNMF: parties in, shared components out."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.testing import assert_allclose

import partsong
from partsong import recipes
from partsong.core import Outcome
from partsong.data.partition import by_label, contiguous, iid, party_names
from partsong.errors import CompositionError, DataError, FeatureError, ParameterError, PartsongError, ShapeError
from partsong.streams import key, stream


def parts(seed=0, sizes=(30, 50, 20)):
    rng = np.random.default_rng(seed)
    H = rng.gamma(0.5, size=(4, 15))
    return [rng.gamma(0.5, size=(n, 4)) @ H + 0.05 * rng.random((n, 15)) for n in sizes]


def test_exact_is_the_pooled_factorization():
    X = parts()
    split = partsong.FederatedNMF(4, method="exact", rounds=30, tol=0, random_state=0).fit(X)
    pooled = partsong.FederatedNMF(4, method="exact", rounds=30, tol=0, random_state=0).fit([np.vstack(X)])
    assert_allclose(split.components_, pooled.components_, rtol=1e-7, atol=1e-8)
    assert split.relative_error_ == pytest.approx(pooled.relative_error_, rel=1e-8)
    stacked = np.vstack(X)
    W = split.transform(stacked)
    error = np.linalg.norm(stacked - split.inverse_transform(W)) / np.linalg.norm(stacked)
    assert split.relative_error_ == pytest.approx(error, rel=1e-8)


@pytest.mark.parametrize("method", ["exact", "fedavg", recipes.local_only(4, steps=20)])
def test_jobs_and_party_order_change_nothing(method):
    X, names = parts(), ["b", "a", "c"]
    settings = {"method": method, "rounds": 6, "random_state": 2}
    one = partsong.FederatedNMF(4, n_jobs=1, **settings).fit(X, names=names)
    for jobs in (2, None):
        other = partsong.FederatedNMF(4, n_jobs=jobs, **settings).fit(X[::-1], names=names[::-1])
        assert other.components_.tobytes() == one.components_.tobytes()


def test_history_counts_rounds_and_bytes():
    model = partsong.FederatedNMF(4, method="exact", rounds=5, tol=0, random_state=0).fit(parts())
    assert model.n_iter_ == 5
    assert model.outcome_ is Outcome.MAX_ROUNDS
    k, m, parties = 4, 15, 3
    assert {row.bytes_up for row in model.history_} == {parties * (8 * (k * k + k * m + 3) + 8)}
    assert {row.bytes_down for row in model.history_} == {8 * (k * m + 2) + 8}
    assert (np.diff([row.relative_error for row in model.history_]) <= 1e-12).all()
    average = partsong.FederatedNMF(4, method="fedavg", rounds=5, tol=0, random_state=0).fit(parts())
    assert {row.bytes_up for row in average.history_} == {parties * (8 * k * m + 8)}
    assert np.isfinite([row.relative_error for row in average.history_]).all()
    assert model.relative_error_ < average.relative_error_ * 1.5


def test_components_are_scaled_and_sorted():
    model = partsong.FederatedNMF(4, random_state=0).fit([sp.csr_array(X.astype(np.float32)) for X in parts()])
    assert model.components_.dtype == np.float32
    assert_allclose(np.linalg.norm(model.components_, axis=1), 1, rtol=1e-5)
    assert (np.diff(model.component_shares_) <= 0).all()
    assert model.explained_variance_ > 0.98


def test_mixed_precision_is_computed_in_the_larger():
    X = parts()
    model = partsong.FederatedNMF(4, random_state=0, rounds=5).fit([X[0].astype(np.float32), X[1], X[2]])
    assert model.components_.dtype == np.float64


def test_named_columns_must_agree():
    pandas = pytest.importorskip("pandas")
    names = [f"g{i}" for i in range(15)]
    frames = [pandas.DataFrame(X, columns=names) for X in parts()]
    partsong.FederatedNMF(3, rounds=2).fit(frames)
    with pytest.raises(FeatureError, match=r"party-02.*another order"):
        partsong.FederatedNMF(3, rounds=2).fit([frames[0], frames[1][names[::-1]], frames[2]])
    renamed = frames[1].rename(columns={"g3": "q"})
    with pytest.raises(FeatureError, match=r"party-02.*lacks column g3 and has other column q"):
        partsong.FederatedNMF(3, rounds=2).fit([frames[0], renamed, frames[2]])


def test_bad_input_names_the_party():
    X = parts()
    X[1][4, 2] = np.nan
    with pytest.raises(DataError, match=r"party-02.*NaN"):
        partsong.FederatedNMF(3).fit(X)
    good = parts()
    for bad, error in (
        ([], ParameterError), (good[0], ShapeError), ([good[0], good[1][:, 1:]], CompositionError),
        ([good[0], np.empty((0, 15))], PartsongError),
    ):  # fmt: skip
        with pytest.raises(error):
            partsong.FederatedNMF(3).fit(bad)
    with pytest.raises(ParameterError, match="2 names"):
        partsong.FederatedNMF(3).fit(good, names=["a", "b"])
    for settings in ({"method": "avg"}, {"start": "alone"}, {"rounds": 0}, {"local_steps": 0}, {"n_components": 0}):
        with pytest.raises(ParameterError):
            partsong.FederatedNMF(**settings).fit(good)
    with pytest.raises(ShapeError, match="X has 14 features"):
        partsong.FederatedNMF(3, rounds=2).fit(good).transform(good[0][:, 1:])


def test_partitions_cover_every_row_once():
    labels = np.repeat(["a", "b", "c"], [50, 30, 21])
    for owned in (
        contiguous(101, 7), iid(101, 7, stream(0, "x")), by_label(labels, 7, stream(0, "x"), 0.1),
        by_label(labels, 101, stream(0, "x"), 5.0),
    ):  # fmt: skip
        assert sorted(np.concatenate(owned).tolist()) == list(range(101))
        assert max(map(len, owned)) - min(map(len, owned)) <= 1
    with pytest.raises(ParameterError):
        contiguous(3, 4)
    assert party_names(2) == ["party-01", "party-02"]
    assert sorted(party_names(120)) == party_names(120)


def test_label_skew_grows_as_concentration_falls():
    labels = np.repeat(np.arange(10), 100)

    def skew(concentration):
        owned = by_label(labels, 10, stream(1, "x"), concentration)
        return np.mean([np.max(np.bincount(labels[rows], minlength=10)) / len(rows) for rows in owned])

    assert skew(0.05) > skew(1.0) > skew(100.0)


def test_streams_are_named():
    assert stream(1, "a", 2).random() == stream(1, "a", 2).random()
    keys = {key(1, "a", 2), key(1, "a2"), key(1, "a", "2"), key(12, "a"), key(1, "2", "a"), key(1, 2, "a")}
    assert len(keys) == 6


def test_independent_starts_disagree_on_the_order_of_parts():
    common = partsong.FederatedNMF(4, method="fedavg", local_steps=50, rounds=2, random_state=0).fit(parts())
    settings = {"method": "fedavg", "local_steps": 50, "rounds": 2, "random_state": 0, "start": "independent"}
    independent = partsong.FederatedNMF(4, **settings).fit(parts())
    assert common.relative_error_ < independent.relative_error_
