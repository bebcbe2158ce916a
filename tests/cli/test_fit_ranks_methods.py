"""Asynchronous methods and games over ranks: real processes under mpiexec, and torch.distributed."""

from __future__ import annotations

import csv
import json
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy import sparse

import partsong
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Schedule, Shard
from partsong.core.streams import key
from partsong.data.blocks import block_range
from partsong.data.conversion import as_matrix
from partsong.data.observed import observed
from partsong.engines.local import Sequential
from partsong.methods.game import FederatedGame
from partsong.solvers.game import ConstantStep, Game, ShrinkOthers
from partsong.solvers.game_orders import Shuffled
from partsong.training.result import complete
from tests.cli.rank_launcher import (
    ENVIRONMENT,
    fit_over,
    mpiexec,
    names_in,
    needs_mpi,
    needs_torch,
    slow_but,
    write_data,
)

READING = """
from partsong.io import blocks
plain = blocks.BlockSource.block
def block(self, rows=None, columns=None):
    with open(folder / f"began-read-{rank}", "a") as file:
        file.write(f"{rows} {columns}\\n")
    return plain(self, rows, columns)
blocks.BlockSource.block = block
"""
FAILING = """
from partsong.errors import DataError
from partsong.methods.averaging import LocalAveraging
plain, calls = LocalAveraging.local, []
def local(self, shard, party, model):
    calls.append(None)
    if rank == 2 and len(calls) == 3:
        raise DataError("Enough of this.")
    return plain(self, shard, party, model)
LocalAveraging.local = local
"""


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path)


class TestArrivals:
    pytestmark = needs_mpi

    @pytest.mark.parametrize("method", slow_but(["asyn-sd", "asyn-ssd-v"], "asyn-ssd-v"))
    def test_with_one_worker_it_is_the_simulation(self, method, data):
        words = ["x.npy", "-k", 4, "--seed", 3, "--max-iter", 12, "--tol", 0, "--method", method]
        said, model = fit_over(2, data, *words)
        assert (said["iterations"], said["outcome"]) == (12, "max-rounds")
        party = {"rank-000001": np.load(data / "x.npy")}
        same = partsong.FederatedNMF(4, method=method, rounds=12, tol=0, random_state=3).fit(party)
        assert_allclose(model.components, same.components_, rtol=1e-8, atol=1e-8)

    def test_workers_read_and_write_their_own_rows_and_the_server_none(self, data):
        words = ["fit", "s.npz", "-k", 4, "--max-iter", 31, "--tol", 0, "--method", "asyn-sd", "--seed", 1]
        words += ["--engine", "mpi", "--json", "--weights", "W.npy", "--run-folder", "run"]
        done = mpiexec(3, data, *words, before=READING)
        assert done.returncode == 0, done.stderr
        assert not (data / "began-read-0").exists()
        assert [(data / f"began-read-{rank}").read_text() for rank in (1, 2)] == ["(0, 46) None\n", "(46, 91) None\n"]
        said, model = json.loads(done.stdout), partsong.load_model(data / "run/model.safetensors")
        assert (said["ranks"], said["reduce"], said["iterations"]) == (3, None, 31)
        assert model.settings["iterations"] == 31
        shards = json.loads((data / "W.shards.json").read_text())["shards"]
        assert shards == [
            {"rank": 1, "rows": [0, 46], "file": "W.rank1of3.npy"},
            {"rank": 2, "rows": [46, 91], "file": "W.rank2of3.npy"},
        ]
        X, W = sparse.load_npz(data / "s.npz").toarray(), np.vstack([np.load(data / one["file"]) for one in shards])
        gap = np.linalg.norm(X - W @ model.components) / np.linalg.norm(X)
        assert_allclose(gap, said["relative_error"], rtol=1e-8)
        history = rows_of(data / "run/history.csv")
        assert [int(row["iteration"]) for row in history] == list(range(1, 32))
        errors = [float(row["relative_error"]) for row in history if row["relative_error"]]
        assert len(errors) <= 16, "everybody is heard between two errors, but for the last"
        assert all(0 <= error <= 1 for error in errors)
        assert_allclose(errors[-1], said["relative_error"], rtol=0.3, err_msg="of reports that may be some turns old")
        senders = [row["party"] for row in rows_of(data / "run/bytes.csv")]
        assert len(senders) >= 31
        assert set(senders) <= {"rank-000001", "rank-000002"}, "one may have been faster 31 times"
        assert not list(data.glob("W.rank0*"))

    @pytest.mark.parametrize("name", slow_but(["x.npy", "s.npz"], "s.npz"))
    def test_a_tolerance_ends_all_ranks_with_a_model_for_all(self, name, data):
        """Also of noise, where workers fit their own rows better than the common model does."""
        words = [name, "-k", 4, "--seed", 1, "--tol", 1e-3, "--max-iter", 10**6, "--method", "asyn-sd"]
        said, model = fit_over(3, data, *words)
        assert said["outcome"] == "converged"
        assert said["iterations"] == model.settings["iterations"] < 10**5
        X = sparse.load_npz(data / name) if name == "s.npz" else np.load(data / name)
        pooled = partsong.NMF(4, random_state=1).fit(X)
        assert model.relative_error**2 < pooled.history_[-1].relative_error ** 2 + 0.02

    def test_a_time_budget_ends_all_ranks(self, data):
        words = ["x.npy", "-k", 4, "--tol", 0, "--max-iter", 10**8, "--time-budget", 8, "--method", "asyn-sd"]
        said, _ = fit_over(3, data, *words)
        assert said["outcome"] == "time-limit"
        assert said["iterations"] > 2
        assert said["seconds"] < 16, "twice the budget, on a machine that may be busy"


