"""A game over ranks from the command line: real processes under mpiexec, and torch.distributed."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

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

sys.path.insert(0, str(Path(__file__).parent))
from rank_launcher import ENVIRONMENT, fit_over, mpiexec, needs_mpi, needs_torch, write_data

SWEEPS = 6
FIT = ["-k", 4, "--seed", 3, "--method", "game", "--max-iter", SWEEPS, "--tol", 0]


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path)


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
        assert "Take a smaller step, or a safe one." in done.stderr

    def test_rows_and_columns_of_which_nothing_is_known(self, data):
        """A rank without a known cell goes along; if no rank knows any, that is an error of all."""
        X = np.load(data / "x.npy")
        X[:60], X[:, 7] = np.nan, np.nan
        np.save(data / "gaps.npy", X)
        words = [*FIT, "--missing", "ignore", "--engine", "mpi", "-o", "m.safetensors"]
        done = mpiexec(2, data, "fit", "gaps.npy", *words)
        assert done.returncode == 0, done.stderr
        assert "Nothing is known of column 7" in done.stderr
        np.save(data / "nothing.npy", np.full_like(X, np.nan))
        done = mpiexec(2, data, "fit", "nothing.npy", *words)
        assert done.returncode != 0
        assert "No cell is known" in done.stderr


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
        (["--method", "game", "--step-decay", 0.1], "--step-decay needs a number"),
        (["--solver", "game"], "Use --method"),
    ],
)
def test_wrong_options(invoke, data, words, why):
    refused = invoke("fit", data / "x.npy", "-k", 3, *words, "--engine", "torch", "-o", "m.safetensors", code=2)
    assert why in refused.stderr
