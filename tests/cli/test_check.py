import csv

import numpy as np
import pytest
from scipy import sparse


def lines(path):
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.fixture
def bad(tmp_path, X):
    X[2, 1], X[2, 5], X[7, 3], X[9, 0] = np.nan, np.nan, -1.0, np.inf
    X[11] = 0
    samples = np.array([f"s{i}" for i in range(len(X))])
    features = np.array([f"f{j}" for j in range(12)])
    np.savez(tmp_path / "bad.npz", X=X, sample_names=samples, feature_names=features)
    return "bad.npz"


def test_good_data(told, invoke, data_csv, X):
    said = told("check", data_csv, "--label", "site")
    assert said["factorizable"] is True
    summary = said["summary"]
    assert summary["shape"] == [45, 12]
    assert summary["dtype"] == "float64"
    assert summary["feature_names"] is True
    assert summary["mean"] == pytest.approx(X.mean())
    assert summary["min"] == X.min()
    assert summary["max"] == X.max()
    shown = invoke("check", data_csv, "--label", "site").stdout
    assert "45 × 12" in shown
    assert "can be factorized" in shown


def test_bad_data(told, invoke, bad):
    said = told("check", bad, code=1)
    assert said["factorizable"] is False
    kinds = {finding["kind"]: finding for finding in said["findings"]}
    assert set(kinds) >= {"nan", "infinite", "negative"}
    assert kinds["nan"]["count"] == 2
    assert np.isfinite(said["summary"]["max"])
    shown = invoke("check", bad, code=1).stdout
    assert "NaN in data" in shown
    assert "'s2'" in shown
    assert "drop these rows" in shown
    assert "cannot be factorized" in shown


def test_report_lists_all_rows(invoke, bad, tmp_path):
    invoke("check", bad, "--report", "rows.csv", code=1)
    rows = lines(tmp_path / "rows.csv")
    found = {(int(row["row"]), row["sample"], row["problem"], int(row["cells"]), row["first_feature"]) for row in rows}
    assert {(2, "s2", "nan", 2, "f1"), (7, "s7", "negative", 1, "f3"), (9, "s9", "infinite", 1, "f0")} <= found
    assert {row["severity"] for row in rows if row["row"] == "11"} <= {"note"}


def test_sparse_data(told, invoke, X, tmp_path):
    S = sparse.csr_array(np.where(X > 1.2, X, 0))
    sparse.save_npz(tmp_path / "s.npz", S)
    summary = told("check", "s.npz")["summary"]
    assert summary["stored_entries"] == S.nnz
    assert summary["sparsity"] == pytest.approx(1 - S.nnz / 540)
    assert summary["min"] == 0
    assert summary["mean"] == pytest.approx(S.mean())
    S.data[4] = -2
    sparse.save_npz(tmp_path / "s.npz", S)
    invoke("check", "s.npz", "--report", "rows.csv", code=1)
    assert len(lines(tmp_path / "rows.csv")) >= 1


def test_unreadable_data(told, invoke, tmp_path):
    (tmp_path / "broken.csv").write_text("a,b\n1,2\n3,x\n")
    assert "line 3" in invoke("check", "broken.csv", code=1).stderr
    said = told("check", "broken.csv", code=1)
    assert said["factorizable"] is False
    assert said["summary"] is None
    assert "line 3" in said["findings"][0]["message"]
    assert (said["type"], said["exit_code"]) == ("FormatError", 1)
    assert "line 3" in said["error"]
    assert "no such file" in invoke("check", "missing.csv", code=1).stderr
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04 and no more")
    invoke("check", "cut.npz", code=1)


@pytest.mark.parametrize("values", [np.ones((3, 3), complex), np.zeros((0, 4)), np.zeros((4, 0))])
def test_odd_arrays(told, tmp_path, values):
    np.save(tmp_path / "odd.npy", values)
    assert told("check", "odd.npy", "--report", "rows.csv", code=1)["factorizable"] is False


def test_whole_numbers_and_zeros(told, tmp_path):
    np.save(tmp_path / "counts.npy", np.zeros((4, 3), np.int32))
    said = told("check", "counts.npy", "--report", "rows.csv")
    assert said["findings"][0]["kind"] == "all-zero"
    assert said["summary"]["sparsity"] == 1


def test_a_folder_of_parts_is_not_one_table(invoke, parts):
    assert "party-01" in invoke("check", parts, code=1).stderr
    invoke("check", "parts/party-01.npz")


def numbered(path, title, first=1):
    rows = [f"{first + i},{i % 5},{i % 7}" for i in range(20)]
    path.write_text("\n".join([f"{title},a,b", *rows]) + "\n")
    return path.name


@pytest.mark.parametrize("title", ["id", "Index", "Unnamed: 0", "sample_id", "anything"])
def test_numbers_of_rows_are_noticed(told, invoke, tmp_path, title):
    name = numbered(tmp_path / "numbered.csv", title)
    said = told("check", name)
    (finding,) = (finding for finding in said["findings"] if finding["kind"] == "identifier-columns")
    assert finding["columns"] == [0]
    assert f"{title!r} as the label" in finding["remedy"]
    shown = invoke("check", name).stdout
    assert f"0 ({title!r})" in shown
    assert "can be factorized" in shown
    warning = invoke("fit", name, "-k", 2, "-o", "m.safetensors", "-q").stderr
    assert warning.startswith("Warning: numbered.csv")
    assert f"{title!r} as the label" in warning
    assert invoke("fit", name, "-k", 2, "-o", "m.safetensors", "-q", "--label", title).stderr == ""
    assert "Warning" in invoke("split", name, "-p", 2, "-o", "parts").stderr


def test_numbers_of_rows_without_a_header(invoke, tmp_path):
    (tmp_path / "bare.csv").write_text("".join(f"{i},{i % 5},{i % 7}\n" for i in range(20)))
    assert "Warning" in invoke("fit", "bare.csv", "-k", 2, "-o", "m.safetensors", "-q").stderr


def test_formulas_in_the_report_are_told(invoke, X, tmp_path):
    X[2, 1] = np.nan
    samples = np.array([f"=A{i}" for i in range(len(X))])
    np.savez(tmp_path / "bad.npz", X=X, sample_names=samples)
    assert "'=A2'" in invoke("check", "bad.npz", "--report", "rows.csv", code=1).stderr
    assert lines(tmp_path / "rows.csv")[0]["sample"] == "=A2"


def test_report_must_be_writable(invoke, data_npy):
    invoke("check", data_npy, "--report", "none/rows.csv", code=1)
    invoke("check", data_npy, "--report", "rows.xlsx", code=2)
