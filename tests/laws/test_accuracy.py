"""Laws of accuracy: in float32 the error of every round is that of float64, to what an error of 1e-3 needs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.testing import assert_allclose

from partsong import NMF, kernels
from partsong.core.interfaces import Shard
from partsong.data.conversion import as_matrix
from partsong.data.dense import FEW_COMPONENTS
from partsong.data.sparse import SparseMatrix
from partsong.evaluation.metrics import relative_error
from partsong.methods.exact import SharedSums
from partsong.solvers.squared_error import DETECTABLE_ERROR, RowState, SquaredError
from partsong.solvers.update_rules import Extrapolation
from partsong.training.result import complete

RANK = 10
MORE_THAN_FEW = FEW_COMPONENTS + 4
"""Products of WᵀW may then be in the type of the data."""


def heavy_tailed(rows, columns, seed=0):
    """Many small numbers and few large ones, a third of them zero: long sums in float32 lose the small ones."""
    rng = np.random.default_rng(seed)
    W, H = rng.gamma(0.3, size=(rows, RANK)), rng.gamma(0.3, size=(RANK, columns))
    X = (W * (rng.random(W.shape) < 0.2)) @ (H * (rng.random(H.shape) < 0.5))
    return (X * (1 + 1e-3 * rng.random(X.shape))).astype(np.float32)


def mapped(X, tmp_path):
    np.save(tmp_path / "X.npy", X)
    return np.load(tmp_path / "X.npy", mmap_mode="r")


def tensor(X):
    return pytest.importorskip("torch").from_numpy(np.ascontiguousarray(X))


FORMS = {
    "C order": lambda X, tmp: as_matrix(X),
    "F order": lambda X, tmp: as_matrix(np.asfortranarray(X)),
    "memory map": lambda X, tmp: as_matrix(mapped(X, tmp)),
    "csr and its transpose": lambda X, tmp: SparseMatrix(sp.csr_array(X), sp.csr_array(X).T.tocsr()),
    "csr alone": lambda X, tmp: SparseMatrix(sp.csr_array(X)),
    "torch": lambda X, tmp: as_matrix(tensor(X)),
}
EVERY_FORM = {**FORMS, "torch csr": lambda X, tmp: as_matrix(tensor(X).to_sparse_csr())}

every_form = pytest.mark.parametrize("form", EVERY_FORM)
beta = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")


def exact(X, W, Ht):
    return float(np.square(X.astype(np.float64) - W.astype(np.float64) @ Ht.astype(np.float64).T).sum())


@pytest.mark.parametrize("rank", [RANK, MORE_THAN_FEW])
@pytest.mark.parametrize("shape", [(30_000, 40), (40, 30_000)], ids=["tall", "wide"])
@pytest.mark.parametrize("form", FORMS)
def test_the_error_of_a_round_is_that_of_float64(form, shape, rank, tmp_path):
    X = heavy_tailed(*shape)
    matrix = FORMS[form](X, tmp_path)
    solver = SquaredError(momentum=Extrapolation())
    rows, columns = RowState(), solver.begin(matrix.native(np.random.default_rng(1).random((shape[1], rank))))
    compared = 0
    for _ in range(6):
        rows, totals = solver.row_step(matrix, rows, solver.broadcast(columns))
        columns = solver.column_step(columns, totals)
        if not columns.pace.must_restart:
            to = kernels.of(columns.Ht).to_numpy
            W = to(rows.W if rows.point is None else rows.point)
            wrong = columns.squared_error - exact(X, W, to(columns.Ht))
            assert abs(wrong) < 1e-7 * matrix.squared_norm
            compared += 1
    assert compared > 3


@beta
@every_form
def test_the_gram_of_float32_is_that_of_float64(form, tmp_path):
    X = heavy_tailed(5_000, 30)
    matrix = EVERY_FORM[form](X, tmp_path)
    F = matrix.native(np.random.default_rng(1).gamma(0.3, size=(5_000, RANK)))
    on = kernels.of(F)
    is_cheap = matrix.gram_is_cheap(RANK)
    cross, (gram,) = matrix.visit(matrix.native(np.ones((30, RANK))), F, lambda at, _: (on.gram(F[at], is_cheap),))
    to = kernels.of(F).to_numpy
    values = to(F).astype(np.float64)
    assert "float64" in str(gram.dtype)
    assert cross.dtype == F.dtype
    assert_allclose(to(gram), values.T @ values, rtol=1e-12)
    assert_allclose(to(kernels.of(F).gram(F)), values.T @ values, rtol=1e-12)


@beta
@every_form
def test_the_distance_is_computed_in_float64(form, tmp_path):
    X = heavy_tailed(3_000, 40)
    matrix = EVERY_FORM[form](X, tmp_path)
    rng = np.random.default_rng(2)
    W, Ht = (matrix.native(rng.gamma(0.3, size=(size, RANK))) for size in X.shape)
    to = kernels.of(W).to_numpy
    expected = exact(X, to(W), to(Ht))
    assert matrix.squared_distance(W, Ht) == pytest.approx(expected, rel=1e-12)


def test_a_fit_in_float32_knows_its_error():
    rng = np.random.default_rng(3)
    X = rng.gamma(0.5, size=(4_000, 5)) @ rng.gamma(0.5, size=(5, 400))
    X += 1e-3 * np.sqrt(np.square(X).mean()) * rng.random(X.shape)
    model = NMF(5, tol=1e-3, max_iter=300, random_state=0).fit(X.astype(np.float32))
    last = min(row.relative_error for row in model.history_)
    assert last == pytest.approx(model.relative_error_, abs=3e-5)
    assert model.relative_error_ < 2e-3


def some_columns(**changed):
    columns = SquaredError().begin(np.ones((4, 2)))
    return replace(columns, **{"squared_error": np.array(1.0), "basis": (np.array(4.0), np.array(2.0)), **changed})


def test_what_is_no_number_is_no_perfect_fit():
    program = SharedSums(2)
    pace = replace(some_columns().pace, objective=np.array(np.nan))
    told = program.metrics(some_columns(squared_error=float("nan"), pace=pace))
    assert np.isnan(told["relative_error"])
    assert np.isnan(told["objective"])
    shards = [Shard("one", Lost(as_matrix(np.ones((6, 4)))))]
    assert np.isnan(relative_error(SquaredError(), shards, np.ones((2, 4))))
    assert np.isnan(complete(SquaredError(), shards, np.ones((4, 2)), rescale=False).relative_error)


class Lost:
    """A matrix whose distance from its model is not a number."""

    def __init__(self, matrix):
        self.matrix = matrix

    def __getattr__(self, name):
        return getattr(self.matrix, name)

    def squared_distance(self, W, Ht):
        return float("nan")


def test_rounding_below_zero_is_stated_as_the_least_error_that_sums_can_tell():
    pace = replace(some_columns().pace, objective=np.array(0.25 - 1e-10))
    told = SharedSums(2).metrics(some_columns(squared_error=-2e-10, pace=pace))
    norm = some_columns().squared_norm
    assert told["relative_error"] ** 2 == pytest.approx(DETECTABLE_ERROR["float64"])
    assert told["objective"] == pytest.approx(DETECTABLE_ERROR["float64"] + 0.5 / norm, rel=1e-9), "penalties stay"


@pytest.mark.parametrize("form", [np.asarray, sp.csr_array], ids=["dense", "sparse"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("size", [1e4, 1e8, 1e10])
def test_the_error_beside_a_very_large_column_is_that_of_the_entries(form, dtype, size):
    """‖X‖² is all in one column, and sums over it drown the others; the error is still told, and fitting goes on."""
    rng = np.random.default_rng(0)
    X = rng.gamma(0.5, size=(80, 4)) @ rng.gamma(0.5, size=(4, 30)) + 0.05 * rng.random((80, 30))
    X[:, 3] *= size
    X = X.astype(dtype)
    model = NMF(4, random_state=0).fit(form(X))
    rest = X.astype(np.float64) - model.transform(form(X)).astype(np.float64) @ model.components_
    assert model.reconstruction_err_ == pytest.approx(np.linalg.norm(rest), rel=1e-6)
    assert model.reconstruction_err_ > 0
    if dtype == np.float64 and size < 1e10:  # beyond that normal equations hold nothing of the others
        others = np.arange(30) != 3
        assert np.square(rest[:, others]).sum() < 0.2 * np.square(X[:, others]).sum()


def test_long_sparse_rows_lose_no_digits():
    rng = np.random.default_rng(3)
    X = sp.random_array((4, 300_001), density=0.5, rng=rng, dtype=np.float32).tocsr()
    B = rng.random((300_001, 6), dtype=np.float32)
    exactly = X.astype(np.float64) @ B.astype(np.float64)
    for matrix in (SparseMatrix(X), SparseMatrix(X, X.T.tocsr())):
        assert_allclose(matrix.times(B), exactly, rtol=3e-7)
