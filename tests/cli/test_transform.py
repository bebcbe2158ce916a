import csv
from dataclasses import replace

import numpy as np
import pytest

import partsong
from partsong.io.model_file import save_model


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


def spoilt(X, names, at):
    """The columns of the fit with columns of text among them, one of them with the name of no feature at all."""
    header, cells = [*names], [[*map(repr, row.tolist())] for row in X]
    for place in sorted(at):
        header.insert(place, "diagnosis" if place == at[0] else "")
        for i, row in enumerate(cells):
            row.insert(place, "flu" if i % 2 else '"cold, or ""worse"""')
    return header, cells


@pytest.mark.parametrize("at", [[12], [0], [5], [12, 3]])
@pytest.mark.parametrize("ending", ["csv", "tsv.gz"])
def test_text_in_extra_columns_does_not_matter(invoke, model, names, X, tmp_path, at, ending):
    import gzip

    header, cells = spoilt(X, names, at)
    lines = [",".join(["sample", *header]), *(",".join([f"new-{i}", *row]) for i, row in enumerate(cells))]
    text = "\n".join(lines) + "\n"
    if ending == "csv":
        (tmp_path / "new.csv").write_text(text)
    else:
        rows = csv.reader(text.splitlines())
        (tmp_path / "new.tsv.gz").write_bytes(gzip.compress("".join("\t".join(row) + "\n" for row in rows).encode()))
    assert invoke("transform", f"new.{ending}", model, "-o", "W.csv", code=1).stdout == ""
    invoke("transform", f"new.{ending}", model, "-o", "W.csv", "--drop-extra")
    new = partsong.read("W.csv")
    np.testing.assert_array_equal(new.X, partsong.read("fitted.csv").X)
    assert new.sample_names == tuple(f"new-{i}" for i in range(45))


def test_text_in_extra_rows_does_not_matter(invoke, model, names, X, tmp_path):
    lines = [",".join(["feature", *(f"new-{i}" for i in range(45))]), ",".join(["diagnosis", *(["flu"] * 45)])]
    lines += [",".join([name, *map(repr, column.tolist())]) for name, column in zip(names, X.T, strict=True)]
    (tmp_path / "new.csv").write_text("\n".join(lines) + "\n")
    invoke("transform", "new.csv", model, "-o", "W.csv", "--transpose", code=1)
    invoke("transform", "new.csv", model, "-o", "W.csv", "--transpose", "--drop-extra")
    np.testing.assert_array_equal(partsong.read("W.csv").X, partsong.read("fitted.csv").X)


def test_text_in_extra_columns_of_parquet_does_not_matter(invoke, model, names, X, tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame(X, columns=list(names), index=[f"new-{i}" for i in range(45)])
    frame.insert(3, "diagnosis", "flu")
    frame["seen"] = pandas.Timestamp("2020-01-01")
    frame.to_parquet(tmp_path / "new.parquet")
    invoke("transform", "new.parquet", model, "-o", "W.csv", code=1)
    invoke("transform", "new.parquet", model, "-o", "W.csv", "--drop-extra")
    new = partsong.read("W.csv")
    np.testing.assert_array_equal(new.X, partsong.read("fitted.csv").X)
    assert new.sample_names[3] == "new-3"


def test_text_in_a_column_of_the_model_is_still_an_error(invoke, model, names, X, tmp_path):
    header, cells = spoilt(X, names, [12])
    cells[7][2] = "many"
    lines = [",".join(["sample", *header]), *(",".join([f"new-{i}", *row]) for i, row in enumerate(cells))]
    (tmp_path / "new.csv").write_text("\n".join(lines) + "\n")
    message = invoke("transform", "new.csv", model, "-o", "W.csv", "--drop-extra", code=1).stderr
    assert "line 9, column 'gene 2' reads 'many'" in message
    assert "diagnosis" not in message


def test_features_that_are_missing_beside_extra_text_are_named(invoke, model, names, X, tmp_path):
    header, cells = spoilt(X[:, 1:], ["Gene 1", *names[2:]], [11])
    lines = [",".join(["sample", *header]), *(",".join([f"new-{i}", *row]) for i, row in enumerate(cells))]
    (tmp_path / "new.csv").write_text("\n".join(lines) + "\n")
    message = invoke("transform", "new.csv", model, "-o", "W.csv", "--drop-extra", code=1).stderr
    assert "2 of the requested features" in message
    assert "'gene 1' is 'Gene 1' here" in message


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
    ("words", "code"),
    [
        (["data.csv", "missing.safetensors", "-o", "W.csv"], 1),
        (["data.csv", "data.csv", "-o", "W.csv"], 2),
        (["missing.csv", "m.safetensors", "-o", "W.csv"], 1),
        (["data.csv", "m.safetensors", "-o", "W.doc"], 2),
        (["data.csv", "m.safetensors", "-o", "none/W.csv"], 1),
        (["data.csv", "m.safetensors", "-o", "data.csv"], 2),
        (["data.csv", "m.safetensors", "-o", "W.csv"], 1),
    ],
)
def test_errors(invoke, model, tmp_path, words, code):
    before = (tmp_path / "data.csv").read_bytes()
    result = invoke("transform", *words, code=code)  # the last one: the column of labels is text
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert not (tmp_path / "W.csv").exists()
    assert (tmp_path / "data.csv").read_bytes() == before


def test_columns_of_text_are_told_with_the_ways_out(invoke, model, data_csv):
    message = invoke("transform", data_csv, model, "-o", "W.csv", code=1).stderr
    assert "such a column as label" in message
    assert "drop_extra" in message


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


def test_topics_of_lda_are_no_least_squares(invoke, model, data_csv):
    known = partsong.load_model(model)
    save_model("lda.safetensors", replace(known, settings={**known.settings, "method": "fedlda"}))
    assert "partsong topics transform" in invoke("transform", data_csv, "lda.safetensors", "-o", "W.csv", code=1).stderr


def test_negative_rows_are_refused(invoke, model, X, tmp_path):
    np.save(tmp_path / "new.npy", -X)
    assert "Negative" in invoke("transform", "new.npy", model, "-o", "W.npy", code=1).stderr
