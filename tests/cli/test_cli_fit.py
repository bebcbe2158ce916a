import csv
import json

import numpy as np
import pytest
from scipy import sparse

import partsong
from partsong.cli import fit_options
from partsong.console import options
from partsong.io import weights
from partsong.io.write import as_json
from partsong.solvers.update_rules import RULES
from partsong.training.centralized import INITS

CONTRACT = {
    "model", "method", "n_components", "shape", "parties", "dtype", "seed", "outcome", "iterations", "seconds",
    "relative_error", "explained_variance", "bytes_up_per_party", "bytes_down_per_party", "left_out", "weights",
    "run_folder", "checkpoint", "resumed_from",
}  # fmt: skip


def test_names_on_the_command_line_are_those_of_the_library():
    assert (*RULES.values, "game") == fit_options.SOLVERS
    assert fit_options.INITS == INITS
    assert set(options.WEIGHT_ENDINGS) == set(weights._WRITERS)


def test_json_contract(told, data_npy):
    said = told("fit", data_npy, "-k", 3, "-o", "m.safetensors", "--seed", 5)
    assert set(said) == CONTRACT
    assert said["shape"] == [45, 12]
    assert said["seed"] == 5
    assert said["method"] == "centralised"
    assert said["bytes_up_per_party"] == 0
    assert 0 < said["relative_error"] < 0.1
    assert said["explained_variance"] == pytest.approx(1 - said["relative_error"] ** 2)


def test_json_holds_no_nan():
    assert as_json({"a": [float("nan"), np.float32("inf"), np.int64(3)]}) == {"a": [None, None, 3]}


@pytest.mark.parametrize("solver", fit_options.SOLVERS[:-1])
def test_same_bits_as_the_estimator(invoke, data_npy, X, solver):
    options = ["--alpha-w", 0.01, "--l1-ratio", 0.5, "--max-iter", 7, "--init", "random", "--threads", 2]
    invoke("fit", data_npy, "-k", 3, "-o", "m.safetensors", "--seed", 5, "--solver", solver, *options)
    estimator = partsong.NMF(
        3, solver=solver, alpha_W=0.01, l1_ratio=0.5, max_iter=7, init="random", random_state=5, n_threads=2
    ).fit(X)
    model = partsong.load_model("m.safetensors")
    np.testing.assert_array_equal(model.components, estimator.components_)
    assert model.relative_error == estimator.relative_error_


def test_weights_and_names(invoke, data_csv, X):
    invoke("fit", data_csv, "-k", 3, "-o", "m.safetensors", "--label", "site", "--seed", 1, "--weights", "W.csv")
    table = partsong.read("W.csv")
    assert table.sample_names[:2] == ("patient-0", "patient-1")
    model = partsong.load_model("m.safetensors")
    assert np.linalg.norm(X - table.X @ model.components) < 0.1 * np.linalg.norm(X)
    assert model.feature_names[0] == "gene 0"


def test_model_files_hold_neither_weights_nor_sample_names(invoke, data_csv, tmp_path):
    invoke("fit", data_csv, "-k", 3, "-o", "m.safetensors", "--label", "site", "--run-folder", "run")
    content = (tmp_path / "m.safetensors").read_bytes()
    assert b"patient" not in content
    assert str(tmp_path).encode() not in content
    assert (tmp_path / "run" / "model.safetensors").stat().st_size == len(content)
    assert len(content) < 8 * 3 * 12 + 8 * 3 + 4000  # H, shares, description: no room for 45 rows of W twice over
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "settings.json", "versions.json", "history.csv", "bytes.csv", "result.json", "model.safetensors",
    }  # fmt: skip


