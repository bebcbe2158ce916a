"""partsong.PCAGame as scikit-learn users meet it: the components are those of the singular value decomposition."""

from __future__ import annotations

import os
import signal
import threading
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.utils.estimator_checks import parametrize_with_checks

import partsong
from partsong.core.interfaces import Outcome
from partsong.errors import (
    DataError,
    DivergenceWarning,
    FeatureError,
    ParameterError,
    PartsongError,
    ShapeError,
    UnreadableError,
)

PLAYS = ["sequential", "simultaneous"]
SPECTRUM = np.array([20.0, 14, 10, 7, 5, 3, 2, 1])


def planted(n=120, d=30, spectrum=SPECTRUM, seed=0, offset=0.0):
    """Rows with these singular values after centring."""
    rng = np.random.default_rng(seed)
    U = rng.standard_normal((n, len(spectrum)))
    U, V = np.linalg.qr(U - U.mean(axis=0))[0], np.linalg.qr(rng.standard_normal((d, len(spectrum))))[0]
    return (U * spectrum) @ V.T + offset * rng.standard_normal(d)


def vectors_of(X, k, center=True):
    _, s, V = np.linalg.svd(X - X.mean(axis=0) * center, full_matrices=False)
    return s[:k], V[:k]


def distance(components, V):
    """The largest sine of the angles between vectors of equal rank, whatever their signs."""
    signs = np.sign((components * V).sum(axis=1))[:, None]
    return np.linalg.norm(components * signs - V, axis=1).max()


CHECKED = [
    partsong.PCAGame(),
    partsong.PCAGame(2, play="simultaneous", max_iter=50),
    partsong.PCAGame(1, batch_size=1, max_iter=5),
]


@parametrize_with_checks(CHECKED)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize("play", PLAYS)
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("offset", [0.0, 3.0, 1e4])
def test_vectors_are_those_of_the_svd(play, center, offset):
    X = planted(offset=offset)
    k = 6 if center or offset < 10 else 1
    model = partsong.PCAGame(k, play=play, center=center, tol=1e-9, random_state=0).fit(X)
    s, V = vectors_of(X, k, center)
    assert model.outcome_ is Outcome.CONVERGED
    assert distance(model.components_, V) < 1e-7
    assert_allclose(model.singular_values_, s, rtol=1e-9)
    assert_allclose(model.mean_, X.mean(axis=0) * center, rtol=1e-12)


@pytest.mark.parametrize("play", PLAYS)
def test_wide_data_and_all_components(play):
    X = planted(12, 40, np.arange(11.0, 0, -1))
    model = partsong.PCAGame(11, play=play, tol=1e-9, random_state=1).fit(X)
    assert distance(model.components_, vectors_of(X, 11)[1]) < 1e-6


def test_attributes_are_those_of_scikit_learn():
    X = planted(offset=2.0)
    ours, theirs = partsong.PCAGame(5, tol=1e-9, random_state=0).fit(X), PCA(5, svd_solver="full").fit(X)
    for name in ("explained_variance_", "explained_variance_ratio_", "singular_values_", "mean_"):
        assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-7, err_msg=name)
    assert_allclose(np.abs(ours.transform(X)), np.abs(theirs.transform(X)), atol=1e-6)
    assert_allclose(ours.inverse_transform(ours.transform(X)), theirs.inverse_transform(theirs.transform(X)), atol=1e-6)
    assert_allclose(ours.utilities_, theirs.explained_variance_ * (len(X) - 1) / len(X), rtol=1e-7)
    assert (ours.components_[np.arange(5), np.abs(ours.components_).argmax(axis=1)] > 0).all()
    assert list(ours.get_feature_names_out()) == [f"pcagame{i}" for i in range(5)]


@pytest.mark.parametrize("form", [sp.csr_array, sp.csc_array, sp.coo_array, sp.csr_matrix])
@pytest.mark.parametrize("center", [True, False])
def test_sparse_is_dense(form, center):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((90, 25)) * (rng.random((90, 25)) < 0.2) * np.linspace(6, 1, 25)
    dense = partsong.PCAGame(4, center=center, tol=1e-10, random_state=0, max_iter=3000).fit(X)
    sparse = partsong.PCAGame(4, center=center, tol=1e-10, random_state=0, max_iter=3000).fit(form(X))
    assert dense.outcome_ is sparse.outcome_ is Outcome.CONVERGED
    assert_allclose(sparse.components_, dense.components_, atol=1e-8)
    assert_allclose(sparse.explained_variance_ratio_, dense.explained_variance_ratio_, rtol=1e-10)
    assert_allclose(sparse.transform(form(X)), dense.transform(X), atol=1e-7)


