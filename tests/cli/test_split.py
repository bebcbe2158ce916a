import json

import numpy as np
import pytest
from scipy import sparse

import partsong
from partsong.core.streams import stream
from partsong.data.partition import by_size
from partsong.io.party_folder import read_parts

HOSTILE = ("a\nb", "<script>alert(1)</script>", "Ünïcödé 蛋白質", "[bold]x[/bold]", "a,b\tc", "\x1b[31mred", '"quoted"')


def test_every_row_goes_to_one_party(told, data_csv, X, tmp_path):
    said = told("split", data_csv, "--parties", 4, "--by", "site", "--seed", 3, "-o", "parts")
    listing = json.loads((tmp_path / "parts/parts.json").read_text())
    assert {**listing, "output": "parts"} == said
    assert listing["format"] == "partsong-parts"
    assert listing["source"] == "data.csv"
    assert listing["n_features"] == 12
    tables = read_parts(tmp_path / "parts")
    assert [entry["name"] for entry in listing["parties"]] == list(tables)
    samples = [name for table in tables.values() for name in table.sample_names]
    assert sorted(samples) == sorted(f"patient-{i}" for i in range(45))
    for entry, table in zip(listing["parties"], tables.values(), strict=True):
        assert entry["rows"] == table.X.shape[0] == sum(entry["labels"].values())
        for name, row in zip(table.sample_names, table.X, strict=True):
            np.testing.assert_array_equal(row, X[int(name.removeprefix("patient-"))])


@pytest.mark.parametrize("how", [["--iid"], ["--contiguous"], []])
def test_ways_to_split(told, data_npy, tmp_path, how):
    said = told("split", data_npy, "-p", 2, *how, "--seed", 1, "-o", "one")
    assert [entry["rows"] for entry in said["parties"]] == [23, 22]
    assert said["split"] == (how[0].removeprefix("--") if how else "iid")
    told("split", data_npy, "-p", 2, *how, "--seed", 1, "-o", "two")
    for party in ("party-01", "party-02"):
        a, b = (np.load(tmp_path / folder / f"{party}.npz")["X"] for folder in ("one", "two"))
        np.testing.assert_array_equal(a, b)


def test_sparse_parts_keep_their_form_and_names(told, X, names, tmp_path):
    S = sparse.csr_array(np.where(X > 1, X, 0))
    labels = np.array(["u", "v", "w"] * 15)
    arrays = {"format": b"csr", "shape": S.shape, "data": S.data, "indices": S.indices, "indptr": S.indptr}
    np.savez(tmp_path / "s.npz", **arrays, feature_names=np.array(names), labels=labels)
    said = told("split", "s.npz", "-p", 3, "--by", "labels", "-o", "parts")
    assert sum(entry["labels"].get("u", 0) for entry in said["parties"]) == 15
    plain = sparse.load_npz(tmp_path / "parts/party-01.npz")  # SciPy reads it as its own
    table = partsong.read(tmp_path / "parts/party-01.npz")
    np.testing.assert_array_equal(plain.toarray(), table.X.toarray())
    assert table.feature_names == names
    assert told("fit", "parts", "-k", 2, "-o", "m.safetensors", "--rounds", 3)["parties"] == 3


def test_hostile_names_survive(told, invoke, tmp_path, X):
    np.savez(tmp_path / "h.npz", X=X[:, : len(HOSTILE)], feature_names=np.array(HOSTILE), sample_names=_samples(X))
    shown = invoke("split", "h.npz", "-p", 2, "-o", "parts").output
    assert "\x1b" not in shown
    told("fit", "parts", "-k", 2, "-o", "m.safetensors", "--rounds", 3)
    assert partsong.load_model("m.safetensors").feature_names == HOSTILE
    result = invoke("transform", "parts/party-01.npz", "m.safetensors", "-o", "W.csv")
    assert "\x1b" not in result.output
    assert set(partsong.read("W.csv").sample_names) <= {name.strip() for name in _samples(X)}


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_bad_values_are_refused_as_a_fit_refuses_them(told, X, names, tmp_path, value):
    X[17, 3] = value
    samples = np.array([f"s{i}" for i in range(len(X))])
    np.savez(tmp_path / "bad.npz", X=X, feature_names=np.array(names), sample_names=samples)
    said = told("split", "bad.npz", "-p", 2, "-o", "parts", code=1)
    assert said == told("fit", "bad.npz", "-o", "m.safetensors", code=1)
    assert said["type"] == "DataError"
    assert "17 ('s17')" in said["error"]
    assert "3 ('gene 3')" in said["error"]
    assert not (tmp_path / "parts").exists()


