"""partsong.NMF as scikit-learn users meet it."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
import warnings
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import parametrize_with_checks

import partsong
from partsong.core import runtime
from partsong.core.interfaces import Outcome
from partsong.errors import (
    DataError,
    DataTypeError,
    FeatureError,
    IllPosedWarning,
    ParameterError,
    PartsongError,
    ShapeError,
    UnreadableError,
)
from partsong.estimators.validation import rank_of
from partsong.io.model_file import save_model
from partsong.solvers.normal_equations import Penalty
from partsong.solvers.update_rules import CoordinateDescent
from partsong.training.result import EmptyModelWarning

SOLVERS = ["hals", "cd", "mu", "pg", "ipalm", "bpp"]
INITS = [None, "auto", "anchors", "random", "nndsvd", "nndsvda", "nndsvdar"]


def planted(n=80, m=20, k=4, seed=0, noise=0.05):
    rng = np.random.default_rng(seed)
    return rng.gamma(0.5, size=(n, k)) @ rng.gamma(0.5, size=(k, m)) + noise * rng.random((n, m))


@parametrize_with_checks([partsong.NMF(), partsong.NMF(n_components=2, init="random", max_iter=20)])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize("solver", [*SOLVERS, CoordinateDescent(sweeps=2, alpha=0.1)])
@pytest.mark.parametrize("init", INITS)
def test_every_solver_and_start_explains_planted_data(solver, init):
    X = planted()
    iterations = 60 if solver in ("hals", "cd", "bpp") else 300
    model = partsong.NMF(4, solver=solver, init=init, random_state=0, max_iter=iterations, tol=1e-6).fit(X)
    assert model.components_.shape == (4, 20)
    assert (model.components_ >= 0).all()
    slow = solver in ("mu", "pg", "ipalm")
    assert model.explained_variance_ > (0.95 if slow else 0.99)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("form", [np.asarray, np.asfortranarray, sp.csr_array, sp.csc_array])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fit_transform_and_transform_agree(solver, form, dtype):
    X = form(planted().astype(dtype))
    model = partsong.NMF(4, solver=solver, random_state=0, max_iter=15)
    W = model.fit_transform(X)
    again = model.transform(X)
    assert W.dtype == again.dtype == model.components_.dtype == dtype
    gap = np.abs(W @ model.components_ - model.inverse_transform(again)).max()
    assert gap <= 1e-6 * np.abs(W @ model.components_).max()


def test_error_scale_order_and_shares_are_as_stated():
    X = planted(noise=0.3)
    model = partsong.NMF(5, random_state=1)
    W = model.fit_transform(X)
    exact = np.linalg.norm(X - W @ model.components_)
    assert model.reconstruction_err_ == pytest.approx(exact, rel=1e-9)
    assert model.relative_error_ == pytest.approx(exact / np.linalg.norm(X), rel=1e-9)
    assert model.explained_variance_ == pytest.approx(1 - model.relative_error_**2)
    assert_allclose(np.linalg.norm(model.components_, axis=1), 1)
    R = W @ model.components_
    shares = [np.vdot(np.outer(W[:, j], model.components_[j]), R) / np.vdot(R, R) for j in range(5)]
    assert_allclose(model.component_shares_, shares, rtol=1e-9)
    assert (np.diff(model.component_shares_) <= 0).all()
    assert model.component_shares_.sum() == pytest.approx(1)


def test_history_tells_the_error_of_each_iteration():
    X = planted(noise=0.3)
    model = partsong.NMF(4, random_state=0, solver="cd", init="random", tol=0, max_iter=12).fit(X)
    rows = model.history_
    assert [row.iteration for row in rows] == list(range(1, 13))
    assert model.n_iter_ == 12
    assert (np.diff([row.seconds for row in rows]) > 0).all()
    errors = [row.relative_error for row in rows]
    assert (np.diff(errors) <= 1e-12).all(), "plain coordinate descent never goes up"
    assert model.relative_error_ <= errors[-1] * (1 + 1e-9), "the final weights are solved for"
    assert model.outcome_ is Outcome.MAX_ROUNDS


@pytest.mark.parametrize("init", INITS)
def test_same_seed_same_bytes(init):
    X = planted(300, 60)
    first = partsong.NMF(6, init=init, random_state=3, max_iter=10).fit(X)
    again = partsong.NMF(6, init=init, random_state=3, max_iter=10).fit(X)
    assert first.components_.tobytes() == again.components_.tobytes()
    other = partsong.NMF(6, init="random", random_state=4, max_iter=10).fit(X)
    assert first.components_.tobytes() != other.components_.tobytes()


def test_thread_count_changes_rounding_only(monkeypatch):
    monkeypatch.setattr(runtime, "SMALL_WORK", 0)
    X = planted(500, 40)
    fits = {
        n: [partsong.NMF(4, random_state=0, n_threads=n, max_iter=5, tol=0).fit(X) for _ in range(2)] for n in (1, 2)
    }
    for pair in fits.values():
        assert pair[0].components_.tobytes() == pair[1].components_.tobytes()
    assert_allclose(fits[1][0].components_, fits[2][0].components_, rtol=1e-6, atol=1e-8)


def test_custom_start():
    X = planted()
    rng = np.random.default_rng(0)
    W, H = rng.random((80, 4)), rng.random((4, 20))
    kept = W.copy(), H.copy()
    model = partsong.NMF(4, init="custom").fit(X, W=W, H=H)
    assert model.explained_variance_ > 0.99
    assert_array_equal(W, kept[0])
    assert_array_equal(H, kept[1])
    partsong.NMF(4, init="custom").fit(X, H=H)
    with pytest.raises(ParameterError, match="needs H"):
        partsong.NMF(4, init="custom").fit(X)
    with pytest.raises(ShapeError, match=r"H must have shape \(4, 20\)"):
        partsong.NMF(4, init="custom").fit(X, H=H[:2])
    with pytest.raises(ParameterError, match="non-negative"):
        partsong.NMF(4, init="custom").fit(X, H=-H)
    assert partsong.NMF("auto", init="custom").fit(X, H=H).n_components_ == 4
    assert partsong.NMF(init="custom").fit(X, W=W, H=H).n_components_ == 4
    for init in (None, "random"):
        with pytest.warns(RuntimeWarning, match="provided W or H are ignored.*init='custom'"):
            ignored = partsong.NMF(4, init=init, random_state=0).fit(X, H=H)
        assert_array_equal(ignored.components_, partsong.NMF(4, init=init, random_state=0).fit(X).components_)


def test_one_row_of_weights_gives_one_row_back():
    X = planted()
    model = partsong.NMF(4, random_state=0).fit(X)
    W = model.transform(X)
    assert_allclose(model.inverse_transform(W[3]), model.inverse_transform(W)[3], rtol=1e-12)
    assert_allclose(model.inverse_transform(list(W[3])), W[3] @ model.components_, rtol=1e-12)
    with pytest.raises(ShapeError, match="4 columns"):
        model.inverse_transform(W[3][:2])


def test_factors_that_cannot_be_a_start_are_told_by_position():
    X, H, W = planted(), np.ones((4, 20)), np.ones((80, 4))
    for name, value, words in (
        ("W", -1.0, r"W must be non-negative.*\(7, 2\): -1\.0, \(9, 0\): -1\.0.*clip"),
        ("W", np.nan, r"W must be finite.*\(7, 2\): nan"),
        ("H", np.inf, r"H must be finite.*\(3, 2\): inf"),
    ):
        factors = {"H": H.copy(), "W": W.copy()}
        for place in ((7, 2), (9, 0)) if name == "W" else ((3, 2),):
            factors[name][place] = value
        with pytest.raises(ParameterError, match=words):
            partsong.NMF(4, init="custom").fit(X, **factors)
    with pytest.raises(ShapeError, match=r"W must have shape \(80, 4\).*one row per sample"):
        partsong.NMF(4, init="custom").fit(X, H=H, W=W.T)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_start_of_zeros_is_told(solver):
    with pytest.raises(ParameterError, match=r"input H\) is full of zeros.*positive"):
        partsong.NMF(4, init="custom", solver=solver).fit(planted(), H=np.zeros((4, 20)))


@pytest.mark.parametrize("l1_ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_penalties_that_leave_nothing_are_told(l1_ratio, dtype):
    X = planted().astype(dtype)
    with pytest.warns(EmptyModelWarning, match=r"model is zero.*penalties.*Lower alpha_W and alpha_H"):
        model = partsong.NMF(4, alpha_W=1e4, l1_ratio=l1_ratio, random_state=0).fit(X)
    assert model.relative_error_ == pytest.approx(1, abs=1e-12)
    partsong.NMF(4, alpha_W=1e-3, l1_ratio=l1_ratio, random_state=0).fit(X)


def penalised_objective(X, W, H, alpha, l1_ratio):
    """That of the docstring, over ½‖X‖²: 1 for the model that is zero."""
    n, m = X.shape
    sizes = [
        each * alpha * (l1_ratio * factor.sum() + 0.5 * (1 - l1_ratio) * np.square(factor).sum())
        for each, factor in ((m, W), (n, H))
    ]
    return (0.5 * np.square(X - W @ H).sum() + sum(sizes)) / (0.5 * np.square(X).sum())


def fitted_objective(X, rank, alpha, l1_ratio, **settings):
    model = partsong.NMF(rank, alpha_W=alpha, l1_ratio=l1_ratio, random_state=0, max_iter=1000, **settings)
    W = model.fit_transform(X)
    return penalised_objective(X, W, model.components_, alpha, l1_ratio)


def low_rank():
    rng = np.random.default_rng(0)
    return rng.gamma(0.5, size=(80, 4)) @ rng.gamma(0.5, size=(4, 30))


@pytest.mark.parametrize(
    ("alpha", "l1_ratio", "known"),
    [(0.8, 0.5, 0.4354), (0.8, 1, 0.4223), (1, 0.5, 0.4831), (1, 1, 0.4567), (3, 0.5, 0.7765), (3, 1, 0.7574)],
)
def test_penalties_do_not_collapse_the_default_start(alpha, l1_ratio, known):
    """`known` is what scikit-learn reaches on digits, the better of nndsvda and random."""
    assert fitted_objective(load_digits().data, 10, alpha, l1_ratio) < 1.02 * known


def test_a_ridge_does_not_collapse_the_default_start():
    assert fitted_objective(low_rank(), 4, 0.8, 0) < 1.02 * 0.8288


@pytest.mark.parametrize("solver", ["hals", "cd"])
@pytest.mark.parametrize(("l1_ratio", "known"), [(0, 0.1585), (0.5, 0.1565), (1, 0.1525)])
def test_components_that_penalties_have_set_to_zero_come_back(solver, l1_ratio, known):
    """From nndsvda most of them die in the first steps; scikit-learn's stay dead with l1, at .2054 and .2023."""
    assert fitted_objective(load_digits().data, 10, 0.1, l1_ratio, init="nndsvda", solver=solver) < 1.02 * known