def test_sparse_is_never_made_dense():
    n = d = 200_000
    rng = np.random.default_rng(0)
    X = sp.csr_array((rng.standard_normal(4000), (rng.integers(n, size=4000), rng.integers(100, size=4000))), (n, d))
    model = partsong.PCAGame(2, max_iter=3, random_state=0).fit(X)
    assert model.components_.shape == (2, d)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("form", [np.ascontiguousarray, np.asfortranarray, sp.csr_array])
def test_type_is_kept_and_input_untouched(dtype, form):
    X = planted().astype(dtype)
    given = form(X)
    model = partsong.PCAGame(3, random_state=0)
    scores = model.fit_transform(given)
    again = model.transform(given)
    for name in ("components_", "mean_", "explained_variance_", "singular_values_", "utilities_"):
        assert getattr(model, name).dtype == dtype, name
    assert scores.dtype == again.dtype == model.inverse_transform(again).dtype == dtype
    assert_allclose(scores, again, atol=1e-4 if dtype == np.float32 else 1e-12)
    assert_array_equal(given.toarray() if sp.issparse(given) else given, X)
    assert partsong.PCAGame(3, dtype=np.float32, max_iter=2).fit(planted()).components_.dtype == np.float32


def test_float32_reaches_small_components():
    """M squares the spread of the data; products in float32 would lose what is below a hundredth."""
    X = planted(spectrum=np.array([1000.0, 300, 30, 10, 5, 2])).astype(np.float32)
    model = partsong.PCAGame(6, tol=1e-7, random_state=0).fit(X)
    assert distance(model.components_, vectors_of(X.astype(float), 6)[1]) < 1e-4


@pytest.mark.parametrize("batch_size", [None, 40])
@pytest.mark.parametrize("play", PLAYS)
def test_same_seed_same_bytes(play, batch_size):
    X = planted()
    make = partsong.PCAGame(4, play=play, batch_size=batch_size, max_iter=7, random_state=3)
    first, again = make.fit(X), clone(make).fit(X)
    assert first.components_.tobytes() == again.components_.tobytes()
    assert [row.utilities for row in first.history_] == [row.utilities for row in again.history_]
    other = clone(make).set_params(random_state=4).fit(X)
    assert first.components_.tobytes() != other.components_.tobytes()


@pytest.mark.parametrize("play", PLAYS)
@pytest.mark.parametrize("form", [np.asarray, sp.csr_array])
def test_minibatches_come_close(play, form):
    rng = np.random.default_rng(5)
    X = rng.standard_normal((2000, 15)) * np.array([8, 5, 3] + [1] * 12) + 1
    model = partsong.PCAGame(3, play=play, batch_size=100, max_iter=60, random_state=0).fit(form(X))
    s, V = vectors_of(X, 3)
    assert distance(model.components_, V) < 0.02
    assert_allclose(model.singular_values_, s, rtol=1e-3)
    residuals = [row.residual for row in model.history_]
    assert residuals[-1] < residuals[3] / 4, "decaying steps go on to come closer"


def test_history_and_outcome():
    X = planted()
    model = partsong.PCAGame(4, random_state=0, max_iter=5, tol=1e-9).fit(X)
    assert model.outcome_ is Outcome.MAX_ROUNDS
    assert [row.iteration for row in model.history_] == [1, 2, 3, 4, 5]
    assert model.n_iter_ == 5
    assert model.n_samples_ == 120
    assert (np.diff([row.seconds for row in model.history_]) > 0).all()
    assert len(model.history_[0].utilities) == 4
    first = [row.utilities[0] for row in model.history_]
    assert (np.diff(first) >= -1e-12).all(), "the first player has no parents, and a safe step never lowers its utility"
    done = partsong.PCAGame(4, random_state=0, tol=1e-9).fit(X)
    assert done.outcome_ is Outcome.CONVERGED
    assert done.history_[-1].residual <= 1e-9 < done.history_[-2].residual
    assert_allclose(done.components_ @ done.components_.T, np.eye(4), atol=1e-12)
    assert (np.diff(done.explained_variance_) < 0).all()


