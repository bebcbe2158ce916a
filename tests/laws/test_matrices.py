"""Laws of data: every form of the same rows gives the same factorization, and nothing is made dense."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from partsong import kernels
from partsong.core import runtime
from partsong.data import csr, scan, sparse
from partsong.data.conversion import as_matrix, float_type
from partsong.data.sparse import SparseMatrix
from partsong.errors import DataTypeError, ShapeError
from partsong.solvers import initialization
from partsong.solvers.squared_error import RowState, SquaredError
from partsong.solvers.update_rules import CoordinateDescent, Extrapolation, InertialPalm


def sparse_like(shape, seed=0, density=0.3):
    rng = np.random.default_rng(seed)
    X = rng.random(shape) * (rng.random(shape) < density)
    X[:, 0] = 0
    X[0] = 0
    return X


def on_disk(X, tmp_path):
    np.save(tmp_path / "X.npy", X)
    return np.load(tmp_path / "X.npy", mmap_mode="r")


FORMS = {
    "C order": lambda X, tmp: np.ascontiguousarray(X),
    "F order": lambda X, tmp: np.asfortranarray(X),
    "strided": lambda X, tmp: np.repeat(X, 2, axis=1)[:, ::2],
    "csr": lambda X, tmp: sp.csr_array(X),
    "csc": lambda X, tmp: sp.csc_array(X),
    "coo": lambda X, tmp: sp.coo_array(X),
    "csr_matrix": lambda X, tmp: sp.csr_matrix(X),
    "csc_matrix": lambda X, tmp: sp.csc_matrix(X),
    "memory map": on_disk,
    "memory map, F order": lambda X, tmp: on_disk(np.asfortranarray(X), tmp),
    "torch": lambda X, tmp: pytest.importorskip("torch").from_numpy(np.ascontiguousarray(X)),
    "torch csr": lambda X, tmp: pytest.importorskip("torch").from_numpy(np.ascontiguousarray(X)).to_sparse_csr(),
}


def factorize(matrix, Ht, rounds=4, rule=CoordinateDescent(sweeps=2)):
    solver = SquaredError(rule, momentum=Extrapolation())
    rows, columns = RowState(), solver.begin(matrix.native(Ht))
    for _ in range(rounds):
        rows, totals = solver.row_step(matrix, rows, solver.broadcast(columns))
        columns = solver.column_step(columns, totals)
    to = kernels.of(columns.Ht).to_numpy
    return to(rows.W), to(columns.Ht), columns.squared_error


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("rule", [CoordinateDescent(sweeps=2), InertialPalm(inertia=0.3)], ids=repr)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_factorization(form, rule, tmp_path):
    X = sparse_like((150, 23))
    Ht = np.random.default_rng(1).random((23, 4))
    W, H, error = factorize(as_matrix(X), Ht, rule=rule)
    W2, H2, error2 = factorize(as_matrix(FORMS[form](X, tmp_path)), Ht, rule=rule)
    assert_allclose(W2, W, rtol=1e-9, atol=1e-11)
    assert_allclose(H2, H, rtol=1e-9, atol=1e-11)
    assert error2 == pytest.approx(error, rel=1e-9)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("form", FORMS)
def test_products_and_numbers(form, tmp_path):
    X = sparse_like((70, 9))
    matrix = as_matrix(FORMS[form](X, tmp_path))
    rng = np.random.default_rng(2)
    A, B = rng.random((70, 3)), rng.random((9, 3))
    to = kernels.of(matrix.native(A)).to_numpy
    assert matrix.shape == (70, 9)
    assert matrix.squared_norm == pytest.approx(np.square(X).sum())
    assert matrix.mean == pytest.approx(X.mean())
    assert_allclose(to(matrix.times(matrix.native(B))), X @ B)
    assert_allclose(to(matrix.transposed_times(matrix.native(A))), X.T @ A)
    assert_allclose(to(matrix.transposed_times(matrix.native(A[:, :1].copy()))), X.T @ A[:, :1])
    assert_allclose(to(matrix.columns(np.array([3, 0, 5]))), X[:, [3, 0, 5]])
    assert_allclose(matrix.column_energies(), np.square(X).sum(axis=0))
    assert_allclose(matrix.gram_column(4), X.T @ X[:, 4])
    exact = np.square(X - A @ B.T).sum()
    assert matrix.squared_distance(matrix.native(A), matrix.native(B)) == pytest.approx(exact)
    if "csr" not in form or "torch" not in form:
        assert_allclose(to(matrix.rows(np.array([1, 4])).times(matrix.native(B))), X[[1, 4]] @ B)


@pytest.mark.parametrize("form", ["C order", "csr", "memory map"])
def test_threads_change_only_rounding_and_are_reproducible(form, tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "SMALL_WORK", 0)
    X = sparse_like((400, 31))
    Ht = np.random.default_rng(1).random((31, 5))
    results = {}
    for count in (1, 2, 3, 3):
        with runtime.limit_kernel_threads(count):
            now = factorize(as_matrix(FORMS[form](X, tmp_path)), Ht)
        if count in results:
            assert_array_equal(now[1], results[count][1])
            assert_array_equal(now[0], results[count][0])
        results[count] = now
    assert_allclose(results[3][1], results[1][1], rtol=1e-9, atol=1e-11)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that a few columns make a wide matrix."""
    for name in ("TILE_BYTES", "MAPPED_TILE_BYTES"):
        monkeypatch.setattr(scan, name, 4096)