def test_concentration_is_about_labels(told, invoke, data_csv, tmp_path):
    for how in ([], ["--iid"], ["--contiguous"]):
        words = ["-p", 2, *how, "--label", "site", "--concentration", 1, "-o", "parts"]
        assert "--by" in invoke("split", data_csv, *words, code=2).stderr
    assert not (tmp_path / "parts").exists()
    assert told("split", data_csv, "-p", 2, "--by", "site", "-o", "parts")["concentration"] == 3.0
    words = ["--by", "site", "--concentration", 1, "-o", "more"]
    assert told("split", data_csv, "-p", 2, *words)["concentration"] == 1.0


def test_sizes_are_skewed_if_asked_for(told, data_npy, X, tmp_path):
    said = {}
    for concentration in (0.3, 1e6):
        said[concentration] = told(
            "split", data_npy, "-p", 6, "--sizes", concentration, "--seed", 2, "-o", concentration
        )
        assert (said[concentration]["split"], said[concentration]["concentration"]) == ("sizes", concentration)
        tables = read_parts(tmp_path / str(concentration))
        rows = np.concatenate([table.X for table in tables.values()])
        np.testing.assert_array_equal(rows[np.lexsort(rows.T)], X[np.lexsort(X.T)])
    skewed, even = ([entry["rows"] for entry in said[c]["parties"]] for c in (0.3, 1e6))
    assert skewed == [len(part) for part in by_size(45, 6, stream(2, "split"), 0.3)]
    assert min(skewed) >= 1
    assert np.std(skewed) > 2 * np.std(even)


@pytest.mark.parametrize("other", [["--by", "site"], ["--iid"], ["--contiguous"], ["--concentration", 1]])
def test_sizes_go_with_no_other_way_to_split(invoke, data_csv, tmp_path, other):
    assert "--by" in invoke("split", data_csv, "-p", 2, "--sizes", 1, *other, "-o", "parts", code=2).stderr
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize("value", [0, -1, "inf", "nan", "many"])
def test_sizes_of_no_distribution_are_refused(invoke, data_npy, tmp_path, value):
    assert "--sizes" in invoke("split", data_npy, "-p", 2, "--sizes", value, "-o", "parts", code=2).stderr
    assert not (tmp_path / "parts").exists()


def _samples(X):
    return np.array([f"{HOSTILE[i % 5]} {i}" for i in range(len(X))])


def test_nothing_is_overwritten(invoke, data_npy, parts):
    before = {path.name: path.read_bytes() for path in parts.iterdir()}
    assert "not empty" in invoke("split", data_npy, "-p", 2, "-o", "parts", code=1).stderr
    assert {path.name: path.read_bytes() for path in parts.iterdir()} == before
    invoke("split", data_npy, "-p", 2, "-o", "data.npy", code=1)


def test_a_failed_split_leaves_nothing(invoke, data_npy, tmp_path, monkeypatch):
    from partsong.io import party_folder as parts_folder

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parts_folder, "_write_part", fail)
    before = set(tmp_path.iterdir())
    invoke("split", data_npy, "-p", 2, "-o", "parts", code=1)
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["-p", 0], 2),
        (["-p", 2, "--iid", "--contiguous"], 2),
        (["-p", 46], 1),
        (["-p", 2, "--by", "site"], 2),
        (["-p", 2, "-o", "none/deep"], 1),
        ([], 2),
    ],
)
def test_errors(invoke, data_npy, tmp_path, words, code):
    output = [] if "-o" in words else ["-o", "parts"]
    result = invoke("split", data_npy, *words, *output, code=code)
    assert "Traceback" not in result.output
    assert not (tmp_path / "parts").exists()
