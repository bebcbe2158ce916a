"""`partsong fit` over ranks, in processes under mpiexec or torch.distributed: one exit code for all, no half result."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
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
    mpi_command,
    mpiexec,
    names_in,
    needs_mpi,
    needs_torch,
    slow_but,
    wait_for,
    write_data,
)


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path)


def model_in_one_process(folder, *words):
    command = [sys.executable, "-m", "partsong.cli.main", "fit", *map(str, words), "-o", "m.safetensors", "--quiet"]
    subprocess.run(command, cwd=folder, env=ENVIRONMENT, timeout=120, check=True)
    return partsong.load_model(folder / "m.safetensors")


CASES = {
    "exact": ("x.npy", "exact", "hals"),
    "sparse hals": ("s.npz", "hals", "cd"),
    "mu": ("x.npy", "mu", "mu"),
    "transposed bpp": ("t.npy", "bpp", "bpp"),
}


@pytest.mark.parametrize("case", slow_but(CASES, "exact"))
class TestExactMethods:
    pytestmark = needs_mpi

    def test_the_model_does_not_depend_on_the_number_of_ranks(self, case, data):
        name, method, solver = CASES[case]
        settings = [name, "-k", 4, "--seed", 3, "--max-iter", 25, "--tol", 0]
        settings += ["--transpose"] if name == "t.npy" else []
        known = model_in_one_process(data, *settings, "--solver", solver, "--init", "random")
        X = dense(data / name)
        for n in (1, 2, 3):
            said, model = fit_over(n, data, *settings, "--method", method, "--weights", "W.npy")
            assert (said["ranks"], said["engine"], said["iterations"]) == (n, "mpi", 25)
            assert_allclose(model.components, known.components, rtol=1e-8, atol=1e-8)
            assert_allclose(model.relative_error, known.relative_error, rtol=1e-8)
            assert_allclose(said["relative_error"], known.relative_error, rtol=1e-8)
            assert model.settings["ranks"] == n
            W = joined(data / "W.shards.json", n)
            gap = np.linalg.norm(X - W @ model.components) / np.linalg.norm(X)
            assert_allclose(gap, model.relative_error, rtol=1e-8)


def dense(path):
    if path.suffix == ".npz":
        return sparse.load_npz(path).toarray()
    X = np.load(path)
    return X.T if path.name == "t.npy" else X


def joined(listing, n):
    """All of W from its shards, which lie where the list says and cover the rows once."""
    told = json.loads(listing.read_text())
    shards = told["shards"]
    assert [shard["rank"] for shard in shards] == list(range(n))
    assert [shard["file"] for shard in shards] == [f"W.rank{rank}of{n}.npy" for rank in range(n)]
    parts = [np.load(listing.parent / shard["file"]) for shard in shards]
    assert [len(part) for part in parts] == [stop - start for start, stop in (shard["rows"] for shard in shards)]
    W = np.concatenate(parts)
    assert list(W.shape) == told["shape"]
    return W


class TestOverMpi:
    pytestmark = needs_mpi

    def test_sums_in_order_and_a_run_folder(self, data):
        words = ["x.npy", "-k", 3, "--seed", 1, "--max-iter", 8, "--tol", 0, "--reduce", "in-order"]
        said, first = fit_over(2, data, *words, "--run-folder", "run")
        again = fit_over(2, data, *words)[1]
        assert said["reduce"] == "in-order"
        assert_array_equal(first.components, again.components)
        assert json.loads((data / "run/result.json").read_text()) == said
        asked = json.loads((data / "run/settings.json").read_text())
        assert (asked["ranks"], asked["engine"], asked["reduce"]) == (2, "mpi", "in-order")
        history = (data / "run/history.csv").read_text().splitlines()
        assert len(history) == 9
        kept = partsong.load_model(data / "run/model.safetensors")
        assert_array_equal(kept.components, first.components)

    @pytest.mark.parametrize("sketch", slow_but(["subsampling", "count"], "subsampling"))
    def test_sketched_exchange(self, data, sketch):
        """With sketches as large as the data nothing is lost; smaller ones send less and still learn."""
        words = ["s.npz", "-k", 4, "--seed", 2, "--tol", 0, "--method", "dsanls", "--sketch", sketch]
        said, model = fit_over(2, data, *words, "--max-iter", 40, "--sketch-ratio", 0.5, "--weights", "W.npy")
        assert said["iterations"] == 40
        W, X = joined(data / "W.shards.json", 2), dense(data / "s.npz")
        gap = np.linalg.norm(X - W @ model.components) / np.linalg.norm(X)
        assert_allclose(gap, model.relative_error, rtol=1e-8)
        exact = model_in_one_process(data, "s.npz", "-k", 4, "--seed", 2, "--init", "random")
        assert model.relative_error < exact.relative_error + 0.05
        assert model.settings["sketch"] == sketch

    @pytest.mark.parametrize("method", slow_but(["syn-sd", "syn-ssd-uv"], "syn-ssd-uv"))
    def test_ranks_as_parties_equal_a_federation_in_one_process(self, method, data):
        settings = ["x.npy", "-k", 4, "--seed", 3, "--max-iter", 6, "--tol", 0, "--method", method]
        said, model = fit_over(2, data, *settings, "--reduce", "in-order")
        assert said["iterations"] == 6
        X = np.load(data / "x.npy")
        parties = {f"rank-{i:06d}": part for i, part in enumerate((X[:46], X[46:]))}
        same = partsong.FederatedNMF(4, method=method, rounds=6, tol=0, random_state=3).fit(parties)
        known = np.array([row.relative_error for row in same.history_])
        assert np.nanmin(np.abs(known / model.relative_error - 1)) < 1e-9, "the best round, with the ranks' own weights"

    def test_text_is_read_whole_and_keeps_its_names(self, data):
        X = np.load(data / "x.npy")
        lines = [",".join(["sample", *(f"g{j}" for j in range(23))])]
        lines += [",".join([f"s{i}", *map(repr, row.tolist())]) for i, row in enumerate(X)]
        (data / "x.csv").write_text("\n".join(lines) + "\n")
        _, model = fit_over(2, data, "x.csv", "-k", 3, "--seed", 1, "--max-iter", 5, "--weights", "W.csv")
        assert model.feature_names == tuple(f"g{j}" for j in range(23))
        second = partsong.read(data / "W.rank1of2.csv")
        assert second.sample_names == tuple(f"s{i}" for i in range(46, 91))

    def test_a_time_budget_ends_all_ranks(self, data):
        began = time.monotonic()
        words = ["x.npy", "-k", 4, "--tol", 0, "--max-iter", 10**8, "--time-budget", 8]
        said, model = fit_over(3, data, *words)
        assert said["outcome"] == "time-limit"
        assert said["iterations"] == model.settings["iterations"] > 1
        assert time.monotonic() - began < 60

    def test_ranks_without_a_seed_agree_on_one(self, data):
        said, model = fit_over(2, data, "x.npy", "-k", 3, "--max-iter", 3)
        known = model_in_one_process(
            data, "x.npy", "-k", 3, "--max-iter", 3, "--seed", said["seed"], "--init", "random"
        )
        assert_allclose(model.components, known.components, rtol=1e-8, atol=1e-8)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_an_interrupt_at_one_rank_saves_the_model_of_all(self, data, number):
        words = ["x.npy", "-k", 4, "--tol", 0, "--max-iter", 10**8, "--seed", 1]
        words += ["--engine", "mpi", "--json", "-o", "m.safetensors", "--weights", "W.npy", "--run-folder", "run"]
        command = mpi_command(2, data, "fit", *words)
        process = subprocess.Popen(
            command, cwd=data, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        wait_for(data / "run/settings.json")
        time.sleep(3)
        os.kill(int((data / "began-1").read_text().split()[1]), number)
        output, errors = process.communicate(timeout=60)
        assert process.returncode in (130, 143), errors
        assert "Traceback" not in errors
        said = json.loads(output)
        assert said["outcome"] == "interrupted"
        assert said["iterations"] > 0
        assert partsong.load_model(data / "m.safetensors").settings["iterations"] == said["iterations"]
        assert len(joined(data / "W.shards.json", 2)) == 91


def nan_at_the_second_rank(folder):
    X = np.load(folder / "x.npy")
    X[80, 7] = np.nan
    np.save(folder / "x.npy", X)


def file_at_the_first_rank_only(folder):
    for rank in range(2):
        (folder / f"home-{rank}").mkdir()
    shutil.copy(folder / "x.npy", folder / "home-0")


def another_file_at_the_second_rank(folder):
    file_at_the_first_rank_only(folder)
    np.save(folder / "home-1/x.npy", np.ones((90, 23)))


def other_numbers_at_the_second_rank(folder):
    file_at_the_first_rank_only(folder)
    np.save(folder / "home-1/x.npy", 2 * np.load(folder / "x.npy"))


def few_rows(folder):
    np.save(folder / "x.npy", np.ones((1, 23)))


def few_columns(folder):
    np.save(folder / "x.npy", np.ones((91, 1)))


FAILURES = {
    "more ranks than rows": (few_rows, [], 1, "ParameterError", "1 row cannot be split over 2 ranks"),
    "more ranks than columns": (few_columns, ["--method", "dsanls"], 1, "ParameterError", "1 column cannot be split"),
    "NaN at one rank": (nan_at_the_second_rank, [], 1, "DataError", "NaN in data: 1 cell(s) of this block, in row 80;"),
    "no file at one rank": (file_at_the_first_rank_only, [], 1, "FileError", "x.npy: there is no such file"),
    "another file at one rank": (another_file_at_the_second_rank, [], 1, "FileError", "90 × 23, float64, "),
    "other numbers at one rank": (
        other_numbers_at_the_second_rank,
        [],
        1,
        "FileError",
        "Use the same file at all ranks",
    ),
    "other seeds": (None, ["--seed", "{rank}"], 2, "UsageError", "it is 0 at rank 0 and 1 at rank 1"),
    "no folder for the model": (None, ["-o", "none/m.safetensors"], 1, "FileError", "there is no folder"),
    "no folder for weights": (None, ["--weights", "none/W.npy"], 1, "FileError", "there is no folder"),
    "sketch below the rank": (None, ["--method", "dsanls", "-k", 24], 1, "ParameterError", "one per component"),
    "federated method": (None, ["--method", "fnmf"], 2, "UsageError", "fnmf is for folders of parts"),
    "other start": (None, ["--init", "nndsvd"], 2, "UsageError", "start from random numbers"),
    "another solver": (None, ["--solver", "mu"], 2, "UsageError", "--method"),
    "checkpoint": (None, ["--checkpoint", "c"], 2, "UsageError", "--engine splits one file over ranks"),
    "sketch without use": (None, ["--sketch", "count"], 2, "UsageError", "has no options"),
}
IN_SHORT = (
    "more ranks than rows",
    "NaN at one rank",
    "no file at one rank",
    "other numbers at one rank",
    "other seeds",
)


@pytest.mark.parametrize("case", slow_but(FAILURES, *IN_SHORT))
class TestFailures:
    pytestmark = needs_mpi

    def test_all_ranks_end_with_one_message_and_no_file(self, case, data):
        spoil, words, code, kind, message = FAILURES[case]
        if spoil is not None:
            spoil(data)
        before = names_in(data)
        given = ["fit", "x.npy", "-k", 2, "--engine", "mpi", "--json", "-o", "m.safetensors", *words]
        done = mpiexec(2, data, *given)
        ended = time.time()
        assert done.returncode == code, done.stderr
        (line,) = done.stdout.splitlines()
        said = json.loads(line)
        assert (said["type"], said["exit_code"]) == (kind, code)
        assert message in said["error"]
        assert done.stderr.count(message) == 1, "people are told once as well"
        assert "Traceback" not in done.stderr
        assert names_in(data) == before
        assert ended - max(float((data / f"began-{rank}").read_text().split()[0]) for rank in range(2)) < 20


class TestFurtherOptions:
    """Options of methods over ranks: one that cannot be meant is refused."""

    @pytest.mark.parametrize(
        ("words", "what"),
        [
            (["--method", "exact", "--local-steps", 3], "--local-steps is not for"),
            (["--method", "dsanls", "--local-steps", 3], "--local-steps is for"),
            (["--method", "dsanls", "--sketch", "counts"], "Did you mean 'count'"),
        ],
    )
    def test_what_cannot_be_meant_is_refused(self, invoke, data_npy, words, what):
        pytest.importorskip("mpi4py")
        told = invoke("fit", data_npy, "-k", 2, "--engine", "mpi", "-o", "m.safetensors", *words, code=2).stderr
        assert what in told


class TestWithoutMpi:
    def test_what_is_for_ranks_alone_is_refused_elsewhere(self, invoke, data_npy, parts):
        for words in (["--reduce", "in-order"], ["--sketch", "count"], ["--sketch-ratio", 0.5], ["--method", "dsanls"]):
            for data in (data_npy, parts):
                assert words[0] in invoke("fit", data, "-k", 2, "-o", "m.safetensors", *words, code=2).stderr
        for value in (0, 1.5):
            words = ["--method", "dsanls", "--engine", "mpi", "--sketch-ratio", value]
            assert "--sketch-ratio" in invoke("fit", data_npy, "-k", 2, "-o", "m.safetensors", *words, code=2).stderr


class TestOverTorch:
    pytestmark = needs_torch

    def test_two_ranks_and_one_agree_with_one_process(self, data):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        settings = ["x.npy", "-k", "4", "--seed", "3", "--max-iter", "20", "--tol", "0"]
        known = model_in_one_process(data, *settings, "--solver", "cd", "--init", "random")
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
        for n, start in ((2, launcher), (1, [])):
            words = ["-m", "partsong", "fit", *settings, "--method", "hals", "--engine", "torch", "--json"]
            command = [sys.executable, *start, *words, "-o", "t.safetensors", "--weights", "W.npy"]
            done = subprocess.run(
                command, cwd=data, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
            )
            assert done.returncode == 0, done.stderr
            said = json.loads(done.stdout)
            assert (said["ranks"], said["engine"]) == (n, "torch")
            model = partsong.load_model(data / "t.safetensors")
            assert_allclose(model.components, known.components, rtol=1e-8, atol=1e-8)
            assert len(joined(data / "W.shards.json", n)) == 91

    def test_bad_values_at_one_rank_end_both(self, data):
        nan_at_the_second_rank(data)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
        words = ["-m", "partsong", "fit", "x.npy", "-k", "2", "--engine", "torch", "-o", "t.safetensors", "--json"]
        done = subprocess.run(
            [sys.executable, *launcher, *words],
            cwd=data,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode != 0
        assert json.loads(done.stdout)["type"] == "DataError"
        assert done.stderr.count("in row 80;") == 1
        assert not (data / "t.safetensors").exists()


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
plain = blocks.BlockSource.block
def block(self, rows=None, columns=None):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    return plain(self, rows, columns)
blocks.BlockSource.block = block
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


def codes_in(folder, n):
    return [(folder / f"began-code-{rank}").read_text() for rank in range(n)]


class TestSignals:
    pytestmark = needs_mpi

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
    pytestmark = needs_mpi

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


ASYNCHRONOUS_FAILURES = {
    "one rank": (1, None, [], 2, "UsageError", "needs a server and at least one worker"),
    "more workers than rows": (3, one_row, [], 1, "ParameterError", "1 row cannot be split over 2 workers"),
    "no file at a worker": (3, no_file_at_a_worker, [], 1, "FileError", "x.npy: there is no such file"),
    "NaN at a worker": (3, nan_at_a_worker, [], 1, "DataError", "in row 80;"),
    "sums": (2, None, ["--reduce", "in-order"], 2, "UsageError", "is asynchronous and adds no sums"),
    "sketch": (2, None, ["--sketch", "count"], 2, "UsageError", "asyn-ssd-v"),
    "work that fails": (3, None, [], 1, "DataError", "Enough of this."),
}


@pytest.mark.parametrize("case", slow_but(ASYNCHRONOUS_FAILURES, "no file at a worker", "work that fails"))
class TestAsynchronousFailures:
    pytestmark = needs_mpi

    def test_all_ranks_end_with_one_message_and_no_file(self, case, data):
        n, spoil, words, code, kind, message = ASYNCHRONOUS_FAILURES[case]
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


class TestGamesOverMpi:
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