@pytest.mark.parametrize("alphas", [(0.0, 0.1), (0.1, 0.0)])
def test_a_penalty_on_one_factor_alone_is_told(alphas):
    with pytest.warns(IllPosedWarning, match=r"Only [WH] has a penalty.*no minimum.*Set alpha_[WH] above 0"):
        partsong.NMF(3, alpha_W=alphas[0], alpha_H=alphas[1], random_state=0).fit(planted())


def test_a_warning_of_zero_has_both_objectives():
    with pytest.warns(EmptyModelWarning, match=r"zero model is 1.*solver='cd' from init='random' ends at 1") as told:
        partsong.NMF(4, alpha_W=1e4, random_state=0).fit(planted())
    assert "best" not in str(told[0].message)


def test_a_start_that_ends_at_zero_is_replaced_where_another_does_better():
    """A block in sparse noise: from random numbers every component dies, from the SVD one finds the block."""
    rng = np.random.default_rng(0)
    X = rng.random((300, 400)) * (rng.random((300, 400)) < 0.02)
    X[:40, :30] += rng.random((40, 30)) < 0.5
    settings = {"alpha_W": 0.014, "l1_ratio": 0.5, "random_state": 0, "max_iter": 1000}
    with pytest.warns(EmptyModelWarning, match=r"From init='random' .* objective of 1 .* is returned instead"):
        model = partsong.NMF(5, init="random", **settings).fit(sp.csr_array(X))
    assert model.explained_variance_ > 0.1
    assert model.n_iter_ == len(model.history_)


