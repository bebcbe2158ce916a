"""Many runs, shared out over processes, each written down as one line when done; what is there is not repeated."""

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

from experiments.datasets import DATASETS
from experiments.federation import EXACT, Budget, perform, shares_iid
from experiments.shared.synthetic import block_federation
from partsong.core.streams import stream


@dataclass(frozen=True, slots=True)
class Play:
    """One method once, on a dataset by name or on blocks ("blocks: 40 rows, 0.2 absent")."""

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
    """The name of generated data with so many rows at a party, of which a share of blocks is absent."""
    return f"blocks: {rows} rows, {absent:g} absent"


def matrices_of(play: Play) -> list[Any]:
    """What the parties of a run hold."""
    if play.data.startswith("blocks"):
        _, rows, _, absent, _ = play.data.replace(",", "").split()
        draw = stream(play.seed, play.data, play.parties)
        made = block_federation([int(rows)] * play.parties, 100, play.rank, draw, absent=float(absent))
        return [X.astype(np.float32) for X in made.matrices]
    X = _loaded(play.data)
    if 0 < play.most_rows < X.shape[0]:
        taken = np.sort(stream(play.seed, "sample").choice(X.shape[0], play.most_rows, replace=False))
        X = X[taken]
    return shares_iid(X, play.parties, play.seed)


@cache
def _loaded(name: str) -> Any:
    return DATASETS[name].load()[0]


def result_of(play: Play) -> dict[str, Any]:
    """Run it; all numbers in one flat record."""
    found = perform(
        play.method,
        matrices_of(play),
        play.rank,
        Budget(play.steps, play.rounds),
        strength=play.strength,
        start=play.start,
        seed=play.seed,
        with_curve=play.with_curve,
    )
    return {**asdict(play), **asdict(found)}


def expected_seconds(play: Play) -> float:
    """A guess on one core, to run long ones first and to begin none that would not be finished in time."""
    rows, columns = (3000, 500) if play.data.startswith("blocks") else SIZES[play.data]
    rows = min(rows, play.most_rows or rows)
    steps = 300 if play.method in (*EXACT, "pooled") else play.steps * play.rounds
    stored = rows * columns * (0.15 if play.data in SPARSE else 1.0)
    per_step = play.parties * (4e-4 + play.rank * columns * 5e-9) + stored * play.rank * 1e-10
    return steps * per_step


SIZES = {
    "mnist": (60000, 784), "fashion": (20000, 784), "cifar": (2000, 3072), "goodreads": (2672, 9990),
    "movielens": (6040, 3706), "tcga": (844, 1000), "hpa": (17229, 61), "brain": (1464, 1000),
}  # fmt: skip
SPARSE = ("goodreads", "movielens")


def known(path: Path | None) -> dict[Play, dict[str, Any]]:
    """All runs that a file holds."""
    if path is None or not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    names = Play.__slots__
    return {Play(**{name: record[name] for name in names}): record for record in records}


def run_all(
    plays: Iterable[Play], path: Path | None, processes: int = 1, minutes: float = float("inf")
) -> dict[Play, dict[str, Any]]:
    """The results of all runs, or of those that could be done in so many minutes."""
    found = known(path)
    wanted = list(dict.fromkeys(plays))
    waiting = sorted((play for play in wanted if play not in found), key=expected_seconds, reverse=True)
    last = time.monotonic() + 60 * minutes

    def keep(play: Play, record: dict[str, Any]) -> None:
        found[play] = record
        if path is not None:
            with path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")
        setting = f"{play.start} | {play.steps} x {play.rounds} | {play.strength:g} | seed {play.seed}"
        print(
            f"{play.data} | {play.method} | {setting}: {record['rmsd_sum']:.4f}, {record['seconds']:.1f} s", flush=True
        )

    if processes == 1:
        for play in waiting:
            if time.monotonic() + expected_seconds(play) < last:
                keep(play, result_of(play))
    else:
        _shared_out(waiting, keep, processes, last)
    return {play: found[play] for play in wanted if play in found}


def _shared_out(waiting: Sequence[Play], keep: Any, processes: int, last: float) -> None:
    os.environ["PARTSONG_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    left = list(waiting)
    running: dict[Future[dict[str, Any]], Play] = {}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        while left or running:
            while left and len(running) < processes:
                now = time.monotonic()
                next_one = next((play for play in left if now + expected_seconds(play) < last), None)
                if next_one is None:
                    left.clear()
                    break
                left.remove(next_one)
                running[pool.submit(result_of, next_one)] = next_one
            done, _ = wait(running, return_when=FIRST_COMPLETED) if running else ((), ())
            for future in done:
                play = running.pop(future)
                try:
                    keep(play, future.result())
                except Exception as problem:  # one run that fails must not cost the others
                    print(f"FAILED {play}: {problem!r}", flush=True)
