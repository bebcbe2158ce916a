import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import partsong
from partsong.cli.parts_folder import read_parts


@pytest.mark.parametrize("method", ["exact", "fedavg"])
def test_same_bits_as_the_estimator(told, parts, method):
    said = told("fit", parts, "-k", 3, "-o", "m.safetensors", "--seed", 2, "--method", method, "--rounds", 6)
    tables = read_parts(parts)
    estimator = partsong.FederatedNMF(3, method=method, rounds=6, random_state=2)
    estimator.fit([table.X for table in tables.values()], names=list(tables))
    np.testing.assert_array_equal(partsong.load_model("m.safetensors").components, estimator.components_)
    assert said["parties"] == 3
    assert said["shape"] == [45, 12]
    assert said["bytes_up_per_party"] == sum(row.bytes_up for row in estimator.history_) / 3
    assert said["bytes_down_per_party"] == sum(row.bytes_down for row in estimator.history_)


def test_engines_give_the_same_bits(told, parts):
    for engine in ("sequential", "parallel"):
        told("fit", parts, "-k", 3, "-o", f"{engine}.safetensors", "--seed", 2, "--engine", engine, "--rounds", 5)
    a, b = (partsong.load_model(f"{engine}.safetensors") for engine in ("sequential", "parallel"))
    np.testing.assert_array_equal(a.components, b.components)


def test_the_model_knows_names_but_no_samples(told, parts, names, tmp_path):
    told("fit", parts, "-k", 3, "-o", "m.safetensors", "--rounds", 3)
    model = partsong.load_model("m.safetensors")
    assert model.feature_names == names
    assert model.settings["method"] == "exact"
    assert b"patient" not in (tmp_path / "m.safetensors").read_bytes()


def test_local_only_has_one_round(told, invoke, parts):
    words = ["fit", parts, "-k", 3, "-o", "m.safetensors", "--method", "local-only"]
    assert told(*words)["iterations"] == 1
    invoke(*words, "--rounds", 5, code=2)


def test_traffic_is_recorded(told, parts, tmp_path):
    said = told("fit", parts, "-k", 3, "--run-folder", "run", "--record", "--rounds", 2, "--tol", 0)
    lines = [json.loads(line) for line in (tmp_path / "run/traffic.jsonl").read_text().splitlines()]
    assert [(line["round"], line["party"], line["phase"]) for line in lines] == [
        (index, f"party-0{party}", 0) for index in (1, 2) for party in (1, 2, 3)
    ]
    assert sum(line["bytes"] for line in lines) == 3 * said["bytes_up_per_party"]
    assert {entry["name"] for entry in lines[0]["arrays"]} == {"gram", "cross", "totals"}
    arrays = load_file(tmp_path / "run/traffic/round-0001.safetensors")
    for line in lines[:3]:
        for entry in line["arrays"]:
            sent = arrays[f"{line['party']}/0/{entry['name']}"]
            assert list(sent.shape) == entry["shape"]
            assert str(sent.dtype) == entry["dtype"]
            assert sent.nbytes == entry["bytes"]
    told("fit", parts, "-k", 3, "--run-folder", "run", "--rounds", 2, "--overwrite")
    assert not list((tmp_path / "run").glob("traffic*/*"))


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--solver", "mu"], "single file"),
        (["--max-iter", 5], "--rounds"),
        (["--weights", "W.csv"], "transform"),
        (["--label", "site"], "single file"),
        (["--method", "exac"], "Did you mean 'exact'"),
        (["--record"], "--run-folder"),
    ],
)
def test_options_that_mean_nothing_here(invoke, parts, words, hint):
    result = invoke("fit", parts, "-o", "m.safetensors", *words, code=2)
    assert hint in " ".join(result.stderr.replace("│", " ").split())


def test_a_folder_with_a_matrix_is_data(told, tmp_path, X):
    from scipy import io, sparse

    (tmp_path / "tenx").mkdir()
    io.mmwrite(tmp_path / "tenx/matrix.mtx", sparse.coo_matrix(X))
    (tmp_path / "tenx/parts.json").write_text("{}")
    assert told("fit", "tenx", "-k", 2, "-o", "m.safetensors")["method"] == "centralised"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format": "partsong-parts", "version": 2, "parties": [{"name": "a", "file": "a.npz"}]}',
        '{"format": "partsong-parts", "version": 1, "parties": []}',
        '{"format": "partsong-parts", "version": 1, "parties": [{"name": "a", "file": "../data.npz"}]}',
        '{"format": "partsong-parts", "version": 1, "parties": [{"name": "a", "file": "/etc/passwd"}]}',
        '{"format": "partsong-parts", "version": 1, "parties": [{"name": 1, "file": 2}]}',
        '{"format": "partsong-parts", "version": 1, "parties": [{"name": "a", "file": "none.npz"}]}',
    ],
)
def test_damaged_lists_of_parts(invoke, parts, content):
    (parts / "parts.json").write_text(content)
    result = invoke("fit", parts, "-o", "m.safetensors", code=1)
    assert "Traceback" not in result.output


def test_a_party_with_bad_values_is_named(invoke, parts):
    with np.load(parts / "party-02.npz") as arrays:
        content = dict(arrays)
    content["X"][0, 0] = np.nan
    np.savez(parts / "party-02.npz", **content)
    message = invoke("fit", parts, "-o", "m.safetensors", code=1).stderr
    assert "party-02" in message
    assert "NaN" in message


def test_columns_are_matched_by_name(told, parts):
    words = ["fit", parts, "-k", 3, "--seed", 1, "--rounds", 3]
    told(*words, "-o", "a.safetensors")
    with np.load(parts / "party-02.npz") as arrays:
        content = dict(arrays)
    content["X"], content["feature_names"] = content["X"][:, ::-1], content["feature_names"][::-1]
    np.savez(parts / "party-02.npz", **content)
    told(*words, "-o", "b.safetensors")
    a, b = partsong.load_model("a.safetensors"), partsong.load_model("b.safetensors")
    np.testing.assert_array_equal(a.components, b.components)
