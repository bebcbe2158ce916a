"""Laws of data: every form of the same rows gives the same factorization, and unknown cells change nothing."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.optimize import nnls

from partsong import kernels
from partsong.core import runtime
from partsong.data import csr, scan, sparse
from partsong.data.conversion import as_matrix, float_type
from partsong.data.observed import observed
from partsong.data.sparse import SparseMatrix
from partsong.errors import CompositionError, DataError, DataTypeError, ShapeError, UnreadableError
from partsong.solvers import initialization
from partsong.solvers.normal_equations import Penalty
from partsong.solvers.observed import ObservedRowSolver
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


def ratings(shape=(60, 25), seed=0, density=0.6):
    """Values with some zeros among them, and which of them are known."""
    rng = np.random.default_rng(seed)
    values = rng.random(shape) * (rng.random(shape) > 0.2)
    return values, rng.random(shape) < density


def with_gaps(values, known):
    return np.where(known, values, np.nan)


def stored(values, known, make=sp.coo_array):
    rows, columns = np.nonzero(known)
    return make(sp.csr_array((values[known], (rows, columns)), shape=values.shape))


def shuffled(values, known):
    """CSR whose columns are in no order."""
    by_row = stored(values, known, sp.csr_array)
    for a, b in zip(by_row.indptr[:-1], by_row.indptr[1:], strict=True):
        by_row.indices[a:b], by_row.data[a:b] = by_row.indices[a:b][::-1].copy(), by_row.data[a:b][::-1].copy()
    return sp.csr_array((by_row.data, by_row.indices, by_row.indptr), shape=by_row.shape)


OBSERVED_FORMS = {
    "NaN": with_gaps,
    "NaN, F order": lambda values, known: np.asfortranarray(with_gaps(values, known)),
    "masked": lambda values, known: np.ma.array(values, mask=~known),
    "csr": lambda values, known: stored(values, known, sp.csr_array),
    "csc": lambda values, known: stored(values, known, sp.csc_array),
    "coo": stored,
    "csr_matrix": lambda values, known: stored(values, known, sp.csr_matrix),
    "unsorted csr": shuffled,
    "frame": lambda values, known: pytest.importorskip("pandas").DataFrame(with_gaps(values, known)),
    "tensor": lambda values, known: pytest.importorskip("torch").tensor(with_gaps(values, known)),
}


@pytest.mark.parametrize("form", OBSERVED_FORMS)
def test_every_form_holds_the_same_cells(form):
    values, known = ratings()
    matrix = observed(OBSERVED_FORMS[form](values, known))
    assert (matrix.shape, matrix.stored) == (values.shape, known.sum())
    for side, cells, known_there in ((matrix.by_row, values, known), (matrix.by_column, values.T, known.T)):
        assert side.has_sorted_indices
        assert_array_equal(side.indices, np.nonzero(known_there)[1])
        assert_array_equal(side.data, cells[known_there])
        assert_array_equal(np.diff(side.indptr), known_there.sum(axis=1))


@pytest.mark.parametrize("form", OBSERVED_FORMS)
def test_numbers_are_over_known_cells(form):
    values, known = ratings()
    matrix = observed(OBSERVED_FORMS[form](values, known))
    rng = np.random.default_rng(1)
    W, Ht = rng.random((60, 4)), rng.random((25, 4))
    error = values - W @ Ht.T
    assert matrix.squared_norm == pytest.approx(np.square(values[known]).sum())
    assert matrix.mean == pytest.approx(values[known].mean())
    assert matrix.squared_distance(W, Ht) == pytest.approx(np.square(error[known]).sum())
    assert_allclose(matrix.residuals(W, Ht), error[known], atol=1e-14)
    filled = np.where(known, values, 0)
    assert_allclose(matrix.column_energies(), np.square(filled).sum(axis=0))
    assert_allclose(matrix.gram_column(3), filled.T @ filled[:, 3])
    assert_array_equal(matrix.columns(np.array([7, 0])), filled[:, [7, 0]])
    part = matrix.rows(np.array([5, 2, 5]))
    assert_array_equal(part.by_row.data, np.concatenate([values[i][known[i]] for i in (5, 2, 5)]))
    assert part.by_column.shape == (25, 3)


def test_a_known_zero_is_not_an_unknown_cell():
    rows, columns = np.array([0, 0, 1]), np.array([0, 2, 1])
    zero = observed(sp.coo_array((np.array([2.0, 0.0, 3.0]), (rows, columns)), shape=(2, 3)))
    assert zero.stored == 3
    assert zero.mean == pytest.approx(5 / 3)
    assert zero.rows(np.array([0])).stored == zero.transposed().rows(np.array([0, 2])).stored == 2
    ones = np.ones((2, 1)), np.ones((3, 1))
    assert zero.squared_distance(*ones) == pytest.approx(1 + 1 + 4)
    without = observed(np.array([[2.0, np.nan, np.nan], [np.nan, 3.0, np.nan]]))
    assert without.squared_distance(*ones) == pytest.approx(1 + 4)
    assert ObservedRowSolver().solve_rows(zero, ones[1])[0] == pytest.approx(1)
    assert ObservedRowSolver().solve_rows(without, ones[1])[0] == pytest.approx(2)


@given(n=st.integers(1, 20), m=st.integers(1, 12), k=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_what_is_not_known_changes_nothing(n, m, k, seed):
    values, known = ratings((n, m), seed)
    rng = np.random.default_rng(seed)
    others = np.where(known, values, 1e6 * rng.random((n, m)))
    W, Ht = rng.random((n, k)), rng.random((m, k))
    one, other = observed(np.ma.array(values, mask=~known)), observed(np.ma.array(others, mask=~known))
    assert (one.squared_norm, one.mean) == (other.squared_norm, other.mean)
    assert one.squared_distance(W, Ht) == other.squared_distance(W, Ht)
    solver = ObservedRowSolver()
    assert_array_equal(solver.solve_rows(one, Ht), solver.solve_rows(other, Ht))
    assert_array_equal(solver.solve_columns(one, W), solver.solve_columns(other, W))
    if known.any():
        changed = values + known
        assert observed(np.ma.array(changed, mask=~known)).squared_norm != one.squared_norm


def test_a_small_distance_keeps_its_digits():
    rng = np.random.default_rng(0)
    W, Ht = rng.random((30, 3)), rng.random((20, 3))
    X = W @ Ht.T
    X[4, 5] += 1e-9
    assert observed(X).squared_distance(W, Ht) == pytest.approx(1e-18, rel=1e-4)


def test_the_transpose_is_the_same_memory():
    matrix = observed(with_gaps(*ratings()))
    assert matrix.transposed().shape == (25, 60)
    assert matrix.transposed().by_row is matrix.by_column
    assert matrix.transposed().transposed().by_row is matrix.by_row


def test_empty_rows_and_columns_are_told():
    values, known = ratings()
    known[[3, 9]], known[:, 4] = False, False
    matrix = observed(with_gaps(values, known))
    assert matrix.empty_rows.tolist() == [3, 9]
    assert matrix.empty_columns.tolist() == [4]
    penalised = ObservedRowSolver(SquaredError(penalty_W=Penalty(0.1, 0.1)))
    for solver in (ObservedRowSolver(), penalised):
        W = solver.solve_rows(matrix, np.random.default_rng(0).random((25, 3)))
        assert np.isfinite(W).all()
        assert not W[[3, 9]].any()
    nothing = observed(np.full((2, 3), np.nan))
    assert (nothing.stored, nothing.mean, nothing.squared_norm) == (0, 0.0, 0.0)


@pytest.mark.parametrize("product", ["visit", "walk", "times", "transposed_times"])
def test_products_that_need_unknown_cells_are_refused(product):
    matrix = observed(with_gaps(*ratings()))
    arguments = {"visit": [np.ones((25, 1)), print, np.ones((60, 1))], "walk": [np.ones((25, 1)), print]}
    with pytest.raises(CompositionError, match=r"unknown cells.*game"):
        getattr(matrix, product)(*arguments.get(product, [np.ones((25, 1))]))


@pytest.mark.parametrize("make", [sp.csr_array, sp.csc_array, sp.coo_array])
def test_cells_with_two_values_are_refused(make):
    if make is sp.coo_array:
        twice = sp.coo_array((np.array([1.0, 4.0, 2.0]), (np.array([1, 0, 1]), np.array([1, 0, 1]))), shape=(2, 2))
    else:
        twice = make((np.array([4.0, 1.0, 2.0]), np.array([0, 1, 1]), np.array([0, 1, 3])), shape=(2, 2))
    with pytest.raises(DataError, match=r"1 cell\(s\) are stored more than once, in row 1"):
        observed(twice)
    assert twice.nnz == 3


def test_last_cell_of_a_row_is_no_twin_of_the_next_rows_first():
    assert observed(np.array([[np.nan, 1.0], [np.nan, 2.0]])).stored == 2


@pytest.mark.parametrize("as_form", [lambda X: X, lambda X: stored(X, ~np.isnan(X))], ids=["dense", "sparse"])
@pytest.mark.parametrize(("value", "word"), [(np.inf, "inf"), (-np.inf, "inf"), (-1.0, "Negative"), (1e200, "largest")])
def test_values_that_cannot_be_factorized_are_refused(as_form, value, word):
    X = with_gaps(*ratings())
    X[17, 3] = value
    with pytest.raises(DataError, match=word) as error:
        observed(as_form(X))
    with pytest.raises(DataError, match="float32"):
        observed(observed(np.full((2, 2), 1e30)), "float32")
    assert word == "largest" or ("17" in str(error.value) and "3" in str(error.value))


@pytest.mark.parametrize(
    ("X", "kind"),
    [
        (np.ones(3), ShapeError),
        (np.ones((0, 3)), DataError),
        (np.ones((3, 0)), DataError),
        (np.ones((2, 2), complex), UnreadableError),
        (np.array([["a", "b"]]), UnreadableError),
        (sp.csr_array(np.array([[np.nan, 1.0]])), DataError),
        (sp.dia_array(np.eye(3)), DataTypeError),
    ],
)
def test_what_is_no_table_of_known_cells_is_refused(X, kind):
    with pytest.raises(kind):
        observed(X)
    with pytest.raises(DataTypeError):
        observed(np.ones((2, 2)), "float16")


@pytest.mark.parametrize(
    ("given_type", "kept"),
    [("float32", "float32"), ("float64", "float64"), ("float16", "float32"), ("int64", "float64"), ("bool", "float32")],
)
def test_number_types_of_known_cells(given_type, kept):
    X = np.array([[1, 0], [1, 1]], given_type)
    matrix = observed(X)
    assert matrix.dtype == matrix.native(np.ones(2)).dtype == kept
    assert ObservedRowSolver().solve_rows(matrix, matrix.native(np.ones((2, 1)))).dtype == kept
    assert observed(X, "float32").dtype == observed(observed(X), "float32").dtype == np.float32
    assert observed(matrix) is matrix


def test_input_is_not_changed():
    values, known = ratings()
    for form in ("NaN", "masked", "unsorted csr"):
        X = OBSERVED_FORMS[form](values, known)
        kept = X.copy()
        matrix = observed(X)
        ObservedRowSolver().solve_rows(matrix, np.ones((25, 2)))
        for name in ("data", "indices") if form == "unsorted csr" else (...,):
            now, before = (X[...], kept[...]) if name is ... else (getattr(X, name), getattr(kept, name))
            assert_array_equal(now, before)


def test_nothing_is_made_dense():
    rng = np.random.default_rng(0)
    side = 400_000
    rows, columns = rng.permutation(side)[:2000], rng.permutation(side)[:2000]
    matrix = observed(sp.coo_array((rng.random(2000), (rows, columns)), shape=(side, side)))
    Ht = rng.random((side, 2))
    W = ObservedRowSolver().solve_rows(matrix, Ht)
    assert matrix.squared_distance(W, Ht) < 1e-20
    assert len(matrix.empty_rows) == len(matrix.empty_columns) == side - 2000


def reference(X, Ht, i, penalty=Penalty()):
    """SciPy's solution for row i, with penalties as rows added to its problem, and the residual's norm."""
    known = ~np.isnan(X[i])
    count, k = known.sum(), Ht.shape[1]
    if not count:
        return np.zeros(k), 0.0
    system, target = Ht[known], X[i, known]
    if penalty.l2:
        root = np.sqrt(penalty.l2 * count)
        system = np.vstack([system, root * np.eye(k)])
        target = np.concatenate([target, np.full(k, -penalty.l1 * count / root)])
    return nnls(system, target)


@pytest.mark.parametrize(("shape", "rank"), [((1, 1), 1), ((80, 60), 5), ((40, 200), 30)])
@pytest.mark.parametrize("penalty", [Penalty(), Penalty(l2=0.01), Penalty(l1=0.02, l2=0.03)], ids=repr)
def test_rows_equal_scipy_at_full_rank(shape, rank, penalty):
    X = with_gaps(*ratings(shape, density=0.9))
    Ht = np.random.default_rng(rank).random((shape[1], rank))
    W = ObservedRowSolver(SquaredError(penalty_W=penalty)).solve_rows(observed(X), Ht)
    expected = np.array([reference(X, Ht, i, penalty)[0] for i in range(len(X))])
    assert_allclose(W, expected, atol=1e-8)


@given(
    m=st.integers(1, 10), k=st.integers(1, 8), density=st.sampled_from([0.2, 0.6, 1.0]), seed=st.integers(0, 10**6),
    twin=st.booleans(),
)  # fmt: skip
def test_objective_equals_scipy_at_any_rank(m, k, density, seed, twin):
    X = with_gaps(*ratings((8, m), seed, density))
    Ht = np.random.default_rng(seed).random((m, k))
    Ht[:, -1] = Ht[:, 0] if twin else Ht[:, -1]
    W = ObservedRowSolver().solve_rows(observed(X), Ht)
    assert (W >= 0).all()
    for i, w in enumerate(W):
        error = np.linalg.norm(np.nan_to_num(X[i] - Ht @ w))
        assert error <= reference(X, Ht, i)[1] + 1e-7


def test_columns_are_the_rows_of_the_transpose():
    matrix = observed(with_gaps(*ratings()))
    W = np.random.default_rng(0).random((60, 3))
    solver = ObservedRowSolver(SquaredError(penalty_W=Penalty(l2=9.0), penalty_H=Penalty(l1=0.01, l2=0.02)))
    swapped = ObservedRowSolver(SquaredError(penalty_W=Penalty(l1=0.01, l2=0.02)))
    assert_array_equal(solver.solve_columns(matrix, W), swapped.solve_rows(matrix.transposed(), W))


@pytest.mark.parametrize("penalty", [Penalty(), Penalty(0.01, 0.05)], ids=repr)
def test_where_all_is_known_it_is_what_a_complete_solver_does(penalty):
    values, _ = ratings()
    Ht = np.random.default_rng(2).random((25, 4))
    complete = SquaredError(penalty_W=penalty)
    ours = ObservedRowSolver(complete).solve_rows(observed(values), Ht)
    assert_allclose(ours, complete.solve_rows(as_matrix(values), Ht), atol=1e-10)
    for matrix in (as_matrix(values), as_matrix(sp.csr_array(values))):
        for exactly in (True, False):
            expected = complete.solve_rows(matrix, Ht, exactly=exactly)
            assert_array_equal(ObservedRowSolver(complete).solve_rows(matrix, Ht, exactly=exactly), expected)


def test_without_exactness_it_is_near():
    matrix = observed(with_gaps(*ratings((80, 60))))
    Ht = np.random.default_rng(2).random((60, 4))
    solver = ObservedRowSolver()
    rough = matrix.squared_distance(solver.solve_rows(matrix, Ht, exactly=False), Ht)
    exact = matrix.squared_distance(solver.solve_rows(matrix, Ht), Ht)
    assert exact <= rough * (1 + 1e-12) <= exact * 1.01


def test_float32_is_solved_to_its_precision():
    X = with_gaps(*ratings((80, 60)))
    Ht = np.random.default_rng(2).random((60, 4)).astype(np.float32)
    W = ObservedRowSolver().solve_rows(observed(X, "float32"), Ht)
    assert W.dtype == np.float32
    assert_allclose(W, ObservedRowSolver().solve_rows(observed(X), Ht.astype(float)), atol=1e-5)


def test_threads_and_neighbours_do_not_change_a_row(monkeypatch):
    monkeypatch.setattr(runtime, "SMALL_WORK", 0)
    matrix = observed(with_gaps(*ratings((300, 40))))
    Ht = np.random.default_rng(1).random((40, 6))
    alone = ObservedRowSolver().solve_rows(matrix, Ht)
    distance, residuals = matrix.squared_distance(alone, Ht), matrix.residuals(alone, Ht)
    for count in (2, 3):
        with runtime.limit_kernel_threads(count):
            assert len(matrix.pieces(6)) == count
            assert_array_equal(ObservedRowSolver().solve_rows(matrix, Ht), alone)
            assert_array_equal(matrix.residuals(alone, Ht), residuals)
            assert matrix.squared_distance(alone, Ht) == pytest.approx(distance, rel=1e-13)
    some = np.array([7, 250])
    assert_array_equal(ObservedRowSolver().solve_rows(matrix.rows(some), Ht), alone[some])


def test_factors_of_another_size_are_refused():
    matrix = observed(with_gaps(*ratings()))
    with pytest.raises(ShapeError, match="25 columns"):
        ObservedRowSolver().solve_rows(matrix, np.ones((60, 3)))
    with pytest.raises(ShapeError, match="60 columns"):
        ObservedRowSolver().solve_columns(matrix, np.ones((25, 3)))


def test_alternating_responses_fit_the_cells_that_were_kept_back():
    rng = np.random.default_rng(3)
    X = rng.random((60, 3)) @ rng.random((3, 40))
    known = rng.random(X.shape) < 0.7
    matrix, solver = observed(with_gaps(X, known)), ObservedRowSolver()
    Ht, errors = rng.random((40, 3)), []
    for _ in range(300):
        W = solver.solve_rows(matrix, Ht)
        Ht = solver.solve_columns(matrix, W)
        errors.append(matrix.squared_distance(W, Ht))
    assert all(after <= before * (1 + 1e-9) + 1e-20 for before, after in pairwise(errors))
    hidden = np.linalg.norm((X - W @ Ht.T)[~known]) / np.linalg.norm(X[~known])
    assert hidden < 0.01
