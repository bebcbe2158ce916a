"""`partsong.fit_distributed`: the same fit as in one process, from files and from rows, in real processes."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import partsong
from partsong.errors import CompositionError, ParameterError
from partsong.training.distributed import open_engine
from partsong.training.run_folder import RunFolder
from tests.integration.mpi import distributed_cases
from tests.integration.mpi.distributed_cases import K, N, data

SCRIPT = Path(__file__).with_name("distributed_cases.py")
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
needs_mpi = [
    pytest.mark.skipif(MPIEXEC is None, reason="mpiexec is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture
def folder(tmp_path):
    X = data()
    np.save(tmp_path / "x.npy", X)
    X[80, 7] = np.nan
    np.save(tmp_path / "nan.npy", X)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    return tmp_path


def start(n, case, folder, launcher="mpi"):
    """What each rank has written down."""
    if launcher == "mpi":
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        version = subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True, check=False).stdout
        options = ["--oversubscribe"] if "Open MPI" in version or "PRRTE" in version else []
        command = [MPIEXEC, "-n", str(n), *options, sys.executable, "-m", "mpi4py"]
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        root = {}
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(n),
            "--master-port",
            str(port),
        ]
    environment = {**os.environ, **root, "PYTHONPATH": str(Path(partsong.__file__).parents[1])}
    command += [str(SCRIPT), case, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in range(n)]


def factors(folder, case, n):
    """H of each rank, and their W put together."""
    arrays = [np.load(folder / f"{case}-{rank}.npz") for rank in range(n)]
    return [one["H"] for one in arrays], np.concatenate([one["W"] for one in arrays])


def in_one_process(solver="hals"):
    return partsong.NMF(K, solver=solver, init="random", random_state=3, max_iter=12, tol=0)


@pytest.mark.filterwarnings("ignore:Maximum number:sklearn.exceptions.ConvergenceWarning")
class TestOverMpi:
    pytestmark = needs_mpi

    @pytest.mark.parametrize(
        ("case", "solver", "n"), [("of_file", "hals", 2), ("of_rows", "hals", 3), ("of_sparse_rows", "mu", 2)]
    )
    def test_it_is_the_fit_of_one_process(self, folder, case, solver, n):
        told = start(n, case, folder)
        known = in_one_process(solver)
        W = known.fit_transform(data())
        shared, own = factors(folder, case, n)
        for H in shared:
            assert_array_equal(H, shared[0], "the same bits at every rank")
        assert_allclose(shared[0], known.components_, rtol=1e-8, atol=1e-8)
        assert_allclose(own, W, rtol=1e-6, atol=1e-8)
        assert [one["rank"] for one in told] == list(range(n))
        assert [one["rows"][0] for one in told[1:]] == [one["rows"][1] for one in told[:-1]]
        assert told[-1]["rows"][1] == N
        assert {one["iterations"] for one in told} == {12}
        assert_allclose([one["error"] for one in told], known.relative_error_, rtol=1e-8)

    def test_files_are_those_of_the_command_line(self, folder):
        start(2, "of_file", folder)
        (H, _), W = factors(folder, "of_file", 2)
        assert_array_equal(partsong.load_model(folder / "m.safetensors").components, H)
        listed = json.loads((folder / "W.shards.json").read_text())
        parts = [np.load(folder / shard["file"]) for shard in listed["shards"]]
        assert_array_equal(np.concatenate(parts), W)
        run = RunFolder(folder / "run")
        assert len(run.history()) == 12
        assert_array_equal(run.model().components, H)
        assert (run.result()["ranks"], run.settings()["reduce"]) == (2, "in-order")
        assert partsong.NMF.load(folder / "m.safetensors").transform(data()).shape == (N, K)

    def test_names_of_columns_are_in_the_model(self, folder):
        assert start(2, "of_names", folder)[1]["names"] == [f"g{j}" for j in range(23)]

    @pytest.mark.parametrize("case", ["of_sketches", "of_cells"])
    def test_methods_between_ranks(self, folder, case):
        told = start(2, case, folder)
        (H, _), W = factors(folder, case, 2)
        X = data()
        gap = np.linalg.norm(X - W @ H) / np.linalg.norm(X)
        assert told[0]["error"] < 0.5
        if case == "of_sketches":
            assert_allclose(gap, told[0]["error"], rtol=1e-8)

    def test_several_fits_in_one_process(self, folder):
        start(2, "thrice", folder)

    def test_arguments_may_be_numbers_of_numpy(self, folder):
        assert start(2, "with_numbers_of_numpy", folder)[1]["iterations"] == 6

    def test_a_server_has_no_rows(self, folder):
        told = start(3, "of_arrivals", folder)
        shared, W = factors(folder, "of_arrivals", 3)
        assert [one["rows"] for one in told] == [[0, 0], [0, 46], [46, 91]]
        assert len(W) == N
        gap = np.linalg.norm(data() - W @ shared[0]) / np.linalg.norm(data())
        assert_allclose([one["error"] for one in told], gap, rtol=1e-8)

    def test_the_first_ctrl_c_at_any_rank_keeps_the_model_of_all(self, folder):
        told = start(2, "interrupted", folder)
        assert {one["outcome"] for one in told} == {"interrupted"}
        assert told[0]["iterations"] == told[1]["iterations"] > 0

    def test_mistakes_are_told_to_all_ranks(self, folder):
        told = start(2, "refused", folder)
        for name, (kind, message) in REFUSALS.items():
            kinds = [one[name][0] for one in told]
            assert kinds == [kind, kind], (name, told[0][name], told[1][name])
            assert all(message in one[name][1] for one in told), (name, told[0][name])
        for name in told[0].keys() - REFUSALS.keys():
            assert {one[name][0] for one in told} <= {"MemoryError", "PartyError", "ParameterError", "FileError"}, name
            assert "nothing" not in (told[0][name][0], told[1][name][0]), name
        assert sorted(path.name for path in folder.glob("*.safetensors")) == []
        assert [path.name for path in (folder / "full").iterdir()] == ["notes.txt"]


REFUSALS = {
    "nan in rows": ("DataError", "rank 1"),
    "nan in a file": ("DataError", "nan.npy"),
    "no file at one": ("FileError", "none.npy"),
    "other arguments": ("ParameterError", "n_components is 4 at rank 0 and 5 at rank 1"),
    "a path and rows": ("ParameterError", "X is"),
    "other columns": ("ShapeError", "23 at rank 0, 22 at rank 1"),
    "no rows": ("DataError", "0 sample(s)"),
    "rows missing": ("ParameterError", "Rank 1 has no rows"),
    "columns needed": ("ParameterError", "path of a file"),
    "rows at the server": ("ParameterError", "X=None"),
    "unknown method": ("ParameterError", "exact"),
    "unknown option": ("ParameterError", "sketch_ratio"),
    "options of exact": ("ParameterError", "local_steps"),
    "bad option": ("ParameterError", "sketch_ratio"),
    "bad rank": ("ParameterError", "n_components"),
    "bad tol": ("ParameterError", "tol"),
    "bad dtype": ("ParameterError", "dtype"),
    "bad seed": ("ParameterError", "random_state"),
    "penalised game": ("ParameterError", "alpha_W"),
    "gaps without a game": ("ParameterError", "missing"),
    "folder in use": ("FileError", "full"),
    "no such folder": ("FileError", "no"),
}


@needs_torch
def test_several_fits_under_torchrun(folder):
    start(2, "thrice", folder, "torch")


@needs_torch
@pytest.mark.filterwarnings("ignore:Maximum number:sklearn.exceptions.ConvergenceWarning")
def test_torchrun_is_seen_by_itself(folder):
    start(2, "of_file", folder, "torch")
    shared, W = factors(folder, "of_file", 2)
    known = in_one_process().fit(data())
    assert_allclose(shared[1], known.components_, rtol=1e-8, atol=1e-8)
    assert len(W) == N
    assert RunFolder(folder / "run").settings()["engine"] == "torch"


class TestAlone:
    """A process that no launcher has started is the only rank."""

    pytestmark = needs_mpi

    @pytest.mark.filterwarnings("ignore:Maximum number:sklearn.exceptions.ConvergenceWarning")
    def test_one_rank_is_one_process(self):
        fit = partsong.fit_distributed(data(), K, engine="mpi", **distributed_cases.SETTINGS)
        known = in_one_process().fit(data())
        assert_array_equal(fit.H, known.components_)
        assert (fit.rank, fit.rows) == (0, (0, N))

    def test_what_can_be_refused_before_ranks_meet(self):
        with pytest.raises(ParameterError, match="engine"):
            partsong.fit_distributed(data(), K, engine="nccl")
        with pytest.raises(ParameterError, match="reduce"):
            partsong.fit_distributed(data(), K, reduce="sorted")
        with pytest.raises(ParameterError, match="at least one worker"):
            partsong.fit_distributed(data(), K, method="asyn-sd", engine="mpi")

    @pytest.mark.parametrize(
        ("engine", "launched"),
        [("torch", {"OMPI_COMM_WORLD_SIZE": "2"}), ("mpi", {"WORLD_SIZE": "2", "RANK": "0"})],
    )
    def test_ranks_of_another_launcher_are_not_alone(self, engine, launched, monkeypatch):
        for name, value in launched.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(CompositionError, match="started these ranks"), open_engine(engine):
            pass

    def test_games_of_all_at_once_are_for_rows_in_one_place(self):
        with pytest.raises((ParameterError, CompositionError), match="simultaneous"):
            partsong.fit_distributed(data(), K, method="game", engine="mpi", method_options={"order": "simultaneous"})