def test_fits_that_max_iter_ends_give_a_warning_as_in_scikit_learn():
    X = planted()
    with pytest.warns(ConvergenceWarning, match="Maximum number of iterations 2 reached"):
        partsong.NMF(4, max_iter=2, random_state=0).fit(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partsong.NMF(4, max_iter=2, tol=0, random_state=0).fit(X)
        partsong.NMF(4, time_budget=1e-6, random_state=0).fit(X)


def test_shuffling_changes_the_order_of_updates_and_nothing_else():
    X = planted()
    plain, mixed, again = (partsong.NMF(4, random_state=3, shuffle=s, tol=1e-8).fit(X) for s in (False, True, True))
    assert_array_equal(mixed.components_, again.components_)
    assert mixed.relative_error_ == pytest.approx(plain.relative_error_, rel=0.05)
    one = {"random_state": 3, "max_iter": 1, "tol": 0, "solver": "cd"}
    assert (partsong.NMF(4, **one).fit(X).components_ != partsong.NMF(4, shuffle=True, **one).fit(X).components_).any()


@pytest.mark.parametrize("beta_loss", ["kullback-leibler", "itakura-saito", 1, 0.5, None, True, "euclid"])
def test_other_losses_are_refused_with_what_is_planned(beta_loss):
    with pytest.raises(ParameterError, match=r"Invalid beta_loss.*Use 'frobenius'.*planned"):
        partsong.NMF(3, beta_loss=beta_loss).fit(planted())


def test_the_function_is_the_estimator_and_takes_h_as_given():
    X = planted()
    W, H, n_iter = partsong.non_negative_factorization(X, n_components=4, random_state=0)
    model = partsong.NMF(4, random_state=0)
    assert_array_equal(W, model.fit_transform(X))
    assert_array_equal(H, model.components_)
    assert n_iter == model.n_iter_
    again, same, one = partsong.non_negative_factorization(X, H=H, update_H=False)
    assert_allclose(again, model.transform(X), rtol=1e-12)
    assert same is H or (same == H).all()
    assert one == 1
    with pytest.raises(ParameterError, match="update_H=False needs H"):
        partsong.non_negative_factorization(X, update_H=False)
    with pytest.warns(RuntimeWarning, match="initial W is not used"):
        partsong.non_negative_factorization(X, W=W, H=H, update_H=False)


def test_start_factors_have_the_type_of_the_data():
    X, H = planted(), np.ones((4, 20), np.float32)
    with pytest.raises(DataTypeError, match=r"H should have the same dtype as X, float64; got float32"):
        partsong.NMF(4, init="custom").fit(X, H=H)
    partsong.NMF(4, init="custom").fit(X, H=H.astype(int))
    partsong.NMF(4, init="custom", dtype="float32").fit(X, H=H.astype(float))


def test_plain_steps_are_tried_before_zero_is_called_the_model():
    """Just below the penalty at which zero is best, 1 − (s − a √(n m))² / ‖X‖² < 1 is."""
    X = np.random.default_rng(3).random((200, 50))
    alpha = 0.97 * np.linalg.svd(X, compute_uv=False)[0] / np.sqrt(X.size)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = partsong.NMF(3, alpha_W=alpha, random_state=0).fit(X)
    is_zero = not model.components_.any()
    assert not is_zero or any("ends at 0.999" in str(warning.message) for warning in told)


def test_data_that_fit_perfectly_give_no_warning():
    X = np.random.default_rng(1).random((300, 4)) @ np.random.default_rng(2).random((4, 80))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partsong.NMF(4, random_state=0).fit(X)


def test_components_that_are_best_zero_stay_zero():
    X = load_digits().data
    model = partsong.NMF(10, alpha_W=1, l1_ratio=0.5, random_state=0).fit(X)
    n_zero = int((model.components_.sum(axis=1) == 0).sum())
    assert 5 <= n_zero < 10
    assert model.outcome_ is Outcome.CONVERGED
    assert model.n_iter_ < 100


def test_weights_with_gaps_are_not_turned_back():
    model = partsong.NMF(2, max_iter=2).fit(planted())
    for wrong in (np.nan, np.inf):
        with pytest.raises(ParameterError, match=r"W must be finite.*\(1, 0\)"):
            model.inverse_transform([[1.0, 2.0], [wrong, 0.0]])
    assert_allclose(model.inverse_transform([[-1.0, 2.0]]), [[-1.0, 2.0]] @ model.components_)


def test_same_start_as_scikit_learn_reaches_as_low():
    from sklearn.decomposition import NMF as Reference

    X = planted(noise=0.3)
    rng = np.random.default_rng(0)
    W, H = rng.random((80, 4)), rng.random((4, 20))
    reference = Reference(4, init="custom", max_iter=2000, tol=1e-9).fit(X, W=W.copy(), H=H.copy())
    reference.fit_transform(X, W=W.copy(), H=H.copy())
    ours = partsong.NMF(4, init="custom", max_iter=2000, tol=1e-9).fit(X, W=W, H=H)
    assert ours.reconstruction_err_ <= reference.reconstruction_err_ * 1.01


def test_penalties_mean_the_same_at_any_size():
    """Repeating rows or columns leaves the balance of error and penalty as it was."""
    X = planted(noise=0.3)
    settings = {"alpha_W": 0.02, "alpha_H": 0.05, "l1_ratio": 0.5, "init": "custom", "tol": 1e-8, "max_iter": 2000}
    H = np.random.default_rng(0).random((4, 20))
    plain = partsong.NMF(4, **settings).fit(X, H=H)
    tall = partsong.NMF(4, **settings).fit(np.vstack([X, X, X]), H=H)
    wide = partsong.NMF(4, **settings).fit(np.hstack([X, X, X]), H=np.hstack([H, H, H]))
    for repeated, expected in ((tall, plain.components_), (wide, np.tile(plain.components_, 3))):
        assert repeated.relative_error_ == pytest.approx(plain.relative_error_, rel=1e-3)
        assert_allclose(repeated.components_, expected, atol=5e-3 * expected.max())
    assert_allclose(wide.transform(np.hstack([X, X, X])), plain.transform(X), atol=5e-3 * plain.transform(X).max())
    free = partsong.NMF(4, random_state=0).fit(X)
    assert plain.relative_error_ > free.relative_error_
    assert (plain.components_ == 0).mean() >= (free.components_ == 0).mean()


def test_objective_with_penalties_equals_scikit_learn():
    from sklearn.decomposition import NMF as Reference

    X = planted(noise=0.3)
    rng = np.random.default_rng(0)
    W, H = rng.random((80, 3)), rng.random((3, 20))
    settings = {"alpha_W": 0.01, "alpha_H": 0.03, "l1_ratio": 0.3, "init": "custom", "max_iter": 5000, "tol": 1e-10}
    reference = Reference(3, **settings)
    their_W = reference.fit_transform(X, W=W.copy(), H=H.copy())
    ours = partsong.NMF(3, **settings)
    our_W = ours.fit_transform(X, W=W, H=H)

    def objective(W, H):
        n, m = X.shape
        on_W = m * 0.01 * (0.3 * W.sum() + 0.35 * np.square(W).sum())
        on_H = n * 0.03 * (0.3 * H.sum() + 0.35 * np.square(H).sum())
        return 0.5 * np.square(X - W @ H).sum() + on_W + on_H

    assert objective(our_W, ours.components_) == pytest.approx(objective(their_W, reference.components_), rel=1e-3)


def test_top_features_by_name_and_number():
    pandas = pytest.importorskip("pandas")
    X = np.kron(np.eye(2), np.ones((5, 3))) * [[1, 2, 3, 3, 2, 1]]
    frame = pandas.DataFrame(X, columns=list("abcdef"))
    model = partsong.NMF(2, random_state=0).fit(frame)
    assert sorted(model.top_features(1)) == [["c"], ["d"]]
    assert sorted(map(sorted, partsong.NMF(2, random_state=0).fit(X).top_features(2))) == [[1, 2], [3, 4]]
    with pytest.raises(FeatureError, match="order"):
        model.transform(frame[list("bacdef")])
    assert model.get_feature_names_out().tolist() == ["nmf0", "nmf1"]


def test_time_budget_and_interrupt_keep_the_model():
    X = planted(2000, 300, 10, noise=0.5)
    model = partsong.NMF(10, tol=0, max_iter=10**6, time_budget=0.3, random_state=0)
    began = time.perf_counter()
    model.fit(X)
    assert model.outcome_ is Outcome.TIME_LIMIT
    assert time.perf_counter() - began < 20
    assert model.explained_variance_ > 0.5

    model = partsong.NMF(10, tol=0, max_iter=10**6, time_budget=60, random_state=0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # also under a shell that ignores it
    try:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        model.fit(X)
    finally:
        signal.signal(signal.SIGINT, before)
    assert model.outcome_ is Outcome.INTERRUPTED
    assert model.explained_variance_ > 0.5


def test_progress_goes_to_standard_error(capsys):
    partsong.NMF(2, verbose=1, max_iter=3, random_state=0).fit(planted())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "NMF of 80 × 20" in captured.err


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda X: X.__setitem__((3, 5), np.nan), DataError, ["NaN", "3", "5"]),
        (lambda X: X.__setitem__((7, 0), np.inf), DataError, ["inf", "7"]),
        (lambda X: X.__setitem__((slice(2, 40), 1), -1.0), DataError, ["Negative values in data", "2"]),
    ],
)
@pytest.mark.parametrize("form", [np.asarray, sp.csr_array])
def test_bad_values_are_named(change, error, words, form):
    X = planted()
    change(X)
    with pytest.raises(error) as caught:
        partsong.NMF(3).fit(form(X))
    assert isinstance(caught.value, ValueError)
    for word in words:
        assert word in str(caught.value)
    fitted = partsong.NMF(3, max_iter=2).fit(planted())
    with pytest.raises(error):
        fitted.transform(form(X))


