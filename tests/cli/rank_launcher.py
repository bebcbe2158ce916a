"""The command line over ranks, in real processes under mpiexec."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from scipy import sparse

import partsong

MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
SOURCE = str(Path(partsong.__file__).parents[1])
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": SOURCE,
    "COLUMNS": "200",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


def slow_but(cases, *quick):
    """Cases of a table, of which some are quick enough, or telling enough, for every run of the tests."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in cases]


needs_mpi = [
    pytest.mark.skipif(MPIEXEC is None, reason="mpiexec is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

AT_A_RANK = """
import os, sys, time
from pathlib import Path
from mpi4py import MPI
rank, folder = MPI.COMM_WORLD.Get_rank(), Path.cwd()
words = [word.format(rank=rank) for word in sys.argv[1:]]
(folder / f"began-{rank}").write_text(f"{time.time()} {os.getpid()}")
if (folder / f"home-{rank}").is_dir():
    os.chdir(folder / f"home-{rank}")
sys.argv = ["partsong", *words]
# before
from partsong.cli.main import main
main()
"""
"""The command line at one rank, in a folder of its own where there is one; {rank} in a word is its number."""


def mpi_command(n, folder, *words, before=""):
    """The command of a run under mpiexec; `before` is code that each rank runs before the command line is loaded."""
    script = folder / "at_a_rank.py"
    script.write_text(AT_A_RANK.replace("# before", before))
    version = subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True, check=False).stdout
    options = ["--oversubscribe"] if "Open MPI" in version or "PRRTE" in version else []
    return [MPIEXEC, "-n", str(n), *options, sys.executable, str(script), *map(str, words)]


def mpiexec(n, folder, *words, before=""):
    return subprocess.run(
        mpi_command(n, folder, *words, before=before),
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def fit_over(n, folder, *words):
    """What rank 0 says in JSON, and the model."""
    done = mpiexec(n, folder, "fit", *words, "--engine", "mpi", "--json", "-o", f"m{n}.safetensors")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line), partsong.load_model(folder / f"m{n}.safetensors")


def write_data(folder):
    """Rows that 2 and 3 do not divide, dense and sparse."""
    rng = np.random.default_rng(0)
    X = rng.random((91, 5)) @ rng.random((5, 23)) + 0.05 * rng.random((91, 23))
    np.save(folder / "x.npy", X)
    S = sparse.random_array((91, 23), density=0.3, rng=rng, format="csr")
    sparse.save_npz(folder / "s.npz", S)
    np.save(folder / "t.npy", X.T)
    return folder


def wait_for(path, seconds=60):
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, f"{path} does not come"
        time.sleep(0.05)


def names_in(folder):
    return sorted(str(path) for path in folder.rglob("*") if not path.name.startswith(("began-", "at_a_rank")))
