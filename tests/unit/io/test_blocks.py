"""Blocks of files: the numbers of the whole, without holding it, and errors in its rows and columns."""

import subprocess
import sys
import zipfile

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from scipy import sparse

import partsong
from partsong.errors import DataError, FileError, FormatError, PartsongError, ShapeError, UnreadableError
from partsong.io import blocks, sparse_archive
from partsong.io.blocks import open_source, validate_block
from partsong.io.opening import ReadOptions

SPANS = [None, (3, 17), (0, 1), (30, 31)]


def dense(X):
    return X.toarray() if hasattr(X, "toarray") else X


@pytest.fixture
def S(monkeypatch):
    """Empty rows and columns, and pieces so small that every seam is met."""
    monkeypatch.setattr(sparse_archive, "PIECE", 37)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 500)
    S = sparse.random_array((50, 31), density=0.2, rng=np.random.default_rng(0), format="csr")
    keep = sparse.diags_array((np.arange(50) % 7 != 0).astype(float))
    return sparse.csr_array(keep @ S)


def require_same_blocks(path, X, *, is_partial, transpose=False):
    source = open_source(path, ReadOptions(transpose=transpose))
    X = X.T if transpose else X
    assert source.shape == X.shape
    assert source.is_loaded is not is_partial
    for rows in SPANS:
        for columns in SPANS:
            block = source.block(rows, columns)
            known = X[slice(*(rows or (None,))), slice(*(columns or (None,)))]
            assert_array_equal(dense(block), known)
            assert block.dtype == X.dtype
            assert getattr(block, "format", "csr") == "csr"
            assert not isinstance(block, np.memmap)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("form", ["csr", "csc"])
def test_sparse_blocks_are_those_of_the_whole(S, tmp_path, form, is_packed, transpose):
    sparse.save_npz(tmp_path / "x.npz", S.asformat(form), compressed=is_packed)
    require_same_blocks(tmp_path / "x.npz", S.toarray(), is_partial=True, transpose=transpose)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("kind", ["f8", "f4", "i2", ">f8"])
def test_dense_blocks_are_those_of_the_whole(S, tmp_path, order, transpose, kind):
    X = np.array((100 * S.toarray()).astype(kind), order=order)
    np.save(tmp_path / "x.npy", X)
    native = X.astype(X.dtype.newbyteorder("="))
    require_same_blocks(tmp_path / "x.npy", native, is_partial=True, transpose=transpose)


def test_other_files_are_read_whole_and_cut(S, tmp_path):
    X = S.toarray()
    np.savez(tmp_path / "x.npz", X=X)
    sparse.save_npz(tmp_path / "coo.npz", S.tocoo())
    np.savetxt(tmp_path / "x.csv", X, delimiter=",", header=",".join(f"f{j}" for j in range(31)), comments="")
    for name in ("x.npz", "coo.npz", "x.csv"):
        require_same_blocks(tmp_path / name, X, is_partial=False)
    source = open_source(tmp_path / "x.csv").released((3, 9))
    assert source.feature_names == tuple(f"f{j}" for j in range(31))
    with pytest.raises(FormatError, match="have been released"):
        source.block((3, 9))


def test_names_come_with_sparse_blocks(S, tmp_path):
    arrays = {"data": S.data, "indices": S.indices, "indptr": S.indptr, "shape": S.shape, "format": b"csr"}
    names = {"feature_names": [f"gene {j}" for j in range(31)], "sample_names": [f"s{i}" for i in range(50)]}
    np.savez(tmp_path / "x.npz", **arrays, **names)
    source = open_source(tmp_path / "x.npz")
    assert source.feature_names == tuple(names["feature_names"])
    assert source.sample_names((4, 6)) == ("s4", "s5")
    turned = open_source(tmp_path / "x.npz", ReadOptions(transpose=True))
    assert turned.feature_names is None, "there are as many features as there were samples"


@pytest.mark.parametrize("what", ["npy", "csr", "packed csc"])
@pytest.mark.parametrize(
    ("value", "words"), [(np.nan, "NaN"), (np.inf, "Infinite"), (-1.0, "Negative")], ids=["nan", "inf", "negative"]
)
def test_bad_values_are_told_by_file_and_by_places_in_the_whole(S, tmp_path, what, value, words):
    X = S.toarray()
    X[20, 9] = X[23, 9] = value
    path = tmp_path / ("x.npy" if what == "npy" else "x.npz")
    if what == "npy":
        np.save(path, X)
    else:
        sparse.save_npz(path, sparse.csr_array(X).asformat(what[-3:]), compressed="packed" in what)
    source = open_source(path)
    for rows, columns in (((18, 30), None), (None, (5, 12)), ((20, 24), (9, 10))):
        block = source.block(rows, columns)
        with pytest.raises(DataError) as told:
            validate_block(block, source, (rows or [0])[0], (columns or [0])[0])
        assert str(path) in str(told.value)
        assert words in str(told.value)
        assert "2 cell(s)" in str(told.value)
        assert "rows 20, 23; column 9;" in str(told.value)
    validate_block(source.block((0, 20)), source)