@pytest.mark.parametrize("k", [0, -1, 2.5, "3", True, 10**9, 100_000])
def test_senseless_ranks_are_refused(k):
    with pytest.raises(ParameterError, match="n_components"):
        partsong.NMF(k).fit(planted())


def test_ranks_beyond_the_smaller_side_or_the_memory_are_refused():
    with pytest.raises(ParameterError, match=r"n_components=20000.*40000 × 5.*at most 5"):
        partsong.NMF(20_000).fit(np.ones((40_000, 5), np.float32))
    assert rank_of(1000, (40_000, 5)) == 1000
    assert rank_of(3000, (40_000, 300)) == 3000
    with pytest.raises(ParameterError, match=r"n_components=500 .* GiB of memory"):
        rank_of(500, (10**12, 10**6))


@pytest.mark.parametrize(
    "settings",
    [{"solver": "hal"}, {"init": "svd"}, {"tol": -1}, {"max_iter": 0}, {"time_budget": 0}, {"l1_ratio": 2},
     {"alpha_W": -1}, {"alpha_H": "x"}, {"n_threads": 0}, {"random_state": -1}, {"random_state": "a"},
     {"tol": "a"}, {"tol": None}, {"tol": np.nan}, {"tol": np.ones(2)}, {"time_budget": "x"}, {"time_budget": np.nan},
     {"alpha_W": None}, {"alpha_W": "same"}, {"alpha_W": np.inf}, {"alpha_H": -1}, {"alpha_H": None},
     {"alpha_H": np.ones(2)}, {"l1_ratio": "0.5"}, {"l1_ratio": np.nan}, {"dtype": "foo"}, {"dtype": int},
     {"dtype": "float16"}, {"solver": 3}, {"solver": None}, {"solver": CoordinateDescent}, {"init": np.ones(2)},
     {"init": 3}, {"verbose": "x"}, {"verbose": -1}, {"max_iter": True}, {"max_iter": 2.0}, {"n_threads": "2"},
     {"n_threads": True}],
    ids=str,
)  # fmt: skip
def test_senseless_settings_are_refused_by_name(settings):
    (name,) = settings
    with pytest.raises(ParameterError, match=name):
        partsong.NMF(2, **settings).fit(planted())