@pytest.mark.parametrize("play", PLAYS)
@pytest.mark.parametrize("batch_size", [None, 40])
@pytest.mark.parametrize("too_long", [3.0, 1e3, 1e300])
def test_a_step_too_long_keeps_the_best_vectors(play, batch_size, too_long):
    X = planted()
    step = too_long / (np.linalg.norm(X, 2) ** 2 / len(X))
    model = partsong.PCAGame(3, play=play, batch_size=batch_size, step=step, decay=0, random_state=0, max_iter=50)
    model.fit(X)
    assert model.outcome_ is Outcome.MAX_ROUNDS
    assert model.utilities_.sum() >= max(sum(row.utilities) for row in model.history_) * (1 - 1e-12)


def test_numbers_that_leave_the_range_of_floats_are_told():
    with pytest.warns(DivergenceWarning, match="Use step='safe'"):
        model = partsong.PCAGame(3, step=1e307, random_state=0).fit(1e5 * planted())
    assert model.outcome_ is Outcome.DIVERGED
    assert np.isfinite(model.components_).all()


@pytest.mark.parametrize("share", [0.05, 0.5, 0.8])
@pytest.mark.parametrize("play", PLAYS)
def test_a_step_short_enough_is_never_called_too_long(play, share):
    X = planted(spectrum=np.array([20.0, 14, 10, 7]))
    step = share / (np.linalg.norm(X, 2) ** 2 / len(X))
    model = partsong.PCAGame(3, play=play, step=step, random_state=0, tol=1e-6, max_iter=5000).fit(X)
    assert model.outcome_ is Outcome.CONVERGED
    assert distance(model.components_, vectors_of(X, 3)[1]) < 1e-4


def test_more_players_than_variance_end_in_an_orthonormal_basis():
    X = planted(40, 12, np.array([9.0, 6, 4]))
    model = partsong.PCAGame(5, random_state=0, tol=1e-8).fit(X)
    assert model.outcome_ is Outcome.CONVERGED
    assert_allclose(model.components_ @ model.components_.T, np.eye(5), atol=1e-10)
    assert distance(model.components_[:3], vectors_of(X, 3)[1]) < 1e-6
    assert (model.explained_variance_[3:] < 1e-12).all()
    assert_allclose(model.explained_variance_ratio_.sum(), 1)


@pytest.mark.parametrize("scale", [1e-120, 1e-30, 1e30, 1e120])
def test_scale_of_the_data_does_not_matter(scale):
    X = planted()
    model, plain = (partsong.PCAGame(3, random_state=0).fit(values) for values in (X * scale, X))
    assert model.n_iter_ == plain.n_iter_
    assert_allclose(model.components_, plain.components_, atol=1e-9)
    assert_allclose(model.singular_values_, plain.singular_values_ * scale, rtol=1e-9)


def test_memory_maps_and_data_frames(tmp_path):
    pandas = pytest.importorskip("pandas")
    X = planted()
    np.save(tmp_path / "rows.npy", X.astype(np.float32))
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    inside = partsong.PCAGame(3, random_state=0, batch_size=30, max_iter=4).fit(X.astype(np.float32))
    on_disk = partsong.PCAGame(3, random_state=0, batch_size=30, max_iter=4).fit(mapped)
    assert_allclose(on_disk.components_, inside.components_, atol=1e-6)
    frame = pandas.DataFrame(X, columns=[f"gene {j}" for j in range(30)])
    model = partsong.PCAGame(3, random_state=0).fit(frame)
    assert list(model.feature_names_in_) == list(frame.columns)
    with pytest.raises(FeatureError, match="order"):
        model.transform(frame[frame.columns[::-1]])


