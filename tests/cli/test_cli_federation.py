import hashlib
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import partsong
from partsong.io.party_folder import read_parts


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
    shown = invoke(*words).stdout
    assert "one round" in shown
    assert "not converged" not in shown
    assert "not converged" in invoke("fit", parts, "-k", 3, "-o", "m.safetensors", "--rounds", 1).stdout
    invoke(*words, "--rounds", 5, code=2)


def test_a_part_that_changed_is_noticed(told, parts, tmp_path):
    path = parts / "party-02.npz"
    listing = json.loads((parts / "parts.json").read_text())
    assert [entry["sha256"] for entry in listing["parties"]] == [
        hashlib.sha256((parts / entry["file"]).read_bytes()).hexdigest() for entry in listing["parties"]
    ]
    with np.load(path) as arrays:
        content = dict(arrays)
    np.savez(path, **{**content, "X": 2 * content["X"]})  # as good as any other file, but not the one that was listed
    said = told("fit", parts, "-k", 2, "-o", "m.safetensors", code=1)
    assert said["type"] == "FormatError"
    assert "party-02.npz" in said["error"]
    assert "SHA-256" in said["error"]
    assert not (tmp_path / "m.safetensors").exists()


def test_a_list_without_hashes_is_read(told, invoke, parts):
    listing = json.loads((parts / "parts.json").read_text())
    hashes = [entry.pop("sha256") for entry in listing["parties"]]
    (parts / "parts.json").write_text(json.dumps(listing))
    assert told("fit", parts, "-k", 2, "-o", "m.safetensors", "--rounds", 2)["parties"] == len(hashes)
    for odd in ("", "abc", 5, "../" * 20 + "aaaa"):
        listing["parties"][0]["sha256"] = odd
        (parts / "parts.json").write_text(json.dumps(listing))
        assert "64 hexadecimal" in invoke("fit", parts, "-o", "m.safetensors", code=1).stderr


def test_traffic_is_recorded(told, parts, tmp_path):
    said = told("fit", parts, "-k", 3, "--run-folder", "run", "--record", "--rounds", 2, "--tol", 0)
    lines = [json.loads(line) for line in (tmp_path / "run/traffic.jsonl").read_text().splitlines()]
    assert [(line["round"], line["party"], line["phase"]) for line in lines] == [
        (index, f"party-0{party}", 0) for index in (1, 2) for party in (1, 2, 3)
    ]
    assert sum(line["bytes"] for line in lines) == 3 * said["bytes_up_per_party"]
    assert {entry["name"] for entry in lines[0]["arrays"]} == {"gram", "cross", "rows", "energy"}
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
        (["--solver", "mu"], "for one table"),
        (["--max-iter", 5], "--rounds"),
        (["--weights", "W.csv"], "transform"),
        (["--label", "site"], "for one table"),
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


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("name", 3, "party 2: its name is 3, but must be text"),
        ("name", "", 'party 2: its name is "", but must be text'),
        ("name", "party-01", "same name, 'party-01'"),
        ("file", 3, "party 2: its file is 3, but must be text"),
        ("file", "party-01.npz", "same file, 'party-01.npz'"),
        ("file", "../party-02.npz", "plain name"),
        ("rows", "15", 'party 2: rows is "15", but must be a whole number'),
        ("rows", 0, "party 2: rows is 0"),
        ("rows", True, "party 2: rows is true"),
        ("rows", None, "party 2: rows is null"),
        ("rows", ..., "party 2: has no 'rows'"),
    ],
)
def test_a_list_with_a_wrong_field_is_told_which(told, parts, field, value, says):
    listing = json.loads((parts / "parts.json").read_text())
    listing["parties"][1][field] = value
    if value is ...:
        del listing["parties"][1][field]
    (parts / "parts.json").write_text(json.dumps(listing))
    said = told("fit", parts, "-o", "m.safetensors", code=1)
    assert says in said["error"]
    assert said["type"] == "FormatError"
    assert "version" not in said["error"]


def test_a_party_with_bad_values_is_named(invoke, parts, replace_part):
    X = read_parts(parts)["party-02"].X
    X[0, 0] = np.nan
    replace_part("party-02", X=X)
    message = invoke("fit", parts, "-o", "m.safetensors", code=1).stderr
    assert "party-02" in message
    assert "NaN" in message


def test_columns_are_matched_by_name(told, parts, replace_part):
    words = ["fit", parts, "-k", 3, "--seed", 1, "--rounds", 3]
    told(*words, "-o", "a.safetensors")
    table = read_parts(parts)["party-02"]
    replace_part("party-02", X=table.X[:, ::-1], feature_names=np.array(table.feature_names[::-1]))
    told(*words, "-o", "b.safetensors")
    a, b = partsong.load_model("a.safetensors"), partsong.load_model("b.safetensors")
    np.testing.assert_array_equal(a.components, b.components)


def test_rounds_and_iterations_are_told_as_the_estimator_does(told, parts):
    said = told("fit", parts, "-k", 2, "-o", "m.safetensors", "--seed", 2, "--rounds", 60, "--tol", 0.05)
    tables = read_parts(parts)
    estimator = partsong.FederatedNMF(2, rounds=60, tol=0.05, random_state=2)
    estimator.fit([table.X for table in tables.values()], names=list(tables)).save("e.safetensors")
    ours, theirs = (partsong.load_model(f"{name}.safetensors").settings for name in "me")
    assert said["iterations"] < 60
    for settings in (ours, theirs):
        assert (settings["rounds"], settings["iterations"]) == (60, said["iterations"])
    loaded = partsong.FederatedNMF.load("m.safetensors")
    assert (loaded.rounds, loaded.n_iter_) == (60, said["iterations"])
