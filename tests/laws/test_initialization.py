"""Laws of initialization: non-negative, of the shape asked for, and what their names say."""

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.testing import assert_allclose

from partsong.core.streams import stream
from partsong.data.conversion import as_matrix
from partsong.errors import ParameterError
from partsong.solvers import initialization as start_module
from partsong.solvers.initialization import anchors, balanced
from partsong.solvers.squared_error import build_solver
from partsong.training.centralized import CentralizedConfig, initial_factors

INITS = ["anchors", "random", "nndsvd", "nndsvda", "nndsvdar"]


def planted(seed=0, shape=(60, 25), rank=5):
    rng = np.random.default_rng(seed)
    return rng.gamma(0.5, size=(shape[0], rank)) @ rng.gamma(0.5, size=(rank, shape[1])) + 0.01 * rng.random(shape)


def start(X, init, rank=5, seed=3):
    return initial_factors(as_matrix(X), CentralizedConfig(rank, build_solver("hals"), init, seed))


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("form", [np.asarray, sp.csr_array])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rank", [1, 5, 40])
def test_starts_are_non_negative_and_keep_type_and_shape(init, form, dtype, rank):
    if rank == 40 and init.startswith("nndsvd"):
        with pytest.raises(
            ParameterError, match=r"nndsvd.*got n_components = 40 and X of shape 60 × 25. Use init='random'"
        ):
            start(form(planted().astype(dtype)), init, rank)
        return
    beginning = start(form(planted().astype(dtype)), init, rank)
    assert beginning.Ht.shape == (25, rank)
    assert beginning.W is None or beginning.W.shape == (60, rank)
    for factor in (beginning.Ht, beginning.W):
        if factor is not None:
            assert factor.dtype == dtype
            assert np.isfinite(factor).all()
            assert (factor >= 0).all()


@pytest.mark.parametrize("init", INITS)
def test_the_same_seed_gives_the_same_start_and_sparse_that_of_dense(init):
    X = planted()
    assert_allclose(start(X, init).Ht, start(X, init).Ht, rtol=0, atol=0)
    assert_allclose(start(sp.csr_array(X), init).Ht, start(X, init).Ht, rtol=1e-6, atol=1e-8)
    other = start(X, init, seed=4).Ht
    if init == "random":
        assert np.abs(start(X, init).Ht - other).max() > 0.5, "drawn anew"
    elif init == "nndsvdar":
        apart = np.abs(start(X, init).Ht - other)
        assert 0 < apart.max() <= 0.01 * X.mean(), "in place of zeros"
    else:
        assert_allclose(start(X, init).Ht, other, rtol=1e-6, atol=1e-8, err_msg="the data alone decide")


@pytest.mark.parametrize("form", [np.asarray, sp.csr_array])
def test_the_seed_of_anchors_draws_what_the_data_do_not_have(form):
    """Components beyond the rank of X begin with random columns, at W alone: those that X has are the same."""
    rng = np.random.default_rng(0)
    X = form(rng.random((60, 3)) @ rng.random((3, 25)))
    first, again, other = (start(X, "anchors", rank=6, seed=seed).W for seed in (3, 3, 4))
    assert first.tobytes() == again.tobytes()
    assert_allclose(first[:, :3], other[:, :3], rtol=0, atol=0)
    assert (np.abs(first[:, 3:] - other[:, 3:]).max(axis=0) > 0.1 * X.mean()).all()


def test_the_seed_of_anchors_draws_the_rows_of_large_data(monkeypatch):
    drawn = []
    plain = start_module._choose_anchors

    def choose(matrix, rank):
        drawn.append(matrix.times(np.eye(25)).tobytes())
        return plain(matrix, rank)

    monkeypatch.setattr(start_module, "MAX_ANCHOR_WORK", 1)
    monkeypatch.setattr(start_module, "_choose_anchors", choose)
    for seed in (3, 3, 4):
        start(planted(shape=(600, 25)), "anchors", seed=seed)
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 8 * 25 * 50, "ten rows per component"


