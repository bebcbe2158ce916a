"""Sketched and asynchronous methods from the command line."""

import numpy as np
import pytest

import partsong

METHODS = ["syn-sd", "syn-ssd-u", "syn-ssd-v", "syn-ssd-uv", "asyn-sd", "asyn-ssd-v"]


@pytest.mark.parametrize("sketch", ["subsampling", "gaussian", "count", "hadamard"])
def test_a_file_by_sketched_steps(told, data_npy, X, sketch):
    words = ["fit", data_npy, "-k", 3, "--solver", "sanls", "--sketch", sketch, "--sketch-ratio", 0.5, "--seed", 1]
    said = told(*words, "--max-iter", 60, "--tol", 0, "-o", "m.safetensors")
    assert said["iterations"] == 60
    estimator = partsong.NMF(
        3, solver="sanls", sketch=sketch, sketch_ratio=0.5, random_state=1, max_iter=60, tol=0, n_threads=1
    ).fit(X)
    assert said["relative_error"] == pytest.approx(estimator.relative_error_, rel=1e-9)
    assert partsong.load_model("m.safetensors").settings["sketch"] == sketch


@pytest.mark.parametrize("method", METHODS)
def test_parts_by_the_secure_methods(told, parts, method):
    said = told(
        "fit", parts, "-k", 3, "--method", method, "--rounds", 4, "--tol", 0, "--seed", 2, "-o", "m.safetensors"
    )
    assert said["iterations"] == 4
    assert said["outcome"] == "max-rounds"
    assert said["relative_error"] < 0.5
    per_model = 3 * 12 * 8
    exchanges = {"syn-sd": 4, "asyn-sd": 4, "asyn-ssd-v": 4}.get(method, 44)
    assert said["bytes_up_per_party"] <= exchanges * (per_model + 8)
    assert np.isfinite(partsong.load_model("m.safetensors").components).all()


def test_sketches_where_nothing_is_sketched_are_a_mistake(invoke, data_npy, parts):
    refused = invoke("fit", data_npy, "-k", 3, "--sketch", "count", "-o", "m.safetensors", code=2)
    assert "--solver sanls" in refused.stderr
    refused = invoke(
        "fit", parts, "-k", 3, "--method", "asyn-sd", "--init-mode", "local", "-o", "m.safetensors", code=2
    )
    assert "one start for all parties" in refused.stderr
