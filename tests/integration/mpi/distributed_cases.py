"""What each rank of test_distributed.py runs: mpiexec -n 2 python distributed_cases.py CASE FOLDER."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
from scipy import sparse

import partsong
from partsong.errors import PartsongError
from partsong.training import distributed, loop

SETTINGS = {"random_state": 3, "max_iter": 12, "tol": 0, "reduce": "in-order"}
N, M, K = 91, 23, 4


def data():
    rng = np.random.default_rng(0)
    return rng.random((N, K)) @ rng.random((K, M)) + 0.01 * rng.random((N, M))


def rank_and_size():
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


def of_file(folder, rank, size):
    """A file, and all that is written of it."""
    places = {"model": folder / "m.safetensors", "weights": folder / "W.npy", "run_folder": folder / "run"}
    return partsong.fit_distributed(folder / "x.npy", K, **SETTINGS, **places)


def of_rows(folder, rank, size):
    """Rows that ranks hold already, unevenly: rank 0 has the first few."""
    cuts = [0, *(10 + 30 * np.arange(size - 1)), N]
    return partsong.fit_distributed(data()[cuts[rank] : cuts[rank + 1]], K, **SETTINGS)


def of_sparse_rows(folder, rank, size):
    rows = sparse.csr_array(np.array_split(data(), size)[rank])
    return partsong.fit_distributed(rows, K, method="mu", **SETTINGS)


def of_names(folder, rank, size):
    import pandas

    names = [f"g{j}" for j in range(M)]
    rows = pandas.DataFrame(np.array_split(data(), size)[rank], columns=names)
    return partsong.fit_distributed(rows, K, **SETTINGS)


def of_sketches(folder, rank, size):
    options = {"sketch": "subsampling", "sketch_ratio": 0.5}
    return partsong.fit_distributed(folder / "x.npy", K, method="dsanls", method_options=options, **SETTINGS)


def of_cells(folder, rank, size):
    """A game of which only some cells are known."""
    rows = np.array_split(data(), size)[rank].copy()
    rows[::3, 5] = np.nan
    options = {"step": 0.01, "step_decay": 0.1}
    return partsong.fit_distributed(rows, K, method="game", missing="ignore", method_options=options, **SETTINGS)


def of_arrivals(folder, rank, size):
    """A server without rows, and workers."""
    rows = None if rank == 0 else np.array_split(data(), size - 1)[rank - 1]
    settings = {**SETTINGS, "reduce": "all-reduce"}
    return partsong.fit_distributed(rows, K, method="asyn-sd", **settings)


def interrupted(folder, rank, size):
    """A Ctrl-C at the last rank while the fit is under way."""
    if rank == size - 1:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        signal.alarm(3)
    return partsong.fit_distributed(folder / "x.npy", K, **{**SETTINGS, "max_iter": 10**8})


def thrice(folder, rank, size):
    """Several fits in one process are the same fit."""
    rows = np.array_split(data(), size)[rank]
    fits = [partsong.fit_distributed(rows, K, **SETTINGS) for _ in range(3)]
    assert all(np.array_equal(one.H, fits[0].H) for one in fits)
    return fits[-1]


def with_numbers_of_numpy(folder, rank, size):
    rows = np.array_split(data(), size)[rank]
    options = {"local_steps": np.int64(2), "rule": "cd"}
    settings = {**SETTINGS, "max_iter": np.int64(6), "tol": np.float32(0)}
    return partsong.fit_distributed(rows, np.int64(K), method="syn-sd", method_options=options, **settings)


FITS = [
    thrice,
    with_numbers_of_numpy,
    of_file,
    of_rows,
    of_sparse_rows,
    of_names,
    of_sketches,
    of_cells,
    of_arrivals,
    interrupted,
]


PLACES = {
    "sums": {"reduce": "sorted"},
    "engine": {"engine": "nccl"},
    "folder": {"run_folder": 5},
    "model": {"model": 5},
    "ending": {"weights": "W.foo"},
    "weights": {"weights": "no/such/W.npy"},
}
"""Arguments that one rank alone is given."""

BROKEN = {
    "memory before": (distributed, "program_for"),
    "memory within": (loop.Training, "note"),
    "memory at the end": (distributed.DistributedFit, "summary"),
}
"""Where one rank alone has too little memory."""


def out_of_memory(home, function, is_here, call):
    plain = getattr(home, function)

    def full(*given, **named):
        raise MemoryError

    try:
        if is_here:
            setattr(home, function, full)
        return call()
    finally:
        setattr(home, function, plain)


def refused(folder, rank, size):
    """Mistakes of one rank, or of all: what each rank is told."""
    x, last = folder / "x.npy", rank == size - 1
    rows = np.array_split(data(), size)[rank]
    bad = rows.copy()
    bad[1, 2] = np.nan if last else 0.5
    calls = {
        "nan in rows": lambda: partsong.fit_distributed(bad, K),
        "nan in a file": lambda: partsong.fit_distributed(folder / "nan.npy", K),
        "no file at one": lambda: partsong.fit_distributed(folder / ("none.npy" if last else "x.npy"), K),
        "other arguments": lambda: partsong.fit_distributed(x, K + rank),
        "a path and rows": lambda: partsong.fit_distributed(rows if last else x, K),
        "other columns": lambda: partsong.fit_distributed(rows[:, : M - rank], K),
        "no rows": lambda: partsong.fit_distributed(rows[:0] if last else rows, K),
        "rows missing": lambda: partsong.fit_distributed(None if last else rows, K),
        "columns needed": lambda: partsong.fit_distributed(rows, K, method="dsanls"),
        "rows at the server": lambda: partsong.fit_distributed(rows, K, method="asyn-sd"),
        "unknown method": lambda: partsong.fit_distributed(x, K, method="exakt"),
        "unknown option": lambda: partsong.fit_distributed(x, K, method="dsanls", method_options={"sketchratio": 1}),
        "options of exact": lambda: partsong.fit_distributed(x, K, method_options={"local_steps": 3}),
        "bad option": lambda: partsong.fit_distributed(x, K, method="dsanls", method_options={"sketch_ratio": 2.0}),
        "bad rank": lambda: partsong.fit_distributed(x, 0),
        "bad tol": lambda: partsong.fit_distributed(x, K, tol=-1),
        "bad dtype": lambda: partsong.fit_distributed(x, K, dtype="int8"),
        "bad seed": lambda: partsong.fit_distributed(x, K, random_state="x"),
        "penalised game": lambda: partsong.fit_distributed(x, K, method="game", alpha_W=0.1),
        "gaps without a game": lambda: partsong.fit_distributed(x, K, missing="ignore"),
        "folder in use": lambda: partsong.fit_distributed(x, K, run_folder=folder / "full", max_iter=2),
        "no such folder": lambda: partsong.fit_distributed(x, K, model=folder / "no/m.safetensors", max_iter=10**9),
    }
    for name, place in PLACES.items():
        calls[f"{name} at one"] = partial(partsong.fit_distributed, x, K, max_iter=10**9, **(place if last else {}))
    for name, (home, function) in BROKEN.items():
        calls[name] = partial(out_of_memory, home, function, last, lambda: partsong.fit_distributed(x, K, max_iter=2))
    told = {}
    for name, call in calls.items():
        try:
            call()
            told[name] = ["nothing", ""]
        except (PartsongError, MemoryError) as error:
            told[name] = [type(error).__name__, str(error)]
    return told


def main():
    warnings.simplefilter("ignore")
    case, folder = sys.argv[1], Path(sys.argv[2])
    rank, size = rank_and_size()
    if case == "refused":
        told = refused(folder, rank, size)
    else:
        fit = {one.__name__: one for one in FITS}[case](folder, rank, size)
        np.savez(folder / f"{case}-{rank}.npz", H=fit.H, W=np.empty((0, K)) if fit.W is None else fit.W)
        told = {
            "rank": fit.rank,
            "rows": fit.rows,
            "error": fit.relative_error,
            "outcome": str(fit.outcome),
            "iterations": fit.iterations,
            "names": fit.model().feature_names,
        }
    (folder / f"{case}-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
