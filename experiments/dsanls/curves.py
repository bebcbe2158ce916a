"""Fig. 2, 4 and 5 of the DSANLS paper: error over time, over k, and coordinate descent against projected gradient.

    python -m experiments.dsanls.curves --sets face,mnist --seconds 15 --output dsanls-curves.jsonl

All methods start from the same random H, in float32, in one process on one thread. The time excludes the computation of
errors ‖X − W H‖ / ‖X‖. DSANLS uses the proximal weight, out of three, with the least error on another seed after a
quarter of the time. Runs that the output file holds are not repeated.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.dsanls.datasets import QUICK, SETS
from partsong import kernels
from partsong.aggregation.plaintext import PlainReduction
from partsong.core import runtime
from partsong.core.interfaces import Matrix, Round, Schedule, Shard
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.methods.dsanls import SketchExchange
from partsong.methods.exact import SharedSums
from partsong.sketch.crossing import Proportion
from partsong.sketch.kinds import CountSketch, Gaussian, Subsampling
from partsong.solvers.squared_error import SquaredError
from partsong.solvers.update_rules import (
    BlockPivoting,
    CoordinateDescent,
    Multiplicative,
    ProjectedGradient,
    ProximalDescent,
)

FOREVER = 10**9
KINDS = {"S": Subsampling, "G": Gaussian, "C": CountSketch}
EXACT = {"MU": Multiplicative(), "HALS": CoordinateDescent(), "BPP": BlockPivoting()}
LATER = 1.12
"""Ratio of the times at which consecutive errors are computed."""


def sketched(kind: str, rule: Any, ratio: float = 0.1) -> Callable[[int], Any]:
    """DSANLS with a sketch and an update rule; H is never sent whole: errors use the nodes' own factors."""

    def make(rank: int) -> Any:
        sketch = Proportion(KINDS[kind], ratio)
        return SketchExchange(rank, SquaredError(rule), sketch, iterations=FOREVER, every=FOREVER)

    return make


def exact(rule: Any) -> Callable[[int], Any]:
    """Shared statistics: the 1-D form of MPI-FAUN."""
    return lambda rank: SharedSums(rank, SquaredError(rule))


WEIGHTS = (0.01, 0.1, 1.0)
TUNING_SEED = 1000

CONTESTANTS: Mapping[str, Callable[[int], Any]] = {
    **{f"DSANLS/{kind}": sketched(kind, ProximalDescent()) for kind in KINDS},
    **{name: exact(rule) for name, rule in EXACT.items()},
}
SOLVERS: Mapping[str, Callable[[int], Any]] = {
    **{f"RCD/{kind}": sketched(kind, ProximalDescent()) for kind in ("S", "G")},
    **{f"PGD/{kind}": sketched(kind, ProjectedGradient(decay=1e-2)) for kind in ("S", "G")},
}
ALL = {**CONTESTANTS, **SOLVERS}


def error_of(matrix: Matrix, done: Round) -> float:
    """‖X − W H‖ / ‖X‖ of the factors after a round, from X Hᵀ alone; of both after whole iterations."""
    state = done.checkpoint.parties["all"]
    Ht = state.Ht_block if hasattr(state, "Ht_block") else done.checkpoint.server.Ht
    W, on = state.W, kernels.of(Ht)
    (crossed,) = matrix.walk(Ht, lambda rows, cross: (on.inner(W[rows], cross),))
    square = matrix.squared_norm - 2 * crossed + on.inner(on.gram(W), on.gram(Ht))
    return float(max(0.0, square) / matrix.squared_norm) ** 0.5


def curve(make: Callable[[int], Any], matrix: Matrix, rank: int, seconds: float, seed: int) -> list[list[float]]:
    """Record (iterations, seconds, error) at growing intervals, up to a time limit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        program = make(rank)
    per_iteration = 2 if isinstance(program, SketchExchange) else 1
    points: list[list[float]] = []
    clock, due = 0.0, 0.0
    rounds = Sequential().run(program, [Shard("all", matrix)], Schedule(FOREVER, seed), reduction=PlainReduction())
    began = time.monotonic()
    for done in rounds:
        clock += done.seconds
        is_over = clock >= seconds or time.monotonic() - began > 6 * seconds + 60
        if (done.index + 1) % per_iteration == 0 and (clock >= due or is_over):
            with runtime.limit_kernel_threads(runtime.available_threads()):
                points.append([(done.index + 1) // per_iteration, clock, error_of(matrix, done)])
            due = clock * LATER
            if is_over:
                break
    return points


def tuned(method: str, matrix: Matrix, rank: int, seconds: float) -> tuple[Callable[[int], Any], float]:
    """Choose the proximal weight with the least error on another seed after a quarter of the time (0: none)."""
    kind = method.split("/")[-1]
    if method not in CONTESTANTS or kind not in KINDS:
        return ALL[method], 0.0
    made = {weight: sketched(kind, ProximalDescent(1, weight, weight)) for weight in WEIGHTS}
    errors = {w: curve(made[w], matrix, rank, seconds / 4, TUNING_SEED)[-1][2] for w in WEIGHTS}
    best = min(errors, key=lambda weight: errors[weight])
    return made[best], best


def runs(chosen: argparse.Namespace) -> Iterator[tuple[str, int, str, int]]:
    """(set, rank, method, seed); methods take turns, so that all see the same machine load."""
    sets = QUICK if chosen.quick else SETS
    for name in sets if chosen.quick else chosen.sets.split(","):
        ranks = [int(k) for k in chosen.ranks.split(",")] if chosen.ranks else [sets[name].rank]
        for rank in ranks:
            for seed in range(chosen.first_seed, chosen.first_seed + chosen.seeds):
                for method in chosen.methods.split(","):
                    yield name, rank, method, seed


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(SETS), help="comma-separated names")
    parser.add_argument("--methods", default=",".join(CONTESTANTS), help=f"of {', '.join(ALL)}")
    parser.add_argument("--ranks", default="", help="values of k for Fig. 4 (default: that of each set)")
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds per method and set")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="small generated sets, half a second each")
    parser.add_argument("--output", type=Path, help="a JSON Lines file; runs that it holds are not repeated")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.seconds, chosen.seeds = 0.3, 1
    there = set()
    if chosen.output is not None and chosen.output.exists():
        for line in chosen.output.read_text("utf-8").splitlines():
            found = json.loads(line)
            there.add((found["data"], found["rank"], found["method"], found["seed"]))
    loaded: dict[str, Matrix] = {}
    warm: dict[tuple[str, str, int], tuple[Callable[[int], Any], float]] = {}
    for run in runs(chosen):
        if run in there:
            continue
        name, rank, method, seed = run
        if name not in loaded:
            loaded = {name: as_matrix((QUICK if chosen.quick else SETS)[name].load())}
        if (name, method, rank) not in warm:
            curve(ALL[method], loaded[name], rank, 1e-3, seed)  # compile first
            warm[name, method, rank] = tuned(method, loaded[name], rank, chosen.seconds)
        make, weight = warm[name, method, rank]
        points = curve(make, loaded[name], rank, chosen.seconds, seed)
        record = {"data": name, "rank": rank, "method": method, "seed": seed, "weight": weight, "points": points}
        iterations, seconds, error = points[-1]
        summary = f"{error:.4f} after {iterations} iterations, {seconds:.1f} s"
        print(f"{name:14s} k {rank:3d} {method:10s} seed {seed}: {summary}")
        if chosen.output is not None:
            with chosen.output.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
