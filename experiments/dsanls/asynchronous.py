"""Asynchronous and synchronous parties as real processes, one of which is slower.

    mpiexec -n 3 python -m experiments.dsanls.asynchronous --method Asyn-SD --set face
    mpiexec -n 2 python -m experiments.dsanls.asynchronous --method Syn-SD --set face

Two workers hold rows, the first a share of `--share`. Asynchronous runs have a separate server (rank 0). Errors are
computed after the run, with weights refitted to recorded H. Rank 0 prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from experiments.dsanls.datasets import QUICK, SETS
from experiments.dsanls.secure import ASYNCHRONOUS, METHODS
from partsong import kernels
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Schedule, Shard
from partsong.core.streams import key, stream
from partsong.data.conversion import as_matrix
from partsong.engines.mpi import Mpi
from partsong.engines.mpi_async import AsynchronousMpi
from partsong.solvers.update_rules import ProximalDescent

WORKERS = 2


def shares(n_rows: int, share: float, seed: int) -> list[np.ndarray]:
    """Split the rows at random between two workers."""
    rows = stream(seed, "rows").permutation(n_rows)
    cut = round(share * n_rows)
    return [np.sort(rows[:cut]), np.sort(rows[cut:])]


def error_of(X: Any, solver: Any, H: np.ndarray) -> float:
    """‖X − W H‖ / ‖X‖ with W refitted."""
    matrix = as_matrix(X)
    Ht = kernels.of(H).rows_of(H)
    W = solver.solve_rows(matrix, Ht)
    return float(np.sqrt(max(0.0, matrix.squared_distance(W, Ht)) / matrix.squared_norm))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run at this rank; rank 0 prints the result."""
    from mpi4py import MPI

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="Asyn-SD", choices=tuple(METHODS))
    parser.add_argument("--set", default="face", choices=(*SETS, *QUICK))
    parser.add_argument("--share", type=float, default=0.8, help="share of the rows at the first worker")
    parser.add_argument("--rank", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=40, help="number of local tasks per worker")
    parser.add_argument("--weight", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    comm, is_asynchronous = MPI.COMM_WORLD, chosen.method in ASYNCHRONOUS
    expected = WORKERS + is_asynchronous
    if comm.Get_size() != expected:
        raise SystemExit(f"{chosen.method} needs mpiexec -n {expected}.")
    X = {**SETS, **QUICK}[chosen.set].load()
    program = METHODS[chosen.method](chosen.rank, ProximalDescent(1, chosen.weight, chosen.weight))
    worker = comm.Get_rank() - is_asynchronous
    names, rows = ["p00", "p01"], shares(X.shape[0], chosen.share, chosen.seed)
    own = [Shard(names[worker], as_matrix(X[rows[worker]]), key(chosen.seed, "secret", worker))] if worker >= 0 else []
    several = program.exchanges(chosen.rounds, WORKERS)
    engine: Any = AsynchronousMpi() if is_asynchronous else Mpi(reduce="all-reduce")
    kept: list[tuple[float, np.ndarray, tuple[str, ...]]] = []
    comm.Barrier()
    began = time.perf_counter()
    for done in engine.run(program, own, Schedule(several, chosen.seed), reduction=PlainReduction()):
        if comm.Get_rank() == 0 and program.turn(done.model).ends_round and done.checkpoint.server is not None:
            H = np.array(program.components(done.checkpoint.server))
            kept.append((time.perf_counter() - began, H, done.participants))
        del done
    if comm.Get_rank() > 0:
        return
    arrivals = {name: sum(name in who for _, _, who in kept) for name in names}
    looked = [kept[i] for i in sorted({round(i) for i in np.geomspace(1, len(kept), 12) - 1})]
    points = [[seconds, error_of(X, program.solver, H)] for seconds, H, _ in looked]
    between = statistics.median(later[0] - sooner[0] for sooner, later in pairwise(kept))
    record = {"method": chosen.method, "set": chosen.set, "share": chosen.share, "arrivals": arrivals}
    print(json.dumps({**record, "median between": between, "points": points}), flush=True)


if __name__ == "__main__":
    main()