def test_penalties_are_refused_where_they_are_made():
    for wrong in (-1, np.nan, np.inf, None, "a"):
        with pytest.raises(ParameterError, match="l2 penalty"):
            Penalty(0.0, wrong)


def test_settings_that_numpy_made_are_taken():
    settings = {"tol": np.float32(1e-3), "max_iter": np.int64(5), "alpha_W": np.float64(0.01), "verbose": False}
    assert partsong.NMF(np.int32(2), dtype=np.float32, **settings).fit(planted()).components_.dtype == np.float32


TEXT = [[1.0, "low", 2.0], [3.0, 4.0, 5.0], [6.0, "high", "n/a"]]


@pytest.mark.parametrize("form", [lambda cells: np.array(cells, dtype=object), np.array, list], ids=["O", "U", "list"])
def test_text_is_told_by_cell(form):
    with pytest.raises(
        UnreadableError, match=r"3 cell\(s\).*row 0, column 1: .*'low'.*row 2, column 2: .*'n/a'"
    ) as caught:
        partsong.NMF(1).fit(form(TEXT))
    assert isinstance(caught.value, DataTypeError | ValueError)
    assert "astype(float)" in str(caught.value)


def test_text_in_a_frame_is_told_by_name_and_counted():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(planted(), columns=[f"g{i}" for i in range(20)])
    fitted = partsong.NMF(2, max_iter=2).fit(frame)
    frame["g7"] = "x"
    for call in (partsong.NMF(2).fit, fitted.transform):
        with pytest.raises(UnreadableError, match=r"80 cell\(s\).*row 0, column 7 \('g7'\): 'x'.*and 75 more"):
            call(frame)
    frame["g7"] = "1.5"
    with pytest.raises(UnreadableError, match=r"80 cell\(s\).*numbers are stored as text"):
        partsong.NMF(2).fit(frame)
    frame["g7"] = pandas.Timestamp(0)
    with pytest.raises(UnreadableError, match=r"column 7 \('g7'\): Timestamp"):
        partsong.NMF(2).fit(frame)
    frame["g7"] = np.nan
    with pytest.raises(DataError, match="'g7'"):
        partsong.NMF(2).fit(frame)


