"""Laws of sketches: E[S Sᵀ] = I, one S for everybody, blocks that add up, and products with every form of data."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from partsong import kernels
from partsong.core import runtime
from partsong.data import scan
from partsong.data.conversion import as_matrix
from partsong.data.sparse import SparseMatrix
from partsong.errors import DataTypeError, ParameterError, ShapeError
from partsong.sketch import operator, placed
from partsong.sketch.kinds import FEW, CountSketch, Gaussian, Hadamard, Subsampling
from partsong.sketch.operator import dimension_for
from partsong.sketch.recovery import most_sketches, recover_from_sketches

KINDS = [Gaussian, Subsampling, CountSketch, Hadamard]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
ignore_beta = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
any_kind = st.sampled_from(KINDS)

STANDARD_ERRORS = 5
"""A mean of draws may be so far from what is expected: less than one in a million means of this kind is farther."""


def assert_mean_is(draws, expected, scale):
    draws = np.asarray(draws)
    error = draws.std(axis=0, ddof=1) / len(draws) ** 0.5
    distance = np.abs(draws.mean(axis=0) - expected)
    assert (distance <= STANDARD_ERRORS * error + 1e-12).all()
    assert error.max() < 0.1 * scale  # or nothing was tested


@every_kind
@pytest.mark.parametrize(("size", "dimension"), [(6, 3), (5, 1), (8, 8)])
def test_the_mean_of_products_is_the_identity(kind, size, dimension):
    drawn = [kind(dimension).draw(size, 11, "mean", t).rows(0, size) for t in range(3000)]
    assert_mean_is([S @ S.T for S in drawn], np.eye(size), 1.0)


@every_kind
def test_the_mean_of_sketched_gradients_is_the_gradient(kind):
    rng = np.random.default_rng(0)
    X, W, H = rng.random((4, 13)), rng.random((4, 2)), rng.random((2, 13))
    gradients = []
    for t in range(3000):
        S = kind(5).draw(13, 2, "gradient", t)
        A, B = S.sketch(X), S.sketch(H)
        gradients.append(W @ (B @ B.T) - A @ B.T)
    assert_mean_is(gradients, W @ (H @ H.T) - X @ H.T, np.abs(X @ H.T).max())


@given(any_kind, st.sampled_from([3, 40]), st.lists(st.integers(0, 9000), max_size=5), st.randoms())
def test_blocks_of_rows_make_up_the_whole(kind, dimension, cuts, random):
    S = kind(dimension).draw(9000, 5, "blocks")
    ranges = list(pairwise([0, *sorted(cuts), 9000]))
    random.shuffle(ranges)  # in any order
    blocks = {block: S.rows(*block) for block in ranges}
    assert_array_equal(np.vstack([blocks[block] for block in sorted(ranges)]), S.rows(0, 9000))


@every_kind
def test_no_part_of_a_sketch_repeats_another(kind):
    S = kind(40).draw(8192, 5, "parts").rows(0, 8192)
    for lag in 2 ** np.arange(
        13
    ):  # inner products have mean 0 and a variance of at most 1/40; repeated rows would give 1
        assert abs(np.einsum("ij,ij->i", S[:-lag], S[lag:]).mean()) < 0.02
    norms = np.linalg.norm(S, axis=0)
    assert np.abs(np.triu(S.T @ S / np.outer(norms, norms), 1)).max() < 0.08  # as above: 7 of 1/√8192


@every_kind
def test_rows_in_float32_are_those_in_float64_rounded(kind):
    S = kind(20).draw(700, 5)
    assert S.rows(3, 600, np.float32).dtype == np.float32
    assert_array_equal(S.rows(3, 600, "float32"), S.rows(3, 600).astype(np.float32))


@every_kind
def test_a_name_is_one_sketch(kind):
    whole = kind(8).draw(50, 7, "W", 3).rows(0, 50)
    assert kind(8).draw(50, 7, "W", 3) == kind(8).draw(50, 7, "W", 3)
    assert_array_equal(kind(8).draw(50, 7, "W", 3).rows(0, 50), whole)
    assert_array_equal(kind(8).draw(np.int64(50), np.int64(7), "W", np.int32(3)).rows(0, 50), whole)
    for other in [(8, "W", 3), (7, "H", 3), (7, "W", 4), (7, "W"), (7, "W", "3")]:
        assert (kind(8).draw(50, *other).rows(0, 50) != whole).any()


class OnlyProducts:
    """Somebody else's matrix: what `core.interfaces.Matrix` says of it, and no more."""

    def __init__(self, X):
        self.matrix = as_matrix(X)

    def __getattr__(self, name):
        return (
            getattr(self.matrix, name)
            if name in ("shape", "dtype", "times", "transposed_times", "native")
            else {}[name]
        )