def damaged(folder, name, **changes):
    S = sparse.random_array((40, 30), density=0.2, rng=np.random.default_rng(1), format="csr")
    arrays = {"data": S.data, "indices": S.indices, "indptr": S.indptr, "shape": S.shape, "format": b"csr"}
    np.savez(folder / name, **{**arrays, **{key: change(np.array(arrays[key])) for key, change in changes.items()}})
    return folder / name


DAMAGES = {
    "indices out of range": {"indices": lambda a: np.where(np.arange(len(a)) == 50, 99, a)},
    "negative indices": {"indices": lambda a: a - 1},
    "indptr falls": {"indptr": lambda a: a[::-1].copy()},
    "indptr too long": {"indptr": lambda a: np.append(a, a[-1])},
    "indptr beyond the entries": {"indptr": lambda a: a * 2},
    "other numbers of entries": {"data": lambda a: a[:-3]},
    "broken indices": {"indices": lambda a: a.astype(float)},
    "a table of indices": {"indices": lambda a: a[: len(a) // 2 * 2].reshape(-1, 2)},
    "impossible shape": {"shape": lambda a: np.array([10**15, 30])},
    "text": {"data": lambda a: a.astype("U5")},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused_and_crash_nothing(damage, tmp_path):
    path = damaged(tmp_path, "x.npz", **DAMAGES[damage])

    def read():
        source = open_source(path)
        return [source.block(*spans) for spans in (((0, 20), None), (None, (0, 15)), ((20, 40), None))]

    with pytest.raises(PartsongError, match=r"x\.npz"):
        read()


def test_what_is_no_matrix_or_not_there_is_refused(tmp_path):
    np.save(tmp_path / "line.npy", np.ones(4))
    np.save(tmp_path / "text.npy", np.array([["a"]]))
    np.save(tmp_path / "z.npy", np.ones((3, 2), complex))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "line.npy").read_bytes()[:-9])
    with pytest.raises(ShapeError, match="1 dimension"):
        open_source(tmp_path / "line.npy")
    for name in ("text.npy", "cut.npy"):
        with pytest.raises(FormatError, match=name):
            open_source(tmp_path / name)
    with pytest.raises(FileError, match="no such file"):
        open_source(tmp_path / "nothing.npy")
    source = open_source(tmp_path / "z.npy")
    with pytest.raises(UnreadableError, match=r"z\.npy.*[Cc]omplex"):
        validate_block(source.block((0, 1)), source)
    with pytest.raises(ShapeError, match="no rows 2 to 3"):
        source.block((2, 4))


def test_a_member_that_is_not_where_the_archive_says_is_refused(tmp_path):
    path = damaged(tmp_path, "x.npz")
    with zipfile.ZipFile(path) as archive:
        at = archive.getinfo("indptr.npy").header_offset
    content = bytearray(path.read_bytes())
    content[at : at + 4] = b"none"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"x\.npz"):
        open_source(path).block((0, 5))


MEASURE = """
import resource, sys
import numpy as np, scipy.sparse
from partsong.io.blocks import open_source
name, rows, columns = sys.argv[1], *map(eval, sys.argv[2:])
warm = open_source(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
block = warm.block(rows, columns)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are counted in kilobytes on Linux")
@pytest.mark.parametrize("name", ["x.npy", "csr.npz", "csc.npz", "packed.npz"])
@pytest.mark.parametrize(("rows", "columns"), [((1000, 1500), None), (None, (1000, 1100))], ids=["rows", "columns"])
def test_a_block_takes_little_more_memory_than_it_holds(name, rows, columns, tmp_path):
    """A tenth of 128 MB or more: near the block, and far from the whole."""
    rng = np.random.default_rng(0)
    if name == "x.npy":
        np.save(tmp_path / name, rng.random((8000, 2000)))
    else:
        ends = np.arange(8001) * 1200
        indices = np.tile(np.arange(0, 2000, 2000 / 1200).astype(np.int32), 8000)
        S = sparse.csr_array((rng.random(len(indices)), indices, ends), (8000, 2000))
        sparse.save_npz(tmp_path / name, S.asformat("csc" if "csc" in name else "csr"), compressed="packed" in name)
    whole = 8000 * 2000 * 8 if name == "x.npy" else 8000 * 1200 * 12
    share = 500 / 8000 if rows else 100 / 2000
    command = [sys.executable, "-c", MEASURE, str(tmp_path / name), str(rows), str(columns)]
    source = str(partsong.__path__[0]).removesuffix("partsong")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env={"PYTHONPATH": source})
    assert done.returncode == 0, done.stderr
    slabs = 40 * 2**20
    assert float(done.stdout) < 3 * share * whole + slabs < whole