def test_numbers_held_as_objects_are_numbers():
    X = planted()
    mixed = X.astype(object)
    mixed[0, 0] = Decimal("0.5")
    mixed[1, 1] = np.float32(2)
    plain = mixed.astype(float)
    settings = {"max_iter": 5, "random_state": 0}
    assert_array_equal(
        partsong.NMF(3, **settings).fit(mixed).components_, partsong.NMF(3, **settings).fit(plain).components_
    )
    mixed[2, 3] = None
    with pytest.raises(DataError, match=r"NaN.*row 2; column 3"):
        partsong.NMF(3).fit(mixed)


@pytest.mark.parametrize(
    ("names", "words"),
    [(["a", "b", "a"], r"'a' \(columns 0, 2\)"), (["a", "", "c"], "without a name: column 1"),
     (["a", None, "c"], "without a name: column 1"), (["a", "b", np.nan], "without a name: column 2"),
     ([0, 1, 0], r"0 \(columns 0, 2\)"), (["a", 7, "c"], r"must be text.*column 1 \(7\)")],
)  # fmt: skip
def test_names_that_cannot_be_told_apart_are_refused(names, words):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(planted(m=3), columns=names)
    for fit in (partsong.NMF(2).fit, lambda X: partsong.FederatedNMF(2).fit([X, X])):
        with pytest.raises(FeatureError, match=words):
            fit(frame)


def test_columns_that_are_numbered_have_no_names():
    pandas = pytest.importorskip("pandas")
    model = partsong.NMF(2, max_iter=2).fit(pandas.DataFrame(planted(m=3), columns=[0, 1, 7]))
    assert not hasattr(model, "feature_names_in_")
    named = partsong.NMF(2, max_iter=2).fit(pandas.DataFrame(planted(m=3), columns=list("abc")))
    assert not hasattr(named.fit(planted()), "feature_names_in_")


@pytest.mark.parametrize(
    ("bad", "remedy"),
    [(np.ma.masked_less(planted(), 0.1), r"masked value.*filled\(0\)"), (planted() * 1j, r"Complex.*abs\(X\)"),
     (sp.csr_array(planted() * 1j), r"Complex.*abs\(X\)"), ([[1, 2], [3]], "rows are samples of equal length"),
     ("data.csv", r"partsong.read\(path\)"), (np.zeros((2, 2), "datetime64[D]"), "not numbers")],
    ids=["secure_aggregation", "complex", "sparse complex", "ragged", "path", "dates"],
)  # fmt: skip
def test_what_is_no_matrix_comes_with_a_remedy(bad, remedy):
    fitted = partsong.NMF(2, max_iter=2).fit(planted())
    for call in (partsong.NMF(2).fit, fitted.transform, lambda X: partsong.FederatedNMF(2).fit([X])):
        with pytest.raises(UnreadableError, match=f"(?s){remedy}") as caught:
            call(bad)
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, TypeError)


def test_a_mask_that_hides_nothing_is_no_obstacle():
    X = planted()
    settings = {"max_iter": 3, "random_state": 0}
    bare, masked = (partsong.NMF(2, **settings).fit(form) for form in (X, np.ma.MaskedArray(X)))
    assert_array_equal(bare.components_, masked.components_)


def test_text_for_factors_is_refused():
    with pytest.raises(UnreadableError, match=r"H: .*'a'"):
        partsong.NMF(2, init="custom").fit(planted(), H=np.full((2, 20), "a"))
    with pytest.raises(UnreadableError, match="W"):
        partsong.NMF(2, max_iter=2).fit(planted()).inverse_transform([["a", "b"]])


def test_rows_too_large_for_the_precision_of_a_model_are_refused_and_small_ones_are_not():
    X = planted()
    for model in (partsong.NMF(3, random_state=0, max_iter=5), partsong.FederatedNMF(3, random_state=0, rounds=5)):
        is_federated = isinstance(model, partsong.FederatedNMF)
        single = clone(model).set_params(dtype="float32").fit([X] if is_federated else X)
        with pytest.raises(DataError, match="range of float32"):
            single.transform(X * 1e39)
        double = clone(model).fit([X] if is_federated else X)
        assert_allclose(double.transform(X * 1e39), double.transform(X) * 1e39, rtol=1e-9)
        assert_allclose(single.transform(X * 1e-18), single.transform(X) * 1e-18, rtol=1e-3, atol=1e-22)


def test_dense_tensors_are_taken_as_arrays():
    torch = pytest.importorskip("torch")
    X = planted().astype(np.float32)
    settings = {"max_iter": 5, "random_state": 0}
    plain = partsong.NMF(3, **settings).fit(X)
    model = partsong.NMF(3, **settings).fit(torch.tensor(X, requires_grad=True))
    assert_array_equal(model.components_, plain.components_)
    assert isinstance(model.transform(torch.from_numpy(X)), np.ndarray)
    for kind in (torch.bfloat16, torch.float16):
        assert partsong.NMF(3, **settings).fit(torch.from_numpy(X).to(kind)).components_.dtype == np.float32
    with pytest.raises(UnreadableError, match="Complex"):
        model.fit(torch.from_numpy(X) * 1j)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_are_refused_with_a_way_out():
    torch = pytest.importorskip("torch")
    X = torch.from_numpy(planted())
    S = X.to_sparse_csr()
    for sparse in (S, X.to_sparse()):
        for call in (partsong.NMF(2).fit, lambda X: partsong.FederatedNMF(2).fit([X])):
            with pytest.raises(UnreadableError, match=r"scipy.sparse.csr_array\(\(S.values\(\)"):
                call(sparse)
    way_out = sp.csr_array((S.values(), S.col_indices(), S.crow_indices()), S.shape)
    assert_array_equal(way_out.toarray(), X.numpy())