def untidy(X):
    """CSR with descending columns and entries in two parts."""
    coo = sp.coo_array(X)
    order = np.lexsort((-coo.col, coo.row))
    pointers = np.append(0, np.cumsum(2 * np.bincount(coo.row, minlength=X.shape[0])))
    parts = np.repeat(coo.data[order] / 2, 2), np.repeat(coo.col[order], 2), pointers
    return sp.csr_array(parts, shape=X.shape)


def on_disk(X, tmp_path):
    np.save(tmp_path / "X.npy", X)
    return np.load(tmp_path / "X.npy", mmap_mode="r")


def tensor(X):
    return pytest.importorskip("torch").from_numpy(np.ascontiguousarray(X))


FORMS = {
    "C order": lambda X, tmp: np.ascontiguousarray(X),
    "F order": lambda X, tmp: np.asfortranarray(X),
    "strided": lambda X, tmp: np.repeat(X, 2, axis=1)[:, ::2],
    "memory map": on_disk,
    "memory map, F order": lambda X, tmp: on_disk(np.asfortranarray(X), tmp),
    "dense matrix": lambda X, tmp: as_matrix(X),
    "csr": lambda X, tmp: sp.csr_array(X),
    "csr, untidy": lambda X, tmp: untidy(X),
    "csr_matrix": lambda X, tmp: sp.csr_matrix(X),
    "csc": lambda X, tmp: sp.csc_array(X),
    "coo": lambda X, tmp: sp.coo_array(X),
    "sparse matrix": lambda X, tmp: as_matrix(sp.csr_array(X)),
    "sparse matrix by row": lambda X, tmp: SparseMatrix(sp.csr_array(X)),
    "torch": lambda X, tmp: tensor(X),
    "torch, transposed": lambda X, tmp: tensor(X.T).T,
    "torch csr": lambda X, tmp: tensor(X).to_sparse_csr(),
    "tensor matrix": lambda X, tmp: as_matrix(tensor(X)),
    "somebody else's": lambda X, tmp: OnlyProducts(X),
}


def data(shape=(41, 120), dtype=np.float64, seed=3):
    rng = np.random.default_rng(seed)
    X = (rng.random(shape) * (rng.random(shape) < 0.4)).astype(dtype)
    X[:, :2], X[:3] = 0, 0
    X[4, 1:] = 1  # a long row, and a long column
    X[1:, 7] = 1
    return X


def assert_is(found, expected, dtype):
    assert type(found).__module__.partition(".")[0] in ("numpy", "torch")
    found = kernels.of(found).to_numpy(found)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    scale = np.abs(expected).max(initial=1.0)
    assert_allclose(found, expected, atol=scale * 20 * np.finfo(dtype).eps, rtol=0)


@ignore_beta
@every_kind
@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_the_same_product(form, dtype, kind, tmp_path):
    for dimension in (7, FEW + 20):
        S = kind(dimension).draw(200, 1)
        dense = S.rows(0, 200)
        for shape, start in [((41, 120), 30), ((120, 41), 159), ((5, 200), 0), ((200, 9), 0)]:
            X = data(shape, dtype)
            A = FORMS[form](X.copy(), tmp_path)
            if start + shape[1] <= 200:
                assert_is(S.sketch(A, start), X.astype(float) @ dense[start : start + shape[1]], dtype)
            if start + shape[0] <= 200:
                assert_is(S.sketch_transposed(A, start), X.T.astype(float) @ dense[start : start + shape[0]], dtype)


