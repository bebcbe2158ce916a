"""Laws of threads: whoever runs first, in whatever thread, after whatever fork, the same bytes come out."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import partsong
from partsong.core import runtime

BIG = """
import hashlib, sys
import numpy as np
from partsong.methods import build
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Schedule, Shard
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel
from partsong.engines.local import Sequential

X = np.random.default_rng(0).random((8000, 301), np.float32)
shards = [Shard(str(i), as_matrix(part)) for i, part in enumerate(np.array_split(X, 3))]
engines = {"sequential": Sequential(), "parallel": Parallel(3)}
for name in sys.argv[1:]:
    for program in (build("exact", 17, local_steps=5), build("fedavg", 17, local_steps=2)):
        run = engines[name].run(program, shards, Schedule(2), reduction=PlainReduction())
        digest = hashlib.sha256()
        for done in run:
            digest.update(np.ascontiguousarray(done.model["H"]).tobytes())
        print(name, digest.hexdigest())
"""


def told(*order: str) -> dict[str, list[str]]:
    done = subprocess.run([sys.executable, "-c", BIG, *order], capture_output=True, text=True, check=True, timeout=300)
    said: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, digest = line.split()
        said.setdefault(name, []).append(digest)
    return said


def test_engines_agree_bit_for_bit_on_products_large_enough_for_threads_whichever_is_first():
    """BLAS picks other kernels and thread counts for large products; a fresh process has never held it before."""
    first, second = told("parallel", "sequential"), told("sequential", "parallel")
    assert first["parallel"] == first["sequential"] == second["parallel"] == second["sequential"]
    assert len(set(first["parallel"])) == 2


def fit() -> bytes:
    X = np.random.default_rng(1).random((6000, 400), np.float32)
    return partsong.NMF(12, max_iter=4, tol=0, random_state=0).fit(X).components_.tobytes()


def test_a_fit_in_another_thread_gives_the_same_bytes():
    found = []
    thread = threading.Thread(target=lambda: found.append(fit()))
    thread.start()
    thread.join()
    assert found == [fit()]


def test_fits_side_by_side_give_the_same_bytes():
    alone, found = fit(), []
    workers = [threading.Thread(target=lambda: found.append(fit())) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == [alone] * 3


def test_blas_is_held_to_one_thread_within_and_set_free_after():
    from threadpoolctl import threadpool_info

    def counts():
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

    before = counts()
    seen = []
    with runtime.limit_kernel_threads(2):
        seen.append(counts())
        with runtime.limit_kernel_threads(1):
            seen.append(counts())
        seen.append(counts())
    assert all(set(found) == {1} for found in seen)
    assert counts() == before
    inside = []
    thread = threading.Thread(target=lambda: inside.append(held_counts(counts)))
    thread.start()
    thread.join()
    assert set(inside[0]) == {1}
    assert counts() == before


def held_counts(counts):
    with runtime.limit_kernel_threads(2):
        return counts()


FORK = """
import os, sys, threading, warnings
import numpy as np
import partsong

warnings.simplefilter("ignore")
X = np.random.default_rng(1).random((6000, 400), np.float32)
make = lambda: partsong.NMF(12, max_iter=6, tol=0, random_state=0).fit(X).components_.tobytes()
alone = make()
stop = threading.Event()
def busy():
    while not stop.is_set():
        make()
worker = threading.Thread(target=busy, daemon=True)
worker.start()
for _ in range(4):
    child = os.fork()
    if child == 0:
        os._exit(0 if make() == alone else 3)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status
stop.set()
worker.join()
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_while_a_fit_runs_can_fit():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "done", done.stderr


def test_side_by_side_keeps_names_raises_the_first_error_and_leaves_nobody_waiting():
    import signal
    import time

    from partsong.engines.local import run_in_threads

    assert run_in_threads(str.upper, ["a", "b", "c"], 2) == {"a": "A", "b": "B", "c": "C"}
    with pytest.raises(ZeroDivisionError):
        run_in_threads(lambda name: 1 / 0, ["a", "b"], 2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            run_in_threads(lambda name: time.sleep(5), ["a", "b"], 2)
        assert time.monotonic() - began < 4, "nobody waits for those who sleep"
    finally:
        signal.signal(signal.SIGINT, before)
