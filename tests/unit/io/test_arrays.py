"""NumPy files: .npy stays on disk, .npz finds the matrix and what belongs to it, nothing is unpickled."""

import io
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import sparse

from partsong.errors import FormatError, ParameterError, ShapeError
from partsong.io.read import read

X = np.arange(12.0).reshape(4, 3)


class Trap:
    """Runs code when unpickled; every test would notice."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('unpickled')",))


def npz(path, **arrays):
    np.savez(path, **arrays)
    return path


def npy_bytes(shape, payload=b"", descr="<f8"):
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": descr, "fortran_order": False, "shape": shape})
    return stream.getvalue() + payload


@given(
    X=hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.int16, np.uint8, np.bool_]),
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=5),
    ),
    fortran=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_npy_gives_back_what_was_saved(tmp_path_factory, X, fortran):
    path = tmp_path_factory.mktemp("npy") / "X.npy"
    np.save(path, np.asfortranarray(X) if fortran else X)
    table = read(path)
    assert isinstance(table.X, np.memmap)
    assert table.X.dtype == X.dtype
    np.testing.assert_array_equal(table.X, X)
    np.testing.assert_array_equal(read(path, transpose=True).X, X.T)


def test_npy_of_another_byte_order_and_of_no_rows(tmp_path):
    np.save(tmp_path / "big.npy", X.astype(">f8"))
    assert read(tmp_path / "big.npy").X.dtype.isnative
    np.save(tmp_path / "none.npy", X[:0])
    assert read(tmp_path / "none.npy").X.shape == (0, 3)


@pytest.mark.parametrize(
    ("array", "error"),
    [
        (np.array([[1, None]], dtype=object), FormatError),
        (np.array([[Trap()]], dtype=object), FormatError),
        (np.array([["a"]]), FormatError),
        (np.zeros(3, dtype=[("a", "f8")]), FormatError),
        (np.zeros(3), ShapeError),
        (np.zeros((2, 2, 2)), ShapeError),
    ],
    ids=["objects", "pickle", "text", "records", "1-D", "3-D"],
)
def test_npy_that_is_no_matrix(tmp_path, array, error):
    np.save(tmp_path / "X.npy", array, allow_pickle=True)
    with pytest.raises(error, match=r"X\.npy"):
        read(tmp_path / "X.npy")


@pytest.mark.parametrize("claimed", [(3, 2), (10**12, 10**6), (-1, 4)])
def test_headers_that_claim_more_than_there_is(tmp_path, claimed):
    (tmp_path / "X.npy").write_bytes(npy_bytes(claimed, bytes(32)))
    with pytest.raises(FormatError):
        read(tmp_path / "X.npy")
    with zipfile.ZipFile(tmp_path / "X.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("X.npy", npy_bytes(claimed, bytes(32)))
    with pytest.raises(FormatError):
        read(tmp_path / "X.npz")


@pytest.mark.parametrize(
    ("arrays", "key", "expected"),
    [
        ({"anything": X}, None, "anything"),
        ({"X": X, "other": X + 1}, None, "X"),
        ({"X_test": X + 1, "X_train": X}, None, "X_train"),
        ({"X": X, "other": X + 1}, "other", "other"),
    ],
)
def test_npz_finds_the_matrix(tmp_path, arrays, key, expected):
    np.testing.assert_array_equal(read(npz(tmp_path / "d.npz", **arrays), key=key).X, arrays[expected])


def test_npz_that_leaves_open_which_matrix_is_meant(tmp_path):
    path = npz(tmp_path / "d.npz", a=X, b=X)
    with pytest.raises(FormatError, match=r"'a' \(4, 3\) float64, 'b'.*Pass one"):
        read(path)
    with pytest.raises(ParameterError, match=r"no array 'c'.*'a'"):
        read(path, key="c")
    with pytest.raises(ShapeError, match="reshape"):
        read(npz(tmp_path / "images.npz", X=np.zeros((4, 2, 2)), a=X, b=X))


@pytest.mark.parametrize("names", ["feature_names", "genes", "features"])
@pytest.mark.parametrize("kind", [np.str_, np.bytes_])
def test_npz_names_are_picked_up_where_they_fit(tmp_path, names, kind):
    path = npz(
        tmp_path / "d.npz",
        **{"X": X, names: np.array(["a", "b", "c"], dtype=kind), "samples": np.array(list("rstu"), dtype=kind)},
    )
    table = read(path)
    assert (table.feature_names, table.sample_names) == (("a", "b", "c"), tuple("rstu"))
    assert read(npz(tmp_path / "e.npz", **{"X": X, names: np.array(["a"])})).feature_names is None
    turned = read(npz(tmp_path / "f.npz", **{"X": X.T, names: np.array(list("abc"))}), transpose=True)
    assert (turned.feature_names, turned.X.shape) == (("a", "b", "c"), (4, 3))


@pytest.mark.parametrize(
    ("arrays", "label", "expected"),
    [
        ({"X": X, "y": np.arange(4)}, None, [0, 1, 2, 3]),
        ({"X": X, "labels": np.array(list("aabb"))}, None, list("aabb")),
        ({"X_train": X, "X_test": X, "y_test": np.arange(4), "y_train": np.arange(4) + 1}, None, [1, 2, 3, 4]),
        ({"X": X, "y": np.arange(3)}, None, None),
        ({"X": X, "y": np.arange(4), "site": np.arange(4) * 2}, "site", [0, 2, 4, 6]),
        ({"X": X, "y": np.array(list("aabb"), dtype=object)}, None, None),
    ],
)
def test_npz_labels(tmp_path, arrays, label, expected):
    labels = read(npz(tmp_path / "d.npz", **arrays), label=label).labels
    assert (labels if labels is None else labels.tolist()) == expected


def test_npz_labels_that_do_not_fit(tmp_path):
    path = npz(tmp_path / "d.npz", X=X, short=np.arange(3), fits=np.arange(4))
    for label in ("short", "absent"):
        with pytest.raises(ParameterError, match="fits"):
            read(path, label=label)


@pytest.mark.parametrize("trapped", ["X", "feature_names"])
def test_npz_never_unpickles(tmp_path, trapped):
    shape = (2, 3) if trapped == "X" else (3,)
    arrays = {"X": X, "feature_names": np.array(list("abc"))} | {trapped: np.full(shape, Trap(), dtype=object)}
    with pytest.raises(FormatError, match=r"astype\(str\)"):
        read(npz(tmp_path / "d.npz", **arrays))


def test_npz_packed_in_another_way_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "d.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("X.npy", npy_bytes((4, 3), X.tobytes()))
    with pytest.raises(FormatError, match="packed"):
        read(tmp_path / "d.npz")


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "bsr", "dia"])
def test_sparse_npz_becomes_csr(tmp_path, form):
    S = sparse.random(6, 4, 0.5, random_state=0, dtype=np.float32)
    sparse.save_npz(tmp_path / "s.npz", S.asformat(form))
    table = read(tmp_path / "s.npz")
    assert table.X.format == "csr"
    assert table.X.dtype == np.float32
    np.testing.assert_array_equal(table.X.toarray(), S.toarray())
    assert read(tmp_path / "s.npz", transpose=True).X.shape == (4, 6)


def test_sparse_npz_may_hold_names_and_labels(tmp_path):
    S = sparse.csr_array(X)
    sparse.save_npz(tmp_path / "s.npz", S)
    with np.load(tmp_path / "s.npz") as parts:
        path = npz(tmp_path / "n.npz", **parts, features=np.array(list("abc")), y=np.arange(4))
    table = read(path)
    assert (table.feature_names, table.labels.tolist()) == (("a", "b", "c"), [0, 1, 2, 3])
    np.testing.assert_array_equal(table.X.toarray(), X)


@pytest.mark.parametrize(
    "changes",
    [{"indices": [0, 9]}, {"indices": [0, -1]}, {"indptr": [0, 9, 2]}, {"shape": [10**14, 2]}, {"shape": [2, 2, 2]}],
)
@pytest.mark.parametrize("form", [b"csr", b"csc"])
def test_sparse_npz_with_hostile_indices(tmp_path, changes, form):
    parts = {
        "format": np.array(form),
        "shape": np.array([2, 2]),
        "data": np.ones(2),
        "indices": np.array([0, 1]),
        "indptr": np.array([0, 1, 2]),
    }
    with pytest.raises(FormatError):
        read(npz(tmp_path / "s.npz", **(parts | changes)))