@pytest.mark.parametrize("form", ["C order", "F order", "memory map", "memory map, F order"])
def test_wide_rows_in_blocks_are_the_same_rows(form, tmp_path, small_tiles, monkeypatch):
    monkeypatch.setattr(runtime, "SMALL_WORK", 0)
    X = sparse_like((300, 41))
    matrix = as_matrix(FORMS[form](X, tmp_path))
    assert scan.Tiles(matrix.X, matrix.dtype).are_low
    rng = np.random.default_rng(2)
    A, B = rng.random((300, 3)), rng.random((41, 3))
    Ht = rng.random((41, 5))
    with runtime.limit_kernel_threads(3):
        assert_allclose(matrix.times(B), X @ B)
        assert_allclose(matrix.transposed_times(A), X.T @ A)
        assert matrix.squared_distance(A, B) == pytest.approx(np.square(X - A @ B.T).sum())
        assert matrix.squared_norm == pytest.approx(np.square(X).sum())
        assert matrix.mean == pytest.approx(X.mean())
        assert_allclose(matrix.columns(np.array([3, 40, 5])), X[:, [3, 40, 5]])
        assert_allclose(matrix.column_energies(), np.square(X).sum(axis=0))
        assert_allclose(matrix.gram_column(4), X.T @ X[:, 4])
        assert_allclose(matrix.rows(np.array([1, 280])).X, X[[1, 280]])
        W, H, error = factorize(matrix, Ht)
        again = factorize(matrix, Ht)
    monkeypatch.undo()
    W2, H2, error2 = factorize(as_matrix(X), Ht)
    assert_array_equal(again[0], W)
    assert_array_equal(again[1], H)
    assert_allclose(W2, W, rtol=1e-9, atol=1e-11)
    assert_allclose(H2, H, rtol=1e-9, atol=1e-11)
    assert error2 == pytest.approx(error, rel=1e-9)


@pytest.mark.parametrize("count", [1, 3])
def test_rows_alone_do_what_rows_and_columns_do(count, monkeypatch):
    monkeypatch.setattr(runtime, "SMALL_WORK", 0)
    monkeypatch.setattr(csr, "CHUNK", 100)
    X = sparse_like((300, 17))
    X[:, 3] = 0
    by_row = sp.csr_array(X)
    alone, both = SparseMatrix(by_row), SparseMatrix(by_row, by_row.T.tocsr())
    rng = np.random.default_rng(2)
    A, Ht = rng.random((300, 4)), rng.random((17, 4))
    with runtime.limit_kernel_threads(count):
        for matrix in (alone, both):
            assert_allclose(matrix.transposed_times(A), X.T @ A)
            assert_allclose(matrix.columns(np.array([3, 0, 5])), X[:, [3, 0, 5]])
            assert_allclose(matrix.column_energies(), np.square(X).sum(axis=0))
            assert_allclose(matrix.gram_column(4), X.T @ X[:, 4])
            assert matrix.squared_norm == pytest.approx(np.square(X).sum())
        for a, b in zip(factorize(alone, Ht), factorize(both, Ht), strict=True):
            assert_allclose(a, b, rtol=1e-9, atol=1e-11)
        assert_array_equal(factorize(alone, Ht)[1], factorize(alone, Ht)[1])


