"""The MPI engine in real processes, under mpiexec."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from numpy.testing import assert_allclose
from pairwise_masks import PairwiseMasks

from partsong.engines.local import Sequential
from partsong.engines.mpi import Mpi
from tests.integration.mpi import rank_cases

SCRIPT = Path(__file__).with_name("rank_cases.py")
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")

pytestmark = [
    pytest.mark.skipif(MPIEXEC is None, reason="mpiexec is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]


def mpiexec(n, case, folder, timeout=300):
    """The finished job of n ranks, and the time when it ended."""
    version = subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True, check=False).stdout
    options = ["--oversubscribe"] if "Open MPI" in version or "PRRTE" in version else []
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [MPIEXEC, "-n", str(n), *options, sys.executable, str(SCRIPT), case, str(folder)]
    done = subprocess.run(
        command, env={**os.environ, **root}, capture_output=True, text=True, timeout=timeout, check=False
    )
    return done, time.time()


def sequential(program, n, **more):
    shards = rank_cases.shards_of(n)
    return json.loads(json.dumps(rank_cases.told(rank_cases.run(Sequential(), program, shards, **more))))


@pytest.mark.parametrize("n", [2, 3])
def test_ranks_agree_with_sequential_and_on_what_to_refuse(n, tmp_path):
    done, _ = mpiexec(n, "agree", tmp_path)
    assert done.returncode == 0, done.stderr
    results = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(n)]
    for rank, of_rank in enumerate(results):
        for name, program in rank_cases.PROGRAMS.items():
            assert of_rank[name] == sequential(program, n), "to the bit, with the same bytes counted"
        for name, program in rank_cases.SKETCHED.items():
            known = rank_cases.told_sketches(Sequential(), program, rank_cases.two_sided_shards(n))
            assert of_rank[name] == json.loads(json.dumps(known)), "to the bit, with the same bytes counted"
            for mine, other in zip(of_rank[f"all-reduce {name}"], of_rank[name], strict=True):
                assert_allclose(mine["H"], other["H"], rtol=1e-10, atol=1e-10)
                assert mine["bytes"] == other["bytes"]
        assert of_rank["secure_aggregation"] == sequential(rank_cases.PROGRAMS["exact"], n, reduction=PairwiseMasks())
        for name in ("exact", "fedavg"):
            for mine, known in zip(of_rank[f"all-reduce {name}"], of_rank[name], strict=True):
                assert_allclose(mine["H"], known["H"], rtol=1e-10, atol=1e-10)
                assert mine["bytes"] == known["bytes"]
        assert of_rank["own states"] == [f"p{rank:02d}"]
        assert of_rank["resumed"] == of_rank["exact"][2:]
        assert of_rank["left"] == [0, 1]
        check_refusals(of_rank, rank)


def check_refusals(of_rank, rank):
    expected = {
        "seed": ("ParameterError", "4 at rank 1"),
        "program": ("CompositionError", "at rank 1"),
        "columns": ("CompositionError", "15 columns at rank 1"),
        "no shard": ("ParameterError", "rank 1 has none"),
        "twin": ("ParameterError", "'p00' is at ranks 0 and 1"),
        "ours": ("DataError", "row 3 is no good"),
        "bug": ("ZeroDivisionError" if rank == 1 else "PartyError", "row 3 is no good"),
        "file": ("FileError", "b.npz cannot be read."),
    }
    for what, (kind, words) in expected.items():
        assert of_rank[what][0] == kind, of_rank[what]
        assert words in of_rank[what][1]
    assert any("p01" in note and "round 1" in note for note in of_rank["bug"][2])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("bug", "ZeroDivisionError: row 3 is no good"),
        ("ours-60", "Rank 1 failed: DataError: row 3 is no good"),
        ("exit", ""),
        ("kill", ""),
    ],
)
def test_a_rank_that_fails_or_dies_ends_the_job_within_ten_seconds(case, words, tmp_path):
    done, ended = mpiexec(3, case, tmp_path)
    assert done.returncode != 0
    assert words in done.stderr
    assert ended - float((tmp_path / "failed-at").read_text()) < 10


def test_one_rank_needs_no_launcher():
    script = (
        "import sys, json; sys.path.insert(0, sys.argv[1]); from partsong.engines.mpi import Mpi; "
        "from rank_cases import PROGRAMS, run, shards_of, told; "
        "print(json.dumps(told(run(Mpi(), PROGRAMS['fnmf'], shards_of(3)))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(SCRIPT.parent)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == sequential(rank_cases.PROGRAMS["fnmf"], 3)


def test_nothing_is_pickled():
    """Of mpi4py's methods, lower-case ones pickle: none is called."""
    names = set(Path(sys.modules[Mpi.__module__].__file__).read_text().split("self.comm."))
    called = {text.split("(")[0] for text in names if "(" in text.split()[0]}
    assert called
    assert all(name[0].isupper() for name in called if name.isidentifier()), called
