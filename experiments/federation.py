"""What the experiments with federations share: parties, methods by name, runs, measures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from partsong import recipes, threads
from partsong.aggregate.linear import Mean
from partsong.align.assignment import Assignment, PartialAssignment
from partsong.align.transport import PartialSinkhorn, Sinkhorn
from partsong.core import Schedule, Shard
from partsong.data.matrix import as_matrix
from partsong.data.partition import iid, party_names
from partsong.engines.parallel import Parallel
from partsong.evaluate.agreement import fit_of
from partsong.fitting import Task, pursue
from partsong.local.coupling import AlignedPull
from partsong.running import Stop
from partsong.streams import key, stream

ALIGNMENTS = {
    "LAP": Assignment(),
    "LAP_ρ": PartialAssignment(),
    "SK": Sinkhorn(),
    "SK_ρ": PartialSinkhorn(),
}
EVERY = {"LAP": 1, "LAP_ρ": 1, "SK": 10, "SK_ρ": 10}
"""Steps between alignments at a party: soft plans cost more than a step."""

Make = Callable[[int, int, float, bool], Any]
"""A program from rank, local steps, strength of the pull, and whether parties start independently."""


def shards_iid(X: Any, parties: int, seed: int) -> list[Shard]:
    """Equal random shares, the same for all methods of a seed."""
    shares = iid(X.shape[0], parties, stream(seed, "split"))
    names = party_names(parties)
    return [
        Shard(name, as_matrix(X[rows]), key(seed, "secret", name)) for name, rows in zip(names, shares, strict=True)
    ]


def methods() -> Mapping[str, Make]:
    """All methods with the same local solver (iPALM without inertia) and uniform averages, as in the paper."""

    def plain(rank: int, steps: int, strength: float, independent: bool) -> Any:
        made = recipes.ipalm_once(rank, steps=steps, independent=independent)
        return replace(made, aggregation=Mean())

    def prox(rank: int, steps: int, strength: float, independent: bool) -> Any:
        made = recipes.fedprox(rank, strength=strength, steps=steps, independent=independent)
        return replace(made, aggregation=Mean())

    def aligned(name: str, variant: str) -> Make:
        def make(rank: int, steps: int, strength: float, independent: bool) -> Any:
            align = ALIGNMENTS[name]
            made = recipes.fnmf(
                rank,
                variant=variant,
                client_align=align,
                server_align=align if name in ("LAP", "SK") else ALIGNMENTS[name.removesuffix("_ρ")],
                strength=strength,
                steps=steps,
                independent=independent,
            )
            return replace(made, coupling=AlignedPull(strength, align, every=EVERY[name]))

        return make

    return {
        "FedAvg": plain,
        "FedProx": prox,
        **{f"FNMF-{name} (paper)": aligned(name, "paper") for name in ("LAP",)},
        **{f"FNMF-{name}": aligned(name, "robust") for name in ALIGNMENTS},
    }


ONCE: dict[str, Make] = {
    "iPALM once": lambda rank, steps, strength, independent: replace(
        recipes.ipalm_once(rank, steps=steps, independent=independent), aggregation=Mean()
    ),
    "MUR once": lambda rank, steps, strength, independent: replace(
        recipes.mur_once(rank, steps=steps, independent=independent), aggregation=Mean()
    ),
}


@dataclass(frozen=True, slots=True)
class Result:
    """Σ RMSD with weights refitted to the final H, that of each round where asked for, seconds, bytes per party."""

    rmsd_sum: float
    total_distance: float
    seconds: float
    bytes_up: float
    curve: tuple[float, ...] = ()


def play(program: Any, shards: Sequence[Shard], rounds: int, seed: int, *, with_curve: bool = False) -> Result:
    """Run a program for all its rounds, and measure the model it ends with."""
    curve: list[float] = []

    def watch(done: Any, row: Any) -> None:
        if with_curve:
            with threads.kernels_on(threads.available()):
                curve.append(fit_of(shards, program.components(done.checkpoint.server), program.solver).rmsd_sum)

    last: list[Any] = []

    def keep(done: Any, row: Any) -> None:
        last[:] = [done.checkpoint.server]
        watch(done, row)

    task = Task(
        program, shards, Schedule(rounds, seed), Stop(0), Parallel(), threads=threads.available(),
        error_of=lambda done: done.metrics.get("relative_error", 1.0),
    )  # fmt: skip
    began = time.perf_counter()
    run = pursue(task, watch=keep)
    seconds = run.history[-1].seconds if run.history else time.perf_counter() - began
    with threads.kernels_on(threads.available()):
        fit = fit_of(shards, program.components(last[0]), program.solver)
    sent = sum(row.bytes_up for row in run.history) / len(shards)
    return Result(fit.rmsd_sum, fit.total_distance, seconds, sent, tuple(curve))


def pooled(X: Any, rank: int, shards: Sequence[Shard], seed: int, iterations: int = 300) -> Result:
    """NMF of all rows in one place, measured at the same parties: what a federation would like to reach."""
    from partsong.fitting import RowFit, fit_rows

    began = time.perf_counter()
    settings = RowFit(
        rank, recipes.accelerated_hals(), "random", seed, iterations, Stop(1e-6), threads=threads.available()
    )
    _, done = fit_rows(as_matrix(X), settings)
    seconds = time.perf_counter() - began
    with threads.kernels_on(threads.available()):
        fit = fit_of(shards, done.H, recipes.accelerated_hals())
    return Result(fit.rmsd_sum, fit.total_distance, seconds, 0.0)


def spread(values: Sequence[float]) -> str:
    """mean ± standard deviation."""
    return f"{np.mean(values):.3f} ± {np.std(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"
