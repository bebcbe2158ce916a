"""The experiments run on small data; what they find is in docs/results."""

import numpy as np
import pytest

from experiments import datasets, fnmf_barycenters, fnmf_local_steps, fnmf_table


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


def test_table(capsys, digits):
    fnmf_table.main(["--quick", "--datasets", "mnist", "--starts", "common"])
    assert "FedProx, common" in capsys.readouterr().out


def test_data_that_are_not_there_are_asked_for(monkeypatch):
    monkeypatch.delenv(datasets.FOLDER, raising=False)
    with pytest.raises(SystemExit, match="PARTSONG_DATA"):
        datasets.DATASETS["mnist"].load()
