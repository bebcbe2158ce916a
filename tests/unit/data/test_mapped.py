"""A mapped file larger than what the process may hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = """
import sys, numpy as np, partsong
partsong.NMF(3, max_iter=2, random_state=0).fit(np.random.default_rng(0).random((2000, 300)).astype(np.float32))
def now(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024
X = np.load(sys.argv[1], mmap_mode="r")
open("/proc/self/clear_refs", "w").write("5")
before = now("VmRSS")
model = partsong.NMF(int(sys.argv[2]), max_iter=3, tol=0, random_state=0).fit(X)
print(now("VmHWM") - before, model.explained_variance_)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("order", ["C", "F"])
def test_memory_stays_far_below_the_size_of_the_file(order, tmp_path):
    rng = np.random.default_rng(0)
    X = np.lib.format.open_memmap(
        tmp_path / "X.npy", "w+", np.float32, (150_000, 300), fortran_order=order == "F"
    )  # 180 MB
    H = rng.random((8, 300), dtype=np.float32)
    for start in range(0, len(X), 10_000):
        X[start : start + 10_000] = rng.random((10_000, 8), dtype=np.float32) @ H
    X.flush()
    size = X.nbytes
    del X
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "X.npy"), "8"], capture_output=True, text=True, check=True
    )
    grown, explained = map(float, done.stdout.split())
    factors = 4 * (150_000 + 300) * 8 * 4
    assert grown < factors + 100e6 < size
    assert explained > 0.9


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_few_very_wide_rows_are_not_read_all_at_once(order, tmp_path):
    shape = (64, 700_000)  # 179 MB
    X = np.lib.format.open_memmap(tmp_path / "X.npy", "w+", np.float32, shape, fortran_order=order == "F")
    rng = np.random.default_rng(0)
    W = rng.random((shape[0], 2), dtype=np.float32)
    for start in range(0, shape[1], 50_000):
        X[:, start : start + 50_000] = W @ rng.random((2, 50_000), dtype=np.float32)
    X.flush()
    size = X.nbytes
    del X
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "X.npy"), "2"], capture_output=True, text=True, check=True
    )
    grown, explained = map(float, done.stdout.split())
    assert grown < 4 * sum(shape) * 2 * 4 + 64e6 < size
    assert explained > 0.9
