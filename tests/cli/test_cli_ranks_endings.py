"""How a fit over ranks ends when something comes in between: one exit code for all, and no files of half a result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import partsong

sys.path.insert(0, str(Path(__file__).parent))
from rank_launcher import ENVIRONMENT, mpi_command, mpiexec, names_in, needs_mpi, slow_but, wait_for, write_data

pytestmark = needs_mpi

CODES = """
def recording(plain):
    def leave(code=None):
        (folder / f"began-code-{rank}").write_text(str(code))
        plain(code)
    return leave
os._exit, sys.exit = recording(os._exit), recording(sys.exit)
"""

SIGNAL_WHILE_READING = (
    CODES
    + """
import signal
from partsong.io import blocks
plain = blocks.Source.block
def block(self, rows=None, columns=None):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    return plain(self, rows, columns)
blocks.Source.block = block
"""
)

TWO_SIGNALS_IN_A_ROUND = (
    CODES
    + """
import signal
from partsong.methods import averaging as consensus, exact as shared_statistics
def interrupted(plain, calls=[]):
    def local(*given):
        calls.append(None)
        if rank == 1 and len(calls) == 3:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)
        return plain(*given)
    return local
for program in (consensus.LocalAveraging, shared_statistics.SharedSums):
    program.local = interrupted(program.local)
"""
)

NO_FOLDER_AT_THE_END = """
import shutil
from partsong.training.distributed import DistributedFit
plain = DistributedFit.save
def save(self, communicator, **places):
    if rank == 0:
        shutil.rmtree(folder / "out")
    plain(self, communicator, **places)
DistributedFit.save = save
"""

NO_NAME_FOR_THE_MODEL = """
from partsong.io import write as atomic
plain = os.replace
def replace(draft, target):
    if Path(target).name == "m.safetensors":
        raise OSError(28, "No space left on device")
    plain(draft, target)
atomic.os.replace = replace
"""


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path)


def codes_in(folder, n):
    return [(folder / f"began-code-{rank}").read_text() for rank in range(n)]


class TestSignals:
    @pytest.mark.parametrize(
        ("method", "n", "at", "number"),
        [("exact", 2, 1, signal.SIGTERM), ("asyn-sd", 3, 2, signal.SIGTERM), ("asyn-sd", 2, 0, signal.SIGINT)],
    )
    def test_a_signal_at_one_rank_gives_all_its_code(self, data, method, n, at, number):
        words = ["fit", "x.npy", "-k", 4, "--tol", 0, "--max-iter", 10**8, "--seed", 1, "--method", method]
        words += ["--engine", "mpi", "--json", "-o", "m.safetensors", "--weights", "W.npy", "--run-folder", "run"]
        command = mpi_command(n, data, *words, before=CODES)
        process = subprocess.Popen(
            command, cwd=data, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        wait_for(data / "run/settings.json")
        time.sleep(3)
        os.kill(int((data / f"began-{at}").read_text().split()[1]), number)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 128 + number, errors
        assert codes_in(data, n) == [str(128 + number)] * n
        said = json.loads(output)
        assert said["outcome"] == "interrupted"
        assert partsong.load_model(data / "m.safetensors").settings["iterations"] == said["iterations"] > 0
        assert len(list(data.glob("W.rank*"))) == n - (method == "asyn-sd")

    @pytest.mark.parametrize("method", slow_but(["exact", "asyn-sd"], "exact"))
    @pytest.mark.parametrize("before", [SIGNAL_WHILE_READING, TWO_SIGNALS_IN_A_ROUND], ids=["reading", "twice"])
    def test_nothing_is_saved_and_all_ranks_say_so(self, data, method, before):
        there = names_in(data)
        words = ["fit", "x.npy", "-k", 4, "--tol", 0, "--max-iter", 10**8, "--method", method, "--engine", "mpi"]
        done = mpiexec(3, data, *words, "--json", "-o", "m.safetensors", "--weights", "W.npy", before=before)
        assert done.returncode == 143, done.stderr
        assert codes_in(data, 3) == ["143"] * 3
        assert json.loads(done.stdout)["exit_code"] == 143
        assert "no result was saved" in done.stderr
        assert "Traceback" not in done.stderr
        assert names_in(data) == there


class TestFailedEnds:
    @pytest.mark.parametrize(
        ("before", "method"),
        [(NO_FOLDER_AT_THE_END, "exact"), (NO_NAME_FOR_THE_MODEL, "exact"), (NO_NAME_FOR_THE_MODEL, "asyn-sd")],
        ids=["no folder", "no name", "no name at a server"],
    )
    def test_no_shard_outlives_a_model_that_cannot_be_written(self, data, before, method):
        words = ["fit", "x.npy", "-k", 4, "--max-iter", 4, "--engine", "mpi", "--method", method, "--json"]
        there = names_in(data)
        (data / "out").mkdir()
        done = mpiexec(3, data, *words, "-o", "out/m.safetensors", "--weights", "W.npy", before=before)
        assert done.returncode == 1, done.stderr
        assert json.loads(done.stdout)["type"] == "FileError"
        assert [name for name in names_in(data) if not name.endswith("out")] == there

    def test_shards_of_an_earlier_fit_are_not_mixed_with_new_ones(self, data):
        words = ["fit", "x.npy", "-k", 4, "--max-iter", 4, "--engine", "mpi", "--quiet"]
        words += ["-o", "m.safetensors", "--weights", "W.npy", "--run-folder", "run", "--overwrite"]
        assert mpiexec(2, data, *words).returncode == 0
        earlier = (data / "m.safetensors").read_bytes()
        assert len(list(data.glob("W.*"))) == 3
        assert mpiexec(2, data, *words, before=NO_NAME_FOR_THE_MODEL).returncode == 1
        assert not list(data.glob("W.*")), "a list of shards without its shards would be worse than none"
        assert (data / "m.safetensors").read_bytes() == earlier
        assert not list((data / "run").glob("*result.json"))
        assert not list((data / "run").glob("*model.safetensors"))
