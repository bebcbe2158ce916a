import csv

import numpy as np
import pytest

import partsong


@pytest.fixture
def model(invoke, data_csv):
    words = ["-k", 3, "--seed", 1, "--label", "site", "--weights", "fitted.csv", "--alpha-w", 0.001]
    invoke("fit", data_csv, *words, "-o", "m.safetensors", "-q")
    return "m.safetensors"


def write(path, header, X):
    rows = [",".join(header)] + [",".join([f"new-{i}", *map(repr, row.tolist())]) for i, row in enumerate(X)]
    path.write_text("\n".join(rows) + "\n")
    return path


def test_the_rows_of_the_fit_get_the_weights_of_the_fit(told, data_csv, model, tmp_path):
    said = told("transform", data_csv, model, "-o", "W.csv", "--label", "site")
    assert (tmp_path / "W.csv").read_bytes() == (tmp_path / "fitted.csv").read_bytes()
    assert said["shape"] == [45, 12]
    assert said["n_components"] == 3
    assert said["relative_error"] == pytest.approx(partsong.load_model(model).relative_error)


def test_columns_are_matched_by_name(invoke, data_csv, model, names, X, tmp_path):
    order = np.random.default_rng(1).permutation(12)
    write(tmp_path / "new.csv", ["sample", *(names[j] for j in order)], X[:, order])
    invoke("transform", "new.csv", model, "-o", "W.csv")
    new, old = partsong.read("W.csv"), partsong.read("fitted.csv")
    np.testing.assert_array_equal(new.X, old.X)
    assert new.sample_names[3] == "new-3"


def test_missing_columns_are_listed(invoke, model, names, X, tmp_path):
    write(tmp_path / "new.csv", ["sample", *names[2:]], X[:, 2:])
    message = invoke("transform", "new.csv", model, "-o", "W.csv", code=1).stderr
    assert "'gene 0'" in message
    assert "'gene 1'" in message
    assert not (tmp_path / "W.csv").exists()


def test_extra_columns_are_dropped_on_demand(invoke, model, names, X, tmp_path):
    write(tmp_path / "new.csv", ["sample", "new gene", *names], np.column_stack([X[:, 0], X]))
    message = invoke("transform", "new.csv", model, "-o", "W.csv", code=1).stderr
    assert "'new gene'" in message
    assert "--drop-extra" in message
    invoke("transform", "new.csv", model, "-o", "W.csv", "--drop-extra")
    np.testing.assert_array_equal(partsong.read("W.csv").X, partsong.read("fitted.csv").X)


def test_without_names_by_number(invoke, model, X, tmp_path):
    np.save(tmp_path / "new.npy", X)
    invoke("transform", "new.npy", model, "-o", "W.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "W.npy"), partsong.read("fitted.csv").X)
    np.save(tmp_path / "narrow.npy", X[:, :5])
    message = invoke("transform", "narrow.npy", model, "-o", "W2.npy", code=1).stderr
    assert "5 columns" in message
    assert "12" in message


@pytest.mark.parametrize("ending", ["tsv", "csv.gz", "parquet", "h5ad"])
def test_formats(invoke, data_csv, model, ending):
    if ending in ("parquet", "h5ad"):
        pytest.importorskip({"parquet": "pyarrow", "h5ad": "anndata"}[ending])
    invoke("transform", data_csv, model, "-o", f"W.{ending}", "--label", "site")
    table = partsong.read(f"W.{ending}")
    np.testing.assert_array_equal(table.X, partsong.read("fitted.csv").X)
    assert table.sample_names[0] == "patient-0"


@pytest.mark.parametrize(
    "words",
    [
        ["data.csv", "missing.safetensors", "-o", "W.csv"],
        ["data.csv", "data.csv", "-o", "W.csv"],
        ["missing.csv", "m.safetensors", "-o", "W.csv"],
        ["data.csv", "m.safetensors", "-o", "W.doc"],
        ["data.csv", "m.safetensors", "-o", "none/W.csv"],
        ["data.csv", "m.safetensors", "-o", "data.csv"],
        ["data.csv", "m.safetensors", "-o", "W.csv"],
    ],
)
def test_errors(invoke, model, tmp_path, words):
    before = (tmp_path / "data.csv").read_bytes()
    result = invoke("transform", *words, code=1)  # the last one: the column of labels is text
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert not (tmp_path / "W.csv").exists()
    assert (tmp_path / "data.csv").read_bytes() == before


def test_messages_speak_of_options(invoke, model, data_csv):
    assert "--label" in invoke("transform", data_csv, model, "-o", "W.csv", code=1).stderr


def test_bad_cells_are_named(invoke, model, names, X, tmp_path):
    X[17, 3] = np.nan
    write(tmp_path / "new.csv", ["sample", *names], X)
    message = invoke("transform", "new.csv", model, "-o", "W.csv", code=1).stderr
    assert "17 ('new-17')" in message
    assert "3 ('gene 3')" in message
    message = invoke("fit", "new.csv", "-o", "m2.safetensors", code=1).stderr
    assert "17 ('new-17')" in message
    assert "3 ('gene 3')" in message


def test_data_and_model_in_the_wrong_order(invoke, model, data_csv):
    assert (
        "partsong transform data.csv m.safetensors"
        in invoke("transform", model, data_csv.name, "-o", "W.csv", code=1).stderr
    )


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t"])
def test_names_that_are_formulas_are_kept_and_told(invoke, names, X, model, tmp_path, start):
    samples = [f"s{i}" for i in range(44)] + [f"{start}1+cmd|' /C calc'!A0"]
    np.savez(tmp_path / "new.npz", X=X, feature_names=np.array(names), sample_names=np.array(samples))
    result = invoke("transform", "new.npz", model, "-o", "W.csv")
    assert "Warning" in result.stderr
    assert "cmd|" in result.stderr
    with (tmp_path / "W.csv").open(newline="") as stream:
        assert [row[0] for row in csv.reader(stream)][1:] == samples
    assert "Warning" not in invoke("transform", "new.npz", model, "-o", "W.npy").stderr
    result = invoke("fit", "new.npz", "-k", 2, "-o", "m2.safetensors", "--weights", "W2.tsv")
    assert "cmd|" in result.stderr


def test_numbers_are_no_formulas(invoke, names, X, model, tmp_path):
    samples = np.array([f"-{i}" for i in range(45)])
    np.savez(tmp_path / "new.npz", X=X, feature_names=np.array(names), sample_names=samples)
    assert invoke("transform", "new.npz", model, "-o", "W.csv").stderr == ""


def test_negative_rows_are_refused(invoke, model, X, tmp_path):
    np.save(tmp_path / "new.npy", -X)
    assert "Negative" in invoke("transform", "new.npy", model, "-o", "W.npy", code=1).stderr
