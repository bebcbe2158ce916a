"""Matrix Market files, and 10x folders turned so that samples are in rows."""

import gzip

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import io, sparse

from partsong.errors import FileError, FormatError, ParameterError
from partsong.io.read import read

S = sparse.random(5, 3, 0.5, random_state=0, format="csr")
GENES = ["id0\tA\tGene Expression", "id1\tB\tGene Expression", "id2\tC\tGene Expression"]


def tenx(folder, matrix, genes=GENES, barcodes=("c0", "c1", "c2", "c3", "c4"), gz="", prefix="", genes_file="features"):
    folder.mkdir(exist_ok=True)

    def put(name, raw):
        (folder / f"{prefix}{name}{gz}").write_bytes(gzip.compress(raw) if gz else raw)

    io.mmwrite(folder / "scratch.mtx", matrix)
    put("matrix.mtx", (folder / "scratch.mtx").read_bytes())
    (folder / "scratch.mtx").unlink()
    if genes is not None:
        put(f"{genes_file}.tsv", "\n".join(genes).encode())
    if barcodes is not None:
        put("barcodes.tsv", "\n".join(barcodes).encode())
    return folder


@given(data=st.data(), form=st.sampled_from(["real", "integer", "pattern"]), symmetric=st.booleans())
@settings(max_examples=40, deadline=None)
def test_what_scipy_writes_is_read(tmp_path_factory, data, form, symmetric):
    n_rows = data.draw(st.integers(1, 6))
    n_columns = n_rows if symmetric else data.draw(st.integers(1, 6))
    cells = st.lists(st.integers(0, 3), min_size=n_rows * n_columns, max_size=n_rows * n_columns)
    dense = np.array(data.draw(cells)).reshape(n_rows, n_columns)
    dense = dense + dense.T if symmetric else dense
    path = tmp_path_factory.mktemp("mtx") / "m.mtx"
    kind = int if form == "integer" else float
    io.mmwrite(path, sparse.csr_array(dense.astype(kind)), field=form, symmetry="symmetric" if symmetric else "general")
    X = read(path).X
    assert X.format == "csr"
    np.testing.assert_array_equal(X.toarray(), dense != 0 if form == "pattern" else dense)


def test_dense_files(tmp_path):
    dense = np.arange(6.0).reshape(2, 3)
    io.mmwrite(tmp_path / "d.mtx", dense)
    np.testing.assert_array_equal(read(tmp_path / "d.mtx").X.toarray(), dense)
    np.testing.assert_array_equal(read(tmp_path / "d.mtx", transpose=True).X.toarray(), dense.T)


def test_a_comment_in_latin_1(tmp_path):
    (tmp_path / "m.mtx").write_bytes(b"%%MatrixMarket matrix coordinate real general\n% M\xfcller\n\n1 2 1\n1 2 4.5\n")
    assert read(tmp_path / "m.mtx").X.toarray().tolist() == [[0, 4.5]]


@pytest.mark.parametrize("gz", ["", ".gz"])
@pytest.mark.parametrize("genes_file", ["features", "genes"])
def test_10x_folders_are_turned(tmp_path, gz, genes_file):
    folder = tenx(tmp_path / "run", S.T, gz=gz, genes_file=genes_file)
    for path in (folder, folder / f"matrix.mtx{gz}"):
        for transpose in (False, True):
            table = read(path, transpose=transpose)
            np.testing.assert_array_equal(table.X.toarray(), S.toarray())
            assert (table.feature_names, table.sample_names) == (("A", "B", "C"), ("c0", "c1", "c2", "c3", "c4"))


def test_samples_in_rows_stay_there(tmp_path):
    folder = tenx(tmp_path / "run", S)
    assert read(folder).X.shape == (5, 3)
    with pytest.raises(ParameterError, match="Remove transpose"):
        read(folder, transpose=True)


def test_a_square_matrix_is_turned_as_10x_has_it(tmp_path):
    square = sparse.csr_array(np.arange(9.0).reshape(3, 3))
    assert read(tenx(tmp_path / "run", square, barcodes="abc")).X.toarray().tolist() == square.T.toarray().tolist()


def test_names_with_a_prefix(tmp_path):
    folder = tenx(tmp_path / "geo", S.T, prefix="GSM1_", gz=".gz")
    assert read(folder / "GSM1_matrix.mtx.gz").feature_names == ("A", "B", "C")


def test_symbols_that_repeat_give_way_to_identifiers(tmp_path):
    folder = tenx(tmp_path / "run", S.T, genes=["id0\tA", "id1\tA", "id2\tC"])
    assert read(folder).feature_names == ("id0", "id1", "id2")


@pytest.mark.parametrize(("genes", "barcodes"), [(None, ["c0", "c1", "c2", "c3", "c4"]), (GENES, None)])
def test_one_file_of_names_is_enough(tmp_path, genes, barcodes):
    assert read(tenx(tmp_path / "run", S.T, genes=genes, barcodes=barcodes)).X.shape == (5, 3)


def test_names_of_another_length(tmp_path):
    with pytest.raises(FormatError, match=r"5 x 3.*2 features and 5 barcodes"):
        read(tenx(tmp_path / "run", S, genes=GENES[:2]))


def test_a_folder_of_something_else(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FileError, match=r"notes\.txt"):
        read(tmp_path)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "hello\n",
        "%%MatrixMarket matrix coordinate real general\n",
        "%%MatrixMarket matrix coordinate real general\n2 2\n",
        "%%MatrixMarket matrix coordinate real general\n2 2 1000000000000\n1 1 1\n",
        "%%MatrixMarket matrix coordinate real general\n1000000000000 2 1\n1 1 1\n",
        "%%MatrixMarket matrix coordinate real general\n2 2 2\n1 1 1\n",
        "%%MatrixMarket matrix coordinate real general\n2 2 1\n1 1 1\n2 2 1\n",
        "%%MatrixMarket matrix coordinate real general\n2 2 0\n1 1 1\n",
        "%%MatrixMarket matrix coordinate real general\n2 2 1\n3 1 1\n",
        "%%MatrixMarket matrix coordinate real general\n2 2 1\n0 1 1\n",
        "%%MatrixMarket matrix coordinate real general\n2 2 1\n99999999999999999999 1 1\n",
        "%%MatrixMarket matrix coordinate real general\n2 2 1\n1 1\n",
        "%%MatrixMarket matrix coordinate real general\n2 2 1\n1 1 x\n",
        "%%MatrixMarket matrix coordinate complex general\n2 2 1\n1 1 1 1\n",
        "%%MatrixMarket matrix coordinate real skew-symmetric\n2 2 1\n2 1 1\n",
        "%%MatrixMarket matrix array real general\n2 2\n1\n2\n3\n",
        "%%MatrixMarket matrix array real general\n2 2\n1 2\n3 4\n",
        "%%MatrixMarket matrix array real general\n1000000 1000000\n1\n",
    ],
)
def test_files_that_are_not_what_they_say(tmp_path, body):
    (tmp_path / "m.mtx").write_text(body)
    with pytest.raises(FormatError, match=r"m\.mtx"):
        read(tmp_path / "m.mtx")


def test_labels_and_keys_are_refused(tmp_path):
    io.mmwrite(tmp_path / "m.mtx", S)
    for wish in ({"label": "y"}, {"key": "X"}):
        with pytest.raises(ParameterError):
            read(tmp_path / "m.mtx", **wish)