@every_kind
def test_numbers_of_other_types_are_taken_as_they_are_elsewhere(kind):
    X = (data() * 9).astype(np.uint8)
    S = kind(7).draw(120, 1)
    assert_is(S.sketch(X), X @ S.rows(0, 120), np.float32)
    assert_is(S.sketch(sp.csr_array(X)), X @ S.rows(0, 120), np.float32)


@ignore_beta
@every_kind
@pytest.mark.parametrize("form", ["C order", "F order", "csr", "csc", "sparse matrix by row", "torch", "torch csr"])
def test_nothing_is_a_sum_of_nothing(form, kind, tmp_path):
    for dimension in (7, FEW + 20):
        S = kind(dimension).draw(200, 1)
        for shape in [(4, 0), (0, 4), (0, 0)]:
            A = FORMS[form](np.zeros(shape, np.float32), tmp_path)
            assert_is(S.sketch(A, 120), np.zeros((shape[0], dimension)), np.float32)
            assert_is(S.sketch_transposed(A, 120), np.zeros((shape[1], dimension)), np.float32)
        assert S.rows(9, 9).shape == (0, dimension)
        zeros = FORMS[form](np.zeros((5, 200), np.float32), tmp_path)
        assert_is(S.sketch(zeros), np.zeros((5, dimension)), np.float32)


@every_kind
@pytest.mark.parametrize("form", ["C order", "F order", "memory map", "csr", "csc", "torch", "somebody else's"])
def test_small_pieces_and_threads_change_nothing(form, kind, tmp_path, monkeypatch):
    X = data((150, 1300))
    operators = [kind(d).draw(size, 1) for d in (40, FEW + 20) for size in (1400, 300)]

    def results():
        A = FORMS[form](X, tmp_path)
        wide, high, wider, higher = operators
        return wide.sketch(A, 90), high.sketch_transposed(A, 60), wider.sketch(A, 90), higher.sketch_transposed(A, 60)

    expected = results()
    monkeypatch.setattr(operator, "BYTES", 1 << 12)
    monkeypatch.setattr(placed, "TOGETHER", 1000)
    monkeypatch.setattr(scan, "TILE_BYTES", 1 << 14)
    monkeypatch.setattr(scan, "MAPPED_TILE_BYTES", 1 << 14)
    monkeypatch.setattr(runtime, "SMALL_WORK", 0)
    with runtime.limit_kernel_threads(3):
        for found, wanted in zip(results(), expected, strict=True):
            assert_allclose(found, wanted, atol=1e-11)


@given(any_kind, st.lists(st.integers(0, 120), max_size=4), st.booleans())
def test_parties_add_up_to_the_whole(kind, cuts, is_sparse):
    X = data()
    A = sp.csc_array(X) if is_sparse else X
    S = kind(9).draw(120, 4, "parties")
    owned = list(pairwise([0, *sorted(cuts), 120]))
    by_columns = sum(S.sketch(A[:, start:stop], start) for start, stop in owned)
    by_rows = sum(S.sketch_transposed(A.T[start:stop], start) for start, stop in owned)
    assert_allclose(by_columns, S.sketch(X), atol=1e-12)
    assert_allclose(by_rows, S.sketch(X), atol=1e-12)


@every_kind
def test_sketches_are_linear(kind):
    X, Y, S = data(), data(seed=8), kind(FEW + 20).draw(120, 4)
    assert_allclose(S.sketch(2 * X - 3 * Y), 2 * S.sketch(X) - 3 * S.sketch(Y), atol=1e-11)
    B = np.random.default_rng(0).random((6, 41))
    assert_allclose(S.sketch(B @ X), B @ S.sketch(X), atol=1e-11)


