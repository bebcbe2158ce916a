"""Inspection finds what was put there, in every container, and tells where."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import sparse

from partsong.data import scan
from partsong.data.validation import inspect, require_factorizable, require_transformable
from partsong.errors import DataError, DataTypeError, FeatureError, PartsongError, ShapeError, UnreadableError

CONTAINERS = {
    "dense": np.asarray,
    "fortran": np.asfortranarray,
    "float32": lambda X: X.astype(np.float32),
    "csr": sparse.csr_array,
    "csc": sparse.csc_matrix,
    "coo": sparse.coo_array,
}
every_container = pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS.keys())


def kinds(X, **names):
    return [finding.kind for finding in inspect(X, **names)]


def found(X, kind, **names):
    return next(finding for finding in inspect(X, **names) if finding.kind == kind)


@pytest.fixture
def X():
    return np.random.default_rng(0).uniform(0.5, 1.0, size=(6, 4))


@every_container
def test_ordinary_data_pass(X, container):
    assert inspect(container(X)) == ()
    require_factorizable(container(X), feature_names=("a", "b", "c", "d"))


@every_container
@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (np.nan, "nan", "NaN"),
        (np.inf, "infinite", "inf"),
        (-np.inf, "infinite", "inf"),
        (-1.0, "negative", "Negative values in data"),
    ],
)
def test_bad_values_are_found_where_they_are(X, container, value, kind, text):
    X[2, 1] = X[4, 3] = value
    finding = found(container(X), kind, feature_names=("a", "b", "c", "d"))
    assert (finding.severity, finding.rows, finding.columns, finding.count) == ("error", (2, 4), (1, 3), 2)
    assert "'b'" in finding.message
    assert kinds(container(X)) == [kind]
    with pytest.raises(DataError, match=text) as caught:
        require_factorizable(container(X))
    assert isinstance(caught.value, ValueError)
    assert finding.remedy in str(caught.value)


@every_container
def test_all_kinds_of_bad_values_are_reported_together(X, container):
    X[0, 0], X[1, 1], X[2, 2] = np.nan, np.inf, -1
    assert kinds(container(X)) == ["nan", "infinite", "negative"]


@every_container
def test_empty_rows_and_columns_are_notes(X, container):
    X[3], X[:, 2], X[:, 0] = 0, 0, 7
    X[3, 0] = 0
    require_factorizable(container(X))
    rows, columns = inspect(container(X), sample_names=list("rstuvw"))
    assert (rows.kind, rows.severity, rows.rows, rows.count) == ("zero-rows", "note", (3,), 1)
    assert "'u'" in rows.message
    assert (columns.kind, columns.columns) == ("zero-columns", (2,))


@every_container
def test_constant_columns_are_a_note(X, container):
    X[:, 1] = 3
    assert found(container(X), "constant-columns").columns == (1,)


@every_container
def test_nothing_but_zeros_is_one_note(container):
    assert kinds(container(np.zeros((3, 2)))) == ["all-zero"]


def test_stored_zeros_are_zeros():
    X = sparse.csr_array((np.array([0.0, 1.0, 2.0]), ([0, 1, 2], [0, 1, 1])), shape=(3, 3))
    assert found(X, "zero-rows").rows == (0,)
    assert found(X, "zero-columns").columns == (0, 2)


@pytest.mark.parametrize(
    ("data", "kind", "error"),
    [
        (np.zeros(3), "not-2d", ShapeError),
        (np.zeros((2, 2, 2)), "not-2d", ShapeError),
        (np.zeros((0, 3)), "no-rows", DataError),
        (np.zeros((3, 0)), "no-columns", DataError),
        (sparse.csr_array((0, 3)), "no-rows", DataError),
        (np.array([["a", "b"]]), "non-numeric", DataTypeError),
        (np.array([[1, None]]), "non-numeric", DataTypeError),
        (np.array([["2020-01-01"]], dtype="datetime64[D]"), "non-numeric", DataTypeError),
        (np.ones((2, 2)) * 1j, "complex", DataTypeError),
        (sparse.csr_array(np.ones((2, 2)) * 1j), "complex", DataTypeError),
        ([[1, 2], [3]], "container", DataTypeError),
        (np.ma.masked_equal(np.eye(2), 1), "container", DataTypeError),
    ],
)
def test_what_is_no_matrix_of_numbers(data, kind, error):
    assert kinds(data) == [kind]
    with pytest.raises(error) as caught:
        require_factorizable(data)
    assert isinstance(caught.value, PartsongError)


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint64, np.float16, np.longdouble])
def test_every_number_type_is_taken(dtype):
    require_factorizable(np.array([[1, 0], [0, 1]], dtype=dtype))
    assert kinds(np.array([[1, 0], [0, 1]], dtype=dtype)) == []


@pytest.mark.parametrize(
    ("names", "kind", "columns"),
    [
        (("a", "b", "a", "b"), "duplicate-names", (0, 1, 2, 3)),
        (("a", "", "c", "  "), "missing-names", (1, 3)),
        (("a", "b"), "name-count", ()),
    ],
)
def test_names_that_are_wrong(X, names, kind, columns):
    finding = found(X, kind, feature_names=names)
    assert (finding.severity, finding.columns) == ("error", columns)
    with pytest.raises(FeatureError):
        require_factorizable(X, names)


def test_names_used_twice_are_told_with_their_columns(X):
    finding = found(X, "duplicate-names", feature_names=("a", "b", "a", "b"))
    assert "'a' (columns 0, 2), 'b' (columns 1, 3)" in finding.message
    with pytest.raises(FeatureError, match=r"'a' \(columns 0, 2\)"):
        require_factorizable(X, ("a", "b", "a", "b"))


@pytest.mark.parametrize("kind", [object, str])
def test_cells_that_are_no_numbers_are_found_where_they_are(X, kind):
    cells = X.astype(kind)
    cells[2, 1], cells[4, 3] = "low", "?"
    finding = found(cells, "non-numeric", feature_names=("a", "b", "c", "d"))
    assert (finding.severity, finding.rows, finding.columns, finding.count) == ("error", (2, 4), (1, 3), 2)
    assert "row 2, column 1 ('b'): 'low'; row 4, column 3 ('d'): '?'" in finding.message
    assert "row 2, column 1: 'low'" in found(cells, "non-numeric", feature_names=("a",)).message
    with pytest.raises(UnreadableError) as caught:
        require_factorizable(cells)
    assert isinstance(caught.value, ValueError)


@every_container
def test_rows_for_a_model_may_be_small_but_not_too_large(X, container):
    small, large = container(X) * X.dtype.type(1e-20), container(X) * X.dtype.type(1e20)
    require_transformable(small, dtype=np.float32)
    for refused, require in (
        (small, require_factorizable),
        (large, require_factorizable),
        (large, require_transformable),
    ):
        with pytest.raises(DataError, match="range of float32"):
            require(refused, dtype=np.float32)
    for value in (np.nan, -1.0):
        X[0, 0] = value
        with pytest.raises(DataError):
            require_transformable(container(X))


def test_memory_maps_are_read_in_blocks(tmp_path, monkeypatch):
    X = np.random.default_rng(0).random((1000, 8))
    X[700, 3] = np.nan
    X[900] = 0
    np.save(tmp_path / "X.npy", X)
    monkeypatch.setattr(scan, "BLOCK_BYTES", 6400)
    sizes = []
    plain = scan._blocks
    monkeypatch.setattr(scan, "_blocks", lambda X: (sizes.append(part[2].nbytes) or part for part in plain(X)))
    mapped = np.load(tmp_path / "X.npy", mmap_mode="r")
    assert found(mapped, "nan").rows == (700,)
    assert found(mapped, "zero-rows").rows == (900,)
    assert max(sizes) <= 6400


@given(
    X=hnp.arrays(
        np.float64,
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=5),
        elements=st.sampled_from([0.0, 0.0, 1.0, 2.0, -1.0, np.nan, np.inf, -np.inf]),
    )
)
@settings(max_examples=150, deadline=None)
def test_containers_agree_and_every_fault_is_found(X):
    def essence(data):
        return [(f.kind, f.rows, f.columns, f.count) for f in inspect(data)]

    expected = essence(X)
    for container in (np.asfortranarray, sparse.csr_array, sparse.csc_array):
        assert essence(container(X)) == expected
    counts = {kind: count for kind, _, _, count in expected}
    assert counts.get("nan", 0) == np.isnan(X).sum()
    assert counts.get("infinite", 0) == np.isinf(X).sum()
    assert counts.get("negative", 0) == (X == -1).sum()
    if counts.keys() & {"nan", "infinite", "negative"}:
        with pytest.raises(DataError):
            require_factorizable(X)
    else:
        require_factorizable(X)
