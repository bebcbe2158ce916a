"""The engine over torch.distributed in real processes, with gloo."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from numpy.testing import assert_allclose

from partsong.engines.local import Sequential
from partsong.engines.torch_distributed import TorchDistributed
from partsong.errors import CompositionError
from tests.integration.mpi import rank_cases

torch = pytest.importorskip("torch")


def one_rank(rank, n, case, folder, as_tensors):
    import torch.distributed as distributed

    told = os.open(Path(folder, f"rank-{rank}.err"), os.O_WRONLY | os.O_CREAT)
    os.dup2(told, sys.stderr.fileno())
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=n)
    rank_cases.main(TorchDistributed, TorchDistributed().communicator(), case, folder, as_tensors)
    distributed.destroy_process_group()


def processes(n, case, folder, as_tensors=False, timeout=300):
    """The exit codes of n ranks, and the time when the last one ended."""
    context = multiprocessing.get_context("spawn")
    work = partial(one_rank, n=n, case=case, folder=str(folder), as_tensors=as_tensors)
    crew = [context.Process(target=work, args=(rank,), daemon=True) for rank in range(n)]
    for process in crew:
        process.start()
    until = time.monotonic() + timeout
    for process in crew:
        process.join(max(0, until - time.monotonic()))
    ended = time.time()
    codes = [process.exitcode for process in crew]
    for process in crew:
        process.kill()
    return codes, ended


@pytest.mark.parametrize("as_tensors", [False, True], ids=["arrays", "tensors"])
def test_ranks_agree_with_sequential_and_on_what_to_refuse(as_tensors, tmp_path):
    codes, _ = processes(2, "agree", tmp_path, as_tensors)
    assert codes == [0, 0], [path.read_text() for path in tmp_path.glob("*.err")]
    shards = rank_cases.shards_of(2, as_tensors=as_tensors)
    kind = "Tensor" if as_tensors else "ndarray"
    for rank in range(2):
        of_rank = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        for name, program in rank_cases.PROGRAMS.items():
            known = rank_cases.told(rank_cases.run(Sequential(), program, shards))
            assert of_rank[name] == json.loads(json.dumps(known)), "to the bit, with the same bytes counted"
        for name, program in rank_cases.SKETCHED.items():
            known = rank_cases.told_sketches(Sequential(), program, rank_cases.two_sided_shards(2, as_tensors))
            assert of_rank[name] == json.loads(json.dumps(known)), "to the bit, with the same bytes counted"
        assert {done["kind"] for done in of_rank["exact"]} == {kind}
        for name in ("exact", "fedavg"):
            for mine, known in zip(of_rank[f"all-reduce {name}"], of_rank[name], strict=True):
                assert_allclose(mine["H"], known["H"], rtol=1e-10, atol=1e-10)
                assert (mine["bytes"], mine["kind"]) == (known["bytes"], kind)
        assert of_rank["resumed"] == of_rank["exact"][2:]
        assert of_rank["left"] == [0, 1]
        assert of_rank["seed"][0] == "ParameterError"
        assert of_rank["columns"][0] == "CompositionError"
        assert of_rank["ours"][:2] == ["DataError", "row 3 is no good"]
        assert of_rank["bug"][0] == ("ZeroDivisionError" if rank == 1 else "PartyError")
        assert of_rank["file"][0] == "FileError"


@pytest.mark.parametrize("case", ["exit", "ours-6"])
def test_a_rank_that_dies_or_fails_ends_the_others_within_ten_seconds(case, tmp_path):
    codes, ended = processes(2, case, tmp_path)
    assert codes[0] not in (0, None)
    assert codes[1] not in (0, None)
    assert ended - float((tmp_path / "failed-at").read_text()) < 10
    errors = [(tmp_path / f"rank-{rank}.err").read_text() for rank in range(2)]
    if case == "exit":
        assert "lost the connection to another rank" in errors[0]
    else:
        assert "Rank 1 failed: DataError: row 3 is no good" in errors[1]


def torchrun(n, case, folder, timeout=60):
    """The finished job of n ranks, and the time when it ended; one that does not end is ended with its ranks."""
    script = Path(__file__).with_name("torchrun_cases.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", str(script)]
    job = subprocess.Popen(
        [*command, case, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        return job.communicate(timeout=timeout)[1], job.returncode, time.time()
    except subprocess.TimeoutExpired:
        job.terminate()  # torchrun passes it on to its ranks
        job.communicate()
        raise


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("bug", "ZeroDivisionError: row 3 is no good"),
        ("ours-60", "Rank 1 failed: DataError: row 3 is no good"),
    ],
)
def test_a_rank_that_fails_in_the_middle_ends_a_job_of_torchrun_within_ten_seconds(case, words, tmp_path):
    told, code, ended = torchrun(2, case, tmp_path)
    assert code != 0
    assert words in told
    assert ended - float((tmp_path / "failed-at").read_text()) < 10


def test_there_must_be_a_process_group():
    with pytest.raises(CompositionError, match="no process group"):
        TorchDistributed().communicator()