@every_kind
@pytest.mark.parametrize("form", ["C order", "csr", "csc"])
def test_input_is_not_modified(form, kind, tmp_path):
    A, S = FORMS[form](data(), tmp_path), kind(9).draw(120, 4)
    S.sketch(A)
    S.sketch_transposed(A)
    assert_array_equal(A.toarray() if sp.issparse(A) else A, data())


def peak_of(function):
    tracemalloc.start()
    function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@every_kind
def test_sparse_data_are_not_made_dense(kind):
    rng = np.random.default_rng(0)
    n, m, stored = 100_000, 1_000_000, 500
    places = np.sort(rng.integers(n, size=stored)), rng.integers(m, size=stored)
    A = sp.coo_array((np.ones(stored, np.float32), places), shape=(n, m)).tocsr()
    S = kind(8).draw(m, 1)
    assert peak_of(lambda: S.sketch(A)) < 80e6  # A would be 4e11 bytes, and S 32e6
    assert peak_of(lambda: kind(8).draw(n, 1).sketch_transposed(A)) < 5 * 4 * 8 * m
    kept = S.sketch(A)
    for i in places[0][:5]:
        columns = A.indices[A.indptr[i] : A.indptr[i + 1]]
        assert_allclose(kept[i], sum(S.rows(j, j + 1)[0] for j in columns), atol=1e-6)


@pytest.mark.parametrize("kind", [Gaussian, Hadamard], ids=lambda kind: kind.__name__)
def test_a_large_sketch_is_never_held_whole(kind):
    S, A = kind(FEW).draw(80_000, 1), np.ones((2, 80_000))
    whole = 8 * S.size * S.dimension
    assert peak_of(lambda: S.sketch(A)) < whole / 2
    assert peak_of(lambda: S.sketch_transposed(A.T)) < whole / 2
    assert peak_of(lambda: S.sketch(tensor(A))) < whole


@ignore_beta
@pytest.mark.parametrize("form", ["C order", "F order", "csr", "csc", "sparse matrix by row", "torch", "torch csr"])
def test_subsampling_looks_at_d_columns_only(form, tmp_path):
    S = Subsampling(9).draw(120, 4)
    chosen = np.flatnonzero(S.rows(0, 120).any(axis=1))
    X = data()
    X[:, np.setdiff1d(np.arange(120), chosen)] = np.nan
    expected = X[:, chosen] * (120 / 9) ** 0.5
    assert_allclose(S.sketch(FORMS[form](X, tmp_path)), expected, atol=1e-12)
    assert_allclose(S.sketch_transposed(FORMS[form](X.T.copy(), tmp_path)), expected, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 64])
def test_as_many_dimensions_as_coordinates(size):
    assert_array_equal(Subsampling(size).draw(size, 0).rows(0, size), np.eye(size))
    S = Hadamard(size).draw(size, 0).rows(0, size)
    assert_allclose(S @ S.T, np.eye(size), atol=1e-14)
    X = np.random.default_rng(0).random((3, size))
    assert_array_equal(Subsampling(size).draw(size, 0).sketch(X), X)


@pytest.mark.parametrize("kind", [Subsampling, CountSketch, Hadamard], ids=lambda kind: kind.__name__)
def test_a_single_coordinate_keeps_its_size(kind):
    assert abs(kind(1).draw(1, 0).rows(0, 1)[0, 0]) == 1


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 100))
def test_as_many_sketches_as_the_guard_allows_do_not_give_the_matrix_away_and_one_more_does(size, dimension, seed):
    dimension = min(size, dimension)
    M = np.random.default_rng(seed).random((3, size))
    allowed = most_sketches(size, dimension)
    operators = [Gaussian(dimension).draw(size, seed, "round", t) for t in range(allowed + 1)]
    seen = [S.sketch(M) for S in operators]
    assert_allclose(recover_from_sketches(seen, operators), M, atol=1e-6)
    if allowed:
        guess = recover_from_sketches(seen[:-1], operators[:-1])
        assert np.abs(guess - M).max() > 1e-4
        for S, Y in zip(operators[:-1], seen[:-1], strict=True):
            assert_allclose(S.sketch(guess), Y, atol=1e-6)  # another matrix with the same sketches


