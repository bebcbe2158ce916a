import numpy as np
import pytest

import partsong

HOSTILE = ("line\nbreak", "<script>alert(1)</script>", "[red]markup[/red]", "\x1b]0;title\x07", "λ → 蛋白")


@pytest.fixture
def model(invoke, X, tmp_path):
    np.savez(tmp_path / "h.npz", X=X[:, :5], feature_names=np.array(HOSTILE))
    invoke("fit", "h.npz", "-k", 3, "-o", "m.safetensors", "--seed", 8, "-q")
    return "m.safetensors"


def test_json(told, model):
    said = told("info", model, "--top", 2)
    assert said["n_components"] == 3
    assert said["n_features"] == 5
    assert said["seed"] == 8
    assert said["settings"]["solver"] == "hals"
    assert {"python", "partsong", "numpy"} <= set(said["versions"])
    H = partsong.load_model(model).components
    for part, row in zip(said["components"], H, strict=True):
        assert part["top_features"] == [HOSTILE[j] for j in np.argsort(-row)[:2]]
        assert part["top_values"] == sorted(row, reverse=True)[:2]
    shares = [part["share"] for part in said["components"]]
    assert sum(shares) == pytest.approx(1)
    assert shares == sorted(shares, reverse=True)


def test_names_cannot_disturb_the_terminal(invoke, model):
    shown = invoke("info", model, "--top", 5).stdout
    assert "\x1b]0;" not in shown
    assert "line\\nbreak" in shown
    assert "[red]markup[/red]" in shown
    assert "<script>" in shown
    assert "λ → 蛋白" in shown


def test_columns_without_names_are_numbers(told, data_npy):
    told("fit", data_npy, "-k", 2, "-o", "m.safetensors")
    said = told("info", "m.safetensors", "--top", 100)
    assert sorted(said["components"][0]["top_features"]) == list(range(12))


@pytest.mark.parametrize("words", [["info"], ["transform", "data.npy"]], ids=["info", "transform"])
def test_a_folder_is_told_what_it_is(invoke, data_npy, parts, words, tmp_path):
    rest = ["-o", "W.npy"] if words[0] == "transform" else []
    invoke("fit", data_npy, "-k", 2, "--run-folder", "run", "-q")
    (tmp_path / "empty").mkdir()
    for folder, way_out in (
        ("run", "run/model.safetensors"),
        ("parts", "no .safetensors file"),
        ("empty", "no .safetensors file"),
        (".", "Pass a file in it, such as"),
    ):
        if folder == ".":
            (tmp_path / "run/model.safetensors").rename(tmp_path / "m.safetensors")
        message = invoke(*words, folder, *rest, code=1).stderr
        assert "is a folder" in message
        assert way_out in message
    assert "no .safetensors file" in invoke(*words, "run", *rest, code=1).stderr
    invoke(*words, "m.safetensors", *rest)


def test_errors(invoke, data_npy, tmp_path):
    invoke("info", "missing.safetensors", code=1)
    assert "Traceback" not in invoke("info", data_npy, code=1).output
    invoke("fit", data_npy, "-k", 2, "-o", "m.safetensors", "--checkpoint", "c.ckpt", "-q")
    assert "partsong model" in invoke("info", "c.ckpt", code=1).stderr
    content = bytearray((tmp_path / "m.safetensors").read_bytes())
    content[-3] ^= 1
    (tmp_path / "m.safetensors").write_bytes(content)
    assert "checksum" in invoke("info", "m.safetensors", code=1).stderr
    invoke("info", "m.safetensors", "--top", 0, code=2)
