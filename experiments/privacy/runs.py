"""Runs with privacy: their settings, their execution, and many of them over processes."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import astuple, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from experiments.privacy.methods import Setting, data_free, free_program, party_program, printed_program, row_program
from experiments.shared.datasets import DATASETS
from experiments.shared.federations import shards_of, shares_iid
from experiments.shared.metrics import distances, rmsd_sum
from experiments.shared.synthetic import block_federation
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Schedule, Shard
from partsong.core.streams import stream
from partsong.engines.local import Sequential
from partsong.solvers.squared_error import SquaredError
from partsong.solvers.update_rules import CoordinateDescent

TUNING_SEED = 1000
"""Seeds from here on choose settings and are in no table."""
BLOCK_COLUMNS = 100


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: data, parties, total rows (0: all), method and settings."""

    purpose: str
    data: str
    method: str
    parties: int
    rows: int
    rank: int
    seed: int
    setting: Setting = Setting()

    @property
    def is_tuning(self) -> bool:
        """Whether the run chooses settings."""
        return self.seed >= TUNING_SEED


Records = Mapping[Trial, Mapping[str, float]]
RESULT = ("rmsd", "error", "seconds")


def matrices_of(trial: Trial) -> list[Any]:
    """The matrices of the parties; the same for all methods of a seed."""
    if trial.data == "blocks":
        draw = stream(trial.seed, "privacy", trial.data, trial.parties, trial.rows)
        rows = [trial.rows // trial.parties] * trial.parties
        made = block_federation(rows, BLOCK_COLUMNS, trial.rank, draw)
        return [X.astype(np.float32) for X in made.matrices]
    X = _loaded(trial.data)
    if 0 < trial.rows < X.shape[0]:
        X = X[np.sort(stream(trial.seed, "sample").choice(X.shape[0], trial.rows, replace=False))]
    return shares_iid(X, trial.parties, trial.seed) if trial.parties > 1 else [X]


@cache
def _loaded(name: str) -> Any:
    return DATASETS[name].load()[0]


def result_of(trial: Trial) -> dict[str, float]:
    """Execute a run: mean RMSD of a party and ‖X − W H‖ / ‖X‖, with W refitted to the final model."""
    began = time.perf_counter()
    matrices = matrices_of(trial)
    shards = shards_of(matrices, trial.seed)
    is_one_sum = trial.method == "row level" and len(matrices) > 1
    H = _model(trial, shards_of([np.concatenate(matrices)], trial.seed) if is_one_sum else shards)
    far = distances(shards, H, SquaredError(CoordinateDescent(sweeps=5)))
    size = sum(float(shard.matrix.squared_norm) for shard in shards) ** 0.5
    error = float(np.linalg.norm(far)) / size
    seconds = time.perf_counter() - began
    return {
        "rmsd": round(rmsd_sum(shards, far) / len(shards), 6),
        "error": round(error, 6),
        "seconds": round(seconds, 2),
    }


def _model(trial: Trial, shards: Sequence[Shard]) -> Any:
    m = shards[0].matrix.shape[1]
    if trial.method == "pooled":
        return _pooled(shards, trial.rank, trial.seed)
    if trial.method.startswith("data-free"):
        return data_free(trial.method, trial.rank, m, stream(trial.seed, "data-free"))
    if trial.method.startswith("pooled on "):
        other = _loaded(trial.method.removeprefix("pooled on "))
        return _pooled(shards_of([other], 0), trial.rank, trial.seed)
    make: dict[str, Callable[..., tuple[Any, int]]] = {
        "printed": printed_program, "free": free_program, "parties": party_program, "rows": row_program,
    }  # fmt: skip
    program, rounds = make[trial.purpose](trial.method, trial.rank, trial.setting, trial.seed)
    for done in Sequential().run(program, shards, Schedule(rounds, trial.seed), reduction=PlainReduction()):
        last = done
    return program.components(last.checkpoint.server)


def _pooled(shards: Sequence[Shard], rank: int, seed: int) -> Any:
    from partsong import NMF
    from partsong.data.conversion import to_values

    X = np.concatenate([to_values(shard.matrix) for shard in shards])
    return NMF(rank, init="random", random_state=seed, max_iter=200, tol=1e-5).fit(X).components_


def line_of(trial: Trial, record: Mapping[str, float]) -> str:
    """Format a run as a line: values of trial, setting and result in the order of their fields; ∞ is null."""
    *fields, setting = astuple(trial)
    values = [None if value == math.inf else value for value in setting]
    return json.dumps([*fields, values, *record.values()], ensure_ascii=False, separators=(",", ":"))


def known(path: Path | None) -> dict[Trial, dict[str, float]]:
    """Read all runs of a file."""
    if path is None or not path.exists():
        return {}
    found, count = {}, len(Trial.__slots__)
    for line in path.read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        setting: list[Any] = [math.inf if value is None else value for value in values[count - 1]]
        trial = Trial(*values[: count - 1], Setting(*setting))
        found[trial] = dict(zip(RESULT, values[count:], strict=True))
    return found


def expected_seconds(trial: Trial) -> float:
    """Estimate the cost, to run long ones first."""
    rows = trial.rows or {"mnist": 60000, "fashion": 20000}.get(trial.data, 1000)
    if trial.method in ("pooled", "row level") or trial.method.startswith("pooled on"):
        return rows * trial.rank * (60 if trial.method != "row level" else 2 * trial.setting.rounds) * 1e-6
    return trial.parties * trial.setting.rounds * trial.setting.steps * 6e-5


def chosen_setting(found: Records, like: Trial, on: str = "", **given: Any) -> Setting:
    """The setting with the least mean error among tuning runs of this method, kind, relation and ε."""
    tried: dict[Setting, list[float]] = {}
    for trial, record in found.items():
        same = (trial.purpose, trial.data, trial.method, trial.rank) == (
            like.purpose,
            on or like.data,
            like.method,
            like.rank,
        )
        wanted, here = like.setting, trial.setting
        alike = (here.kind, here.relation, here.epsilon) == (wanted.kind, wanted.relation, wanted.epsilon)
        if trial.is_tuning and same and alike and all(getattr(trial, name) == value for name, value in given.items()):
            tried.setdefault(here, []).append(record["error"])
    if not tried:
        raise LookupError(f"No tuning run matches {like}.")
    return min(tried, key=lambda setting: float(np.mean(tried[setting])))


def run_all(trials: Iterable[Trial], path: Path | None, processes: int = 1) -> dict[Trial, dict[str, float]]:
    """Execute all runs; write each when it is done, and skip those in the file."""
    found, wanted = known(path), list(dict.fromkeys(trials))
    waiting = sorted((t for t in wanted if t not in found), key=expected_seconds, reverse=True)

    def keep(trial: Trial, record: dict[str, float]) -> None:
        found[trial] = record
        if path is not None:
            with path.open("a", encoding="utf-8") as lines:
                lines.write(line_of(trial, record) + "\n")

    if processes == 1:
        for trial in waiting:
            keep(trial, result_of(trial))
    elif waiting:
        os.environ["PARTSONG_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            running = {pool.submit(result_of, trial): trial for trial in waiting}
            for future in as_completed(running):
                keep(running[future], future.result())
    return {trial: found[trial] for trial in wanted}