def test_only_small_data_are_held_twice(monkeypatch):
    X = sp.csr_array(sparse_like((30, 7)))
    assert SparseMatrix.of_rows(X).by_column is not None
    monkeypatch.setattr(sparse, "SECOND_COPY_BYTES", 10)
    assert SparseMatrix.of_rows(X).by_column is None
    assert SparseMatrix.of_rows(X).rows(np.array([1, 4])).by_column is None


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_random_numbers_drawn_in_blocks_are_those_drawn_at_once(dtype, monkeypatch):
    monkeypatch.setattr(initialization, "DRAW_BLOCK", 7)
    drawn = initialization.random_columns(40, 3, np.random.default_rng(5), dtype)
    assert_array_equal(drawn, np.random.default_rng(5).random((40, 3)).astype(dtype))


@pytest.mark.parametrize(
    ("given_type", "computed"),
    [("float32", "float32"), ("float64", "float64"), ("uint8", "float32"), ("int16", "float32"), ("bool", "float32"),
     ("float16", "float32"), ("int64", "float64"), ("uint32", "float64")],
)  # fmt: skip
def test_number_types(given_type, computed):
    X = (sparse_like((20, 6)) * 5).astype(given_type)
    for form in (X, sp.csr_array(X) if given_type != "float16" else X):
        matrix = as_matrix(form)
        W, H, _ = factorize(matrix, np.random.default_rng(0).random((6, 2)))
        assert str(matrix.dtype) == str(W.dtype) == str(H.dtype) == computed
    assert float_type(given_type, "float32") == np.float32


def test_what_is_no_matrix_is_refused():
    with pytest.raises(ShapeError):
        as_matrix(np.ones(3))
    with pytest.raises(DataTypeError):
        as_matrix(np.ones((2, 2), complex))
    with pytest.raises(DataTypeError):
        as_matrix(np.ones((2, 2)), "int32")


def test_data_are_not_copied_or_changed():
    X = sparse_like((50, 8))
    kept = X.copy()
    matrix = as_matrix(X)
    assert np.shares_memory(matrix.X, X)
    factorize(matrix, np.random.default_rng(0).random((8, 3)))
    assert_array_equal(X, kept)
    columns = sp.csc_array(X)
    assert np.shares_memory(as_matrix(columns).by_column.data, columns.data)


def test_duplicate_entries_of_a_sparse_matrix_are_summed():
    twice = sp.csr_array((np.array([1.0, 2.0, 4.0]), np.array([1, 1, 0]), np.array([0, 2, 3])), shape=(2, 3))
    assert as_matrix(twice).squared_norm == pytest.approx(9 + 16)
    assert twice.nnz == 3


@given(rows=st.integers(1, 90), columns=st.integers(1, 9), rank=st.integers(1, 12), seed=st.integers(0, 10**6))
def test_dense_and_sparse_agree_on_any_shape(rows, columns, rank, seed):
    X = sparse_like((rows, columns), seed)
    Ht = np.random.default_rng(seed).random((columns, rank))
    dense, sparse = factorize(as_matrix(X), Ht, 2), factorize(as_matrix(sp.csr_array(X)), Ht, 2)
    for a, b in zip(dense[:2], sparse[:2], strict=True):
        assert np.isfinite(a).all()
        assert (a >= 0).all()
        assert_allclose(a, b, rtol=1e-7, atol=1e-9)