def test_run_folder(told, data_npy, tmp_path):
    said = told("fit", data_npy, "-k", 3, "--run-folder", "run", "--threads", 1)
    folder = tmp_path / "run"
    assert said["model"] == "run/model.safetensors"
    assert json.loads((folder / "result.json").read_text()) == said
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["seed"] == said["seed"]
    assert settings["solver"] == "hals"
    versions = json.loads((folder / "versions.json").read_text())
    wanted = {"python", "partsong", "numpy", "scipy", "numba", "sklearn", "platform", "cpu_count", "threads"}
    assert set(versions) == wanted
    rows = list(csv.DictReader((folder / "history.csv").read_text().splitlines()))
    assert len(rows) == said["iterations"]
    assert float(rows[-1]["relative_error"]) < float(rows[0]["relative_error"])


def test_run_folder_is_not_overwritten_by_accident(invoke, data_npy, tmp_path):
    invoke("fit", data_npy, "-k", 2, "--run-folder", "run")
    (tmp_path / "run" / "mine.txt").write_text("keep")
    result = invoke("fit", data_npy, "--run-folder", "run", code=1)
    assert "--run-folder 'run' is not empty" in result.stderr
    invoke("fit", data_npy, "-k", 3, "--run-folder", "run", "--overwrite")
    assert (tmp_path / "run" / "mine.txt").read_text() == "keep"
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["n_components"] == 3


@pytest.mark.parametrize(
    "others",
    [
        {"mine.txt": "keep"},
        {"history.csv": "mine"},
        {"settings.json": "{}", "versions.json": "{}", "history.csv": "mine"},
        {"settings.json": '{"method": 1, "started": 2}', "result.json": "mine"},
        {"settings.json": "[]", "versions.json": '["partsong"]'},
    ],
)
def test_a_folder_that_holds_no_run_of_ours_is_never_overwritten(invoke, data_npy, tmp_path, others):
    (tmp_path / "run").mkdir()
    for name, text in others.items():
        (tmp_path / "run" / name).write_text(text)
    for words in ([], ["--overwrite"]):
        assert "not those of a run" in invoke("fit", data_npy, "--run-folder", "run", *words, code=1).stderr
        assert {path.name: path.read_text() for path in (tmp_path / "run").iterdir()} == others


def test_files_of_the_run_are_not_data_or_weights(invoke, data_npy, tmp_path):
    invoke("fit", data_npy, "-k", 2, "--run-folder", "run")
    before = (tmp_path / "run/history.csv").read_bytes()
    invoke("fit", "run/history.csv", "-k", 2, "--run-folder", "run", "--overwrite", code=2)
    invoke("fit", data_npy, "-k", 2, "--run-folder", "run", "--overwrite", "--weights", "run/bytes.csv", code=2)
    assert (tmp_path / "run/history.csv").read_bytes() == before
    invoke("fit", data_npy, "-k", 2, "--run-folder", "new", "--weights", "new/W.csv", "-o", "new/model.safetensors")


def test_a_fresh_seed_is_told_and_repeats_the_fit(told, data_npy):
    said = told("fit", data_npy, "-k", 3, "-o", "a.safetensors", "--init", "random")
    told("fit", data_npy, "-k", 3, "-o", "b.safetensors", "--init", "random", "--seed", said["seed"])
    a, b = partsong.load_model("a.safetensors"), partsong.load_model("b.safetensors")
    np.testing.assert_array_equal(a.components, b.components)
    assert a.seed == said["seed"]


