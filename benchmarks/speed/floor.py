"""Time of an iteration above its two products X Hᵀ and Wᵀ X, with the same tiles and threads, interleaved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.speed.evaluation import Problem
from benchmarks.speed.iterations import factors, iterate
from partsong.core import runtime
from partsong.data.conversion import as_matrix
from partsong.solvers.initialization import random_init
from partsong.solvers.squared_error import SquaredError, accelerated_hals
from partsong.solvers.update_rules import CoordinateDescent, Extrapolation

ALLOWED = 1.3
WARM = 3


def measure(problem: Problem, n_threads: int, repeats: int) -> dict[str, float]:
    """Median milliseconds of three kinds of iteration and of the products, computed in one pass and in two.

    The cheaper way of the products counts. One pass also forms WᵀW, which is not a product with X.
    """
    matrix = as_matrix(problem.X)
    with runtime.limit_kernel_threads(n_threads):
        start = random_init(matrix, problem.rank, np.random.default_rng(0))
    one_sweep = CoordinateDescent(sweeps=1)
    kinds = {
        "one sweep": SquaredError(one_sweep),
        "one sweep, extrapolated": SquaredError(one_sweep, momentum=Extrapolation()),
        "default": accelerated_hals(),
    }
    running = {
        name: iterate(matrix, problem.rank, solver, start, n_threads, repeats + WARM) for name, solver in kinds.items()
    }
    times: dict[str, list[float]] = {name: [] for name in (*kinds, "one pass", "two passes")}
    for _ in range(repeats + WARM):
        for name, rounds in running.items():
            began = time.perf_counter()
            done = next(rounds)
            times[name].append(time.perf_counter() - began)
        W, H = factors(done)
        with runtime.limit_kernel_threads(n_threads):
            for name, products in _products(matrix, W, np.ascontiguousarray(H.T)).items():
                began = time.perf_counter()
                products()
                times[name].append(time.perf_counter() - began)
    found = {name: 1000 * statistics.median(values[WARM:]) for name, values in times.items()}
    found["products"] = min(found["one pass"], found["two passes"])
    found["ratio"] = found["one sweep"] / found["products"]
    found["repeats"] = repeats
    return found


def _products(matrix: Any, W: np.ndarray, Ht: np.ndarray) -> dict[str, Callable[[], Any]]:
    return {
        "one pass": lambda: matrix.visit(Ht, W, lambda rows, cross: ()),
        "two passes": lambda: (matrix.times(Ht), matrix.transposed_times(W)),
    }