@every_kind
def test_other_sketches_give_the_matrix_away_once_their_rank_is_full(kind):
    M = np.random.default_rng(0).random((4, 20))
    operators = [kind(5).draw(20, 9, t) for t in range(40)]
    rank = np.linalg.matrix_rank(np.hstack([S.rows(0, 20) for S in operators]))
    assert rank == 20
    assert_allclose(recover_from_sketches([S.sketch(M) for S in operators], operators), M, atol=1e-10)


def test_one_subsampling_sketch_publishes_its_columns():
    M, S = np.random.default_rng(0).random((4, 20)), Subsampling(5).draw(20, 9)
    chosen = np.flatnonzero(S.rows(0, 20).any(axis=1))
    assert len(chosen) == 5
    assert_allclose(recover_from_sketches([tensor(S.sketch(M))], [S])[:, chosen], M[:, chosen], atol=1e-12)


@given(st.integers(1, 10**6), st.integers(1, 300), st.floats(1e-6, 1.0))
def test_a_dimension_can_always_be_drawn_and_serves_the_rank(size, rank, ratio):
    dimension = dimension_for(size, rank, ratio)
    assert min(rank, size) <= dimension <= size
    assert dimension >= ratio * size * (1 - 1e-9)
    assert dimension <= max(rank, ratio * size + 1)
    assert Subsampling(dimension).draw(size, 0).dimension == dimension


@pytest.mark.parametrize("tens", [1, 3, 7, 10**5])
def test_a_tenth_is_a_tenth(tens):
    assert dimension_for(10 * tens, 1) == tens


@every_kind
@pytest.mark.parametrize("dimension", [0, -1, 2.5, True, "8", None])
def test_no_dimension(kind, dimension):
    with pytest.raises(ParameterError, match="whole number"):
        kind(dimension)


@every_kind
def test_wrong_sizes_are_refused_with_the_way_out(kind):
    with pytest.raises(ParameterError, match="dimension_for"):
        kind(9).draw(8, 0)
    with pytest.raises(ParameterError, match="at least 1"):
        kind(9).draw(0, 0)
    S = kind(3).draw(8, 0)
    for block in [(-1, 2), (3, 2), (0, 9)]:
        with pytest.raises(ShapeError, match="outside the 8 coordinates of this sketch"):
            S.rows(*block)
    for A, start in [(np.ones((2, 9)), 0), (np.ones((2, 4)), 5), (np.ones((2, 4)), -1), (sp.csr_array((2, 9)), 0)]:
        with pytest.raises(ShapeError, match="`start`"):
            S.sketch(A, start)
        with pytest.raises(ShapeError, match="`start`"):
            S.sketch_transposed(A.T, start)
    with pytest.raises(ShapeError, match="2 dimensions"):
        S.sketch(np.ones(8))
    with pytest.raises(DataTypeError):
        S.sketch(np.full((2, 8), "a"))


def test_recovery_and_its_guard_refuse_what_does_not_fit():
    S, T = Gaussian(3).draw(8, 0), Gaussian(3).draw(9, 0)
    Y = np.ones((2, 3))
    for sketches, operators in [([], []), ([Y], [S, S]), ([Y, Y], [S, T]), ([Y[:, :2]], [S]), ([Y, Y[:1]], [S, S])]:
        with pytest.raises(ShapeError):
            recover_from_sketches(sketches, operators)
    for size, dimension in [(0, 1), (5, 0)]:
        with pytest.raises(ParameterError):
            most_sketches(size, dimension)
    for wrong in [{"size": 0, "rank": 1}, {"size": 5, "rank": 0}, {"size": 5, "rank": 1, "ratio": 0}]:
        with pytest.raises(ParameterError):
            dimension_for(**wrong)