def test_equal_fits_are_equal_files_at_a_given_time(invoke, data_npy, tmp_path, monkeypatch):
    for name, epoch in (("a", "1700000000"), ("b", "1700000000"), ("c", "1700000001")):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
        invoke("fit", data_npy, "-k", 2, "--seed", 1, "-o", f"{name}.safetensors", "-q")
    a, b, c = ((tmp_path / f"{name}.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c
    assert partsong.load_model("a.safetensors").created == "2023-11-14T22:13:20+00:00"


def test_summary_and_quiet(invoke, data_npy):
    shown = invoke("fit", data_npy, "-k", 3, "-o", "m.safetensors", "--seed", 77).stdout
    assert "77" in shown
    assert "m.safetensors" in shown
    assert invoke("fit", data_npy, "-k", 3, "-o", "m.safetensors", "-q").output == ""


def test_number_types(told, data_npy):
    assert told("fit", data_npy, "-k", 2, "-o", "m.safetensors", "--dtype", "float32")["dtype"] == "float32"
    assert partsong.load_model("m.safetensors").components.dtype == np.float32


def test_sparse_data(told, X, tmp_path):
    sparse.save_npz(tmp_path / "s.npz", sparse.csr_array(np.where(X > 1, X, 0)))
    assert told("fit", "s.npz", "-k", 2, "-o", "m.safetensors")["shape"] == [45, 12]


def test_time_budget(told, data_npy):
    said = told("fit", data_npy, "-k", 3, "-o", "m.safetensors", "--tol", 0, "--max-iter", 10**7, "--time-budget", 0.2)
    assert said["outcome"] == "time-limit"


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["--solver", "halls"], "hals"),
        (["--init", "nnsvd"], "nndsvd"),
        (["--dtype", "float46"], "float64"),
    ],
)
def test_unknown_names_are_usage_errors_with_the_nearest_name(invoke, data_npy, words, nearest):
    result = invoke("fit", data_npy, "-o", "m.safetensors", *words, code=2)
    assert f"Did you mean '{nearest}'" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["-o", "m.safetensors", "-k", 0],
        ["-o", "m.safetensors", "-k", "many"],
        ["-o", "m.safetensors", "--tol", "nan"],
        ["-o", "m.safetensors", "--l1-ratio", 2],
        ["-o", "m.safetensors", "--method", "exact"],
        ["-o", "m.safetensors", "--record"],
        ["-o", "m.safetensors", "--unheard-of"],
    ],
)
def test_usage_errors(invoke, data_npy, words):
    invoke("fit", data_npy, *words, code=2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "none/m.safetensors"], "no folder"),
        (["-o", "m.safetensors", "--weights", "none/W.csv"], "no folder"),
        (["-o", "m.safetensors", "--checkpoint", "none/c"], "no folder"),
        (["-o", "m.safetensors", "--run-folder", "data.npy"], "is a file"),
        (["-o", "m.safetensors", "--run-folder", "a/b/c"], "no folder"),
        (["-o", "m.safetensors", "-k", 10**6], "--components 1000000 is far more"),
        (["-o", "m.safetensors", "--resume", "none.ckpt"], "no such file"),
        (["-o", "m.safetensors", "--resume", "data.npy"], "data.npy"),
    ],
)
def test_plain_errors(invoke, data_npy, tmp_path, words, said):
    result = invoke("fit", data_npy, *words, code=1)
    assert said in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.output
    assert not (tmp_path / "m.safetensors").exists()


def test_output_is_checked_before_the_data_are_read(invoke):
    assert "no folder" in invoke("fit", "missing.npy", "-o", "none/m.safetensors", code=1).stderr


def test_bad_data_are_named(invoke, tmp_path, X):
    X[3, 4] = -1
    np.save(tmp_path / "bad.npy", X)
    message = invoke("fit", "bad.npy", "-o", "m.safetensors", code=1).stderr
    assert "bad.npy" in message
    assert "Negative" in message
    assert "row 3" in message


def test_a_model_of_nothing_is_told(told, invoke, data_npy):
    result = invoke("fit", data_npy, "-k", 2, "-o", "m.safetensors", "--alpha-w", 1e10, "-q")
    assert result.stderr.startswith("Warning: The model is zero")
    assert "alpha_W" in result.stderr
    assert invoke("fit", data_npy, "-k", 2, "-o", "m.safetensors", "-q").stderr == ""


def test_debug_shows_where_an_error_comes_from(invoke):
    assert "Traceback" in invoke("--debug", "fit", "missing.npy", "-o", "m.safetensors", code=1).stderr
    assert "Traceback" not in invoke("fit", "missing.npy", "-o", "m.safetensors", code=1).stderr


def test_a_folder_of_neither_kind(invoke, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "neither" in invoke("fit", "empty", "-o", "m.safetensors", code=1).stderr
