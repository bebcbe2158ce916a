"""Weights: what is written is read back, and a failure leaves the old file alone."""

import csv
import os
import stat

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import sparse

from partsong.errors import DataTypeError, FeatureError, FileError, PartsongError, ShapeError
from partsong.io import weights
from partsong.io.read import read
from partsong.io.weights import write_weights
from partsong.io.write import atomic_write, first_formula

ENDINGS = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".npy", ".parquet", ".h5ad")
every_ending = pytest.mark.parametrize("ending", ENDINGS)
W = np.random.default_rng(0).random((3, 2))


@pytest.fixture(autouse=True)
def _needs_packages(request):
    ending = request.node.callspec.params.get("ending") if hasattr(request.node, "callspec") else None
    if ending == ".parquet":
        pytest.importorskip("pyarrow")
    if ending == ".h5ad":
        pytest.importorskip("anndata")


@pytest.mark.parametrize("name", ["=1+1", "+cmd", "-2+3", "@SUM(A1)", "\t=1", "\r=1"])
def test_formulas_are_found_and_never_changed(tmp_path, name):
    assert first_formula(["a", name, "=other"]) == name
    write_weights(tmp_path / "W.csv", W, sample_names=["a", name, "b"])
    with (tmp_path / "W.csv").open(newline="") as stream:
        assert [row[0] for row in csv.reader(stream)] == ["sample", "a", name, "b"]


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".csv.gz"])
@pytest.mark.parametrize("name", ["a\rb", "a\nb", "a\r\nb", 'a"\r,\tb'])
def test_line_breaks_in_names_stay_in_names(tmp_path, ending, name):
    path = tmp_path / f"W{ending}"
    write_weights(path, W, sample_names=["x", name, "y"])
    table = read(path)
    assert table.sample_names == ("x", name, "y")
    np.testing.assert_array_equal(table.X, W)


def test_other_names_are_no_formulas():
    assert first_formula(["a=b", "1-2", "x@y", "-3", "+1e5", "-inf", ""]) is None


@every_ending
@pytest.mark.parametrize("named", [True, False])
def test_round_trip(tmp_path, ending, named):
    path = tmp_path / f"W{ending}"
    write_weights(path, W, sample_names=["r", "s, x", 't "y"'] if named else None)
    table = read(path)
    np.testing.assert_array_equal(table.X, W)
    if ending != ".npy":
        assert table.feature_names == ("component_1", "component_2")
        assert table.sample_names == (
            ("r", "s, x", 't "y"') if named else ("0", "1", "2") if ending == ".h5ad" else None
        )


@given(
    W=hnp.arrays(
        st.sampled_from([np.float32, np.float64]),
        st.tuples(st.integers(1, 4), st.integers(1, 3)),
        elements=st.floats(0, 2.0**100, width=32),
    )
)
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("ending", [".csv", ".tsv.gz", ".npy", ".parquet"])
def test_every_digit_survives(tmp_path_factory, ending, W):
    path = tmp_path_factory.mktemp("weights") / f"W{ending}"
    write_weights(path, W)
    np.testing.assert_array_equal(read(path).X.astype(W.dtype), W)


@pytest.mark.parametrize("ending", [".csv", ".tsv.gz", ".h5ad"])
def test_names_that_look_like_numbers_stay_names(tmp_path, ending):
    write_weights(tmp_path / f"W{ending}", W, sample_names=["1", "2", "3"])
    assert read(tmp_path / f"W{ending}").sample_names == ("1", "2", "3")


def test_equal_weights_are_equal_bytes(tmp_path):
    for name in ("a", "b"):
        write_weights(tmp_path / f"{name}.csv.gz", W)
    assert (tmp_path / "a.csv.gz").read_bytes() == (tmp_path / "b.csv.gz").read_bytes()


@every_ending
def test_a_failure_leaves_the_old_file(tmp_path, ending, monkeypatch):
    path = tmp_path / f"W{ending}"
    path.write_bytes(b"old")
    writer = weights._WRITERS[ending]

    def fail_late(draft, content):
        writer(draft, content)
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(weights._WRITERS, ending, fail_late)
    with pytest.raises(FileError, match="No space left"):
        write_weights(path, W)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == [path.name]


def test_an_interrupt_leaves_the_old_file(tmp_path):
    path = tmp_path / "W.csv"
    path.write_text("old")

    def write_and_stop():
        with atomic_write(path) as draft:
            draft.write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_stop()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["W.csv"]


def test_permissions_and_links_are_kept(tmp_path):
    path, link = tmp_path / "W.csv", tmp_path / "link.csv"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    write_weights(link, W)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert read(path).X.shape == (3, 2)


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("W.xlsx", (W,), FileError),
        ("absent/W.csv", (W,), FileError),
        ("W.csv", (W[0],), ShapeError),
        ("W.csv", (sparse.csr_array(W),), DataTypeError),
        ("W.csv", (W, ["a"]), ShapeError),
        ("W.csv", (W, None, ["a"]), ShapeError),
        ("W.csv", (W, None, ["a", "a"]), FeatureError),
    ],
)
def test_what_cannot_be_written(tmp_path, name, arguments, error):
    with pytest.raises(error) as caught:
        write_weights(tmp_path / name, *arguments)
    assert isinstance(caught.value, PartsongError)
    assert os.listdir(tmp_path) == []
