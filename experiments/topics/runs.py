"""Execute many runs over processes; append each to a JSON Lines file when done, and skip those it holds."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from experiments.topics.methods import MI, NUMPY, OURS
from experiments.topics.results import result_of
from experiments.topics.settings import WORDS, Run, parse_run


def known(path: Path | None) -> dict[str, dict[str, Any]]:
    """Read all runs of a file, by their keys."""
    if path is None or not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    runs_wanted = [parse_run(record) for record in records]
    return {
        one.key: {**record, "settings": asdict(one.settings)} for one, record in zip(runs_wanted, records, strict=True)
    }


SIZES = {"spam": (5572, 7587), "news": (1433, 8512), "rt": (10662, 17977), "so": (20000, 10366)}


def expected_seconds(asked: Run, device: str = NUMPY) -> float:
    """Estimate the seconds on one busy core or a shared GPU, to respect the time limit."""
    n, V = SIZES.get(asked.data, (1000, 1000))
    scale = n / 1433 * V / 8512 * asked.rank / 50
    own = asked.settings
    if asked.method in ("LDA", "NMF", WORDS, "FedLDA", *OURS):
        return 5 * scale + 5
    if device != NUMPY:
        batches = own.epochs * own.rounds * asked.fraction * n / own.batch
        return batches * (2e-3 if asked.method.endswith(MI) else 5e-4) + 10
    passes = own.epochs * own.rounds * asked.fraction / 40
    return passes * scale * ((4 + 128 / own.batch) + (8 if asked.method.endswith(MI) else 0)) + 2


def run_all(
    runs_wanted: Iterable[Run], path: Path | None, jobs: int = 1, minutes: float = float("inf"), device: str = NUMPY
) -> dict[str, dict[str, Any]]:
    """Execute all runs, or those that can start within the minutes; return results in the given order."""
    found = known(path)
    wanted = list({one.key: one for one in runs_wanted}.values())
    waiting = [one for one in wanted if one.key not in found]
    last = time.monotonic() + 60 * minutes

    def keep(one: Run, record: dict[str, Any]) -> None:
        found[one.key] = record
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")
        summary = f"{one.data} | {one.method} | k={one.rank} | {one.weighting} | {one.reading} | seed {one.seed}"
        print(f"{summary}: F1 {record['f1']:.3f}, {record['whole_seconds']:.1f} s", flush=True)

    if jobs == 1:
        for one in waiting:
            if time.monotonic() + expected_seconds(one, device) < last:
                keep(one, result_of(one, device))
    else:
        guess = {one.key: expected_seconds(one, device) for one in waiting}
        _shared_out(waiting, partial(result_of, device=device), keep, jobs, last, guess)
    return {one.key: found[one.key] for one in wanted if one.key in found}


def _shared_out(
    waiting: Sequence[Run], work: Any, keep: Any, jobs: int, last: float, guess: Mapping[str, float]
) -> None:
    for name in ("PARTSONG_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ[name] = "1"
    left = sorted(waiting, key=lambda one: guess[one.key], reverse=True)
    running: dict[Future[dict[str, Any]], Run] = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        while left or running:
            while left and len(running) < jobs:
                now = time.monotonic()
                following = next((one for one in left if now + guess[one.key] < last), None)
                if following is None:
                    left.clear()
                    break
                left.remove(following)
                running[pool.submit(work, following)] = following
            done, _ = wait(running, return_when=FIRST_COMPLETED) if running else ((), ())
            for future in done:
                one = running.pop(future)
                try:
                    keep(one, future.result())
                except Exception as problem:  # a failing run must not stop the others
                    print(f"FAILED {one}: {problem!r}", flush=True)
