"""Laws of asynchronous runs: over MPI in real processes."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from partsong.engines import mpi
from partsong.engines.virtual_clock import Asynchronous, Durations
from tests.integration.mpi import asynchronous_cases as cases
from tests.integration.mpi.asynchronous_cases import NAMES, PROGRAM, run, shards_of

SCRIPT = Path(cases.__file__)
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
EQUAL = Durations(seconds=dict.fromkeys(NAMES, 1.0))


needs_mpi = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None, reason="mpiexec or mpi4py is not installed"
)


def mpiexec(n, case, folder, timeout=120):
    """The finished job of n ranks, and the time when it ended."""
    version = subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True, check=False).stdout
    options = ["--oversubscribe"] if "Open MPI" in version or "PRRTE" in version else []
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [MPIEXEC, "-n", str(n), *options, sys.executable, str(SCRIPT), case, str(folder)]
    done = subprocess.run(
        command, env={**os.environ, **root}, capture_output=True, text=True, timeout=timeout, check=False
    )
    return done, time.time()


def results_of(n, folder):
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(n)]


def in_one_process(program=PROGRAM, shards=None, arrivals=cases.ARRIVALS, record=True, **more):
    rounds = run(Asynchronous(EQUAL, record=record), program, shards or shards_of(), arrivals, **more)
    return json.loads(json.dumps(cases.told(rounds)))


def without(rounds, *names):
    return [{name: value for name, value in done.items() if name not in names} for done in rounds]


@needs_mpi
def test_one_worker_is_the_virtual_clock_to_the_bit(tmp_path):
    done, _ = mpiexec(2, "agree", tmp_path)
    assert done.returncode == 0, done.stderr
    server, worker = results_of(2, tmp_path)
    for what, known in {
        "whole": in_one_process(),
        "resumed": in_one_process()[5:],
        "refused": in_one_process(cases.Refusing(PROGRAM), record=False, on_party_error="skip"),
    }.items():
        assert without(server[what], "states") == without(known, "states")
        assert without(worker[what][:-1], "server") == without(known, "server")
        check_the_end(server[what], worker[what])
        assert worker[what][-1]["states"] == known[-1]["states"]
    assert server["over"] == []
    assert worker["over"][-1]["H"] == in_one_process()[4]["H"]
    check_refusals(server, worker)


def check_the_end(server, worker):
    end = worker[-1]
    for what in ("index", "H", "server"):
        assert end[what] == server[-1][what]
    assert (end["participants"], end["bytes"], end["refused"]) == ([], [{}, 0], {})


@needs_mpi
def test_with_two_workers_every_arrival_is_counted_once(tmp_path):
    done, _ = mpiexec(3, "agree", tmp_path)
    assert done.returncode == 0, done.stderr
    server, *workers = results_of(3, tmp_path)
    known = {shard.name: i for i, shard in enumerate(shards_of()[:2])}
    sizes = in_one_process()[0]["bytes"]
    for what, n_arrivals in (("whole", 12), ("resumed", 7)):
        arrivals = server[what]
        assert len(arrivals) == n_arrivals
        assert arrivals[-1]["index"] == 11
        for name, rank in known.items():
            own = [one for one in arrivals if one["participants"] == [name]]
            contributions = workers[rank][what][:-1]
            assert without(own, "states", "server") == without(contributions, "states", "server")
            check_the_end(arrivals, workers[rank][what])
        assert all(one["bytes"] == [dict.fromkeys(one["participants"], sizes[0]["p00"]), sizes[1]] for one in arrivals)
        assert all(one["traffic"] == [[*one["participants"], 0, sizes[0]["p00"]]] for one in arrivals)
    for rank, of_rank in enumerate((server, *workers)):
        assert all(seconds >= 0 for seconds in of_rank["seconds"]), rank
        assert of_rank["error"] == server["error"]
    virtual = list(run(Asynchronous(), PROGRAM, shards_of(NAMES[:2]), 12))[-1]
    assert server["error"] < 2 * cases.relative_error(virtual.model["H"]) + 0.05
    for leaver in (0, 2):
        left = [of_rank[f"left at {leaver}"] for of_rank in (server, *workers)]
        assert len(left[leaver]) == 2
        for rank in {1, 2} - {leaver}:
            end = left[rank][-1]
            assert end["participants"] == []
            assert (end["index"], end["H"]) == (left[0][-1]["index"], left[0][-1]["H"])
    check_refusals(server, *workers)


def check_refusals(server, *workers):
    expected = {
        "seed": ("ParameterError", "4 at rank 1"),
        "program": ("CompositionError", "steps=2"),
        "no shard": ("ParameterError", "rank 1 has none"),
        "shard at rank 0": ("ParameterError", "Rank 0 is the server"),
        "masked": ("CompositionError", "uploads one at a time"),
        "enrol": ("DataError", "row 3 is no good"),
        "absent": ("ParameterError", "stragglers"),
        "sweeps": ("CompositionError", "sweeps=1"),
        "ours": ("DataError", "row 3 is no good"),
        "bug": ("PartyError", "row 3 is no good"),
        "ours at the server": ("DataError", "row 3 is no good"),
        "bug at the server": ("PartyError", "row 3 is no good"),
    }
    if len(workers) > 1:
        expected["columns"] = ("CompositionError", "p01: 15")
        expected["twin"] = ("ParameterError", "more than once: p00")
    for what, (kind, words) in expected.items():
        for rank, of_rank in enumerate((server, *workers)):
            is_there = (what == "bug" and rank == 1) or (what == "bug at the server" and rank == 0)
            assert of_rank[what][0] == ("ZeroDivisionError" if is_there else kind), (what, rank, of_rank[what])
            assert words in of_rank[what][1]
    assert any("'p00'" in note for note in server["bug"][2])


@needs_mpi
@pytest.mark.parametrize("n", [2, 3])
def test_a_caller_that_leaves_its_loop_ends_the_run_everywhere_and_says_why(n, tmp_path):
    done, _ = mpiexec(n, "leave", tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    results = results_of(n, tmp_path)
    for loop, leaver, rank in product(("plain", "closed", "passed_on"), range(n), range(n)):
        broken, raised = (results[rank][f"{loop} {how} {leaver}"] for how in ("break", "raise"))
        assert max(broken[-1], raised[-1]) < 10, "seconds"
        if rank == leaver:
            assert raised[:2] == ["Tired", "of it all"]
        elif loop == "closed":
            assert raised[0] == "PartyError"
            assert f"The caller at rank {leaver} ended the run" in raised[1]
            assert "Tired: of it all" in raised[1]
        elif rank:
            assert raised[:2] == ["Ending", leaver], "a bare loop that raises has broken out"
        if rank and rank != leaver:
            assert broken[:2] == ["Ending", leaver]
    for rank in range(n):
        kind, words = results[rank]["interrupted"]
        assert kind == ("KeyboardInterrupt" if rank == 1 else "PartyError")
        assert rank == 1 or "Rank 1 failed: KeyboardInterrupt" in words


@needs_mpi
def test_a_run_ends_once_the_slowest_has_been_heard_whose_last_piece_is_not_taken_in(tmp_path):
    done, _ = mpiexec(3, "straggler", tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    results = results_of(3, tmp_path)
    server, fast, slow = (of_rank["rounds"] for of_rank in results)
    assert {tuple(one["participants"]) for one in server} == {("p00",)}
    assert (len(server), len(fast), len(slow)) == (40, 41, 1)
    assert slow[-1]["states"] == {}
    for worker in (fast, slow):
        check_the_end(server, worker)
    assert max(of_rank["seconds"] for of_rank in results) < 10


@needs_mpi
def test_who_is_faster_contributes_more(tmp_path):
    done, _ = mpiexec(3, "speeds", tmp_path)
    assert done.returncode == 0, done.stderr
    counts = Counter(one["participants"][0] for one in results_of(3, tmp_path)[0])
    assert sum(counts.values()) == 60
    assert counts["p00"] > 2 * counts["p01"] > 0


@needs_mpi
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("p01-bug-0", "ZeroDivisionError: row 3 is no good"),
        ("p01-ours-60", "Rank 2 failed: DataError: row 3 is no good"),
        ("server-ours-60", "Rank 0 failed: DataError: row 3 is no good"),
        ("tired caller", "The caller at rank 0 ended the run"),
        ("p01-exit-0", ""),
        ("p01-kill-0", ""),
        ("server-kill-0", ""),
    ],
)
def test_a_rank_that_fails_or_dies_ends_the_job_within_ten_seconds(case, words, tmp_path):
    done, ended = mpiexec(3, case, tmp_path)
    assert done.returncode != 0
    assert words in done.stderr
    assert ended - float((tmp_path / "failed-at").read_text()) < 10


@needs_mpi
def test_one_rank_alone_is_told_that_there_are_no_workers():
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from asynchronous_cases import PROGRAM, run; "
        "from partsong.engines.mpi_async import AsynchronousMpi; next(run(AsynchronousMpi(), PROGRAM, []))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(SCRIPT.parent)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "mpiexec -n 2 or more" in done.stderr


def test_nothing_is_pickled():
    """Of mpi4py's methods, lower-case ones pickle: none is called."""
    called = {text.split("(")[0] for text in Path(mpi.__file__).read_text().split("comm.")[1:] if "(" in text}
    methods = {name for name in called if name.isidentifier()}
    assert {"Isend", "Irecv", "Iprobe"} <= methods
    assert all(name[0].isupper() for name in methods), methods
