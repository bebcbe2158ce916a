"""What is no path gets a typed error in every function that takes one."""

import os
import pathlib

import numpy as np
import pytest

import partsong
from partsong.errors import DataTypeError, FileError
from partsong.io.state_file import read_state
from partsong.io.weights import write_weights

X = np.random.default_rng(0).random((8, 5))


class BytesPath(os.PathLike):
    def __fspath__(self):
        return b"x.npy"


@pytest.fixture(scope="module")
def fitted():
    return partsong.NMF(2, random_state=0, max_iter=5, tol=0).fit(X)


@pytest.fixture(params=["read", "load", "load_model", "save", "save_model", "weights", "checkpoint"])
def takes_a_path(request, fitted, tmp_path):
    fitted.save(tmp_path / "m.safetensors")
    model = partsong.load_model(tmp_path / "m.safetensors")
    return {
        "read": partsong.read,
        "load": partsong.NMF.load,
        "load_model": partsong.load_model,
        "save": fitted.save,
        "save_model": lambda path: partsong.save_model(path, model),
        "weights": lambda path: write_weights(path, X),
        "checkpoint": lambda path: read_state(path),
    }[request.param]


NO_PATHS = [None, 3, b"x.npy", True, 2.5, ["x.npy"], BytesPath(), object()]


@pytest.mark.parametrize("path", NO_PATHS, ids=lambda path: type(path).__name__)
def test_what_is_no_path_is_told(takes_a_path, path):
    with pytest.raises(DataTypeError, match=r"path of a file must be text or a pathlib.Path, not ") as caught:
        takes_a_path(path)
    assert isinstance(caught.value, TypeError)
    assert type(path).__name__ in str(caught.value)


@pytest.mark.parametrize("path", ["", "a\0b.npy", "~nobody-of-this-name/x.npy"])
def test_paths_that_lead_nowhere(takes_a_path, path):
    with pytest.raises(FileError):
        takes_a_path(path)


def test_text_and_path_likes_are_paths(fitted, tmp_path):
    np.save(tmp_path / "x.npy", X)

    class Like(os.PathLike):
        def __init__(self, name):
            self.name = name

        def __fspath__(self):
            return str(tmp_path / self.name)

    for form in (str, pathlib.Path):
        np.testing.assert_array_equal(partsong.read(form(tmp_path / "x.npy")).X, X)
    np.testing.assert_array_equal(partsong.read(Like("x.npy")).X, X)
    fitted.save(Like("m.safetensors"))
    np.testing.assert_array_equal(partsong.NMF.load(Like("m.safetensors")).components_, fitted.components_)


@pytest.mark.parametrize("name", ["m", "m.pkl", "m.npz", "m.safetensors.gz", "m.safetensor"])
def test_a_model_file_says_what_it_is(fitted, tmp_path, name):
    with pytest.raises(FileError, match=r"must end in \.safetensors\. Save it as m.*\.safetensors"):
        fitted.save(tmp_path / name)
    federated = partsong.FederatedNMF(2, rounds=1, random_state=0).fit([X[:4], X[4:]])
    with pytest.raises(FileError, match="safetensors"):
        federated.save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_renamed_model_file_can_be_read(fitted, tmp_path):
    fitted.save(tmp_path / "M.SAFETENSORS")
    (tmp_path / "M.SAFETENSORS").rename(tmp_path / "model")
    np.testing.assert_array_equal(partsong.NMF.load(tmp_path / "model").components_, fitted.components_)


@pytest.mark.parametrize(("name", "value"), [("label", 3), ("key", b"X"), ("header", "yes"), ("header", 1)])
def test_settings_of_another_kind_are_told(tmp_path, name, value):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataTypeError, match=f"{name} must be"):
        partsong.read(tmp_path / "x.csv", **{name: value})