def test_other_bad_input():
    for bad, error in (
        (np.empty((0, 3)), PartsongError), (np.empty((3, 0)), PartsongError), (np.ones(4), ShapeError),
        (np.array([["a", "b"]]), (DataTypeError, DataError)), (np.ones((2, 2), complex), PartsongError),
    ):  # fmt: skip
        with pytest.raises(error) as caught:
            partsong.NMF(1).fit(bad)
        assert isinstance(caught.value, PartsongError)
        assert isinstance(caught.value, ValueError | TypeError)
    model = partsong.NMF(2, max_iter=2).fit(planted())
    with pytest.raises(ShapeError, match="X has 19 features, but NMF is expecting 20"):
        model.transform(planted()[:, 1:])
    with pytest.raises(ShapeError, match="2 columns"):
        model.inverse_transform(np.ones((3, 5)))


def test_legal_corners():
    zero = partsong.NMF(3, random_state=0).fit(np.zeros((6, 4)))
    assert zero.relative_error_ == 0
    assert np.isfinite(zero.components_).all()
    X = planted()
    X[5] = 0
    X[:, 7] = 0
    W = partsong.NMF(4, random_state=0).fit_transform(X)
    assert_array_equal(W[5], 0)
    constant = partsong.NMF(2, random_state=0).fit(np.ones((5, 5)))
    assert constant.relative_error_ < 1e-3
    wide = partsong.NMF(30, random_state=0, max_iter=20).fit(planted(5, 8))
    assert wide.components_.shape == (30, 8)
    assert wide.explained_variance_ > 0.999
    assert partsong.NMF().fit(planted(12, 7)).n_components_ == 7


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    n=st.integers(1, 12), m=st.integers(1, 12), k=st.integers(1, 15), seed=st.integers(0, 10**6),
    density=st.floats(0, 1), solver=st.sampled_from(SOLVERS), init=st.sampled_from(INITS), sparse=st.booleans(),
    dtype=st.sampled_from([np.float32, np.float64, np.int32, np.uint8]),
)  # fmt: skip
def test_any_legal_matrix_is_factorized(n, m, k, seed, density, solver, init, sparse, dtype):
    rng = np.random.default_rng(seed)
    X = (rng.random((n, m)) * 9 * (rng.random((n, m)) < density)).astype(dtype)
    if init in ("nndsvd", "nndsvda", "nndsvdar"):
        k = min(k, n, m)
    model = partsong.NMF(k, solver=solver, init=init, max_iter=3, random_state=seed)
    W = model.fit_transform(sp.csr_array(X) if sparse else X)
    assert W.shape == (n, k)
    assert np.isfinite(W).all()
    assert (W >= 0).all()
    assert np.isfinite(model.components_).all()
    assert 0 <= model.relative_error_ <= 1 + 1e-3


def test_clones_are_equal():
    model = partsong.NMF(3, solver=CoordinateDescent(sweeps=4), alpha_W=0.1)
    assert clone(model).get_params() == model.get_params()


def test_memory_map_is_read_in_place(tmp_path):
    X = planted(3000, 50).astype(np.float32)
    np.save(tmp_path / "X.npy", X)
    mapped = np.load(tmp_path / "X.npy", mmap_mode="r")
    ours = partsong.NMF(4, random_state=0, max_iter=10, tol=0).fit(mapped)
    plain = partsong.NMF(4, random_state=0, max_iter=10, tol=0).fit(X)
    assert_allclose(ours.components_, plain.components_, rtol=1e-3, atol=1e-4)


def test_save_and_load(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(planted(), columns=[f"g{i}" for i in range(20)])
    model = partsong.NMF(4, alpha_W=0.001, l1_ratio=0.5, random_state=0).fit(frame)
    model.save(tmp_path / "m.safetensors")
    again = partsong.NMF.load(tmp_path / "m.safetensors")
    assert_array_equal(again.transform(frame), model.transform(frame))
    assert again.top_features(3) == model.top_features(3)
    stored = partsong.load_model(tmp_path / "m.safetensors")
    assert stored.seed == 0
    assert stored.settings["n_samples"] == again.n_samples_ == 80
    again.save(tmp_path / "again.safetensors")
    assert partsong.load_model(tmp_path / "again.safetensors").settings["n_samples"] == 80
    with pytest.raises(FeatureError):
        again.transform(frame[frame.columns[::-1]])
    federated = partsong.FederatedNMF(3, rounds=3, random_state=0).fit([frame[:40], frame[40:]])
    federated.save(tmp_path / "f.safetensors")
    assert_allclose(partsong.NMF.load(tmp_path / "f.safetensors").transform(frame), federated.transform(frame))


def test_values_that_leave_the_range_of_the_precision_are_refused():
    X = planted().astype(np.float32)
    for factor in (1e20, 1e-20):
        with pytest.raises(DataError, match=r"range of float32.*float64"):
            partsong.NMF(3).fit(X * np.float32(factor))
        scaled = partsong.NMF(3, dtype="float64", random_state=0).fit(X.astype(np.float64) * factor)
        plain = partsong.NMF(3, dtype="float64", random_state=0).fit(X.astype(np.float64))
        assert scaled.relative_error_ == pytest.approx(plain.relative_error_, rel=1e-6)
    with pytest.raises(DataError, match="float32"):
        partsong.NMF(3, dtype="float32").fit(X.astype(np.float64) * 1e20)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("n", "m", "rank", "k"), [(66, 24, 2, 67), (183, 48, 5, 70), (38, 35, 6, 78), (31, 20, 2, 66)])
