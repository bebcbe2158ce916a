"""Names that are numbers: --header and --no-header wherever a text file is read, and a word where it was a guess."""

import json

import numpy as np
import pytest

import partsong

YEARS = tuple(str(1990 + j) for j in range(6))


@pytest.fixture
def years(tmp_path):
    X = np.random.default_rng(3).integers(0, 50, (30, 6))
    lines = [",".join(YEARS), *(",".join(map(str, row)) for row in X.tolist())]
    (tmp_path / "years.csv").write_text("\n".join(lines) + "\n")
    return X


def test_fit_transform_and_split_take_the_years_for_names(told, invoke, years, tmp_path):
    said = told("fit", "years.csv", "--header", "-k", 2, "--run-folder", "run", "--weights", "W.npy")
    assert said["shape"] == [30, 6]
    assert json.loads((tmp_path / "run/settings.json").read_text())["header"] is True
    assert partsong.load_model("run/model.safetensors").feature_names == YEARS
    invoke("transform", "years.csv", "run/model.safetensors", "--header", "-o", "V.npy")
    np.testing.assert_array_equal(np.load("V.npy"), np.load("W.npy"))
    invoke("transform", "years.csv", "run/model.safetensors", "-o", "U.npy")  # the model knows these names
    np.testing.assert_array_equal(np.load("U.npy"), np.load("W.npy"))
    said = told("split", "years.csv", "--header", "-p", 2, "-o", "parts")
    assert (said["header"], said["n_samples"]) == (True, 30)
    assert partsong.read("parts/party-01.npz").feature_names == YEARS


def test_without_a_header_they_are_data(told, years, tmp_path):
    said = told("fit", "years.csv", "--no-header", "-k", 2, "--run-folder", "run")
    assert said["shape"] == [31, 6]
    assert json.loads((tmp_path / "run/settings.json").read_text())["header"] is False
    assert told("split", "years.csv", "--no-header", "-p", 2, "-o", "parts")["n_samples"] == 31


def test_a_guess_is_told(told, invoke, years):
    (note,) = (finding for finding in told("check", "years.csv")["findings"] if finding["kind"] == "header-or-data")
    assert note["severity"] == "note"
    assert "1990, 1991, 1992" in note["message"]
    assert "header is true" in note["remedy"]
    for words in (["fit", "years.csv", "-k", 2, "-o", "m.safetensors"], ["split", "years.csv", "-p", 2, "-o", "parts"]):
        assert "may be a header" in invoke(*words).stderr
    assert "may be a header" in invoke("transform", "years.csv", "m.safetensors", "-o", "W.npy").stderr


@pytest.mark.parametrize("how", ["--header", "--no-header"])
def test_what_was_said_is_not_told(told, invoke, years, how):
    assert [f["kind"] for f in told("check", "years.csv", how)["findings"]].count("header-or-data") == 0
    assert invoke("fit", "years.csv", how, "-k", 2, "-o", "m.safetensors", "-q").stderr == ""


def test_arrays_have_no_first_line(told, tmp_path):
    X = np.random.default_rng(3).integers(0, 50, (30, 6))
    np.save(tmp_path / "x.npy", np.vstack([np.arange(1990, 1996), X]))
    assert told("check", "x.npy")["findings"] == []


def test_years_over_columns_of_samples(told, years, tmp_path):
    rows = (tmp_path / "years.csv").read_text()
    (tmp_path / "turned.csv").write_text(rows)
    assert told("check", "turned.csv", "--transpose")["findings"][-1]["kind"] == "header-or-data"
    assert told("check", "turned.csv", "--transpose", "--header")["summary"]["shape"] == [6, 30]


def test_a_resumed_run_has_to_read_alike(told, years, invoke):
    words = ["fit", "years.csv", "-k", 2, "-o", "m.safetensors", "--seed", 1, "--max-iter", 5, "--tol", 0]
    told(*words, "--header", "--checkpoint", "c.ckpt")
    assert "shape" in invoke(*words, "--no-header", "--resume", "c.ckpt", code=1).stderr
