"""Fig. 3 of the DSANLS paper: cost of an iteration over ranks.

    python -m experiments.dsanls.ranks --output dsanls-ranks.json

1 and 2 ranks are measured on this machine (`mpiexec`, one thread each, interleaved), and two independent runs of one
rank at the same time as the ceiling for two cores. For 1 … 16 ranks, the numbers that a rank sends per iteration are
counted in one process, and its floating-point operations follow from the sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.dsanls.curves import CONTESTANTS
from experiments.dsanls.datasets import QUICK, SETS
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Schedule, Shard
from partsong.data.blocks import two_sided_blocks
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.methods.dsanls import SketchExchange
from partsong.sketch.operator import dimension_for

METHODS = ("DSANLS/S", "DSANLS/G", "MU", "HALS", "BPP")
RANKS = (1, 2, 4, 8, 16)
OPTIONS = ("--oversubscribe", "--bind-to", "none")


def set_of(name: str) -> Any:
    """Load a set by name, including small ones."""
    return {**SETS, **QUICK}[name]


def per_iteration(program: Any) -> int:
    """Number of exchanges per iteration."""
    return 2 if isinstance(program, SketchExchange) else 1


def work_at_rank(name: str, method: str, rank: int, iterations: int) -> None:
    """Run one process on its block; rank 0 prints the median seconds of an iteration."""
    from mpi4py import MPI

    from partsong.engines.mpi import Mpi

    comm = MPI.COMM_WORLD
    X, program = set_of(name).load(), CONTESTANTS[method](rank)
    block = two_sided_blocks(X, comm.Get_size())[comm.Get_rank()]
    matrix = block if isinstance(program, SketchExchange) and comm.Get_size() > 1 else block.row_block
    del X
    shard, several = Shard(f"r{comm.Get_rank():02d}", matrix), per_iteration(program)
    taken: list[float] = []
    engine = Mpi(reduce="all-reduce")
    began = time.perf_counter()
    for done in engine.run(program, [shard], Schedule(several * (iterations + 3)), reduction=PlainReduction()):
        if (done.index + 1) % several == 0:
            taken.append(time.perf_counter() - began)
            began = time.perf_counter()
        del done
    if comm.Get_rank() == 0:
        print(json.dumps({"seconds": statistics.median(taken[3:])}), flush=True)


def started(name: str, method: str, rank: int, iterations: int, ranks: int) -> subprocess.Popen[str]:
    """Start a measurement in separate processes."""
    single = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "PARTSONG_NUM_THREADS"), "1"
    )
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    worker = [sys.executable, "-m", "experiments.dsanls.ranks", "--worker", name, method, str(rank), str(iterations)]
    return subprocess.Popen(
        ["mpiexec", "-n", str(ranks), *OPTIONS, *worker],
        stdout=subprocess.PIPE, text=True, env={**os.environ, **single, **root},
    )  # fmt: skip


def seconds_of(process: subprocess.Popen[str]) -> float:
    """Wait for it and return the median seconds of an iteration."""
    said, _ = process.communicate(timeout=600)
    if process.returncode:
        raise SystemExit(f"mpiexec ended with {process.returncode}")
    result = said[said.index("{") : said.rindex("}") + 1]  # terminal escape codes may surround it
    return float(json.loads(result)["seconds"])


def in_process(name: str, method: str, rank: int, iterations: int) -> float:
    """Seconds of an iteration without MPI: sequential engine, one thread."""
    program, matrix = CONTESTANTS[method](rank), as_matrix(set_of(name).load())
    several, taken = per_iteration(program), []
    began = time.perf_counter()
    rounds = Sequential().run(
        program, [Shard("all", matrix)], Schedule(several * (iterations + 3)), reduction=PlainReduction()
    )
    for done in rounds:
        if (done.index + 1) % several == 0:
            taken.append(time.perf_counter() - began)
            began = time.perf_counter()
        del done
    return statistics.median(taken[3:])


def measured(name: str, method: str, rank: int, iterations: int, repeats: int) -> dict[str, float]:
    """Medians over repeats of: in process, one rank, two ranks, two runs of one rank at once."""
    found: dict[str, list[float]] = {what: [] for what in ("in process", "1 rank", "2 ranks", "two at once")}
    for _ in range(repeats):
        found["in process"].append(in_process(name, method, rank, iterations))
        found["1 rank"].append(seconds_of(started(name, method, rank, iterations, 1)))
        found["2 ranks"].append(seconds_of(started(name, method, rank, iterations, 2)))
        both = [started(name, method, rank, iterations, 1) for _ in range(2)]
        found["two at once"].append(statistics.mean(seconds_of(one) for one in both))
    return {what: statistics.median(values) for what, values in found.items()}


def counted(name: str, method: str, rank: int) -> list[dict[str, float]]:
    """Numbers sent by a rank in an iteration, and its operations, for 1 … 16 ranks."""
    X = set_of(name).load()
    n, m = X.shape
    stored = X.nnz if hasattr(X, "nnz") else n * m
    table = []
    for ranks in RANKS:
        program = CONTESTANTS[method](rank)
        shards = [Shard(f"r{i:02d}", block) for i, block in enumerate(two_sided_blocks(X, ranks))]
        several = per_iteration(program)
        rounds = list(Sequential().run(program, shards, Schedule(3 * several), reduction=PlainReduction()))
        sent = sum(max(done.bytes_up.values()) for done in rounds[-several:])
        table.append({"ranks": ranks, "bytes": float(sent), "flops": operations(method, n, m, stored, rank, ranks)})
    return table


def operations(method: str, n: int, m: int, stored: int, k: int, ranks: int) -> float:
    """Multiplications and additions of a rank in an iteration, by leading terms.

    Exact: 4·nnz·k/N for both products, 4 n k²/N for the rows' sweep and gram, 4 m k² for H at every rank (BPP: a sweep
    stands for one solve, of which it needs several). Sketched: 2 k (n d + m d')/N for products with subsampled blocks
    (2 k nnz (d/m + d'/n)/N where X is sparse), plus 2 nnz (d + d')/N to sketch it (G), 2 k² (n + m)/N for the sweeps
    and 2 k² (d + d') for grams.
    """
    if not method.startswith("DSANLS"):
        return (4 * stored * k + 4 * n * k * k) / ranks + 4 * m * k * k
    d, other = dimension_for(m, k), dimension_for(n, k)
    entries = n * m if method.endswith("/G") else stored
    products = 2 * k * entries * (d / m + other / n) / ranks
    drawn = 2 * stored * (d + other) / ranks if method.endswith("/G") else 0.0
    return products + drawn + 2 * k * k * (n + m) / ranks + 2 * k * k * (d + other)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, count and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--sets", default="mnist,face,rcv1-twin")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rank", type=int, default=50)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--counted-only", action="store_true", help="count only, without measurements")
    parser.add_argument("--quick", action="store_true", help="one small set, counted only")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(arguments)
    if chosen.worker:
        name, method, rank, iterations = chosen.worker
        work_at_rank(name, method, int(rank), int(iterations))
        return
    if chosen.quick:
        chosen.sets, chosen.rank, chosen.counted_only = "dense", 5, True
    found = []
    for name in chosen.sets.split(","):
        for method in chosen.methods.split(","):
            record: dict[str, Any] = {"data": name, "method": method, "rank": chosen.rank}
            record["counted"] = counted(name, method, chosen.rank)
            if not chosen.counted_only:
                record["measured"] = measured(name, method, chosen.rank, chosen.iterations, chosen.repeats)
            print(json.dumps(record), flush=True)
            found.append(record)
    if chosen.output is not None:
        chosen.output.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