def test_dependent_components_leave_transform_and_fit_transform_equal(n, m, rank, k, dtype):
    X = planted(n, m, rank, noise=0.0).astype(dtype)
    model = partsong.NMF(k, max_iter=20, random_state=0)
    W = model.fit_transform(X)
    gap = np.abs(W @ model.components_ - model.transform(X) @ model.components_).max()
    assert gap <= 1e-6 * X.max()
    assert model.relative_error_ < 0.02


def test_a_loaded_model_is_saved_as_it_was_told_until_it_is_fitted_again(tmp_path):
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    settings = {"solver": "mu", "init": "random", "tol": 1e-3, "max_iter": 77}
    penalties = {"alpha_W": 0.002, "alpha_H": 0.001, "l1_ratio": 0.25}
    partsong.NMF(5, **settings, **penalties, random_state=3).fit(planted()).save(first)
    loaded = partsong.NMF.load(first)
    loaded.save(second)
    assert second.read_bytes() == first.read_bytes()
    assert loaded.get_params().items() >= {**settings, **penalties}.items(), "a new fit is the same again"
    copy.deepcopy(loaded).save(second)
    assert second.read_bytes() == first.read_bytes()

    stored = partsong.load_model(first)
    foreign = {**stored.settings, "solver": "Rule(9)", "note": {"by": ["somebody"]}, "tol": "small"}
    save_model(first, replace(stored, settings=foreign, created="2001-01-01T00:00:00+00:00", versions={"x": "1"}))
    loaded = partsong.NMF.load(first)
    assert (loaded.solver, loaded.tol, loaded.init) == ("hals", 1e-4, "random"), "what cannot be asked for is not"
    loaded.save(second)
    assert second.read_bytes() == first.read_bytes()

    loaded.set_params(max_iter=4, tol=0, n_components=2).fit(planted()).save(second)
    anew = partsong.load_model(second)
    assert "note" not in anew.settings
    assert (anew.settings["max_iter"], anew.settings["n_components"]) == (4, 2)
    assert anew.settings["iterations"] == partsong.NMF.load(second).n_iter_ == 4
    assert anew.versions != {"x": "1"}
    assert not anew.created.startswith("2001")


def test_penalties_that_were_changed_after_loading_are_saved(tmp_path):
    path, X = tmp_path / "m.safetensors", planted()
    partsong.NMF(3, solver="cd", alpha_W=0.01, l1_ratio=0.5, random_state=0).fit(X).save(path)
    loaded = partsong.NMF.load(path).set_params(alpha_W=0.05)
    loaded.save(path)
    again = partsong.NMF.load(path)
    assert_array_equal(again.transform(X), loaded.transform(X))
    assert (again.solver, again.alpha_W) == ("cd", 0.05)


def test_another_width_is_told_with_the_way_out():
    pandas = pytest.importorskip("pandas")
    X = planted()
    plain = partsong.NMF(2, max_iter=2).fit(X)
    with pytest.raises(
        ShapeError, match=r"X has 5 features, but NMF is expecting 20 .*Pass X with the columns of the fit"
    ):
        plain.transform(X[:, :5])
    frame = pandas.DataFrame(X, columns=[f"g{i}" for i in range(20)])
    named = partsong.NMF(2, max_iter=2).fit(frame)
    with (
        pytest.warns(UserWarning, match="feature names"),
        pytest.raises(ShapeError, match=r"expecting 20 .*'g0', 'g1', 'g2', 'g3', 'g4' \(and 15 more\)"),
    ):
        named.transform(X[:, :5])
    with pytest.raises(FeatureError, match=r"(?s)- g7\n.*Add the missing columns .*model\.feature_names_in_"):
        named.transform(frame.drop(columns="g7").assign(new=1.0))
    with pytest.raises(FeatureError, match=r"(?s)- new\n.*Remove the columns"):
        named.transform(frame.assign(new=1.0))
    with pytest.raises(FeatureError, match=r"Reorder the columns: X\[list"):
        named.transform(frame[frame.columns[::-1]])
    mixed = frame.assign(new=1.0)[["new", *frame.columns[::-1]]]
    assert_allclose(named.transform(mixed[list(named.feature_names_in_)]), named.transform(frame), rtol=1e-9)


LEVEL = {
    "ones": lambda rng: np.ones((9, 8)),
    "identity": lambda rng: np.eye(8),
    "exact": lambda rng: rng.random((20, 3)) @ rng.random((3, 8)),
}


@pytest.mark.filterwarnings("ignore::partsong.training.result.EmptyModelWarning")
@pytest.mark.parametrize("alpha", [0.0, 0.3])
@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("name", LEVEL)
def test_a_fit_whose_objective_never_rises_goes_on(name, precision, alpha):
    """Its extrapolation grows to the ceiling and stays there."""
    X = LEVEL[name](np.random.default_rng(14)).astype(precision)
    settings = {"tol": 0, "max_iter": 200, "random_state": 14, "alpha_W": alpha, "alpha_H": alpha, "l1_ratio": 0.5}
    fitted = partsong.NMF(3, **settings).fit(X)
    assert fitted.n_iter_ == 200
    federated = partsong.FederatedNMF(3, method="fnmf", rounds=60, tol=0, random_state=0).fit([X, X])
    assert np.isfinite(federated.relative_error_)
