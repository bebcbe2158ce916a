"""Execute many runs over processes; append each to a JSON Lines file when done, and skip those it holds."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from experiments.shared.datasets import DATASETS
from experiments.shared.federations import EXACT, Budget, perform, shares_iid
from experiments.shared.synthetic import block_federation
from partsong.core.streams import stream


@dataclass(frozen=True, slots=True)
class Run:
    """Settings of one run, on a dataset by name or on generated blocks ("blocks: 40 rows, 0.2 absent")."""

    data: str
    method: str
    start: str
    steps: int
    rounds: int
    strength: float
    seed: int
    parties: int
    rank: int
    most_rows: int = 0
    with_curve: bool = False


def blocks(rows: int, absent: float = 0.0) -> str:
    """Name of generated data with this many rows per party and this share of missing blocks."""
    return f"blocks: {rows} rows, {absent:g} absent"


def matrices_of(run: Run) -> list[Any]:
    """The matrices of the parties of a run."""
    if run.data.startswith("blocks"):
        _, rows, _, absent, _ = run.data.replace(",", "").split()
        draw = stream(run.seed, run.data, run.parties)
        made = block_federation([int(rows)] * run.parties, 100, run.rank, draw, absent=float(absent))
        return [X.astype(np.float32) for X in made.matrices]
    X = _loaded(run.data)
    if 0 < run.most_rows < X.shape[0]:
        taken = np.sort(stream(run.seed, "sample").choice(X.shape[0], run.most_rows, replace=False))
        X = X[taken]
    return shares_iid(X, run.parties, run.seed)


@cache
def _loaded(name: str) -> Any:
    return DATASETS[name].load()[0]


def result_of(run: Run) -> dict[str, Any]:
    """Execute a run and return a flat record."""
    found = perform(
        run.method,
        matrices_of(run),
        run.rank,
        Budget(run.steps, run.rounds),
        strength=run.strength,
        start=run.start,
        seed=run.seed,
        with_curve=run.with_curve,
    )
    return {**asdict(run), **asdict(found)}


def expected_seconds(run: Run) -> float:
    """Estimate the seconds on one core, to schedule long runs first and to respect the time limit."""
    rows, columns = (3000, 500) if run.data.startswith("blocks") else SIZES[run.data]
    rows = min(rows, run.most_rows or rows)
    steps = 300 if run.method in (*EXACT, "pooled") else run.steps * run.rounds
    stored = rows * columns * (0.15 if run.data in SPARSE else 1.0)
    per_step = run.parties * (4e-4 + run.rank * columns * 5e-9) + stored * run.rank * 1e-10
    return steps * per_step


SIZES = {
    "mnist": (60000, 784), "fashion": (20000, 784), "cifar": (2000, 3072), "goodreads": (2672, 9990),
    "movielens": (6040, 3706), "tcga": (844, 1000), "hpa": (17229, 61), "brain": (1464, 1000),
}  # fmt: skip
SPARSE = ("goodreads", "movielens")


def known(path: Path | None) -> dict[Run, dict[str, Any]]:
    """Read all runs of a file."""
    if path is None or not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    names = Run.__slots__
    return {Run(**{name: record[name] for name in names}): record for record in records}


def run_all(
    runs: Iterable[Run], path: Path | None, processes: int = 1, minutes: float = float("inf")
) -> dict[Run, dict[str, Any]]:
    """Execute all runs, or those that fit into the minutes, and return their results."""
    found = known(path)
    wanted = list(dict.fromkeys(runs))
    waiting = sorted((run for run in wanted if run not in found), key=expected_seconds, reverse=True)
    last = time.monotonic() + 60 * minutes

    def keep(run: Run, record: dict[str, Any]) -> None:
        found[run] = record
        if path is not None:
            with path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")
        setting = f"{run.start} | {run.steps} x {run.rounds} | {run.strength:g} | seed {run.seed}"
        print(f"{run.data} | {run.method} | {setting}: {record['rmsd_sum']:.4f}, {record['seconds']:.1f} s", flush=True)

    if processes == 1:
        for run in waiting:
            if time.monotonic() + expected_seconds(run) < last:
                keep(run, result_of(run))
    else:
        _shared_out(waiting, keep, processes, last)
    return {run: found[run] for run in wanted if run in found}


def _shared_out(waiting: Sequence[Run], keep: Any, processes: int, last: float) -> None:
    os.environ["PARTSONG_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    left = list(waiting)
    running: dict[Future[dict[str, Any]], Run] = {}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        while left or running:
            while left and len(running) < processes:
                now = time.monotonic()
                next_one = next((run for run in left if now + expected_seconds(run) < last), None)
                if next_one is None:
                    left.clear()
                    break
                left.remove(next_one)
                running[pool.submit(result_of, next_one)] = next_one
            done, _ = wait(running, return_when=FIRST_COMPLETED) if running else ((), ())
            for future in done:
                run = running.pop(future)
                try:
                    keep(run, future.result())
                except Exception as problem:  # a failing run must not stop the others
                    print(f"FAILED {run}: {problem!r}", flush=True)
