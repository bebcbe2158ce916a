"""How many threads a process may use: limits that others have set are kept."""

import subprocess
import sys

import pytest
from threadpoolctl import threadpool_limits

from partsong.core import runtime

CORES = runtime.available_threads()


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "NUMBA_NUM_THREADS"])
@pytest.mark.parametrize("value", ["1", "1,4"])
def test_limits_of_the_environment_are_kept(monkeypatch, name, value):
    monkeypatch.delenv("PARTSONG_NUM_THREADS", raising=False)
    monkeypatch.setenv(name, value)
    assert runtime.available_threads() == 1
    monkeypatch.setenv("PARTSONG_NUM_THREADS", "3")
    assert runtime.available_threads() == 3, "our own variable wins"


@pytest.mark.parametrize("value", ["", "many", "0", "1000"])
def test_limits_that_are_none_change_nothing(monkeypatch, value):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert runtime.available_threads() == CORES


def test_limits_of_threadpoolctl_are_kept_and_ours_are_none(monkeypatch):
    monkeypatch.delenv("PARTSONG_NUM_THREADS", raising=False)
    with threadpool_limits(1, user_api="blas"):
        assert runtime.available_threads() == 1
        with runtime.limit_kernel_threads(2):
            assert runtime.available_threads() == 1
    with runtime.limit_kernel_threads(2):
        assert runtime.available_threads() == CORES, "one thread for BLAS is our own doing"


def test_workers_of_joblib_take_their_share():
    code = (
        "from joblib import Parallel, delayed\n"
        "from partsong.core import runtime\n"
        "print(set(Parallel(n_jobs=2)(delayed(runtime.available_threads)() for _ in range(2))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{{{max(1, CORES // 2)}}}"
