"""Sketched and asynchronous methods through the estimators."""

import math

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from scipy import sparse

import partsong
from partsong.core.interfaces import Outcome
from partsong.errors import ParameterError

SKETCHES = ["subsampling", "gaussian", "count", "hadamard"]


def planted(n=400, m=120, k=5, seed=0):
    rng = np.random.default_rng(seed)
    H = (rng.random((k, m)) < 0.4) * rng.random((k, m))
    return rng.gamma(0.5, size=(n, k)) @ H + 0.02 * rng.random((n, m))


@pytest.mark.parametrize("sketch", SKETCHES)
@pytest.mark.parametrize("form", ["dense", "float32", "csr"])
def test_sketched_steps_come_near_exact_ones(sketch, form):
    X = planted()
    X = {"dense": X, "float32": X.astype(np.float32), "csr": sparse.csr_matrix(X * (X > 0.1))}[form]
    known = partsong.NMF(5, random_state=0).fit(X).relative_error_
    model = partsong.NMF(5, solver="sanls", sketch=sketch, sketch_ratio=0.2, random_state=0, max_iter=300).fit(X)
    assert known <= model.relative_error_ < 1.2 * known + 1e-3
    assert model.components_.dtype == X.dtype
    rows = model.history_
    assert [row.iteration for row in rows] == [*range(10, 10 * len(rows) + 1, 10)]
    assert rows[-1].relative_error < rows[0].relative_error
    assert model.n_iter_ == rows[-1].iteration
    assert model.outcome_ in (Outcome.CONVERGED, Outcome.MAX_ROUNDS)


def test_the_same_seed_gives_the_same_bytes_and_another_one_other_sketches():
    X = planted()
    settings = {"solver": "sanls", "max_iter": 20, "tol": 0, "init": "anchors"}
    one, again = (partsong.NMF(5, random_state=1, **settings).fit(X) for _ in range(2))
    assert_array_equal(one.components_, again.components_)
    other = partsong.NMF(5, random_state=2, **settings).fit(X)
    assert abs(other.components_ - one.components_).max() > 1e-6


def test_a_given_start_is_where_it_begins():
    X = planted()
    good = partsong.NMF(5, random_state=0).fit(X)
    settings = {"solver": "sanls", "init": "custom", "max_iter": 1, "tol": 0, "random_state": 0}
    model = partsong.NMF(5, **settings).fit(X, W=good.transform(X), H=good.components_)
    assert model.relative_error_ < 1.5 * good.relative_error_
    assert model.n_iter_ == 1


def test_a_spent_budget_keeps_what_was_done():
    X = planted()
    model = partsong.NMF(5, solver="sanls", init="random", time_budget=1e-9, random_state=0).fit(X)
    assert (model.outcome_, model.n_iter_) == (Outcome.TIME_LIMIT, 10)
    federated = partsong.FederatedNMF(5, method="syn-ssd-uv", time_budget=1e-9, random_state=0)
    assert federated.fit(np.array_split(X, 3)).n_iter_ == 1


def test_settings_of_sketches_are_looked_at(tmp_path):
    X = planted()
    for bad in ({"sketch": "srht"}, {"sketch_ratio": 0}, {"sketch_ratio": 1.5}, {"sketch_ratio": "much"}):
        with pytest.raises(ParameterError, match="sketch"):
            partsong.NMF(3, solver="sanls", **bad).fit(X)
    model = partsong.NMF(3, solver="sanls", sketch="count", max_iter=10).fit(X)
    model.save(tmp_path / "m.safetensors")
    again = partsong.NMF.load(tmp_path / "m.safetensors")
    assert (again.solver, again.sketch, again.sketch_ratio) == ("sanls", "count", 0.1)


def test_a_rank_beyond_the_matrix_is_no_trouble():
    model = partsong.NMF(30, solver="sanls", max_iter=10, random_state=0).fit(planted(40, 20))
    assert np.isfinite(model.components_).all()


@pytest.mark.parametrize(
    ("method", "exchanges"),
    [("syn-sd", 1), ("syn-ssd-u", 11), ("syn-ssd-v", 11), ("syn-ssd-uv", 11), ("asyn-sd", 4), ("asyn-ssd-v", 4)],
)
def test_a_round_of_a_secure_method_has_its_exchanges(method, exchanges):
    X = planted()
    model = partsong.FederatedNMF(5, method=method, rounds=6, tol=0, random_state=0).fit(np.array_split(X, 4))
    assert model.n_iter_ == 6
    assert len(model.history_) == 6 * exchanges
    known = [row.iteration for row in model.history_ if not math.isnan(row.relative_error)]
    assert known == [*range(exchanges, 6 * exchanges + 1, exchanges)]
    whole = 5 * 120 * 8
    sent = [row.bytes_up for row in model.history_]
    assert max(sent) <= 4 * (whole + 8)
    assert model.relative_error_ < 0.5


def test_parties_of_asynchronous_methods_take_part_by_their_speed():
    X = planted()
    parties = {"large": X[:300], "small": X[300:]}
    model = partsong.FederatedNMF(5, method="asyn-sd", rounds=10, tol=0, random_state=0).fit(parties)
    assert [row.parties for row in model.history_] == [1] * 20
    assert model.n_parties_ == 2


def test_comparisons_have_the_secure_methods():
    found = partsong.compare(
        np.array_split(planted(), 3), 5, ("syn-ssd-uv", "asyn-sd", "exact"), rounds=5, random_state=0
    )
    by_name = {one.name: one for one in found.findings}
    assert by_name["syn-ssd-uv"].rounds == by_name["asyn-sd"].rounds == 5
    assert len(by_name["asyn-sd"].curve.errors) == 5
    assert np.isfinite(by_name["syn-ssd-uv"].relative_error)