BAD_DATA = [
    (np.array([[1.0, np.nan], [0.0, 1.0]]), DataError, "NaN"),
    (np.array([[1.0, -np.inf], [0.0, 1.0]]), DataError, "inf"),
    (sp.csr_array([[1.0, np.nan], [0.0, 1.0]]), DataError, "NaN"),
    (np.full((5, 3), 0.1), DataError, "zero variance"),
    (np.zeros((5, 3)), DataError, "zero variance"),
    (sp.csr_array((5, 3)), DataError, "zero variance"),
    (np.ones((1, 3)), DataError, "1 sample "),
    (np.array([[1e200, 1.0], [0.0, 1.0]]), DataError, "Rescale"),
    (np.ones(4), ShapeError, "2-D"),
    (np.ones((0, 3)), DataError, "0 sample"),
    (np.array([["a", "b"]]), UnreadableError, "numbers|numeric|convert"),
    (np.ones((4, 3)) * 1j, UnreadableError, "[Cc]omplex"),
]


@pytest.mark.parametrize(("X", "error", "says"), BAD_DATA)
def test_bad_data_are_refused(X, error, says):
    with pytest.raises(error, match=says):
        partsong.PCAGame(1).fit(X)


@pytest.mark.parametrize("form", [np.asarray, sp.csr_array])
@pytest.mark.parametrize("scale", [1e-160, 1e-200, 1e-300])
def test_values_too_small_to_be_squared_are_not_called_alike(form, scale):
    X = form(planted() * scale)
    for center, says in ((True, "squared deviations from the mean"), (False, "squares of the values")):
        with pytest.raises(DataError, match=f"{says} underflow float64. Rescale"):
            partsong.PCAGame(3, center=center).fit(X)
    with pytest.raises(DataError, match="These 5 samples have zero variance: all rows are equal"):
        partsong.PCAGame(1).fit(form(np.full((5, 3), 0.1 * scale)))
    with pytest.raises(DataError, match=r"^1 sample has zero variance"):
        partsong.PCAGame(1).fit(form(np.full((1, 3), scale)))


def test_zeros_without_centring_are_refused_and_equal_rows_taken():
    with pytest.raises(DataError, match="zero"):
        partsong.PCAGame(1, center=False).fit(np.zeros((5, 3)))
    rows = np.tile([3.0, 0.0, 4.0], (5, 1))
    assert_allclose(partsong.PCAGame(1, center=False).fit(rows).components_, [[0.6, 0, 0.8]], atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"n_components": 31}, "= 30 of the"),
        ({"n_components": 0}, "n_components"),
        ({"n_components": 2.0}, "n_components"),
        ({"batch_size": 121}, "batch_size=121"),
        ({"batch_size": 2}, "between the number of components"),
        ({"batch_size": 0}, "batch_size"),
        ({"step": 0}, "step"),
        ({"step": -1.0}, "step"),
        ({"step": np.nan}, "step"),
        ({"step": np.inf}, "step"),
        ({"step": "large"}, "step"),
        ({"step": True}, "step"),
        ({"decay": -0.1}, "decay"),
        ({"decay": "slow"}, "decay"),
        ({"play": "random"}, "sequential, simultaneous"),
        ({"max_iter": 0}, "max_iter"),
        ({"tol": -1}, "tol"),
        ({"tol": "small"}, "tol"),
        ({"center": "yes"}, "center"),
        ({"verbose": -1}, "verbose"),
        ({"dtype": "float16"}, "dtype"),
        ({"random_state": -1}, "random_state"),
    ],
)
def test_bad_settings_are_refused(settings, says):
    with pytest.raises(ParameterError, match=says):
        partsong.PCAGame(**{"n_components": 3, **settings}).fit(planted())


def test_other_columns_are_refused():
    model = partsong.PCAGame(2, max_iter=2).fit(planted())
    with pytest.raises(ShapeError, match="30 features"):
        model.transform(np.ones((3, 29)))
    with pytest.raises(ShapeError, match="2 columns"):
        model.inverse_transform(np.ones((3, 5)))
    with pytest.raises(DataError, match="NaN"):
        model.transform(np.full((3, 30), np.nan))
    assert issubclass(DataError, PartsongError)


def test_progress_is_shown(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partsong.PCAGame(2, max_iter=3, verbose=1).fit(planted())
    assert "PCA game of 120 × 30" in capsys.readouterr().err


def test_an_interrupt_keeps_the_model():
    X = np.random.default_rng(0).standard_normal((400, 60))
    model = partsong.PCAGame(10, tol=0, max_iter=10**6, random_state=0)
    threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()
    model.fit(X)
    assert model.outcome_ is Outcome.INTERRUPTED
    assert model.n_iter_ == len(model.history_) > 0
