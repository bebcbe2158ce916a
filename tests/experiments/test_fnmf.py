"""The experiments of the FNMF paper run on small data; what they find is in docs/results/fnmf.md."""

import numpy as np
import pytest

from experiments.fnmf import barycenters as fnmf_barycenters
from experiments.fnmf import local_steps as fnmf_local_steps
from experiments.fnmf import report as fnmf_report
from experiments.fnmf import scaling as fnmf_scaling
from experiments.fnmf import table as fnmf_table
from experiments.fnmf import two_stages as fnmf_relay
from experiments.fnmf.runs import known
from experiments.shared import datasets


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """A stand-in for MNIST, made of scikit-learn's digits."""
    from sklearn.datasets import load_digits

    held = load_digits()
    X = np.round(held.data / 16 * 255).astype(np.uint8)
    np.savez(tmp_path / "mnist.npz", X_train=X, y_train=held.target)
    monkeypatch.setenv(datasets.FOLDER, str(tmp_path))


def test_barycenters(capsys, tmp_path):
    fnmf_barycenters.main(["--quick", "--output", str(tmp_path / "b.json")])
    said = capsys.readouterr().out
    assert "idealised" in said
    assert "hierarchical" in said
    assert (tmp_path / "b.json").stat().st_size > 100


def test_local_steps(capsys, digits):
    fnmf_local_steps.main(["--quick", "--starts", "independent"])
    said = capsys.readouterr().out
    assert "FNMF-LAP | independent | 5 x 2" in said
    assert "iPALM once" in said


def test_table(capsys, digits, tmp_path):
    arguments = ["--quick", "--datasets", "mnist", "--output", str(tmp_path / "t.jsonl")]
    fnmf_table.main(arguments)
    said = capsys.readouterr().out
    assert "FedProx" in said
    assert "then 10 exact rounds" in said
    found = known(tmp_path / "t.jsonl")
    error = {(play.method, play.start): record["rmsd_sum"] for play, record in found.items()}
    assert error["exact, to the end", "independent"] == pytest.approx(error["pooled", "independent"], rel=0.02)
    assert error["FNMF-LAP, then 10 exact rounds", "common"] < error["FNMF-LAP", "common"]
    fnmf_table.main(arguments)  # everything is there already
    assert known(tmp_path / "t.jsonl") == found
    assert len((tmp_path / "t.jsonl").read_text().splitlines()) == len(found)


def test_relay(capsys, digits):
    fnmf_relay.main(["--quick", "--datasets", "mnist"])
    said = capsys.readouterr().out
    assert "mnist | FNMF-SK once, exact in all other rounds, common" in said
    assert "mnist | exact, as many rounds, independent" in said


def test_scaling(capsys):
    fnmf_scaling.main(["--quick"])
    said = capsys.readouterr().out
    assert "blocks: 20 rows, 0.2 absent, 3 parties | FNMF-SK_ρ" in said


def test_data_that_are_not_there_are_asked_for(monkeypatch):
    monkeypatch.delenv(datasets.FOLDER, raising=False)
    with pytest.raises(SystemExit, match="PARTSONG_DATA"):
        datasets.DATASETS["mnist"].load()


def test_report_replaces_tables_and_nothing_else(tmp_path, digits, capsys):
    runs, document = tmp_path / "t.jsonl", tmp_path / "fnmf.md"
    fnmf_scaling.main(["--quick", "--output", str(runs)])
    document.write_text("# Before\n\n<!-- table: ratios -->\nold\n<!-- end -->\n\nAfter.\n")
    fnmf_report.main([str(runs), "--document", str(document)])
    text = document.read_text()
    assert text.startswith("# Before\n\n<!-- table: ratios -->\n| method, init_mode |")
    assert text.endswith("<!-- end -->\n\nAfter.\n")
    assert "old" not in text
    fnmf_report.main([str(runs), "--document", str(document)])
    assert document.read_text() == text
