"""Results stay as they were: H of every method on every engine, against arrays that were stored once.

The arrays change only by a commit that says which results it changes, and why: `golden.py --write CASE …`.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from numpy.testing import assert_allclose

sys.path.insert(0, str(Path(__file__).parent))

import ranks
from cases import CASES, SITES
from golden import TOLERANCE, TOLERANCES, load
from method_tables import ASYNCHRONOUS, BETWEEN_PARTIES, METHODS

STORED = load()
READING_SINGLE_UPLOADS = {"fnmf", "fnmf as printed", "fnmf, then exact"}
"""Programs that an all-reduce cannot sum."""
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
needs_mpi = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None, reason="mpi4py and mpiexec are not installed"
)
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def require_same(name, H, engine):
    tolerance = TOLERANCES.get(name, TOLERANCE)
    message = f"{name} on {engine}. If this change is meant: python tests/golden/golden.py --write {name!r}"
    assert_allclose(H, STORED[name], rtol=tolerance, atol=tolerance, err_msg=message)


@pytest.mark.parametrize(("name", "engine"), [pytest.param(*case, id=" @ ".join(case)) for case in CASES])
def test_results_are_as_they_were(name, engine):
    require_same(name, CASES[name, engine][1](), engine)


def test_every_case_has_an_array_and_every_array_a_case():
    assert {name for name, _ in CASES} == set(STORED)


def test_every_method_has_cases():
    names = set(STORED)
    assert {f"FederatedNMF {method}" for method in METHODS} <= names
    assert {f"{SITES} {method}" for method in BETWEEN_PARTIES} <= names
    assert {engine for name, engine in CASES if name in ASYNCHRONOUS} == {"virtual clock"}


def require_ranks(folder):
    found = json.loads((folder / "found.json").read_text())
    refused = {name for name in ranks.RANKED if name not in found["all-reduce"]}
    assert refused == READING_SINGLE_UPLOADS
    for sums, arrays in found.items():
        for name, H in arrays.items():
            require_same(name, H, f"ranks, {sums}")


@needs_mpi
def test_ranks_of_mpi_give_the_same(tmp_path):
    version = subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True, check=False).stdout
    options = ["--oversubscribe"] if "Open MPI" in version or "PRRTE" in version else []
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [MPIEXEC, "-n", str(ranks.N_RANKS), *options, sys.executable, ranks.__file__, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **root}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    require_ranks(tmp_path)


def torch_rank(rank, folder):
    import torch.distributed as distributed

    from partsong.engines.torch_distributed import TorchDistributed

    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks.N_RANKS)
    ranks.work(TorchDistributed, rank, folder)
    distributed.destroy_process_group()


@needs_torch
def test_ranks_of_torch_give_the_same(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=torch_rank, args=(rank, str(tmp_path))) for rank in range(ranks.N_RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0]
    require_ranks(tmp_path)