@pytest.mark.parametrize("init", ["nndsvd", "nndsvda"])
def test_double_svd_equals_scikit_learn(init):
    from sklearn.decomposition._nmf import _initialize_nmf

    X = planted()
    W, H = _initialize_nmf(X, 5, init, random_state=0)
    beginning = start(X, init)
    assert_allclose(beginning.Ht.T, H, atol=1e-4 * H.max())
    assert_allclose(beginning.W, W, atol=1e-4 * W.max())


def test_nndsvda_has_the_mean_where_nndsvd_has_zeros():
    X = planted()
    bare, filled = start(X, "nndsvd"), start(X, "nndsvda")
    for empty, full in ((bare.Ht, filled.Ht), (bare.W, filled.W)):
        assert (empty == 0).any()
        assert_allclose(full, np.where(empty == 0, X.mean(), empty))


def test_anchors_find_the_pure_columns_of_separable_data():
    """Where every component has a column of its own, these columns are the weights to begin with."""
    rng = np.random.default_rng(0)
    W = rng.random((80, 4))
    mix = rng.dirichlet(np.ones(4), size=30).T
    mix[:, [3, 8, 17, 25]] = np.eye(4)
    beginning = anchors(as_matrix(W @ mix), 4, stream(0, "start"))
    found = {int(np.argmin([np.linalg.norm(column - w) for w in W.T])) for column in beginning.W.T}
    assert found == {0, 1, 2, 3}
    for column in beginning.W.T:
        assert min(np.linalg.norm(column - w) for w in W.T) < 1e-12


@pytest.mark.parametrize("init", ["nndsvd", "nndsvda"])
def test_double_svd_beyond_the_rank_of_the_data_is_the_same_for_every_form(init):
    """Singular pairs that are rounding are left out; what is left does not depend on how products were summed."""
    rng = np.random.default_rng(0)
    X = rng.random((40, 2)) @ rng.random((2, 12))
    plain = start(X, init, rank=8)
    for form in (np.asfortranarray, sp.csr_array, sp.csc_array):
        other = start(form(X), init, rank=8)
        assert_allclose(other.Ht, plain.Ht, atol=1e-6)
        assert_allclose(other.W, plain.W, atol=1e-6)
    bare = start(X, "nndsvd", rank=8)
    assert not bare.W[:, 2:].any()
    assert not bare.Ht[:, 2:].any()


def penalties(W, Ht, solver):
    """m (l1 ‖w_j‖₁ + ½ l2 ‖w_j‖²) + n (l1 ‖h_j‖₁ + ½ l2 ‖h_j‖²) of each component."""
    on_W, on_H = solver.penalty_W, solver.penalty_H
    of_W = len(Ht) * (on_W.l1 * W.sum(0) + 0.5 * on_W.l2 * np.square(W).sum(0))
    of_H = len(W) * (on_H.l1 * Ht.sum(0) + 0.5 * on_H.l2 * np.square(Ht).sum(0))
    return of_W + of_H


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("l1_ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_a_balanced_start_has_the_same_product_and_the_least_penalties(init, l1_ratio, size):
    matrix, solver = as_matrix(size * planted()), build_solver("hals", 0.3, 0.05, l1_ratio)
    plain = initial_factors(matrix, CentralizedConfig(5, solver, init, 3))
    found = balanced(matrix, plain, solver)
    if plain.W is not None:
        assert_allclose(found.W @ found.Ht.T, plain.W @ plain.Ht.T, rtol=1e-9, atol=1e-12 * size)
    least = penalties(found.W, found.Ht, solver)
    for factor in (0.5, 0.99, 1.01, 2.0):
        other = penalties(found.W * factor, found.Ht / factor, solver)
        assert (other >= least * (1 - 1e-12)).all()


@pytest.mark.parametrize("alphas", [(0.0, 0.0), (0.3, 0.0), (0.0, 0.3)])
def test_without_penalties_on_both_there_is_nothing_to_balance(alphas):
    matrix = as_matrix(planted())
    plain = start(planted(), "anchors")
    assert balanced(matrix, plain, build_solver("hals", *alphas)) is plain
