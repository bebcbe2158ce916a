"""Parquet and .h5ad: names, labels, and what cannot be used."""

import decimal
import sys

import numpy as np
import pytest
from scipy import sparse

from partsong.errors import FeatureError, FormatError, MissingExtra, ParameterError
from partsong.io.read import read

pandas = pytest.importorskip("pandas")


@pytest.fixture
def frame():
    return pandas.DataFrame({"a": [1.0, 2.0], "b": [3, 4], "flag": [True, False]})


class TestParquet:
    @pytest.fixture(autouse=True)
    def _needs_pyarrow(self):
        pytest.importorskip("pyarrow")

    def test_numeric_columns_are_features(self, tmp_path, frame):
        frame.to_parquet(tmp_path / "t.parquet")
        table = read(tmp_path / "t.parquet")
        assert table.X.tolist() == [[1, 3, 1], [2, 4, 0]]
        assert (table.feature_names, table.sample_names, table.labels) == (("a", "b", "flag"), None, None)

    def test_float32_is_kept_and_decimals_and_nulls_become_floats(self, tmp_path, frame):
        frame[["a"]].astype(np.float32).to_parquet(tmp_path / "t.parquet")
        assert read(tmp_path / "t.parquet").X.dtype == np.float32
        odd = pandas.DataFrame(
            {"d": [decimal.Decimal("1.5"), decimal.Decimal("2.5")], "n": [1, None], "f": [True, None]}
        )
        odd.to_parquet(tmp_path / "o.parquet")
        np.testing.assert_array_equal(read(tmp_path / "o.parquet").X, [[1.5, 1, 1], [2.5, np.nan, np.nan]])

    @pytest.mark.parametrize("as_index", [False, True])
    def test_a_text_column_names_the_samples(self, tmp_path, frame, as_index):
        frame.insert(0, "id", ["r", "s"])
        frame["kind"] = pandas.Categorical(["x", "y"])
        (frame.set_index("id") if as_index else frame).to_parquet(tmp_path / "t.parquet")
        table = read(tmp_path / "t.parquet", label="kind")
        assert (table.feature_names, table.sample_names) == (("a", "b", "flag"), ("r", "s"))
        assert table.labels.tolist() == ["x", "y"]

    def test_a_numeric_index_is_no_feature(self, tmp_path, frame):
        frame.index = pandas.Index([7, 9])
        frame.to_parquet(tmp_path / "t.parquet")
        table = read(tmp_path / "t.parquet", label="b")
        assert (table.feature_names, table.sample_names, table.labels.tolist()) == (("a", "flag"), ("7", "9"), [3, 4])

    def test_transpose(self, tmp_path, frame):
        frame.insert(0, "gene", ["g", "h"])
        frame.to_parquet(tmp_path / "t.parquet")
        table = read(tmp_path / "t.parquet", transpose=True)
        assert (table.feature_names, table.sample_names, table.X.shape) == (("g", "h"), ("a", "b", "flag"), (3, 2))

    def test_columns_that_cannot_be_used(self, tmp_path, frame):
        frame["s"], frame["t"] = ["x", "y"], ["x", "y"]
        frame.to_parquet(tmp_path / "t.parquet")
        with pytest.raises(FormatError, match=r"columns 's' .*'t'.*as label"):
            read(tmp_path / "t.parquet")
        with pytest.raises(FeatureError, match="label='z'"):
            read(tmp_path / "t.parquet", label="z")
        pandas.DataFrame({"a": [1.0], "when": [pandas.Timestamp(0)]}).to_parquet(tmp_path / "w.parquet")
        with pytest.raises(FormatError, match="timestamp"):
            read(tmp_path / "w.parquet")


class TestH5ad:
    @pytest.fixture
    def anndata(self):
        pytest.importorskip("h5py")
        return pytest.importorskip("anndata")

    def write(self, anndata, path, X, **parts):
        obs = pandas.DataFrame({"site": pandas.Categorical(["p", "q", "p"]), "age": [3, 4, 5]}, index=["r", "s", "t"])
        anndata.AnnData(X=X, obs=obs, var=pandas.DataFrame(index=["a", "b"]), **parts).write_h5ad(path)
        return path

    @pytest.mark.parametrize("form", [np.asarray, sparse.csr_matrix, sparse.csc_matrix, sparse.csr_array])
    def test_x_and_names(self, anndata, tmp_path, form):
        X = np.array([[1, 0], [0, 2], [3, 0]], dtype=np.float32)
        table = read(self.write(anndata, tmp_path / "t.h5ad", form(X)), label="site")
        held = table.X.toarray() if sparse.issparse(table.X) else table.X
        np.testing.assert_array_equal(held, X)
        assert held.dtype == np.float32
        assert not sparse.issparse(table.X) or table.X.format == "csr"
        assert (table.feature_names, table.sample_names) == (("a", "b"), ("r", "s", "t"))
        assert table.labels.tolist() == ["p", "q", "p"]

    def test_layers_and_transpose(self, anndata, tmp_path):
        X = np.ones((3, 2))
        path = self.write(anndata, tmp_path / "t.h5ad", X, layers={"counts": sparse.csr_matrix(X * 5)})
        assert read(path, key="counts").X.sum() == 30
        assert read(path, key="counts", transpose=True).X.format == "csr"
        assert read(path, transpose=True).feature_names == ("r", "s", "t")
        with pytest.raises(ParameterError, match="'counts'"):
            read(path, key="absent")
        with pytest.raises(ParameterError, match="transpose"):
            read(path, label="age", transpose=True)
        with pytest.raises(FeatureError, match="'site', 'age'"):
            read(path, label="absent")

    def test_links_out_of_the_file_are_refused(self, anndata, tmp_path):
        import h5py

        other = self.write(anndata, tmp_path / "other.h5ad", np.ones((3, 2)))
        path = self.write(anndata, tmp_path / "t.h5ad", np.ones((3, 2)))
        with h5py.File(path, "a") as file:
            del file["X"]
            file["X"] = h5py.ExternalLink(str(other), "X")
        with pytest.raises(FormatError, match="links to another file"):
            read(path)

    def test_sizes_beyond_the_file_are_refused(self, anndata, tmp_path):
        import h5py

        path = self.write(anndata, tmp_path / "t.h5ad", np.ones((3, 2)))
        with h5py.File(path, "a") as file:
            attributes = dict(file["X"].attrs)
            del file["X"]
            file.create_dataset("X", shape=(2**40, 2), chunks=(1, 2), dtype="f8").attrs.update(attributes)
        with pytest.raises(FormatError, match="claims"):
            read(path)


@pytest.mark.parametrize(
    ("name", "package"), [("t.parquet", "pyarrow.parquet"), ("t.h5ad", "h5py"), ("t.h5ad", "anndata.io")]
)
def test_missing_packages_are_named_with_their_extra(tmp_path, monkeypatch, name, package):
    (tmp_path / name).touch()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=r'pip install "partsong\[io\]"'):
        read(tmp_path / name)