def rows_of(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def no_file_at_a_worker(folder):
    for rank in range(3):
        (folder / f"home-{rank}").mkdir()
        if rank < 2:
            np.save(folder / f"home-{rank}/x.npy", np.load(folder / "x.npy"))


def nan_at_a_worker(folder):
    X = np.load(folder / "x.npy")
    X[80, 7] = np.nan
    np.save(folder / "x.npy", X)


def one_row(folder):
    np.save(folder / "x.npy", np.ones((1, 23)))


FAILURES = {
    "one rank": (1, None, [], 2, "UsageError", "needs a server and at least one worker"),
    "more workers than rows": (3, one_row, [], 1, "ParameterError", "1 rows cannot be split over 2 workers"),
    "no file at a worker": (3, no_file_at_a_worker, [], 1, "FileError", "x.npy: there is no such file"),
    "NaN at a worker": (3, nan_at_a_worker, [], 1, "DataError", "in row 80;"),
    "sums": (2, None, ["--reduce", "in-order"], 2, "UsageError", "is asynchronous and adds no sums"),
    "sketch": (2, None, ["--sketch", "count"], 2, "UsageError", "asyn-ssd-v"),
    "work that fails": (3, None, [], 1, "DataError", "Enough of this."),
}


@pytest.mark.parametrize("case", slow_but(FAILURES, "no file at a worker", "work that fails"))
class TestFailures:
    pytestmark = needs_mpi

    def test_all_ranks_end_with_one_message_and_no_file(self, case, data):
        n, spoil, words, code, kind, message = FAILURES[case]
        if spoil is not None:
            spoil(data)
        before = names_in(data)
        given = ["fit", "x.npy", "-k", 2, "--method", "asyn-sd", "--engine", "mpi", "--json", "-o", "m.safetensors"]
        given += ["--weights", "W.npy", "--tol", 0, *words]
        done = mpiexec(n, data, *given, before=FAILING if case == "work that fails" else "")
        ended = time.time()
        assert done.returncode == code, done.stderr
        said = json.loads(done.stdout)
        assert (said["type"], said["exit_code"]) == (kind, code)
        assert message in said["error"]
        assert done.stderr.count(message) == 1
        assert "Traceback" not in done.stderr
        assert names_in(data) == before
        assert ended - max(float((data / f"began-{rank}").read_text().split()[0]) for rank in range(n)) < 15


def test_the_engine_of_torch_is_refused_with_a_way_out(invoke, data_npy):
    pytest.importorskip("torch")
    words = ["--method", "asyn-sd", "--engine", "torch", "-o", "m.safetensors"]
    told = " ".join(invoke("fit", data_npy, "-k", 2, *words, code=2).stderr.split())
    assert 'engine="mpi"' in told
    assert "syn-sd" in told


SWEEPS = 6
FIT = ["-k", 4, "--seed", 3, "--method", "game", "--max-iter", SWEEPS, "--tol", 0]


def played_in_one_process(X, n, game, take=as_matrix):
    """The same parties on the sequential engine: the model after as many sweeps, and its relative error."""
    names = [f"rank-{rank:06d}" for rank in range(n)]
    blocks = [X[slice(*block_range(X.shape[0], n, rank))] for rank in range(n)]
    shards = [Shard(name, take(block), key(3, "secret", name)) for name, block in zip(names, blocks, strict=True)]
    program = FederatedGame(4, game)
    *_, last = Sequential().run(program, shards, Schedule(SWEEPS * n, 3), reduction=PlainReduction())
    H = program.components(last.checkpoint.server)
    done = complete(program.solver, shards, np.ascontiguousarray(H.T), rescale=True)
    return done.H, done.relative_error


class TestOverMpi:
    pytestmark = needs_mpi

    @pytest.mark.parametrize("n", [2, 3])
    def test_the_same_bits_as_in_one_process(self, data, n):
        words = ["--game-order", "random", "--step", 0.1, "--self-play", "max", "--reduce", "in-order"]
        said, model = fit_over(n, data, "x.npy", *FIT, *words, "--weights", "W.npy", "--run-folder", "run")
        game = Game(Shuffled(), ConstantStep(0.1), ShrinkOthers())
        H, error = played_in_one_process(np.load(data / "x.npy"), n, game)
        assert_array_equal(model.components, H)
        assert_allclose(said["relative_error"], error, rtol=1e-12)
        assert (said["iterations"], said["ranks"], said["game"]["play"]) == (SWEEPS, n, "random")
        assert (model.settings["step"], model.settings["self_play"], model.settings["ranks"]) == (0.1, "max", n)
        asked = json.loads((data / "run/settings.json").read_text())
        assert (asked["method"], asked["play"], asked["shrink"]) == ("game", "random", 0.99)
        lines = (data / "run/history.csv").read_text().splitlines()[1:]
        errors = [line.split(",")[2] for line in lines]
        assert [bool(error) for error in errors] == ([False] * (n - 1) + [True]) * SWEEPS
        assert float(errors[-1]) < float(errors[n - 1])

    def test_known_cells_alone_whatever_the_sums(self, data):
        said, model = fit_over(2, data, "s.npz", *FIT, "--missing", "ignore")
        H, error = played_in_one_process(sparse.load_npz(data / "s.npz"), 2, Game(), observed)
        assert_allclose(model.components, H, rtol=1e-9)
        assert_allclose(said["relative_error"], error, rtol=1e-9)
        assert model.settings["missing"] == "ignore"


class TestTrouble:
    pytestmark = needs_mpi

    def test_a_step_that_is_too_large(self, data):
        done = mpiexec(2, data, "fit", "x.npy", *FIT, "--step", 50, "--engine", "mpi", "--json", "-o", "m.safetensors")
        assert done.returncode != 0
        assert "Use a smaller step, or a safe step." in done.stderr

    def test_rows_and_columns_of_which_nothing_is_known(self, data):
        """A rank without a known cell goes along; if no rank knows any, that is an error of all."""
        X = np.load(data / "x.npy")
        X[:60], X[:, 7] = np.nan, np.nan
        np.save(data / "gaps.npy", X)
        words = [*FIT, "--missing", "ignore", "--engine", "mpi", "-o", "m.safetensors"]
        done = mpiexec(2, data, "fit", "gaps.npy", *words)
        assert done.returncode == 0, done.stderr
        assert "No cell is known in column 7" in done.stderr
        np.save(data / "nothing.npy", np.full_like(X, np.nan))
        done = mpiexec(2, data, "fit", "nothing.npy", *words)
        assert done.returncode != 0
        assert "no known cell" in done.stderr


def over_torch(n, folder, *words):
    """Standard output, standard error and exit code of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "partsong.cli.main", "fit", *map(str, words), "--engine", "torch"]
    ranks = [
        subprocess.Popen(
            command,
            cwd=folder,
            env={
                **ENVIRONMENT,
                **{"WORLD_SIZE": str(n), "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(n)
    ]
    return [(*rank.communicate(timeout=120), rank.returncode) for rank in ranks]


@needs_torch
def test_over_torch(data):
    ends = over_torch(2, data, "x.npy", *FIT, "--reduce", "in-order", "--json", "-o", "m.safetensors")
    assert [code for _, _, code in ends] == [0, 0], ends
    said = json.loads(ends[0][0])
    H, error = played_in_one_process(np.load(data / "x.npy"), 2, Game())
    assert_array_equal(partsong.load_model(data / "m.safetensors").components, H)
    assert_allclose(said["relative_error"], error, rtol=1e-12)


@needs_torch
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--method", "exact", "--game-order", "random"], "has no options"),
        (["--method", "game", "--game-order", "simultaneous"], "moves all players at once"),
        (["--method", "game", "--alpha-w", 0.1], "no penalties"),
        (["--method", "game", "--step-decay", 0.1], "--step-decay needs a numeric step"),
        (["--solver", "game"], "Use --method"),
    ],
)
def test_wrong_options(invoke, data, words, why):
    refused = invoke("fit", data / "x.npy", "-k", 3, *words, "--engine", "torch", "-o", "m.safetensors", code=2)
    assert why in refused.stderr
