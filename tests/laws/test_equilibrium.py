"""Laws of play: gains are what a best response brings, nobody gains at an equilibrium, and norms are those of NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.optimize import nnls

from partsong import NMF
from partsong.core import runtime
from partsong.data.conversion import as_matrix
from partsong.data.observed import observed
from partsong.errors import DataError, ShapeError
from partsong.evaluation.equilibrium import equilibrium


def profile(shape=(40, 25), rank=3, seed=0):
    """Data with zeros, W and H that have nothing to do with them, and which cells are known."""
    rng = np.random.default_rng(seed)
    X = rng.random(shape) * (rng.random(shape) > 0.3)
    return X, rng.random((shape[0], rank)), rng.random((rank, shape[1])), rng.random(shape) < 0.6


def with_gaps(X, known):
    return np.where(known, X, np.nan)


FORMS = {
    "C order": np.ascontiguousarray,
    "F order": np.asfortranarray,
    "strided": lambda X: np.repeat(X, 2, axis=1)[:, ::2],
    "list": lambda X: X.tolist(),
    "csr": sp.csr_array,
    "csc": sp.csc_array,
    "dense Matrix": as_matrix,
    "sparse Matrix": lambda X: as_matrix(sp.csr_array(X)),
    "observed": observed,
    "tensor": lambda X: pytest.importorskip("torch").from_numpy(X),
}


def row_gains(X, W, Ht):
    """By SciPy, row by row over the cells that are not NaN."""
    gains = []
    for x, w in zip(X, W, strict=True):
        known = ~np.isnan(x)
        least = nnls(Ht[known], x[known])[1] if known.any() else 0.0
        gains.append(0.5 * (np.square(x[known] - Ht[known] @ w).sum() - least**2))
    return np.array(gains)


@pytest.mark.parametrize("form", FORMS)
def test_gains_are_what_scipy_finds(form):
    X, W, H, _ = profile()
    found = equilibrium(FORMS[form](X), W, H)
    assert_allclose(found.row_gains, row_gains(X, W, H.T), atol=1e-12)
    assert_allclose(found.column_gains, row_gains(X.T, H.T, W), atol=1e-12)
    assert found.energy == pytest.approx(0.5 * np.square(X).sum())


@given(n=st.integers(1, 20), m=st.integers(1, 20), k=st.integers(1, 6), seed=st.integers(0, 10**6), gaps=st.booleans())
def test_gains_of_any_shape(n, m, k, seed, gaps):
    X, W, H, known = profile((n, m), k, seed)
    X = with_gaps(X, known) if gaps else X
    found = equilibrium(observed(X) if gaps else X, W, H)
    assert (found.row_gains >= 0).all()
    assert (found.column_gains >= 0).all()
    assert_allclose(found.row_gains, row_gains(X, W, H.T), atol=1e-8)
    assert_allclose(found.column_gains, row_gains(X.T, H.T, W), atol=1e-8)


def test_what_is_not_known_changes_nothing():
    X, W, H, known = profile()
    others = np.where(known, X, 1e3 * np.random.default_rng(1).random(X.shape))
    one, other = (observed(np.ma.array(values, mask=~known)) for values in (X, others))
    assert_array_equal(equilibrium(one, W, H).row_gains, equilibrium(other, W, H).row_gains)
    assert_array_equal(equilibrium(one, W, H).column_gains, equilibrium(other, W, H).column_gains)
    assert equilibrium(others, W, H).epsilon > 2 * equilibrium(one, W, H).epsilon


def test_a_gain_is_what_the_error_falls_by():
    X, W, H, known = profile()
    for matrix in (as_matrix(X), observed(with_gaps(X, known))):
        before = equilibrium(matrix, W, H)
        i = int(before.row_gains.argmax())
        cells = known[i] if matrix.stored < X.size else np.ones(X.shape[1], bool)
        moved = W.copy()
        moved[i] = nnls(H.T[cells], X[i, cells])[0]
        fall = 0.5 * (matrix.squared_distance(W, H.T.copy()) - matrix.squared_distance(moved, H.T.copy()))
        assert before.row_gains[i] == pytest.approx(fall)
        after = equilibrium(matrix, moved, H)
        assert after.row_gains[i] == pytest.approx(0, abs=1e-12)
        others = np.arange(len(X)) != i
        assert_allclose(after.row_gains[others], before.row_gains[others], atol=1e-13)


@pytest.mark.parametrize("form", FORMS)
def test_nobody_gains_at_an_exact_factorization(form):
    _, W, H, _ = profile()
    found = equilibrium(FORMS[form](W @ H), W, H)
    assert found.holds(1e-20)
    assert not equilibrium(FORMS[form](W @ H), 1.01 * W, H).holds(1e-6)


def test_nobody_gains_where_known_cells_are_met():
    _, W, H, known = profile()
    X = with_gaps(W @ H, known)
    X[4], X[:, 7] = np.nan, np.nan
    assert equilibrium(observed(X), W, H).holds(1e-20)
    filled = np.nan_to_num(X)
    assert not equilibrium(filled, W, H).holds(1e-3)


@pytest.mark.parametrize("form", ["C order", "csr", "observed"])
def test_nobody_gains_at_a_converged_factorization(form):
    X = profile((30, 20), seed=5)[0]
    model = NMF(3, solver="bpp", tol=0, max_iter=3000, random_state=0)
    W = model.fit_transform(X)
    found = equilibrium(FORMS[form](X), W, model.components_)
    assert found.holds(1e-12, relative=True)
    early = NMF(3, solver="mu", tol=0, max_iter=3, random_state=0, init="random").fit(X)
    assert not equilibrium(FORMS[form](X), early.transform(X), early.components_).holds(1e-12, relative=True)


def test_epsilon_is_the_largest_gain_of_all():
    X, W, H, _ = profile()
    found = equilibrium(X, W, H)
    assert found.epsilon == max(found.row_gains.max(), found.column_gains.max()) > 0
    assert found.relative_epsilon == found.epsilon / found.energy
    assert found.holds(found.epsilon)
    assert not found.holds(0.99 * found.epsilon)
    assert found.holds(found.relative_epsilon, relative=True)
    assert equilibrium(np.zeros((2, 2)), np.zeros((2, 1)), np.zeros((1, 2))).relative_epsilon == 0


def test_gains_grow_with_the_square_of_the_unit():
    X, W, H, known = profile()
    for make in (np.asarray, observed):
        data = with_gaps(X, known) if make is observed else X
        one, other = equilibrium(make(data), W, H), equilibrium(make(10 * data), 10 * W, H)
        assert_allclose(other.row_gains, 100 * one.row_gains, rtol=1e-9)
        assert other.relative_epsilon == pytest.approx(one.relative_epsilon)


def test_a_scale_moved_between_the_factors_changes_nothing():
    X, W, H, known = profile()
    scale = np.array([1e-3, 1.0, 1e4])
    for matrix in (X, observed(with_gaps(X, known))):
        one, other = equilibrium(matrix, W, H), equilibrium(matrix, W * scale, H / scale[:, None])
        assert_allclose(other.row_gains, one.row_gains, atol=1e-9)
        assert_allclose(other.column_gains, one.column_gains, atol=1e-9)


def test_arrays_in_float32_are_looked_at_in_float64():
    X, W, H, known = profile()
    X = X.astype(np.float32)
    for form in (X, sp.csr_array(X), observed(with_gaps(X, known))):
        wide = observed(with_gaps(X, known), "float64") if hasattr(form, "by_row") else X.astype(float)
        assert_allclose(equilibrium(form, W, H).row_gains, equilibrium(wide, W, H).row_gains, atol=1e-12)
    narrow = equilibrium(as_matrix(X), W, H)
    assert narrow.epsilon == pytest.approx(equilibrium(X, W, H).epsilon, rel=1e-4)


def test_threads_change_nothing(monkeypatch):
    X, W, H, known = profile((200, 60))
    matrix = observed(with_gaps(X, known))
    alone = equilibrium(matrix, W, H)
    monkeypatch.setattr(runtime, "SMALL_WORK", 0)
    with runtime.limit_kernel_threads(3):
        shared = equilibrium(matrix, W, H)
    assert_array_equal(shared.row_gains, alone.row_gains)
    assert_array_equal(shared.column_gains, alone.column_gains)


def test_what_is_no_profile_is_refused():
    X, W, H, _ = profile()
    with pytest.raises(ShapeError, match="40 × 25"):
        equilibrium(X, W, H.T)
    with pytest.raises(ShapeError):
        equilibrium(X, W[:, :2], H)
    with pytest.raises(DataError, match="W has"):
        equilibrium(X, -W, H)
    with pytest.raises(DataError, match="H has"):
        equilibrium(X, W, H * np.nan)
    with pytest.raises(DataError, match="NaN"):
        equilibrium(with_gaps(X, X > 0.5), W, H)
